"""Stand-ins for operators that onnx's shape inference does not know: operators of ai.onnx with equal types and shapes.

They only replace the operators in the model whose shapes are inferred; most compute other values than the operators.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.formulas import Body, Value
from opgrad.onnx.graph.messages import CLASSICAL, MICROSOFT, domain_of
from opgrad.onnx.graph.node_view import NodeView, fused_product
from opgrad.onnx.graph.nodes import attributes_of, registering

CONVOLUTION = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
WINDOW = (*CONVOLUTION, "ceil_mode")
Write = Callable[["Unknown"], Sequence[Value | None]]
WRITTEN: dict[str, Write] = {}


class Unknown(NodeView):
    """A node of an operator that onnx does not know."""

    def __init__(self, node: onnx.NodeProto, opset: int):
        self.body = Body(opset, f"opgrad.stand_in.{next(filter(None, node.output), '')}.")
        self.attributes, self.op = attributes_of(node), node.op_type
        self.inputs = [Value(self.body, name) if name else None for name in node.input]


# Registers the function that writes the stand-ins of these operators; it returns one value for each result.
stand_in_for = registering(WRITTEN)


def stand_ins(node: onnx.NodeProto, opset: int) -> list[onnx.NodeProto]:
    """The stand-ins of a node; the node itself if onnx knows the operator, or if there is no stand-in for it."""
    known = facts_of(node)
    if any(each.name == "output_type" for each in node.attribute):
        return [node]
    if known.like:
        pairs = [(*node.input[b : b + 1], *node.output[a : a + 1]) for a, b in known.like.items()]
        return [helper.make_node("Identity", [pair[0]], [pair[1]]) for pair in pairs if len(pair) == 2 and all(pair)]
    if known.becomes:
        return [_renamed(node, known.becomes, opset)]
    if domain_of(node) not in (MICROSOFT, CLASSICAL):
        return [node]
    if node.op_type not in WRITTEN:
        return [node]
    unknown = Unknown(node, opset)
    try:
        results = WRITTEN[node.op_type](unknown)
    except (LookupError, TypeError, ValueError):  # a required input or attribute is missing or has a wrong value
        return [node]
    named_results = [(value, name) for value, name in zip(results, node.output, strict=False) if value and name]
    return [
        *unknown.body.nodes,
        *(helper.make_node("Identity", [value.name], [name]) for value, name in named_results),
    ]


def _renamed(node: onnx.NodeProto, op: str, opset: int) -> onnx.NodeProto:
    """The node of another operator of ai.onnx, with as many inputs and outputs and the attributes that it has."""
    if not onnx.defs.has(op, opset):
        return node
    schema: Any = onnx.defs.get_schema(op, opset)  # onnx's type stubs lack the members read below
    other = helper.make_node(op, node.input[: schema.max_input], node.output[: schema.max_output])
    other.attribute.extend(each for each in node.attribute if each.name in schema.attributes)
    return other


# --- of ai.onnx.ml ---


stand_in_for("Scaler", "Normalizer")(lambda node: [node.required(0).cast(TensorProto.FLOAT)])


@stand_in_for("LinearRegressor", "SVMRegressor")
def _regression(node: Unknown) -> Sequence[Value]:
    row = node.required(0).cast(TensorProto.FLOAT).mean(-1)
    return [node.body.node("Concat", *[row] * int(node.attributes.get("targets", 1)), axis=-1)]


# --- products ---


stand_in_for("FusedMatMul", "TransposeMatMul", "FusedMatMulActivation")(lambda node: [fused_product(node)])


@stand_in_for("DynamicQuantizeMatMul", "MatMulIntegerToFloat")
def _of_integers(node: Unknown) -> Sequence[Value]:
    a, b = (node.required(place).cast(TensorProto.FLOAT) for place in (0, 1))
    return [node.body.node("MatMul", a, b)]


@stand_in_for("MatMulNBits", "MatMulBnb4", "MatMulFpQ4")
def _packed_product(node: Unknown) -> Sequence[Value]:
    x, sizes = node.required(0), [int(node.attributes[name]) for name in ("K", "N")]
    return [node.body.node("MatMul", x, node.body.node("ConstantOfShape", node.body.ints(sizes)).like(x))]


@stand_in_for("LinearCrossEntropyLoss", "LinearCrossEntropyLossAndGrad")
def _loss_of_tokens(node: Unknown) -> Sequence[Value]:
    x = node.required(0)
    each = node.attributes.get("reduction", b"mean") in (b"none", "none")
    return [node.required(2).cast(TensorProto.FLOAT) if each else node.body.constant(np.zeros((), np.float32)), x]


@stand_in_for("CropAndResize")
def _cropped(node: Unknown) -> Sequence[Value]:
    """[regions, channels, height, width]: a number for each region, each channel, and each element of the size."""
    x, regions, size = (node.required(place) for place in (0, 1, 3))
    shape = node.body.concat(regions.shape(0, 1), x.shape(1, 2), size.cast(TensorProto.INT64))
    return [node.body.full(shape, 0, like=x)]


@stand_in_for("QGemm")
def _quantized_gemm(node: Unknown) -> Sequence[Value]:
    a, b = (node.required(place).cast(TensorProto.FLOAT) for place in (0, 3))
    flags = {name: int(node.attributes.get(name, 0)) for name in ("transA", "transB")}
    y, zero = node.body.node("Gemm", a, b, **flags), node.input(8)
    return [y if zero is None else y.like(zero)]


@stand_in_for("MoEGroupRouter")
def _experts_of_rows(node: Unknown) -> Sequence[Value]:
    experts = node.required(1).shape()
    rows = node.required(0).reshape(node.body.concat(node.body.ints([-1]), experts))
    return [rows, rows.cast(TensorProto.FLOAT), rows.cast(TensorProto.FLOAT)]


@stand_in_for("HyperConnectionPreMix")
def _one_branch(node: Unknown) -> Sequence[Value]:
    x, count = node.required(0), int(node.attributes.get("num_branches", 0))
    return [x.split(count, -1)[0] if count else x.along("ReduceSum", [-2], keepdims=0)]


@stand_in_for("SwiGLU")
def _gated(node: Unknown) -> Sequence[Value]:
    return [node.required(0) if node.input(1) is not None else node.required(0).split(2, -1)[0]]


stand_in_for("QLinearAdd", "QLinearMul")(lambda node: [node.required(0) + node.required(3)])
stand_in_for("BiasSplitGelu")(lambda node: node.required(0).split(2, -1)[:1])


@stand_in_for("GatherBlockQuantized")
def _rows_of_blocks(node: Unknown) -> Sequence[Value]:
    """The scales of the chosen rows, once for each number of a block."""
    scales = node.body.node("Gather", node.required(2), node.required(1))
    return [node.body.concat(*[scales] * int(node.attributes.get("block_size", 128)), axis=-1)]


stand_in_for("GatedDeltaNet")(lambda node: [node.required(2), node.input(6)])


@stand_in_for("LinearAttention")
def _linear_attention(node: Unknown) -> Sequence[Value | None]:
    """The value, once for each query that shares its head, and the state of the past."""
    queries, keys = (int(node.attributes[name]) for name in ("q_num_heads", "kv_num_heads"))
    return [node.body.concat(*[node.required(2)] * max(queries // keys, 1), axis=-1), node.input(3)]


# --- several tensors, and axes ---


@stand_in_for("QLinearConcat")
def _joined(node: Unknown) -> Sequence[Value]:
    parts = [node.required(place) for place in range(2, len(node.inputs), 3)]
    return [node.body.concat(*parts, axis=int(node.attributes["axis"]))]


@stand_in_for("QLinearWhere")
def _chosen(node: Unknown) -> Sequence[Value]:
    return [node.body.node("Where", node.required(0), node.required(1), node.required(4))]


@stand_in_for("ExpandDims")
def _with_axis(node: Unknown) -> Sequence[Value]:
    axis = node.required(1).cast(TensorProto.INT64).reshape([1])
    return [node.body.node("Unsqueeze", node.required(0), axis)]


stand_in_for("CDist")(lambda node: [node.body.node("MatMul", node.required(0), node.required(1).transpose(1, 0))])


@stand_in_for("DynamicQuantizeLSTM")
def _quantized_layer(node: Unknown) -> Sequence[Value]:
    names = ("direction", "hidden_size")
    given = {name: node.attributes[name] for name in names if name in node.attributes}
    weights = [node.required(place).cast(TensorProto.FLOAT).transpose(0, 2, 1) for place in (1, 2)]
    return node.body.nodes_of("LSTM", 3, node.required(0), *weights, **given)


# --- images ---


@stand_in_for("QLinearConv")
def _convolved(node: Unknown) -> Sequence[Value]:
    x, w = (node.required(place).cast(TensorProto.FLOAT) for place in (0, 3))
    return [_of_images(node, x, "Conv", w).like(node.required(7))]


@stand_in_for("NhwcConv", "NhwcFusedConv")
def _convolved_images(node: Unknown) -> Sequence[Value]:
    return [_of_images(node, node.required(0), "Conv", node.required(1), last=1)]


@stand_in_for("QLinearAveragePool", "QLinearGlobalAveragePool", "NhwcMaxPool")
def _pooled(node: Unknown) -> Sequence[Value]:
    x, op = node.required(0), node.op.removeprefix("QLinear").removeprefix("Nhwc")
    return [_of_images(node, x.cast(TensorProto.FLOAT), op, last=int(op == "MaxPool")).like(x)]


def _of_images(node: Unknown, x: Value, op: str, *others: Value, last: int = 0) -> Value:
    """A convolution or pooling. Where the channels are the last axis, images have two axes beside them."""
    given = {name: value for name, value in node.attributes.items() if name in WINDOW}
    if not (last or node.attributes.get("channels_last", 0)):
        return node.body.node(op, x, *others, **given)
    y = node.body.node(op, x.transpose(0, 3, 1, 2), *others, **given)
    return y.transpose(0, 2, 3, 1)


stand_in_for("TorchEmbedding")(lambda node: [node.body.node("Gather", node.required(0), node.required(1))])


@stand_in_for("EmbedLayerNormalization")
def _embedding(node: Unknown) -> Sequence[Value]:
    """The rows of the tables, one length for each row of tokens, and the rows again."""
    rows, lengths = _looked_up(node)
    return [rows, lengths, rows]


@stand_in_for("QEmbedLayerNormalization")
def _quantized_embedding(node: Unknown) -> Sequence[Value]:
    rows, lengths = _looked_up(node)
    return [rows.cast(TensorProto.FLOAT), lengths]


def _looked_up(node: Unknown) -> tuple[Value, Value]:
    tokens = node.required(0)
    lengths = tokens.along("ReduceMax", [1], keepdims=0).cast(TensorProto.INT32)
    return node.body.node("Gather", node.required(2), tokens), lengths


# --- attention ---


@stand_in_for("Attention")
def _attention(node: Unknown) -> Sequence[Value | None]:
    """The last third of x @ weights, and the keys and values of each head, appended to those of the past."""
    value = _value_part(node, node.required(0), node.required(1))
    heads, past = _heads(node, value).unsqueeze(0), node.input(4)
    present = node.body.concat(heads, heads, axis=0)
    if past is not None:
        shared = node.attributes.get("past_present_share_buffer", 0)
        present = past if shared else node.body.concat(past, present, axis=3)
    return [value, present]


@stand_in_for("AttentionTraining")
def _attention_in_tiles(node: Unknown) -> Sequence[Value | None]:
    """The shape of q with heads as large as v's, and a number for each query of each head."""
    q, v = node.required(0), node.required(2)
    if node.input(8) is not None:  # sequences behind each other, [L, heads, H]
        rows = q.slice(0, 1, 2)
        return [rows + v.slice(0, 1, 0).slice(0, 1, 1), rows.squeeze(2).transpose(1, 0)]
    rows = q.slice(0, 1, 3)
    lse = rows.transpose(0, 2, 1, 3) if node.attributes.get("layout", "BHLD") == "BLHD" else rows
    return [rows + v.slice(0, 1, 1).slice(0, 1, 2), lse.squeeze(3)]


@stand_in_for("DropoutTraining")
def _dropout(node: Unknown) -> Sequence[Value]:
    x = node.required(0)
    return [x.apply("Identity"), x.equals(x)]


stand_in_for("PackedAttention")(lambda node: [_value_part(node, node.required(0), node.required(1))])


@stand_in_for("QAttention")
def _quantized_attention(node: Unknown) -> Sequence[Value]:
    return [_value_part(node, *(node.required(place).cast(TensorProto.FLOAT) for place in (0, 1)))]


def _value_part(node: Unknown, x: Value, weights: Value) -> Value:
    packed, widths = node.body.node("MatMul", x, weights), node.attributes.get("qkv_hidden_sizes")
    return packed.slice(sum(widths[:2]), sum(widths), -1) if widths else packed.split(3, -1)[2]


def _heads(node: Unknown, value: Value) -> Value:
    """[N, L, heads * H] as [N, heads, L, H]."""
    return value.reshape([0, 0, int(node.attributes["num_heads"]), -1]).transpose(0, 2, 1, 3)


@stand_in_for("MultiHeadAttention")
def _heads_attention(node: Unknown) -> Sequence[Value | None]:
    """q @ (k.T @ v), which has the shape of the attention's result, and the keys and values of each head."""
    q, k, v, body = node.required(0), node.input(1), node.input(2), node.body
    if k is None:  # all three lie in q, [N, L, heads, 3, H]
        return [q.slice(0, 1, 3).reshape([0, 0, -1])]
    if v is None:  # k holds both, [N, L, heads, 2, H]
        return [q]
    y = body.node("MatMul", q, body.node("MatMul", k.transpose(0, 2, 1), v))
    presents = [_heads(node, each) for each in (k, v)]
    pasts = [node.input(place) for place in (6, 7)]
    return [
        y,
        *(a if b is None else body.concat(b, a, axis=2) for a, b in zip(presents, pasts, strict=True)),
    ]


@stand_in_for("GroupQueryAttention", "SparseAttention")
def _grouped_attention(node: Unknown) -> Sequence[Value]:
    """The query; if keys and values are packed into it, only its own part."""
    q = node.required(0)
    if node.input(1) is not None:
        return [q]
    heads, keys = (int(node.attributes[name]) for name in ("num_heads", "kv_num_heads"))
    parts = q.reshape([0, 0, heads + 2 * keys, -1])
    return [parts.slice(0, heads, 2).reshape([0, 0, -1])]
