"""Nodes of the operators that have an ONNX name: the inputs, attributes and outputs for the arguments of a call."""

import numpy as np

from opgrad.contract import DTYPES
from opgrad.onnxruntime.abi import ELEMENT_TYPES
from opgrad.onnxruntime.overloads import VALUE, overloads

OVERLOADS = {}
for each in overloads():
    OVERLOADS.setdefault(each.onnx.name, []).append(each)


def feeds_of(op, onnx, arguments):
    """The node's inputs in order: name, dtype, value; None for those that are left out."""
    found = []
    for port in OVERLOADS[onnx.name][0].inputs:
        value = arguments.get(port.parameter, op.attributes.get(port.parameter))
        if value is None:
            found.append(None)
        elif port.operand == VALUE:
            dtypes = {p.dtype for o in OVERLOADS[onnx.name] for p in o.inputs if p.parameter == port.parameter}
            dtype = "int64" if "int64" in dtypes else sorted(dtypes)[-1]
            found.append((port.parameter, dtype, np.asarray(value).astype(DTYPES[dtype])))
        else:
            value = np.asarray(value) if isinstance(value, int) else value
            arrays = value if isinstance(value, list) else [value]
            several = [(f"{port.parameter}{i}", array.dtype.name, array) for i, array in enumerate(arrays)]
            found += several if port.several else [(port.parameter, value.dtype.name, value)]
    while found[-1] is None:
        found.pop()
    return found


def takes(onnx, inputs):
    """Whether the node is declared for these dtypes: some operators take more of them than their nodes."""
    given = {name.rstrip("0123456789"): dtype for name, dtype, _ in filter(None, inputs)}
    return any(
        all(given.get(port.parameter, port.dtype) == port.dtype for port in overload.inputs)
        for overload in OVERLOADS[onnx.name]
    )


def attributes_of(op, onnx, arguments):
    found = {}
    for name in onnx.attributes:
        key = "out_dtype" if name in ("to", "output_type") else name
        value = arguments.get(key, op.attributes.get(key))
        if key == "out_dtype" and value is None and "arrays" in arguments:
            value = next(array.dtype.name for array in arguments["arrays"])
        if value is not None and value != () and (value or not isinstance(onnx.attributes[name], str)):
            found[name] = ELEMENT_TYPES[value] if key == "out_dtype" else attribute(value)
    return found


def shapes_of(op, onnx, arguments):
    """The shapes that the graph must declare for outputs."""
    return {f"result{list(op.results).index(onnx.shape_of)}": arguments["shape"]} if onnx.shape_of else {}


def placed(op, onnx, arguments, outputs):
    """The outputs at the places that the node has for those in `needs`; None between them."""
    if "needs" not in arguments:
        return outputs
    found = [None] * (1 + max(onnx.outputs.index(f"{name}?") for name in arguments["needs"]))
    for output, name in zip(outputs, [name for name in op.results if name in arguments["needs"]], strict=True):
        found[onnx.outputs.index(f"{name}?")] = output
    return found


def attribute(value):
    if isinstance(value, tuple):
        return list(value)
    return int(value) if isinstance(value, bool) else value
