"""The integer model of a trained one: scales are numbers again, weights integers, biases int32."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from opgrad.onnx.graph.byte_products import LIMITED, MOST
from opgrad.onnx.graph.messages import MICROSOFT, import_microsoft
from opgrad.onnx.graph.nodes import attributes_of
from opgrad.onnx.rules.quantization import LIMITS
from opgrad.training.quantization.blocks import stretched
from opgrad.training.quantization.learning import LOG, PAIR

WHO = "quantization.convert"
BIASED, BIAS = ("Conv", "Gemm"), 2  # which add a bias, and its place
PARTS = 3  # of what is quantized: numbers, scale and zero point
MIDDLE = 8  # the zero point of unsigned integers of 4 bits
INT32 = np.iinfo(np.int32)


def integer_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """The integer model; the given one is changed."""
    graph = model.graph
    values = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    # The nodes without those that make scales, which become constants.
    scales = {node.input[1] for node in graph.node if node.op_type in PAIR}
    made = {
        node.output[0]: values[node.input[0]]
        for node in graph.node
        if node.op_type == "Exp" and node.output[0] in scales and node.input[0].endswith(LOG)
    }
    values |= dict(zip(made, _exponentials(list(made.values())), strict=True))
    nodes = [node for node in graph.node if made.keys().isdisjoint(node.output)]
    nodes, count = _without_rounding(nodes, values)
    if not count:
        raise ValueError(f"{WHO}: no weight of the model is quantized, expected a trained one that `prepare` made")
    makers = {name: node for node in nodes for name in node.output}
    written = []
    for node in nodes:
        weight = makers.get(node.input[1]) if len(node.input) > 1 else None
        if weight is None or weight.op_type != "DequantizeLinear":
            written.append(node)
            continue
        if node.op_type in ("MatMul", "Gemm") and attributes_of(weight).get("block_size"):
            written += _in_four_bits(node, weight, values)
            continue
        if node.op_type in BIASED and len(node.input) > BIAS:
            written += _bias(node, makers.get(node.input[0]), weight, values)
        written.append(node)
    read = {name for node in written for name in node.input} | {each.name for each in graph.output}
    used = [node for node in written if node.op_type != "DequantizeLinear" or node.output[0] in read]
    read = {name for node in used for name in node.input}
    del graph.node[:], graph.initializer[:]
    graph.node.extend(used)
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in values.items() if name in read)
    if any(node.domain == MICROSOFT for node in used):
        import_microsoft(model)
    return model


def _exponentials(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Those that onnxruntime computes, to the last bit: training rounded by them."""
    if not arrays:
        return []
    kind = helper.np_dtype_to_tensor_dtype(arrays[0].dtype)
    given, made = ([helper.make_tensor_value_info(name, kind, ["n"])] for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Exp", ["x"], ["y"])], "exp", given, made)
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    whole = session.run(None, {"x": np.concatenate([each.reshape(-1) for each in arrays])})[0]
    parts = np.split(whole, np.cumsum([each.size for each in arrays])[:-1])
    return [part.reshape(each.shape) for part, each in zip(parts, arrays, strict=True)]


def _without_rounding(
    nodes: Sequence[onnx.NodeProto], values: dict[str, np.ndarray]
) -> tuple[list[onnx.NodeProto], int]:
    """The nodes without those that round weights, which become integers, and how many there were."""
    rest = []
    for node in nodes:
        given = [name.removesuffix(LIMITED) for name in node.input]
        if node.op_type != "QuantizeLinear" or not all(name in values for name in given) or len(given) < PARTS:
            rest.append(node)
            continue
        w, scale, zero = (values[name] for name in given)
        told = attributes_of(node)
        several, block = scale.ndim > 0 and scale.size > 1, told.get("block_size") or None
        axis = told.get("axis", 1) % w.ndim if several else None
        low, high = LIMITS[helper.np_dtype_to_tensor_dtype(zero.dtype)]
        if node.input[0].endswith(LIMITED):
            low, high = -MOST, MOST
        wide, offset = (stretched(each, w.shape, axis, block) for each in (scale, zero.astype(np.int32)))
        values[node.output[0]] = np.clip(np.rint(w / wide) + offset, low, high).astype(zero.dtype)
    return [node for node in rest if LIMITED not in node.output[0]], len(nodes) - len(rest)


def _bias(
    node: onnx.NodeProto, x: onnx.NodeProto | None, weight: onnx.NodeProto, values: dict[str, np.ndarray]
) -> list[onnx.NodeProto]:
    """The node that makes the bias of int32, if there is one, which the node reads then.

    Its scale is that of x times that of the weight, as that of the products, to which it is added as an integer.
    """
    name = node.input[BIAS]
    if name not in values or x is None or x.op_type != "DequantizeLinear" or attributes_of(node).get("beta", 1.0) != 1:
        return []
    if weight.input[0] not in values or values[weight.input[0]].dtype.itemsize != 1 or x.input[1] not in values:
        return []
    scale = (values[x.input[1]] * values[weight.input[1]]).astype(np.float32)
    if scale.size > 1 and scale.shape != values[name].shape:
        return []
    made, integers, own = f"{name}/{node.name or node.output[0]}", f"{name}_quantized", f"{name}_scale"
    values[f"{made}/{integers}"] = np.clip(
        np.rint(values[name] / scale.astype(np.float64)), INT32.min, INT32.max
    ).astype(np.int32)
    values[f"{made}/{own}"] = scale
    axis: dict[str, Any] = {"axis": 0} if scale.size > 1 else {}
    node.input[BIAS] = f"{made}/floats"
    return [
        helper.make_node("DequantizeLinear", [f"{made}/{integers}", f"{made}/{own}"], [f"{made}/floats"], made, **axis)
    ]


def _in_four_bits(node: onnx.NodeProto, weight: onnx.NodeProto, values: dict[str, np.ndarray]) -> list[onnx.NodeProto]:
    """The product as MatMulNBits, and a node that adds its bias."""
    told, block = attributes_of(weight), attributes_of(weight)["block_size"]
    integers, scale = values[weight.input[0]], values[weight.input[1]]
    if told["axis"] == 0:
        integers, scale = integers.T, scale.T
    rows, depth = integers.shape
    whole = np.full((rows, scale.shape[1] * block), MIDDLE, np.uint8)
    whole[:, :depth] = integers.astype(np.int8) + MIDDLE
    packed, scales = f"{weight.output[0]}/packed", f"{weight.output[0]}/scales"
    values[packed] = (whole[:, ::2] | whole[:, 1::2] << 4).reshape(rows, scale.shape[1], block // 2)
    values[scales] = np.ascontiguousarray(scale).reshape(-1)
    biased = len(node.input) > BIAS and node.input[BIAS]
    result = f"{node.output[0]}/product" if biased else node.output[0]
    size: dict[str, Any] = {"K": depth, "N": rows, "bits": 4, "block_size": block}
    given = [node.input[0], packed, scales]
    made = [helper.make_node("MatMulNBits", given, [result], node.name, domain=MICROSOFT, **size)]
    if biased:
        made.append(helper.make_node("Add", [result, node.input[BIAS]], [node.output[0]], f"{node.output[0]}/Add"))
    return made
