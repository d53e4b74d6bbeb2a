"""The operators of training graphs in stock onnxruntime, on their examples, against the float64 references."""

import functools

import numpy as np
import pytest
from graph_cases import CASES as PAIRS
from graph_cases import OPERATORS, call, check_close
from onnx_models import one_node, outside

from opgrad.cli.examples import examples, expected
from opgrad.contract import DTYPES, FLOATS
from opgrad.onnxruntime import InferenceSession
from opgrad.onnxruntime.abi import ELEMENT_TYPES
from opgrad.onnxruntime.overloads import VALUE, overloads

CASES = [(op, onnx) for op in OPERATORS for onnx in op.onnx]
OVERLOADS = {name: [o for o in overloads() if o.onnx.name == name] for name in {onnx.name for _, onnx in CASES}}
each_case = pytest.mark.parametrize(("op", "onnx"), CASES, ids=[onnx.name for _, onnx in CASES])
TYPED = [(op, onnx, dtype) for op, onnx in CASES for dtype in FLOATS if (op, dtype) in PAIRS]
each_dtype = pytest.mark.parametrize(("op", "onnx", "dtype"), TYPED, ids=[f"{o.name}-{d}" for _, o, d in TYPED])


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
        if key == "out_dtype" and value is None:
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


@each_dtype
def test_against_the_reference(op, onnx, dtype):
    """Examples that differ in shapes alone, which the model does not tell, go through one session."""
    session = functools.cache(InferenceSession)
    for example in examples(op, dtype):
        inputs = feeds_of(op, onnx, example.arguments)
        if not takes(onnx, inputs):
            continue
        exact = expected(op, example.arguments)
        wanted = [array.dtype for array in call(op, example.arguments)]
        attributes = attributes_of(op, onnx, example.arguments)
        ports = [port and port[:2] for port in inputs]
        feeds = {port[0]: port[2] for port in inputs if port}
        # Some results are written over an input.
        before = {name: array.copy() for name, array in feeds.items()}
        outputs = placed(op, onnx, example.arguments, [(f"result{i}", each.name) for i, each in enumerate(wanted)])
        more = {"domain": onnx.origin, "shapes": shapes_of(op, onnx, example.arguments)}
        found = session(one_node(onnx.name, ports, outputs, **more, **attributes)).run(None, outside(feeds))
        found = [array.astype(each) for array, each in zip(found, wanted, strict=True)]
        check_close(found, exact, example.terms)
        needed = [o for o, name in zip(outputs, onnx.outputs, strict=False) if "?" not in name]
        if len(onnx.outputs) > 1 and len(needed) < len(onnx.outputs):
            model = one_node(onnx.name, ports, outputs[: max(1, len(needed))], **more, **attributes)
            fewer = session(model).run(None, outside(before))
            for less, full in zip(fewer, found, strict=False):
                assert less.astype(full.dtype).tobytes() == full.tobytes()


@each_case
def test_registered_for_every_float_that_the_operator_takes(op, onnx):
    taken = {name for tensor in op.inputs.values() for name in tensor.dtypes} & set(FLOATS)
    registered = {port.dtype for overload in OVERLOADS[onnx.name] for port in overload.inputs}
    assert taken <= registered
