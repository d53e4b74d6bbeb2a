"""Models of one node for the onnxruntime tests."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from opgrad.onnxruntime import InferenceSession
from opgrad.onnxruntime.abi import ELEMENT_TYPES

Port = tuple[str, str] | None  # name and dtype; None: absent


def one_node(
    op_type: str,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    *,
    domain: str = "com.microsoft",
    shapes: Mapping[str, Sequence[int | str]] = MappingProxyType({}),
    **attributes: Any,
) -> bytes:
    """A model with this node alone; bfloat16 comes in and goes out as float32, for Python's sake.

    `shapes` are those that the graph declares for outputs.
    """
    nodes, feeds, results = [], [], []
    for name, dtype in filter(None, inputs):
        feeds.append(helper.make_tensor_value_info(name, _outside(dtype), None))
        if dtype == "bfloat16":
            nodes.append(helper.make_node("Cast", [name], [f"{name}_inside"], to=TensorProto.BFLOAT16))
    names_in = [_inside(port) for port in inputs]
    names_out = [_inside(port) for port in outputs]
    nodes.append(helper.make_node(op_type, names_in, names_out, domain=domain, **attributes))
    for name, dtype in filter(None, outputs):
        results.append(helper.make_tensor_value_info(name, _outside(dtype), shapes.get(name)))
        if dtype == "bfloat16":
            nodes.append(helper.make_node("Cast", [f"{name}_inside"], [name], to=TensorProto.FLOAT))
    declared = [
        helper.make_tensor_value_info(f"{name}_inside", TensorProto.BFLOAT16, shapes.get(name))
        for name, dtype in filter(None, outputs)
        if dtype == "bfloat16"
    ]
    graph = helper.make_graph(nodes, op_type, feeds, results, value_info=declared)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def run(model: bytes, feeds: dict[str, Any], **options: Any) -> list[np.ndarray]:
    """Run a model in a new session; bfloat16 arrays are fed as float32."""
    return InferenceSession(model, **options).run(None, outside(feeds))


def run_node(op_type: str, feeds: dict[str, Any], *outputs: str, **given: Any) -> list[np.ndarray]:
    """The results of one node for these inputs in order, None for one that is left out; outputs are float32."""
    arrays = {name: None if value is None else np.asarray(value) for name, value in feeds.items()}
    ports = [None if array is None else (name, array.dtype.name) for name, array in arrays.items()]
    model = one_node(op_type, ports, [(name, "float32") for name in outputs or ("dx",)], **given)
    return run(model, {name: array for name, array in arrays.items() if array is not None})


def outside(feeds: dict[str, Any]) -> dict[str, np.ndarray]:
    """The feeds as onnxruntime's Python takes them."""
    arrays = {name: np.asarray(value) for name, value in feeds.items()}
    return {name: a.astype("float32") if a.dtype.name == "bfloat16" else a for name, a in arrays.items()}


def _outside(dtype: str) -> int:
    return ELEMENT_TYPES["float32" if dtype == "bfloat16" else dtype]


def _inside(port: Port) -> str:
    if port is None:
        return ""
    name, dtype = port
    return f"{name}_inside" if dtype == "bfloat16" else name
