"""Quantized weights become float weights that are rounded in each run, and scales become weights."""

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from opgrad.onnx.graph.byte_products import LIMITED, MOST
from opgrad.onnx.graph.messages import size_of
from opgrad.onnx.graph.nodes import attributes_of, needed, read_by, rename_inputs
from opgrad.training.quantization.blocks import stretched

PAIR = ("QuantizeLinear", "DequantizeLinear")
LOG = ".log"  # behind the name of a scale: the weight of which it is the exponential
MOST_NAME = "quantization.most"  # the number as a tensor


def with_learned_scales(model: onnx.ModelProto, floats: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """A quantized model for training.

    model: with integer weights before DequantizeLinear, named as those in `floats` with "_quantized" behind; it is
    changed. floats: the values of float weights, by name.
    """
    graph = model.graph
    tensors = {each.name: each for each in graph.initializer}
    nodes, renamed, kept = [], dict[str, str](), dict[str, np.ndarray]()
    for node in graph.node:
        held = tensors.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if held is None:
            nodes.append(node)
            continue
        name = held.name.removesuffix("_quantized")
        kept[name] = floats[name] if name in floats else _dequantized(node, tensors)  # a copy that the quantizer made
        if held.data_type == TensorProto.INT32:  # a bias, whose integers are so fine that training need not round it
            renamed[node.output[0]] = name
            continue
        limited = name
        if held.data_type == TensorProto.INT8:
            limited = f"{name}{LIMITED}"
            nodes += _limits(name, node, kept[name].ndim, tensors)
        rounded = helper.make_node("QuantizeLinear", [limited, *node.input[1:]], [f"{name}/rounded"], f"{name}/rounded")
        rounded.attribute.extend(node.attribute)
        node.input[0] = rounded.output[0]
        nodes += [rounded, node]
    # Sizes are read of what is quantized: a second reader of floats keeps onnxruntime from its integer kernels.
    rounded_of = {node.output[0]: node.input[0] for node in nodes if node.op_type == "QuantizeLinear"}
    sources = {each.output[0]: rounded_of.get(each.input[0]) for each in nodes if each.op_type == "DequantizeLinear"}
    for node in nodes:
        rename_inputs(node, renamed)
        if node.op_type in ("Shape", "Size") and (source := sources.get(node.input[0])) is not None:
            node.input[0] = source
    nodes = needed(nodes, [each.name for each in graph.output])
    scales = {node.input[1]: None for node in nodes if node.op_type in PAIR}
    kept = {name: array for name, array in kept.items() if name in read_by(nodes)}
    kept |= {f"{name}{LOG}": np.log(numpy_helper.to_array(tensors[name])) for name in scales}
    exponentials = [helper.make_node("Exp", [f"{name}{LOG}"], [name], f"{name}/Exp") for name in scales]
    read = read_by(nodes)
    others = [each for name, each in tensors.items() if name in read and name not in scales and name not in kept]
    del graph.node[:], graph.initializer[:]
    graph.node.extend([*exponentials, *nodes])
    graph.initializer.extend([*others, *(numpy_helper.from_array(np.asarray(v), name) for name, v in kept.items())])
    return model


def _limits(name: str, node: onnx.NodeProto, rank: int, tensors: dict[str, onnx.TensorProto]) -> list[onnx.NodeProto]:
    """Nodes that keep a weight within MOST times its scale, of which it gets its gradient beyond.

    node: what makes floats of its integers. tensors: get the numbers that the nodes read.
    """
    scale, axis, made = node.input[1], attributes_of(node).get("axis", 1) % max(rank, 1), []
    tensors.setdefault(MOST_NAME, numpy_helper.from_array(np.array(MOST, np.float32), MOST_NAME))
    if size_of(tensors[scale]) > 1 and axis < rank - 1:
        shape = f"{name}{LIMITED}/shape"
        tensors[shape] = numpy_helper.from_array(np.array([-1, *[1] * (rank - 1 - axis)]), shape)
        made.append(helper.make_node("Reshape", [scale, shape], [f"{name}{LIMITED}/scale"], f"{name}{LIMITED}/scale"))
        scale = made[-1].output[0]
    high, low, below = (f"{name}{LIMITED}/{each}" for each in ("high", "low", "below"))
    return [
        *made,
        helper.make_node("Mul", [scale, MOST_NAME], [high], high),
        helper.make_node("Neg", [high], [low], low),
        helper.make_node("Min", [name, high], [below], below),
        helper.make_node("Max", [below, low], [f"{name}{LIMITED}"], f"{name}{LIMITED}"),
    ]


def _dequantized(node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> np.ndarray:
    """The floats that a node makes of constant integers."""
    integers, scale, *zero = (numpy_helper.to_array(tensors[name]) for name in node.input)
    axis = attributes_of(node).get("axis", 1) if scale.size > 1 else None
    wide, offset = (stretched(each, integers.shape, axis, None) for each in (scale, zero[0] if zero else np.zeros(())))
    return ((integers.astype(np.float64) - offset) * wide).astype(scale.dtype)
