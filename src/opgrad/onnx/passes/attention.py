"""Recognition of attention, softmax between two products, in the forms that exporters and optimizers write.

A match begins at the softmax. What lies between it and the product of queries and keys is read from there on: factors,
addends and conditions that hide keys, casts, and a tanh that caps the scores. One node stands for all of it. Masks that
are causal whatever the sizes are become an attribute of the node; the others its input.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce

import numpy as np
import onnx
from onnx import TensorProto

from opgrad.onnx.graph.formulas import ONE_AXIS_FROM, GraphBody, Value
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import FLOATS, MICROSOFT
from opgrad.onnx.graph.nodes import attributes_of, naming, title
from opgrad.onnx.graph.sizes import Sizes


@dataclass(frozen=True)
class ScoreOperand:
    """An operand of the product of queries and keys: a value, times a factor.

    turned: whether its last two axes still have to be exchanged, to have a row for each key.
    """

    name: str
    factor: float = 1.0
    turned: bool = False


def scaled(graph: Graph, name: str) -> ScoreOperand:
    """An operand without the number that it is multiplied with, or divided by."""
    node = graph.maker(name, "Mul", "Div") if graph.inner(name) else None
    if node is None:
        return ScoreOperand(name)
    pairs = [tuple(node.input)] if node.op_type == "Div" else [tuple(node.input), tuple(node.input)[::-1]]
    for value, other in pairs:
        number = graph.scalar(other)
        sizes, own = graph.sizes(value), graph.sizes(name)
        if number and sizes is not None and own is not None and len(sizes) == len(own):
            found = scaled(graph, value)
            return replace(found, factor=found.factor * (1 / number if node.op_type == "Div" else number))
    return ScoreOperand(name)


def as_keys(graph: Graph, found: ScoreOperand) -> ScoreOperand:
    """The keys before a Transpose, between two Reshapes or not, exchanged their last two axes for the product."""
    name, source = found.name, None
    node = graph.maker(name, "Transpose", "Reshape")
    if node is not None and node.op_type == "Transpose":
        rank = len(order := attributes_of(node).get("perm", []))
        if rank > 2 and order == [*range(rank - 2), rank - 1, rank - 2]:
            source = node.input[0]
    elif node is not None:
        inner = graph.maker(node.input[0], "Transpose")
        first = graph.maker(inner.input[0], "Reshape") if inner is not None else None
        if inner is not None and first is not None and attributes_of(inner).get("perm") == [0, 2, 1]:
            before, flat, after = (graph.sizes(each) or [] for each in (first.input[0], first.output[0], name))
            if len(before) == len(after) == 4 and flat and None not in (flat[-1], before[1]):
                is_source = flat[-1] == before[-1] == after[-2] and before[1] == after[1]
                source = first.input[0] if is_source else None
    if source is None:
        return replace(found, turned=True)
    inside = scaled(graph, source)
    return ScoreOperand(inside.name, found.factor * inside.factor)


def head_size(graph: Graph, name: str) -> int | None:
    """The size of the last axis, from operands that are broadcast to a value where the graph does not tell its own."""
    sizes = graph.sizes(name)
    if sizes and isinstance(sizes[-1], int):
        return sizes[-1]
    node = graph.maker(name, "Add", "Sub", "Mul", "Div", "Cast", "Identity")
    found = [] if node is None else [head_size(graph, each) for each in node.input]
    return next((size for size in found if size is not None and size > 1), None)


def _before_repetition(graph: Graph, name: str) -> str | None:
    """x [B, H, L, D] of Reshape(Expand(Unsqueeze(x, 2))), which repeats each head."""
    last = graph.maker(name, "Reshape")
    middle = graph.maker(last.input[0], "Expand") if last is not None else None
    first = graph.maker(middle.input[0], "Unsqueeze", "Reshape") if middle is not None else None
    if first is None or middle is None:
        return None
    before, split, wide, after = (
        graph.sizes(each) for each in (first.input[0], first.output[0], middle.output[0], name)
    )
    if before is None or split is None or after is None or len(before) != 4 or len(split) != 5 or len(after) != 4:
        return None
    heads, every = before[1], after[1]
    if not isinstance(heads, int) or not isinstance(every, int) or split[1:3] != [heads, 1]:
        return None
    if not heads or every % heads:
        return None
    # The product asks for as many numbers in a head as queries have, so that sizes which are not told are those before.
    known = [(a, b) for a, b in zip(before[2:], after[2:], strict=True) if isinstance(a, int) and isinstance(b, int)]
    if any(a != b for a, b in known):
        return None
    return first.input[0] if wide is None or wide[2] in (None, every // heads) else None


LOW = -1e4  # a number from which on down an addend hides a key; exporters write -10000, the least number, or -inf
LARGEST = 1 << 26  # bytes of a mask, or of what it is computed from
SIZES = (5, 3, 7, 2, 9, 4)  # what named sizes are in a trial; in the second one all are larger
TRIALS = (0, 6)
FARTHEST = 2**31 - 1  # from here on a number stands for the end of an axis
NUMBERS = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Add", "Sub", "Div")  # that read floats as places
ALL = "all"
ALIGNMENTS = (ALL, "top_left", "bottom_right")  # in the order in which one is chosen where several hold


class _Trial(Graph):
    """A graph with numbers for its named sizes, so that whatever follows from sizes is a constant.

    more: what is added to SIZES. named: the numbers of some sizes.
    """

    most_read, most_folded = math.inf, LARGEST

    def __init__(self, graph: Graph, more: int, named: dict[str, int] | None = None):
        self.__dict__ |= graph.__dict__
        self.more, self.named, self._folded, self._left = more, named or {}, {}, math.inf

    def folds(self, node: onnx.NodeProto) -> bool:
        return len(node.output) == 1

    def sizes(self, name: str) -> Sizes | None:
        sizes = super().sizes(name)
        return sizes and [self._number(size) if isinstance(size, str) else size for size in sizes]

    def _number(self, size: str) -> int | None:
        if size not in self.named and len(self.named) < len(SIZES):
            self.named[size] = SIZES[len(self.named)] + self.more
        return self.named.get(size)

    def beyond(self, first: "_Trial", shape: Sequence[int]) -> "_Trial | None":
        """A trial with sizes at which all constants of a mask show; None if those of this one are such.

        A window of 512 keys hides none of 15, and of a stored table a trial reads what its sizes reach. first: another
        trial, in which constants are the same. shape: of the mask.
        """
        least, axes = 0, [size for size in shape[-2:] if size != 1]
        for name, value in self._folded.items():
            other = first._folded.get(name)
            if value is None or other is None or not np.array_equal(value, other):
                continue
            if value.size == 1:
                reads = {node.op_type for node in self.readers.get(name, ())}
                number = abs(value.item()) if value.dtype.kind in "iu" or not reads.isdisjoint(NUMBERS) else 0
                least = max(least, int(number) + 2 if number < FARTHEST else 0)
            elif value.size and axes:
                least = max(least, max(value.shape) - max(axes[-1] - axes[0], 0))
        if not axes or least <= min(axes):
            return None
        return _Trial(self, 0, dict.fromkeys([each for each in self.named if self.named[each] in axes], least))


@cache  # for one mask that all layers read, while `fuse_attention` runs
def alignment(graph: Graph, name: str, hides: bool = False) -> str | None:
    """How a causal mask, bool or added, aligns queries with keys: "top_left" or "bottom_right".

    ALL of a mask that hides no key, None of any other. It is computed for some sizes of each name, which tells what it
    is for all sizes unless it compares places with what sizes give in a way that none of those shows, such as a square.

    hides: the mask is bool, and True where a key is hidden.
    """
    found, trials = set(ALIGNMENTS), [_Trial(graph, more) for more in TRIALS]
    try:
        for trial in trials:
            if (mask := trial.constant(name)) is None:
                return None
            mask = ~mask if hides else mask
            seen = mask if mask.dtype == bool else mask == 0
            if mask.dtype != bool and not (seen | (mask.astype(np.float64) <= LOW)).all():
                return None  # a number in it is neither 0 nor so low that it hides a key
            if mask.ndim < 2 or any(size != 1 for size in mask.shape[:-2]):
                found &= {ALL} if seen.all() else set()
            else:
                queries, keys = mask.shape[-2:]
                diagonals = {ALL: keys, "top_left": 0, "bottom_right": keys - queries}
                every = {each: np.tri(queries, keys, diagonal, dtype=bool) for each, diagonal in diagonals.items()}
                found &= {each for each, causal in every.items() if (seen.reshape(queries, keys) == causal).all()}
            if not found or not trial.named:
                break
            if trial is trials[-1] and (last := trial.beyond(trials[0], mask.shape)) is not None:
                if len(trials) > len(TRIALS):
                    return None  # its axes do not grow with the sizes, or not as far
                trials.append(last)
    except RecursionError:
        return None
    return next((each for each in ALIGNMENTS if each in found), None)


@dataclass(frozen=True)
class Condition:
    """A bool value, which is True where a query sees a key.

    lacks_heads: whether its axes are batch, queries and keys, if it has three. ends: the value that tells how many of
    its keys count, as an end of Slice has it; "" where all do.
    """

    name: str
    lacks_heads: bool = False
    ends: str = ""


def conditions(graph: Graph, name: str, lacks_heads: bool = False) -> list[Condition]:
    """The conditions of which all have to hold for a bool value, which nothing else needs to read."""
    own = Condition(name, lacks_heads)
    node = graph.maker(name, "And", "Expand", "Reshape")
    if node is None:
        return [own]
    if node.op_type != "Reshape":
        names = node.input if node.op_type == "And" else node.input[:1]
        return [each for part in names for each in conditions(graph, part, lacks_heads)]
    before, after = graph.sizes(node.input[0]), graph.sizes(name)
    if lacks_heads or before is None or len(before) != 3 or after != [before[0], 1, *before[1:]]:
        return [own]
    found = conditions(graph, node.input[0], lacks_heads=True)
    return found if all(graph.sizes(each.name) is not None for each in found) else [own]


def all_keys(graph: Graph, name: str) -> tuple[str, str]:
    """What a mask is before a Slice leaves the first of its keys, and the number of these; itself and "" without."""
    node = graph.maker(name, "Slice")
    given = [] if node is None else [graph.constant(each) if each else None for each in node.input[1:]]
    if node is None or len(given) not in (3, 4) or given[0] is None or given[2] is None:
        return name, ""
    rank = len(graph.sizes(node.input[0]) or ())
    keys_alone = given[0].tolist() == [0] and rank and given[2].tolist() in ([-1], [rank - 1])
    steps = given[3] if len(given) > 3 else np.array([1])
    return (node.input[0], node.input[2]) if keys_alone and steps is not None and (steps == 1).all() else (name, "")


class NotAttention(Exception):
    """The text says why a softmax between products is not replaced."""


def _value(graph: Graph, body: GraphBody, name: str) -> Value:
    """A value of the graph, for the formulas in a body; float32 where the graph does not tell its type."""
    return Value(body, name, graph.element_type(name) or TensorProto.FLOAT)


def mask_of(
    graph: Graph, body: GraphBody, seen: Sequence[tuple[str, bool]], masks: Sequence[tuple[str, float]], dtype: int
) -> tuple[str, Value | None]:
    """How the mask is causal, and the rest of it.

    body: gets the nodes that compute it. seen: conditions, each with whether a query sees a key where it holds. masks:
    what is added to the scores, each with its factor. dtype: of the queries.
    """
    aligned, parts, added = set[str](), list[Value](), list[Value]()
    for condition, holds in seen:
        for each in conditions(graph, condition) if holds else [Condition(condition)]:
            own = alignment(graph, each.name, hides=not holds)
            if own:
                aligned.add(own)
            else:
                part = _as_mask(graph, body, each)
                parts.append(part if holds else ~part)
    for name, factor in masks:
        while (node := graph.maker(name, "Expand")) is not None:  # the node broadcasts masks itself
            name = node.input[0]
        added += _split(graph, body, name, factor, aligned)
    aligned.discard(ALL)
    if len(aligned) > 1:
        raise NotAttention("two of its masks are causal in different ways")
    whole = reduce(Value.__and__, parts) if parts else None
    total = reduce(Value.__add__, added) if added else None
    if total is not None and total.element_type not in (dtype, TensorProto.FLOAT):
        total = total.cast(dtype)
    if whole is not None and total is not None:
        whole = body.where(whole, total, -math.inf)
    return "".join(aligned), total if whole is None else whole


def some_key(graph: Graph, body: GraphBody, seen: Sequence[tuple[str, bool]]) -> Value | None:
    """Whether a query sees a key, broadcast to the scores with one key; None if the conditions are causal alone.

    body, seen: as in `mask_of`.
    """
    if all(alignment(graph, condition, hides=not holds) for condition, holds in seen):
        return None
    if not all(graph.sizes(condition) for condition, _ in seen):
        raise NotAttention("the graph does not tell the rank of its mask")
    pairs = [(_value(graph, body, each), holds) for each, holds in seen]
    whole = reduce(Value.__and__, (each if holds else ~each for each, holds in pairs))
    return whole.cast(TensorProto.FLOAT).along("ReduceMax", [-1], keepdims=1).cast(TensorProto.BOOL)


def _split(graph: Graph, body: GraphBody, name: str, factor: float, aligned: set[str]) -> list[Value]:
    """An added mask without what of it is causal, which joins `aligned`; nothing if nothing is left."""
    own = alignment(graph, name) if factor > 0 else None
    if own:
        aligned.add(own)
        return []
    whole, ends = all_keys(graph, name)
    node = graph.maker(whole, "Where")
    low = graph.scalar(node.input[2]) if node is not None and graph.scalar(node.input[1]) == 0.0 else None
    own_value = _value(graph, body, name)
    if node is None or low is None or low > LOW or factor != 1:
        return [own_value if factor == 1 else own_value * factor]
    every = [(each, alignment(graph, each.name)) for each in conditions(graph, node.input[0])]
    # Of fewer keys, those that a query sees from the first on stay the same; counted from the last they do not.
    rest = [replace(each, ends=ends) for each, own in every if not own or (ends and own == "bottom_right")]
    if len(rest) == len(every):
        return [own_value]
    aligned.update(own for _, own in every if own and not (ends and own == "bottom_right"))
    if not rest:
        return []
    seen = reduce(Value.__and__, (_as_mask(graph, body, each) for each in rest))
    return [body.where(seen, *(_value(graph, body, each) for each in node.input[1:]))]


def _as_mask(graph: Graph, body: GraphBody, condition: Condition) -> Value:
    """A condition that is broadcast to the scores."""
    value, sizes = _value(graph, body, condition.name), graph.sizes(condition.name)
    if condition.lacks_heads and len(sizes or ()) == 3:
        value = value.unsqueeze(1)
    return value.slice(0, _value(graph, body, condition.ends), -1) if condition.ends and sizes != [] else value


NODE = "AttentionTraining"
LARGEST_HEAD = 256  # of the kernels


@dataclass(frozen=True)
class Recognition:
    """What became of a softmax between two products: replaced if `reason` is empty."""

    node: str
    reason: str = ""


@dataclass
class AttentionScores:
    """What is done to the product of queries and keys, before softmax.

    product: the node of the product. masks: added values, in the scores' type, each with the factor that is applied to
    it. seen: conditions under which a query sees a key. lows: the numbers that stand where it does not, and NaN if
    something is added to them. capped: whether the factors found from here on are inside of the tanh of the softcap.
    """

    product: onnx.NodeProto | None = None
    scale: float = 1.0
    softcap: float = 0.0
    masks: list[tuple[str, float]] = field(default_factory=list)
    seen: list[tuple[str, bool]] = field(default_factory=list)
    lows: set[float] = field(default_factory=set)


def fuse_attention(graph: Graph) -> list[Recognition]:
    """Replace attention by nodes of AttentionTraining; a line for each softmax that stands before a product."""
    found = []
    alignment.cache_clear()  # what an error has left
    for node in list(graph.nodes()):
        if node.op_type != "Softmax" or node.domain not in ("", "ai.onnx"):
            continue
        try:
            with naming(node):
                last = _product_behind(graph, node)
                if last is None:
                    continue
                _write(graph, node, last)
            found.append(Recognition(title(node)))
        except NotAttention as reason:
            found.append(Recognition(title(node), str(reason)))
    alignment.cache_clear()
    return found


@dataclass(frozen=True)
class Last:
    """The product with the values, and what dropout does before it. guard: the mask whose empty rows become 0 there."""

    node: onnx.NodeProto
    dropout: onnx.NodeProto | None = None
    guard: str = ""


def _product_behind(graph: Graph, softmax: onnx.NodeProto) -> Last | None:
    """The product whose first operand the probabilities are; None if there is none.

    Before it, a Where may put 0 into rows without a key. Exporters ask for NaN, and the guard is ""; the body of ONNX's
    Attention asks for a mask that is -inf everywhere.
    """
    name, dropout, guard = softmax.output[0], None, ""
    while True:
        readers = graph.readers.get(name, [])
        wheres = [each for each in readers if each.op_type == "Where" and each.input[2] == name]
        if len(wheres) == 1 and name not in graph.kept and _number(graph, wheres[0].input[1]) == 0.0:
            others = [each for each in readers if each.op_type not in ("Where", "CastLike")]
            test, found = graph.maker(wheres[0].input[0], "IsNaN", "Equal"), None
            if test is not None and test.op_type == "IsNaN":
                found = "" if test.input[0] == name and others == [test] else None
            elif test is not None and not others and _number(graph, test.input[1]) == -math.inf:
                largest = graph.maker(test.input[0], "ReduceMax")
                if largest is not None:
                    found = largest.input[0]
                elif graph.constant(test.input[0]) is not None:
                    found = ""
            if found is not None:
                name, guard = wheres[0].output[0], found
                continue
        products = [each for each in readers if each.op_type == "MatMul" and each.input[0] == name]
        if products:
            return Last(products[0], dropout, guard) if graph.inner(name) else None
        node = graph.reader(name, "Cast", "Dropout")
        if node is None or (node.op_type == "Dropout" and dropout is not None):
            return None
        dropout = node if node.op_type == "Dropout" else dropout
        name = node.output[0]


def _number(graph: Graph, name: str) -> float | None:
    """The number in a constant, whatever type it is converted to."""
    node = graph.maker(name, "CastLike")
    return graph.scalar(name if node is None else node.input[0])


def _scores(graph: Graph, name: str) -> AttentionScores | None:
    """What is done to the product from which a value comes; None if no product is found."""
    node = graph.part(name, "MatMul", "Cast", "Mul", "Div", "Add", "Where")
    if node is None:
        return None
    if node.op_type == "MatMul":
        return AttentionScores(node)
    if node.op_type == "Cast":
        return _scores(graph, node.input[0])
    if node.op_type == "Where":
        return _hidden(graph, node)
    pairs = [tuple(node.input), tuple(node.input)[::-1]]
    for before, other in pairs[:1] if node.op_type == "Div" else pairs:
        if node.op_type == "Add":
            found = _scores(graph, before)
            if found is not None:
                found.masks.append((other, 1.0))
                found.lows |= {math.nan} if found.seen else set()
                return found
            continue
        number = graph.scalar(other)
        if number is None or not math.isfinite(number) or not number:
            continue
        factor = 1 / number if node.op_type == "Div" else number
        tanh = graph.part(before, "Tanh")
        found = _scores(graph, before if tanh is None else tanh.input[0])
        if tanh is not None:  # a softcap, c * tanh(scores / c)
            if found is None or found.masks or found.seen or found.softcap or factor <= 0:
                return None
            found.scale, found.softcap = found.scale * factor, factor
            return found
        if found is not None:  # scores times a number, outside of whatever was added to them before
            if found.softcap:
                return None
            found.scale *= factor
            found.masks = [(mask, own * factor) for mask, own in found.masks]
            return found
    return None


def _hidden(graph: Graph, node: onnx.NodeProto) -> AttentionScores | None:
    """Scores where a condition holds, and a number that hides a key elsewhere, or the other way round."""
    condition, a, b = node.input
    for name, other, holds in ((a, b, True), (b, a, False)):
        low = graph.scalar(other)
        found = _scores(graph, name) if low is not None and low <= LOW else None
        if found is not None and low is not None:
            found.seen.append((condition, holds))
            found.lows.add(low)
            return found
    return None


def _write(graph: Graph, softmax: onnx.NodeProto, last: Last) -> None:
    sizes = graph.sizes(softmax.input[0])
    axis = attributes_of(softmax).get("axis", -1 if graph.opset >= ONE_AXIS_FROM else 1)
    if sizes is None:
        raise NotAttention("the graph does not tell the rank of its input")
    if axis not in (-1, len(sizes) - 1):
        raise NotAttention(f"its axis is {axis}, expected the last one")
    found = _scores(graph, softmax.input[0])
    if found is None or found.product is None:
        raise NotAttention("its input is no product of queries and keys that is only scaled, masked or capped")
    if last.guard and last.guard not in [mask for mask, _ in found.masks]:
        raise NotAttention("rows become 0 behind it by another mask than that of the scores")
    q, v = scaled(graph, found.product.input[0]), last.node.input[1]
    k = as_keys(graph, scaled(graph, found.product.input[1]))
    ratio = _ratio(graph, last.dropout) if last.dropout is not None else 0.0
    before = [_before_repetition(graph, name) for name in (k.name, v)]
    names = (q.name, k.name, v) if before[0] is None or before[1] is None else (q.name, before[0], before[1])
    _check_sizes(graph, names)
    y, rank = last.node.output[0], len(graph.sizes(q.name) or ())
    body = GraphBody(graph.opset, graph.taken)
    body.scope(f"{y}/attention")
    inputs = [_value(graph, body, name) for name in names]
    if k.turned:
        inputs[1] = inputs[1].transpose(*range(rank - 2), rank - 1, rank - 2)
    causal, mask = mask_of(graph, body, found.seen, found.masks, graph.element_type(q.name) or TensorProto.FLOAT)
    if rank == 3:
        inputs = [each.unsqueeze(0) for each in inputs]
    # A query without a key may have equal scores for all of them, and so the mean of the values.
    is_even = len(found.lows) == 1 and all(map(math.isfinite, found.lows))
    some = some_key(graph, body, found.seen) if is_even else None
    seed = None
    if last.dropout is not None and ratio:
        given = attributes_of(last.dropout).get("seed")  # each run draws a number, which both parts read
        options = {"shape": [1], "high": float(2**24), "low": 0.0} | ({} if given is None else {"seed": float(given)})
        seed = body.node("RandomUniform", **options).cast(TensorProto.INT64)
    scale = found.scale * q.factor * k.factor
    attributes = {"scale": scale, "softcap": found.softcap, "dropout": ratio, "causal": causal}
    made, _ = body.nodes_of(NODE, 2, *inputs, mask, None, None, seed, domain=MICROSOFT, **attributes)
    made = made.squeeze(0) if rank == 3 else made
    if some is not None:
        made = body.where(some, made, _value(graph, body, last.node.input[1]).mean(-2))
    body.rename({made.name: y})
    for tensor in body.initializers:
        graph.add_initializer(tensor)
    graph.substitute(last.node, body.nodes)


def _check_sizes(graph: Graph, names: tuple[str, ...]) -> None:
    kinds = [graph.element_type(name) for name in names]
    if kinds[0] not in FLOATS or len(set(kinds)) > 1:
        raise NotAttention("its operands are not known to have one float type")
    ranks = [len(graph.sizes(name) or ()) for name in names]
    if ranks[0] not in (3, 4) or len(set(ranks)) > 1:
        raise NotAttention(f"its operands have {', '.join(map(str, ranks))} axes, expected three or four each")
    q, k, v = (graph.sizes(name) or [] for name in names)
    for size in (head_size(graph, names[0]) or head_size(graph, names[1]), head_size(graph, names[2])):
        if size is None or not 1 <= size <= LARGEST_HEAD:
            raise NotAttention(f"heads have {size or 'an unknown number of'} elements, expected at most {LARGEST_HEAD}")
    # Outside of the heads, sizes of 1 would be broadcast by products, and are not by the node.
    for one, other in ((q[0], k[0]), (q[0], v[0]), (k[-3], v[-3])):
        if (one == 1) != (other == 1) and (isinstance(one, int) and isinstance(other, int)):
            raise NotAttention("its operands are broadcast to each other")


def _ratio(graph: Graph, dropout: onnx.NodeProto) -> float:
    given = attributes_of(dropout).get("ratio", 0.5)
    ratio = graph.scalar(dropout.input[1]) if len(dropout.input) > 1 and dropout.input[1] else given
    if ratio is None:
        raise NotAttention("the ratio of its dropout is not known before the graph runs")
    training = graph.constant(dropout.input[2]) if len(dropout.input) > 2 and dropout.input[2] else np.array(False)
    if training is None:
        raise NotAttention("whether its dropout trains is not known before the graph runs")
    return float(ratio) if training.all() else 0.0
