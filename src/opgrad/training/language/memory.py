"""Which layers are computed again in the backward part, so that a step takes no more memory than it may.

What a step takes is estimated from the training graph: values live from the node that makes them to the last one that
reads them. The first layers are computed again, as few as the limit permits: their values would live longest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from opgrad.graph.nodes import captured
from opgrad.training.language.products import Product

WORKING = 160 << 20  # bytes beside values: of kernels, above all the scores of some tokens and their exponentials
PROCESS = 350 << 20  # bytes of Python, onnxruntime and opgrad themselves
SPARE = 1.1  # what onnxruntime's arena takes for values of so many bytes


@dataclass(frozen=True)
class Plan:
    """What was chosen: the values at which the graph is cut, and what a step will take in bytes.

    base: those of weights that stay as they are, mapped. values: those of what a step computes, at its peak.
    """

    segments: tuple[str, ...]
    base: int
    values: int

    @property
    def bytes(self) -> int:
        """What the process will take, the mapped base included."""
        return self.base + self.values + WORKING + PROCESS


def ends_of_layers(products: Sequence[Product]) -> tuple[str, ...]:
    """The result of the last product of each layer."""
    found = {each.layer: each.output for each in products if each.layer >= 0}
    return tuple(found[layer] for layer in sorted(found))


def plan(
    build: Callable[[Sequence[str]], onnx.ModelProto], layers: Sequence[str], sizes: Mapping[str, int], base: int,
    limit: int | None, who: str,
) -> Plan:  # fmt: skip
    """Choose the layers that are computed again.

    build: makes the training graph that is cut at some values. layers: the ends of the layers. sizes: those of axes, by
    the names that the graph has for them. base: the bytes of weights that stay. limit: the most bytes of the process;
    None: nothing is computed again.
    Raises ValueError if a step takes more even if all layers but the last are computed again.
    """

    def planned(count: int) -> Plan:
        segments = tuple(layers[:count])
        return Plan(segments, base, math.ceil(SPARE * step_bytes(build(segments), sizes)))

    chosen = planned(0)
    if limit is None or chosen.bytes <= limit:
        return chosen
    low, high = 0, max(len(layers) - 1, 0)
    chosen = planned(high)
    if chosen.bytes > limit:
        least = math.ceil(chosen.bytes / 1e6)
        raise ValueError(
            f"{who}: memory is {limit // 10**6} MB, expected at least {least} MB for batches of this size; shorter "
            "examples or fewer rows take less"
        )
    while high - low > 1:
        middle = (low + high) // 2
        tried = planned(middle)
        low, high, chosen = (low, middle, tried) if tried.bytes <= limit else (middle, high, chosen)
    return chosen


def step_bytes(model: onnx.ModelProto, sizes: Mapping[str, int]) -> int:
    """The bytes of all values at the moment of a graph's run at which they are most.

    sizes: those of axes, by name; an axis of another name counts as the longest of them, but the first of several as
    `batch`, since arrays of language models begin with it.
    """
    nodes, graph = list(model.graph.node), model.graph
    known = {each.name: _bytes(each.type.tensor_type, sizes) for each in (*graph.value_info, *graph.output)}
    last = {name: place for place, node in enumerate(nodes) for name in captured(node)}
    last |= {each.name: len(nodes) for each in graph.output}
    ends: list[int] = [0] * (len(nodes) + 1)
    live = most = 0
    for place, node in enumerate(nodes):
        for name in filter(None, node.output):
            size = known.get(name, 0)
            live += size
            ends[last.get(name, place)] += size
        most = max(most, live)
        live -= ends[place]
    return most


def _bytes(kind: onnx.TypeProto.Tensor, sizes: Mapping[str, int]) -> int:
    longest = max(sizes.values(), default=1)
    if not kind.elem_type or not kind.HasField("shape"):
        return 0
    axes = kind.shape.dim
    batch = sizes.get("batch", longest) if len(axes) > 1 else longest
    unnamed = (batch, *[longest] * len(axes))
    lengths = [
        each.dim_value if each.HasField("dim_value") else sizes.get(each.dim_param, other)
        for each, other in zip(axes, unnamed, strict=False)
    ]
    return math.prod(lengths) * helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
