"""The types and sizes of a model's values, by onnx's shape inference in bounded memory, also for unknown operators.

With data propagation onnx computes shapes from the values of other arrays. It then takes every array of one axis for a
shape and stores 200 bytes for each element, however long the array is. So a first run without data propagation finds
the long arrays; in the second run, with it, each long array has a symbolic size, so that onnx stores no elements.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, TypeProto, helper, numpy_helper, shape_inference

from opgrad.onnx.graph import messages
from opgrad.onnx.graph.conversion import raise_opset
from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.formulas import Body, NodeView, Value, fused_product
from opgrad.onnx.graph.nodes import attributes_of, captured, registering, rename_inputs
from opgrad.onnx.graph.sizes import VAGUE, forget_vague, known, sizes_in

KNOWN_BEST = 17  # older models are inferred as this opset: onnx propagates the data of more of its operators
MEASURING = ("Shape", "Size")  # operators of which integers come that onnx propagates
MOVING = messages.names_of("Shape Size Gather Concat Unsqueeze Squeeze Cast Add Sub Mul Div")  # sizes by sizes alone
INTEGERS = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
LONG = "opgrad.size."  # the prefix of the symbolic size of a long array
# Operators whose inputs hold the sizes of the result, and the places of these inputs.
SIZE_GIVEN = {"ConstantOfShape": (0,), "Expand": (1,), "Tile": (1,), "Reshape": (1,), "Range": (0, 1, 2)}
KNOWN = "opgrad.known."  # the prefix of a vague name of a size that is known already, as long as a part is inferred
MADE_UP = "unk__"  # the prefix of the names that onnx makes up for sizes, before a number
Types: TypeAlias = dict[str, TypeProto.Tensor]
Constants: TypeAlias = Callable[[Types, Sequence[onnx.NodeProto]], Mapping[str, np.ndarray]]


def shapes_given(node: onnx.NodeProto) -> Iterator[str]:
    """The names of the inputs that hold the sizes of a node's result."""
    places = SIZE_GIVEN.get(node.op_type, ()) if not messages.domain_of(node) else ()
    return (node.input[index] for index in places if index < len(node.input) and node.input[index])


def infer(model: onnx.ModelProto, constants: Constants) -> tuple[Types, Types]:
    """The types of the tensors of a model's graph, by name, as far as they can be inferred, and those in sequences.

    constants: a function that gets the types known so far and nodes, and returns the constants among their
    `shapes_given`, by name.

    Returns the types of the tensors, and for each sequence of tensors the type of these.
    """
    stand_in = _stand_in(model)
    operators = {node.op_type for node in stand_in.graph.node}
    if not operators.isdisjoint(MEASURING) and not operators <= MOVING:
        with suppress(NotImplementedError):  # onnx propagates the data of fewer operators of older opsets
            raise_opset(stand_in, KNOWN_BEST)
    own = {tensor.name: type_of(tensor) for tensor in model.graph.initializer}
    found, sequences = _inferred(stand_in, False)
    first = found | own
    given = constants(first, model.graph.node)
    if given:
        # Nodes read constants in place of the shapes that other nodes compute.
        names = {name: f"{LONG}constant.{name}" for name in given}
        stand_in.graph.initializer.extend(numpy_helper.from_array(value, names[name]) for name, value in given.items())
        for node in stand_in.graph.node:
            rename_inputs(node, {name: names[name] for name in shapes_given(node) if name in names})
        first = _inferred(stand_in, False)[0] | own
    if ranks := more_ranks(model.graph.node, first):
        messages.keep(stand_in.graph.value_info, [each for each in stand_in.graph.value_info if each.name not in ranks])
        values = (helper.make_value_info(name, TypeProto(tensor_type=each)) for name, each in ranks.items())
        stand_in.graph.value_info.extend(values)
        first = _inferred(stand_in, False)[0] | own
    # In place of each long array nodes read a new input whose size is symbolic.
    hidden = {}
    for name, each in first.items():
        if _is_long(each):
            size = f"{LONG}{each.shape.dim[0].dim_value}"
            hidden[name] = f"{size}.{name}"
            stand_in.graph.input.append(helper.make_tensor_value_info(hidden[name], each.elem_type, [size]))
    for node in stand_in.graph.node:
        rename_inputs(node, hidden)
    try:
        second, made_up = _inferred(stand_in, True)
    except MemoryError:
        return first, sequences
    for name, each in first.items():
        if name not in second or not second[name].HasField("shape"):
            forget_vague(each)  # onnx makes up names for unknown sizes; the second run uses them for other sizes
    found = dict(first)
    for name, each in second.items():
        before = first.get(name, each)
        others = before.shape.dim if len(before.shape.dim) == len(each.shape.dim) else each.shape.dim
        for dim, other in zip(each.shape.dim, others, strict=True):
            if dim.dim_param.startswith(LONG):
                dim.dim_value = int(dim.dim_param.removeprefix(LONG))
            elif other.HasField("dim_value"):  # which only the first run knew
                dim.dim_value = other.dim_value
        found[name] = each if each.HasField("shape") else before
    found |= own
    # Names that onnx made up for sizes of tensors in sequences, which need not be equal, are removed.
    inside = (size.dim_param for each in (*made_up.values(), *sequences.values()) for size in each.shape.dim)
    vague = {name for name in inside if VAGUE.fullmatch(name)} - {""}
    for size in (size for each in (*found.values(), *sequences.values()) if vague for size in each.shape.dim):
        if size.dim_param in vague:
            size.Clear()
    return found, sequences


def infer_part(
    model: onnx.ModelProto, constants: Constants, order: Sequence[onnx.NodeProto], makers: Mapping[str, onnx.NodeProto],
    nodes: Sequence[onnx.NodeProto], initializers: Mapping[str, TensorProto], types: Types, sequences: Types,
    unused: int,
) -> tuple[Types, Types]:  # fmt: skip
    """The types of the results of some nodes, from those of what they read, as `infer` returns them.

    model: whose nodes and values are not read. order: all nodes of its graph. makers: of each value its node. nodes:
    some of them. initializers: of the graph, by name. types, sequences: what is known of the graph's values. unused:
    see `unused_number`.
    """

    def declared(name: str) -> Iterator[onnx.ValueInfoProto]:
        """What is known of a value; vague names of sizes, which `infer` forgets, are marked."""
        if name in types:
            value = helper.make_value_info(name, TypeProto(tensor_type=types[name]))
            for size in value.type.tensor_type.shape.dim:
                if size.dim_param.startswith(MADE_UP):
                    size.dim_param = f"{KNOWN}{size.dim_param}"
            yield value
        elif name in sequences:
            inside = TypeProto(tensor_type=sequences[name])
            yield helper.make_value_info(name, helper.make_sequence_type_proto(inside))

    # The nodes, and those that compute the integers which they read: shapes follow from these.
    chosen, waiting = {id(node) for node in nodes}, list(nodes)
    while waiting:
        for name in captured(waiting.pop()):
            maker, known = makers.get(name), types.get(name)
            if maker is None or id(maker) in chosen or known is None or known.elem_type not in INTEGERS:
                continue
            if not (known.HasField("shape") and len(known.shape.dim) > 1) and not _is_long(known):
                chosen.add(id(maker))
                waiting.append(maker)
    part = messages.copied_without(model, "graph")
    part.graph.name, nodes = "part", [node for node in order if id(node) in chosen]
    part.graph.node.extend(nodes)
    made = dict.fromkeys(name for node in nodes for name in node.output if name)
    for name in dict.fromkeys(name for node in nodes for name in captured(node) if name not in made):
        tensor = initializers.get(name)
        if tensor is not None and not messages.is_large(tensor):
            part.graph.initializer.append(tensor)
        else:
            part.graph.input.extend(declared(name))
    part.graph.value_info.extend(info for name in made for info in declared(name))
    onnx_knows = {name for node in nodes if not messages.domain_of(node) for name in node.output}
    for info in part.graph.value_info:
        for size in info.type.tensor_type.shape.dim:
            if size.dim_param.startswith(KNOWN):
                size.Clear()  # a name that was made up before: what a node reads may give a better one
        if info.name in onnx_knows:
            info.type.tensor_type.ClearField("elem_type")  # a rule has declared what it computes with
    found, in_sequences = infer(part, lambda more, nodes: constants(types | more, nodes))
    own = {each.name for each in part.graph.initializer}
    found = {name: each for name, each in found.items() if name not in own and not name.startswith(LONG)}
    # Sizes that onnx made up names for get new ones, and known ones their own again.
    new: dict[str, str] = {}
    for size in (size for each in found.values() for size in each.shape.dim if size.dim_param):
        if size.dim_param.startswith(KNOWN):
            size.dim_param = size.dim_param.removeprefix(KNOWN)
        elif size.dim_param.startswith(MADE_UP):
            size.dim_param = new.setdefault(size.dim_param, f"{MADE_UP}{unused + len(new)}")
    names = set(new.values())
    pairs = ((name, each, types.get(name)) for name, each in found.items())
    return {name: each if old is None else _joined(old, each, names) for name, each, old in pairs}, in_sequences


def unused_number(types: Types) -> int:
    """The number from which on no name that was made up for a size has one."""
    names = (size.dim_param for each in types.values() for size in each.shape.dim if size.dim_param)
    numbers = (name.removeprefix(MADE_UP) for name in names if name.startswith(MADE_UP))
    return max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)


def _joined(before: TypeProto.Tensor, now: TypeProto.Tensor, new: Collection[str]) -> TypeProto.Tensor:
    """A type with the sizes that it had before, where the present ones tell no more: names that are `new`."""
    if not now.HasField("shape") or not (now.elem_type or not before.elem_type):
        return before
    if before.elem_type != now.elem_type or not before.HasField("shape") or len(before.shape.dim) != len(now.shape.dim):
        return now
    for size, old in zip(now.shape.dim, before.shape.dim, strict=True):
        known = size.HasField("dim_value") or (size.dim_param and size.dim_param not in new)
        if not known and old.WhichOneof("value") is not None:
            size.CopyFrom(old)
    return now


def _inferred(model: onnx.ModelProto, data_prop: bool) -> tuple[Types, Types]:
    """The types of tensors, and those of the tensors in sequences. ValueError if they contradict each other."""
    try:
        found = messages.declared_types(shape_inference.infer_shapes(model, data_prop=data_prop).graph)
    except shape_inference.InferenceError as error:
        raise ValueError(f"the model's types contradict each other: {str(error).splitlines()[0]}") from None
    inside = {name: each.sequence_type.elem_type for name, each in found.items() if each.HasField("sequence_type")}
    tensors = {name: each.tensor_type for name, each in found.items() if name not in inside}
    return tensors, {name: each.tensor_type for name, each in inside.items() if each.tensor_type.elem_type}


def _is_long(declared: TypeProto.Tensor) -> bool:
    """Whether an array of one axis is too long to be a shape or a list of axes."""
    sizes = known(sizes_in(declared))
    return sizes is not None and len(sizes) == 1 and sizes[0] > messages.LARGE


def type_of(tensor: TensorProto) -> TypeProto.Tensor:
    """The type of a tensor."""
    return helper.make_tensor_type_proto(tensor.data_type, tensor.dims).tensor_type


def _stand_in(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model with the same shapes for onnx's inference.

    Large constants are inputs of it, and operators that onnx does not know are replaced by ones with equal shapes.
    """
    graph, opset = messages.without_large(model.graph), messages.opset_of(model)
    del graph.node[:]
    graph.node.extend(other for node in model.graph.node for other in stand_ins(node, opset))
    result = messages.copied_without(model, "graph")
    result.graph.CopyFrom(graph)
    for value in (*result.graph.input, *result.graph.output, *result.graph.value_info):
        forget_vague(value.type.tensor_type)
    return result


# --- ranks that onnx does not infer -----------------------------------------------------------------------------------


BROADCASTING = frozenset(("Add", "Div", "Max", "Mean", "Min", "Mul", "Sub", "Sum", "Where"))
MATRIX = 2
TREES = ("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor")  # their last result has a row for each row


def more_ranks(nodes: Sequence[onnx.NodeProto], types: Mapping[str, TypeProto.Tensor]) -> dict[str, TypeProto.Tensor]:
    """The types, with ranks, of values of which only the element type is known."""
    found: dict[str, TypeProto.Tensor] = {}
    if all(each.HasField("shape") for each in types.values()):
        return found

    def rank(name: str) -> int | None:
        known = found.get(name) or types.get(name)
        return len(known.shape.dim) if known is not None and known.HasField("shape") else None

    def set_rank(name: str, size: int) -> None:
        if name in types and rank(name) is None:
            found[name] = helper.make_tensor_type_proto(types[name].elem_type, [None] * size).tensor_type

    for node in reversed(nodes):
        result = rank(node.output[0]) if node.output and not messages.domain_of(node) else None
        if node.op_type in TREES and node.domain == messages.CLASSICAL and node.output:
            set_rank(node.output[-1], MATRIX)
        if result is None:
            continue
        ranks = {name: rank(name) for name in node.input}
        if facts_of(node).same_rank:
            set_rank(node.input[0], result)
        elif node.op_type == "Concat" or (node.op_type == "MatMul" and MATRIX in ranks.values()):
            for name in node.input:
                set_rank(name, result)
        elif node.op_type == "Gemm":
            for name in node.input[:2]:
                set_rank(name, MATRIX)
        elif node.op_type in BROADCASTING:
            unknown = [name for name, known in ranks.items() if known is None]
            if len(unknown) == 1 and all(other < result for other in ranks.values() if other is not None):
                set_rank(unknown[0], result)  # the widest operand has the rank of the result
    return found


WINDOW = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides", "ceil_mode")
Write = Callable[["Unknown"], Sequence[Value | None]]
WRITTEN: dict[str, Write] = {}


class Unknown(NodeView):
    """A node of an operator that onnx does not know."""

    def __init__(self, node: onnx.NodeProto, opset: int):
        self.body = Body(opset, f"opgrad.stand_in.{next(filter(None, node.output), '')}.")
        self.attributes, self.op = attributes_of(node), node.op_type
        self.inputs = [Value(self.body, name) if name else None for name in node.input]

    def floats(self, *places: int) -> list[Value]:
        """These inputs, as float32."""
        return [self.required(index).cast(TensorProto.FLOAT) for index in places]

    def number(self, name: str, default: Any = None) -> int:
        """An attribute that is an integer."""
        return int(self.attributes.get(name, default))

    def heads(self, value: Value) -> Value:
        """[N, L, heads * H] as [N, heads, L, H]."""
        return value.reshape([0, 0, self.number("num_heads"), -1]).transpose(0, 2, 1, 3)


# Registers the function that writes the stand-ins of these operators; it returns one value for each result.
stand_in_for = registering(WRITTEN)


def stand_ins(node: onnx.NodeProto, opset: int) -> list[onnx.NodeProto]:
    """Operators of ai.onnx with the types and shapes of a node that onnx does not know; most compute other values.

    The node itself if onnx knows the operator, or if there is no stand-in for it.
    """
    known = facts_of(node)
    if any(each.name == "output_type" for each in node.attribute):
        return [node]
    if known.like:
        pairs = [(*node.input[b : b + 1], *node.output[a : a + 1]) for a, b in known.like.items()]
        return [helper.make_node("Identity", [pair[0]], [pair[1]]) for pair in pairs if len(pair) == 2 and all(pair)]
    if known.becomes and onnx.defs.has(known.becomes, opset):
        schema: Any = onnx.defs.get_schema(known.becomes, opset)  # onnx's type stubs lack the members read below
        inputs, outputs = node.input[: schema.max_input], node.output[: schema.max_output]
        other = helper.make_node(known.becomes, inputs, outputs)
        other.attribute.extend(each for each in node.attribute if each.name in schema.attributes)
        return [other]
    written = messages.domain_of(node) in (messages.MICROSOFT, messages.CLASSICAL) and node.op_type in WRITTEN
    if known.becomes or not written:
        return [node]
    unknown = Unknown(node, opset)
    try:
        results = WRITTEN[node.op_type](unknown)
    except (LookupError, TypeError, ValueError):  # a required input or attribute is missing or has a wrong value
        return [node]
    named = [(value, name) for value, name in zip(results, node.output, strict=False) if value and name]
    return [*unknown.body.nodes, *(helper.make_node("Identity", [value.name], [name]) for value, name in named)]


stand_in_for("Scaler", "Normalizer")(lambda node: node.floats(0))
stand_in_for("FusedMatMul", "TransposeMatMul")(lambda node: [fused_product(node)])
stand_in_for("DynamicQuantizeMatMul", "MatMulIntegerToFloat")(
    lambda node: [node.body.node("MatMul", *node.floats(0, 1))]
)
stand_in_for("QLinearAdd", "QLinearMul")(lambda node: [node.required(0) + node.required(3)])
stand_in_for("QLinearWhere")(
    lambda node: [node.body.node("Where", node.required(0), node.required(1), node.required(4))]
)
stand_in_for("QLinearConcat")(
    lambda node: [
        node.body.concat(*map(node.required, range(2, len(node.inputs), 3)), axis=int(node.attributes["axis"]))
    ]
)
stand_in_for("DropoutTraining")(
    lambda node: [node.required(0).apply("Identity"), node.required(0).equals(node.required(0))]
)


@stand_in_for("MatMulNBits", "MatMulBnb4")
def _packed_product(node: Unknown) -> Sequence[Value]:
    x, sizes = node.required(0), [node.number(name) for name in ("K", "N")]
    return [node.body.node("MatMul", x, node.body.node("ConstantOfShape", node.body.ints(sizes)).like(x))]


@stand_in_for("LinearCrossEntropyLoss", "LinearCrossEntropyLossAndGrad")
def _loss_of_tokens(node: Unknown) -> Sequence[Value]:
    each = node.attributes.get("reduction", b"mean") in (b"none", "none")
    return [node.floats(2)[0] if each else node.body.constant(np.zeros((), np.float32)), node.required(0)]


@stand_in_for("QGemm")
def _quantized_gemm(node: Unknown) -> Sequence[Value]:
    flags = {name: node.number(name, 0) for name in ("transA", "transB")}
    y, zero = node.body.node("Gemm", *node.floats(0, 3), **flags), node.input(8)
    return [y if zero is None else y.like(zero)]


@stand_in_for("GatherBlockQuantized")
def _rows_of_blocks(node: Unknown) -> Sequence[Value]:
    """The scales of the chosen rows, once for each number of a block."""
    scales = node.body.node("Gather", node.required(2), node.required(1))
    return [node.body.concat(*[scales] * node.number("block_size", 128), axis=-1)]


@stand_in_for("LinearAttention")
def _linear_attention(node: Unknown) -> Sequence[Value | None]:
    """The value, once for each query that shares its head, and the state of the past."""
    shared = node.number("q_num_heads") // node.number("kv_num_heads")
    return [node.body.concat(*[node.required(2)] * max(shared, 1), axis=-1), node.input(3)]


@stand_in_for("DynamicQuantizeLSTM")
def _quantized_layer(node: Unknown) -> Sequence[Value]:
    weights = [each.transpose(0, 2, 1) for each in node.floats(1, 2)]
    return node.body.nodes_of("LSTM", 3, node.required(0), *weights, **node.given("direction", "hidden_size"))


@stand_in_for("QLinearConv")
def _convolved(node: Unknown) -> Sequence[Value]:
    x, w = node.floats(0, 3)
    return [_of_images(node, x, "Conv", w).like(node.required(7))]


@stand_in_for("QLinearAveragePool", "QLinearGlobalAveragePool")
def _pooled(node: Unknown) -> Sequence[Value]:
    return [_of_images(node, node.floats(0)[0], node.op.removeprefix("QLinear")).like(node.required(0))]


def _of_images(node: Unknown, x: Value, op: str, *others: Value) -> Value:
    """A convolution or pooling. Where the channels are the last axis, images have two axes beside them."""
    given = node.given(*WINDOW)
    if not node.attributes.get("channels_last", 0):
        return node.body.node(op, x, *others, **given)
    return node.body.node(op, x.transpose(0, 3, 1, 2), *others, **given).transpose(0, 2, 3, 1)


@stand_in_for("EmbedLayerNormalization", "QEmbedLayerNormalization")
def _embedding(node: Unknown) -> Sequence[Value]:
    """The rows of the tables, one length for each row of tokens, and the rows again."""
    tokens = node.required(0)
    lengths = tokens.along("ReduceMax", [1], keepdims=0).cast(TensorProto.INT32)
    rows = node.body.node("Gather", node.required(2), tokens)
    return [rows.cast(TensorProto.FLOAT), lengths] if node.op.startswith("Q") else [rows, lengths, rows]


@stand_in_for("Attention", "QAttention")
def _attention(node: Unknown) -> Sequence[Value | None]:
    """The last third of x @ weights, and the keys and values of each head, appended to those of the past."""
    body, widths = node.body, node.attributes.get("qkv_hidden_sizes")
    packed = body.node("MatMul", *(node.floats(0, 1) if node.op == "QAttention" else map(node.required, (0, 1))))
    value = packed.slice(sum(widths[:2]), sum(widths), -1) if widths else packed.split(3, -1)[2]
    if node.op != "Attention":
        return [value]
    heads, past = node.heads(value).unsqueeze(0), node.input(4)
    present = body.concat(heads, heads, axis=0)
    if past is not None:
        shared = node.attributes.get("past_present_share_buffer", 0)
        present = past if shared else body.concat(past, present, axis=3)
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


@stand_in_for("MultiHeadAttention")
def _heads_attention(node: Unknown) -> Sequence[Value | None]:
    """q @ (k.T @ v), which has the shape of the attention's result, and the keys and values of each head."""
    q, k, v, body = node.required(0), node.input(1), node.input(2), node.body
    if k is None:  # all three lie in q, [N, L, heads, 3, H]
        return [q.slice(0, 1, 3).reshape([0, 0, -1])]
    if v is None:  # k holds both, [N, L, heads, 2, H]
        return [q]
    y = body.node("MatMul", q, body.node("MatMul", k.transpose(0, 2, 1), v))
    pairs = zip((node.heads(k), node.heads(v)), (node.input(6), node.input(7)), strict=True)
    return [y, *(now if past is None else body.concat(past, now, axis=2) for now, past in pairs)]


@stand_in_for("GroupQueryAttention")
def _grouped_attention(node: Unknown) -> Sequence[Value]:
    """The query; if keys and values are packed into it, only its own part."""
    q = node.required(0)
    if node.input(1) is not None:
        return [q]
    heads, keys = node.number("num_heads"), node.number("kv_num_heads")
    parts = q.reshape([0, 0, heads + 2 * keys, -1])
    return [parts.slice(0, heads, 2).reshape([0, 0, -1])]
