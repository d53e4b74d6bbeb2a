"""Takes caches, masks, positions and the choice of the last token out of a model, and packs examples into one row.

Whole sequences are given: padded on the right, or one behind the other, each of which sees itself alone."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.formulas import GraphBody, Value
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import MICROSOFT, copied, domain_of, keep, opset_of
from opgrad.onnx.graph.nodes import attributes_of, names_in, needed, read_by, rename_inputs
from opgrad.onnx.rules.attention import in_sequences, of_sequences
from opgrad.onnx.rules.node import Node, NoGradient, sizes_of

# The places of caches among the inputs of operators of attention; their results behind the first are caches, too.
PAST = {"GroupQueryAttention": (3, 4), "MultiHeadAttention": (6, 7), "Attention": (4,)}
KEPT = ("mask", "type", "segment")  # parts of the names of an encoder's inputs, which are of the tokens' shape
COPIES = ("Cast", "Identity")
WRITES = ("ScatterND", "ScatterElements", "TensorScatter", "IndexPut")  # into a cache of a fixed length
SCOPE = "without_caches"  # what the names of nodes in the places of inputs begin with
COUNTS = "CumSum"  # the operator that gives each token its place in its row


def without_caches(
    source: onnx.ModelProto, tokens: str, logits: str, what: str, is_encoder: bool = False
) -> onnx.ModelProto:  # fmt: skip
    """The graph from tokens to scores, for sequences without anything before them.

    Masks become ones, positions count from 0, and caches are empty. Padding on the right needs no mask, as attention is
    causal; of an encoder, masks and types of tokens stay inputs. what: the model's name in messages.
    Raises NotImplementedError for other inputs.
    """
    model = copied(source)
    graph = model.graph
    _drop_past(graph, tokens)
    _normalize_apart(model)
    if not is_encoder:
        _keep_all_tokens(model, logits)
    keep(graph.output, [each for each in graph.output if each.name == logits])
    keep(graph.node, needed(graph.node, [logits]))
    read = read_by(graph.node)
    held = {each.name for each in graph.initializer}
    own = {each.name for each in graph.input if is_encoder and any(part in each.name for part in KEPT)} | {tokens}
    others = [each for each in graph.input if each.name in read and each.name not in own | held]
    writer = _CacheWriter(model, tokens, what)
    for each in others:
        writer.replace(each)
    keep(graph.input, [each for each in graph.input if each.name in own & (read | {tokens})])
    graph.initializer.extend(writer.body.initializers)
    keep(graph.node, [*writer.body.nodes, *graph.node])
    read = read_by(graph.node)
    keep(graph.initializer, [each for each in graph.initializer if each.name in read])
    return model


def _drop_past(graph: onnx.GraphProto, tokens: str) -> None:
    """Leave out the inputs and results of attention's nodes that are caches."""
    given = {each.name for each in graph.input} - {tokens}
    for node in graph.node:
        if node.op_type in COPIES and node.input[0] in given:
            given.add(node.output[0])
        places = PAST.get(node.op_type, ()) if domain_of(node) == MICROSOFT else ()
        if node.op_type == "Attention" and not domain_of(node):
            places = (4, 5)
        past = [place for place in places if place < len(node.input) and node.input[place] in given]
        for place in past:
            node.input[place] = ""
        # Without a past the window, which stays, is all that a cache that slides means.
        keep(node.attribute, [each for each in node.attribute if each.name != "sliding_window_cache" or not past])
        if past:
            del node.output[1:]
        while node.input and not node.input[-1]:
            node.input.pop()


def _normalize_apart(model: onnx.ModelProto) -> None:
    """Write the norms of queries and keys that GroupQueryAttention has in itself for GPUs as nodes."""
    body, nodes = GraphBody(opset_of(model), names_in(model.graph)), list[onnx.NodeProto]()
    for node in model.graph.node:
        inputs = [*node.input, *[""] * 16]
        if node.op_type == "GroupQueryAttention" and inputs[14] and inputs[1]:
            given = attributes_of(node)
            norm = {"axis": -1, "epsilon": given.get("qk_norm_epsilon", 1e-6), "stash_type": 1}
            body.scope(f"{SCOPE}/{node.name}")
            for place, heads in enumerate((given["num_heads"], given["kv_num_heads"])):
                x, scale = Value(body, inputs[place]).reshape([0, 0, heads, -1]), Value(body, inputs[14 + place])
                y = body.node("SimplifiedLayerNormalization", x, scale, **norm).reshape([0, 0, -1])
                node.input[place], node.input[14 + place] = y.name, ""
            while not node.input[-1]:
                node.input.pop()
            nodes, body.nodes = nodes + body.nodes, []
        nodes.append(copied(node))
    keep(model.graph.node, nodes)
    model.graph.initializer.extend(body.initializers)


def _keep_all_tokens(model: onnx.ModelProto, logits: str) -> None:
    """Let the scores of all tokens be computed where a model for generation takes the last token alone."""
    graph = Graph(copied(model))
    for node in model.graph.node:
        if node.op_type not in ("Gather", "Unsqueeze") or attributes_of(node).get("axis", 1) != 1:
            continue
        chosen = graph.maker(node.input[0], "Gather") if node.op_type == "Unsqueeze" else node
        index = None if chosen is None or attributes_of(chosen).get("axis") != 1 else graph.constant(chosen.input[1])
        if chosen is None or index is None or index.ravel().tolist() != [-1] or index.ndim != (chosen is node):
            continue
        node.CopyFrom(helper.make_node("Identity", [chosen.input[0]], list(node.output), node.name))
        scores = next(each for each in model.graph.output if each.name == logits)
        scores.type.tensor_type.shape.dim[1].Clear()


class _CacheWriter:
    """Writes values in the places of inputs. tokens: the input of whose shape they are. what: names the model."""

    def __init__(self, model: onnx.ModelProto, tokens: str, what: str):
        self._graph, self._what = Graph(copied(model)), what
        self.body = GraphBody(self._graph.opset, self._graph.taken)
        self.body.scope(SCOPE)
        self._tokens = Value(self.body, tokens)

    def replace(self, value: onnx.ValueInfoProto) -> None:
        kind, name, body = value.type.tensor_type, value.name, self.body
        rank = len(kind.shape.dim)
        if "mask" in name and rank == 2:
            found = self._ones()
        elif "position" in name and rank == 1:
            found = body.node("Gather", self._positions(), body.constant(np.array(0)), axis=0)
        elif "position" in name and rank == 2:
            found = self._positions()
        elif "position" in name and rank == 3 and kind.shape.dim[0].dim_value:
            # Of texts alone the places in time, height and width are the same.
            found = body.concat(*[self._positions().unsqueeze(0)] * kind.shape.dim[0].dim_value)
        elif "past" in name or "cache" in name:
            found = self._empty(value)
        elif "logits_to_keep" in name:  # the scores of so many last tokens, of 0 those of all
            found = body.constant(np.zeros([1] * rank, np.int64))
        else:
            raise NotImplementedError(
                f"{self._what} has the input {name!r}, expected tokens, masks, positions and caches"
            )
        cast = helper.make_node("Cast", [found.name], [name], f"{SCOPE}/{name}/Cast", to=kind.elem_type)
        body.nodes.append(cast)

    def _ones(self) -> Value:
        one = helper.make_tensor("value", TensorProto.INT64, [1], [1])
        return self.body.node("ConstantOfShape", self._tokens.shape(), value=one)

    def _positions(self) -> Value:
        """The index of each token in its row."""
        return self.body.node(COUNTS, self._ones(), self.body.constant(np.array(1)), exclusive=1)

    def _empty(self, value: onnx.ValueInfoProto) -> Value:
        """A cache of which the axis of the past has no elements, or a state of zeros, which has no such axis.

        The graph tells the axis, along which keys are appended or whose length is read, and sizes the input lacks.
        """
        kind, axes = value.type.tensor_type, value.type.tensor_type.shape.dim
        sizes: list[int | None] = [each.dim_value if each.HasField("dim_value") else None for each in axes]
        tokens = next(each for each in self._graph.graph.input if each.name == self._tokens.name).type.tensor_type
        batch = tokens.shape.dim[0].dim_param  # the name of the axis of the rows
        rows = next((axis for axis, each in enumerate(axes) if each.dim_param and each.dim_param == batch), None)
        rows = 0 if rows is None and sizes[:1] == [None] else rows
        found = _Past(self._graph, value.name, sizes)
        unknown = [axis for axis, size in enumerate(found.sizes) if size is None and axis != rows]
        if found.axis is None and len(unknown) == 1:
            found.axis = unknown[0]
        if found.axis is not None:
            found.sizes[found.axis], unknown = 0, [axis for axis in unknown if axis != found.axis]
        if found.written or unknown:
            why = f"into which {found.written} writes" if found.written else f"whose axes {unknown} have unknown sizes"
            raise NotImplementedError(f"{self._what} has the cache {value.name!r}, {why}; expected one that grows")
        parts = [self.body.ints([size or 0]) for size in found.sizes]
        if rows is not None:
            parts[rows] = self._tokens.shape(0, 1)
        nothing = helper.make_tensor("value", kind.elem_type, [1], [0])
        return self.body.node("ConstantOfShape", self.body.concat(self.body.ints([]), *parts), value=nothing)


class _Past:
    """What a graph does with a cache.

    axis: of the past, if the graph tells it. sizes: of the axes, if known. written: the operator that writes into it.
    """

    def __init__(self, graph: Graph, name: str, sizes: list[int | None]):
        self._graph, self.sizes = graph, sizes
        self.axis: int | None = None
        self.written = ""
        self._follow(name, list(range(len(sizes))))

    def _follow(self, name: str, order: list[int]) -> None:
        """Look at the readers of a value whose axes are those of the cache in this order."""
        for node in self._graph.readers.get(name, []):
            given, domain = attributes_of(node), domain_of(node)
            if node.op_type in COPIES:
                self._follow(node.output[0], order)
            elif node.op_type == "Transpose":
                turned = given.get("perm", range(len(order))[::-1])
                self._follow(node.output[0], [order[axis] for axis in turned])
            elif node.op_type == "Concat":
                if any(each.op_type == "Conv" for each in self._graph.readers.get(node.output[0], [])):
                    continue  # a state of what the kernel reads before the first token
                self.axis = order[given["axis"] % len(order)]
                for other in set(node.input) - {name}:
                    for axis, size in zip(order, self._graph.sizes(other) or [None] * len(order), strict=True):
                        if self.sizes[axis] is None and isinstance(size, int):
                            self.sizes[axis] = size
            elif node.op_type == "Shape" and self.axis is None:
                self._ask(node.output[0], order[given.get("start", 0) : given.get("end")])
            elif node.op_type in WRITES and node.input[0] == name:
                self.written = node.op_type
            elif node.op_type in PAST and self.axis is None:
                self.axis = order[3 if node.op_type == "Attention" and domain == MICROSOFT else 2]

    def _ask(self, shape: str, order: list[int]) -> None:
        """Look which length is asked for, if only one of an axis of unknown size behind the first is."""
        asked = set[int]()
        for node in self._graph.readers.get(shape, []):
            index = self._graph.constant(node.input[1]) if node.op_type == "Gather" else None
            asked |= set() if index is None else {order[int(each)] for each in index.ravel()}
        asked |= {order[0]} if len(order) == 1 else set()
        found = {axis for axis in asked if axis and self.sizes[axis] is None}
        self.axis = found.pop() if len(found) == 1 else self.axis


STARTS, PLACES = "starts", "places"  # inputs: where examples begin, [1, n + 1], and the places of their tokens, [1, L]
# Operators with a state that tokens of a row hand on, whatever their weights are.
MIXING = ("LSTM", "GRU", "RNN", "Scan", "Loop", "CumSum", "CausalConvWithState", "LinearAttention")


def packed_rows(model: onnx.ModelProto, what: str) -> onnx.ModelProto:
    """The graph for one row of several examples, with the inputs `starts` and `places`.

    Raises NotImplementedError without an operator of causal attention, or with one that hands a state on. Where tokens
    act on others in other ways, losses differ from those of rows apart, see `AdaptedModel.check_sight`.
    """
    graph = Graph(copied(model))
    body = GraphBody(graph.opset, graph.taken)
    graph.graph.input.extend([
        helper.make_tensor_value_info(STARTS, TensorProto.INT64, [1, "bounds"]),
        helper.make_tensor_value_info(PLACES, TensorProto.INT64, ["batch", "length"]),
    ])  # fmt: skip
    counts = [node for node in graph.nodes() if node.op_type == COUNTS and node.name.startswith(SCOPE)]
    count, own = 0, {node.output[0]: PLACES for node in counts}
    for node in list(graph.nodes()):
        write = WRITERS.get((domain_of(node), node.op_type))
        if node.op_type == "ConstantOfShape" and node.name.startswith(SCOPE) and graph.maker(node.input[0], "Shape"):
            # A mask is as long as the longest example: by its length models choose how they scale rotary embeddings.
            body.scope(node.name)
            longest = Value(body, PLACES, TensorProto.INT64, [1, None]).along("ReduceMax", [1], keepdims=0) + 1
            mask = copied(node)
            mask.input[0] = body.concat(body.ints([1]), longest).name
            made, body.nodes = body.nodes, []
            graph.substitute(node, [*made, mask])
            continue
        if write is None:
            if node.op_type in MIXING and node.output[0] not in own:
                raise NotImplementedError(
                    f"{what}: {node.op_type} (node {node.name!r}) lets the tokens of a row act on each other; examples "
                    "can be packed where operators of attention alone do"
                )
            continue
        body.scope(node.name or node.op_type)
        starts, places = (Value(body, name, TensorProto.INT64, [1, None]) for name in (STARTS, PLACES))
        try:
            y = write(Node(node, graph, body, [], []), starts.squeeze(0), places)
        except NoGradient as reason:
            raise NotImplementedError(f"{what}: examples cannot be packed: {node.op_type} {reason}") from None
        made, body.nodes = body.nodes, []
        graph.substitute(node, [*made, helper.make_node("Identity", [y.name], [node.output[0]])])
        count += 1
    if not count:
        raise NotImplementedError(f"{what}: examples cannot be packed: the model has no operator of attention")
    graph.graph.initializer.extend(body.initializers)
    graph.commit()
    for node in graph.graph.node:
        rename_inputs(node, own)
    return graph.model


def _attention(node: Node, starts: Value, _: Value) -> Value:
    """ONNX's Attention, whose queries, keys and values are [1, L, heads * H] or [1, heads, L, H]."""
    if not node.get("is_causal", 0) or node.input(3) is not None:
        raise NoGradient("is not causal, or has a mask")
    if node.rank() > 3:
        parts = [node.required(index).squeeze(0).transpose(1, 0, 2) for index in range(3)]
    else:
        counts = [node.get(name) for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
        parts = [_by_heads(node.required(index), count) for index, count in enumerate(counts)]
    given = {"causal": "top_left", "softcap": node.get("softcap", 0.0), **_scale(node)}
    y = of_sequences(node, parts, starts, None, **given)
    if node.rank() > 3:
        heads = sizes_of(node.x)[1]
        if not isinstance(heads, int):
            raise NoGradient("does not tell how many heads it has")
        return y.reshape([0, 0, heads, -1]).transpose(0, 2, 1, 3)
    return y


def _multi_head(node: Node, starts: Value, _: Value) -> Value:
    """MultiHeadAttention of com.microsoft, with queries, keys and values [1, L, heads * H] apart."""
    if not node.get("unidirectional", 0) or any(node.input(index) is not None for index in range(3, 8)):
        raise NoGradient("is not causal, or has a mask or a bias")
    if node.input(1) is None or node.input(2) is None or any(node.rank(index) != 3 for index in range(3)):
        raise NoGradient("has queries, keys and values in one array")
    parts = [_by_heads(node.required(index), node.get("num_heads")) for index in range(3)]
    return of_sequences(node, parts, starts, None, causal="top_left", **_scale(node))


def _by_heads(x: Value, heads: int) -> Value:
    """[1, L, heads * H] as [L, heads, H]."""
    return x.reshape([0, 0, heads, -1]).squeeze(0)


def _scale(node: Node) -> dict[str, Any]:
    given = node.get("scale", 0.0)
    return {"scale": given} if given else {}


WRITERS: dict[tuple[str, str], Callable[[Node, Value, Value], Value]] = {
    (MICROSOFT, "GroupQueryAttention"): in_sequences,
    (MICROSOFT, "MultiHeadAttention"): _multi_head,
    ("", "Attention"): _attention,
}
