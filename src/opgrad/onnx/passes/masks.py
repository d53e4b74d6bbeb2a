"""Which masks of attention are causal: a mask that depends on sizes alone is computed for a few sizes and looked at."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from opgrad.onnx.graph.graph import Graph, evaluate
from opgrad.onnx.graph.messages import domain_of
from opgrad.onnx.graph.nodes import attributes_of

LOW = -1e4  # a number from which on down an addend hides a key; exporters write -10000, the least number, or -inf
LARGEST = 1 << 24  # bytes of a mask, or of what it is computed from
SIZES = (5, 3, 7, 2, 9, 4)  # what named sizes are in a trial; in the second one all are larger
TRIALS = (0, 6)
ALL = "all"
ALIGNMENTS = (ALL, "top_left", "bottom_right")  # in the order in which one is chosen where several hold


class _Unknown(Exception):
    """The value depends on more than sizes, or is large."""


class _Trial:
    """The values of a graph that follow from sizes, with numbers for the named sizes."""

    def __init__(self, graph: Graph, more: int):
        self.graph, self.more = graph, more
        self.named: dict[str, int] = {}
        self.found: dict[str, np.ndarray] = {}

    def __call__(self, name: str) -> np.ndarray:
        if name not in self.found:
            self.found[name] = self._value(name)
        return self.found[name]

    def _value(self, name: str) -> np.ndarray:
        constant = self.graph.constant(name)
        if constant is not None:
            return constant
        node = self.graph.producers.get(name)
        if node is None or domain_of(node) or len(node.output) != 1:
            raise _Unknown
        if node.op_type in ("Shape", "Size"):
            return self._sizes(node)
        results = evaluate(node, [self(each) for each in node.input if each], self.graph.opset, LARGEST)
        if results is None:
            raise _Unknown
        return results[0]

    def _sizes(self, node: onnx.NodeProto) -> np.ndarray:
        sizes, given = self.graph.sizes(node.input[0]), attributes_of(node)
        if sizes is None:
            raise _Unknown
        every = [self._number(size) for size in sizes]
        if node.op_type == "Size":
            return np.array(math.prod(every), np.int64)
        return np.array(every[given.get("start", 0) : given.get("end", len(every))], np.int64)

    def _number(self, size: int | str | None) -> int:
        if size is None:
            raise _Unknown
        if isinstance(size, int):
            return size
        if size not in self.named and len(self.named) == len(SIZES):
            raise _Unknown
        return self.named.setdefault(size, SIZES[len(self.named) % len(SIZES)] + self.more)


def alignment(graph: Graph, name: str, hides: bool = False) -> str | None:
    """How a causal mask, bool or added, aligns queries with keys: "top_left" or "bottom_right".

    ALL of a mask that hides no key, None of any other.

    hides: the mask is bool, and True where a key is hidden.
    """
    found = set(ALIGNMENTS)
    try:
        for more in TRIALS:
            trial = _Trial(graph, more)
            found &= _alignments(~trial(name) if hides else trial(name))
            if not found or not trial.named:
                break
    except (_Unknown, RecursionError):
        return None
    return next((each for each in ALIGNMENTS if each in found), None)


def _alignments(mask: np.ndarray) -> set[str]:
    if not _hides(mask):
        return set()
    seen = mask if mask.dtype == bool else mask == 0
    if mask.ndim < 2 or any(size != 1 for size in mask.shape[:-2]):
        return {ALL} if seen.all() else set()
    seen = seen.reshape(mask.shape[-2:])
    queries, keys = mask.shape[-2], mask.shape[-1]
    places: Mapping[str, int] = {ALL: keys, "top_left": 0, "bottom_right": keys - queries}
    return {each for each, place in places.items() if (seen == np.tri(queries, keys, place, dtype=bool)).all()}


def _hides(mask: np.ndarray) -> bool:
    """Whether the mask is bool, or every number in it is 0 or so low that it hides a key."""
    return mask.dtype == bool or bool(((mask == 0) | (mask.astype(np.float64) <= LOW)).all())


# --- conditions of which all have to hold ----------------------------------------------------------------------------


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
    if node.op_type == "Reshape":
        before, after = graph.sizes(node.input[0]), graph.sizes(name)
        if lacks_heads or before is None or len(before) != 3 or after != [before[0], 1, *before[1:]]:
            return [own]
        found = conditions(graph, node.input[0], lacks_heads=True)
        return found if all(graph.sizes(each.name) is not None for each in found) else [own]
    names: Iterable[str] = node.input if node.op_type == "And" else node.input[:1]
    return [each for part in names for each in conditions(graph, part, lacks_heads)]


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
