"""Which layers are computed again in the backward part, so that a step takes no more memory than it may.

What a step takes is estimated from the training graph: values live from the node that makes them to the last one that
reads them. The first layers are computed again, as few as the limit permits: their values would live longest.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from opgrad.base.limits import free_memory
from opgrad.onnx.gradients.differentiation import Differentiated
from opgrad.onnx.graph.nodes import captured
from opgrad.tune.language.products import WeightProduct

WORKING = 160 << 20  # bytes beside values: of kernels, above all the scores of some tokens and their exponentials
PROCESS = 350 << 20  # bytes of Python, onnxruntime and opgrad themselves
SPARE = 1.1  # what onnxruntime's arena takes for values of so many bytes
ALLOWANCE, TOKENS = 10**9, 512  # bytes that a step may take by default beside 1.5 times the base, for so many tokens
COPIES = 4  # of the gradients, in bytes: themselves, the values that are trained, and two moments


@dataclass(frozen=True)
class Limit:
    """The most bytes that the process shall take. is_given: whether the user said so; else it is a default."""

    bytes: int
    is_given: bool


@dataclass(frozen=True)
class MemoryPlan:
    """What was chosen: the values at which the graph is cut, and what a step will take in bytes.

    base: those of weights that stay as they are, mapped. values: those of what a step computes, at its peak.
    trained: those of what is trained, with gradients and moments. limit: what was to be kept.
    """

    segments: tuple[str, ...]
    base: int
    values: int
    trained: int
    limit: Limit

    @property
    def bytes(self) -> int:
        """What the process will take, the mapped base included."""
        return self.base + self.values + self.trained + WORKING + PROCESS

    @property
    def fits(self) -> bool:
        """Whether a step takes no more than the limit."""
        return self.bytes <= self.limit.bytes


def ends_of_layers(products: Sequence[WeightProduct]) -> tuple[str, ...]:
    """The result of the last product of each layer."""
    found = {each.layer: each.output for each in products if each.layer >= 0}
    return tuple(found[layer] for layer in sorted(found))


def limit_of(given: int | None, base: int, tokens: int) -> Limit:
    """The limit: what is given, or 1.5 times the base's bytes and a GB for each 512 tokens of a batch.

    The default is no more than the memory that the machine has left.
    """
    if given is not None:
        return Limit(given, True)
    wanted = base * 3 // 2 + math.ceil(ALLOWANCE * max(1.0, tokens / TOKENS))
    return Limit(min(filter(None, (wanted, free_memory()))), False)


@dataclass(frozen=True)
class Room:
    """The memory for a step.

    layers: the ends of the layers. sizes: those of axes, by the names that the graph has for them. base: the bytes of
    weights that stay.
    """

    layers: Sequence[str]
    sizes: Mapping[str, int]
    base: int
    limit: Limit


def plan(made: Differentiated, room: Room, who: str) -> tuple[MemoryPlan, onnx.ModelProto]:
    """Choose the layers that are computed again; returns the choice and the training graph.

    made: the graph of the loss and the gradients, its outputs.
    A default limit is kept as far as it can be. Raises ValueError if a step takes more than a given one even if all
    layers but the last are computed again.
    """

    layers, sizes, limit = room.layers, room.sizes, room.limit

    def planned(count: int) -> tuple[MemoryPlan, onnx.ModelProto]:
        segments = tuple(layers[:count])
        model = made.model(segments or None)
        values = math.ceil(SPARE * step_bytes(model, sizes))
        trained = COPIES * sum(_bytes(each.type.tensor_type, sizes) for each in model.graph.output[1:])
        return MemoryPlan(segments, room.base, values, trained, limit), model

    low, high = 0, max(len(layers) - 1, 0)
    above, model = planned(low)
    if above.fits or (not high and not limit.is_given):
        return above, model
    chosen, model = planned(high)
    if not chosen.fits and limit.is_given:
        least = math.ceil(chosen.bytes / 1e6)
        raise ValueError(
            f"{who}: memory is {limit.bytes // 10**6} MB, expected at least {least} MB for batches of this size; "
            "shorter examples or fewer rows take less"
        )
    while chosen.fits and high - low > 1:
        # Each layer saves about as much as the others: the guess is the first that fits if all save the same.
        share = (above.bytes - limit.bytes) / max(above.bytes - chosen.bytes, 1)
        middle = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
        tried = planned(middle)
        if tried[0].fits:
            high, (chosen, model) = middle, tried
        else:
            low, above = middle, tried[0]
    return chosen, model


def step_bytes(model: onnx.ModelProto, sizes: Mapping[str, int]) -> int:
    """The bytes of all values at the moment of a graph's run at which they are most, without its outputs.

    sizes: those of axes, by name; an axis of another name counts as the longest of them, but the first of several as
    `batch`, since arrays of language models begin with it.
    """
    nodes, graph = list(model.graph.node), model.graph
    known = {each.name: _bytes(each.type.tensor_type, sizes) for each in graph.value_info}
    last = {name: place for place, node in enumerate(nodes) for name in captured(node)}
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
