"""DTensor's rules: the placements that every operator allows on a mesh, from the declarations.

An operator is shared out along the axes that it does not reduce; arguments that lie otherwise are redistributed
first. The rules are registered when the first DTensor arrives: importing torch.distributed.tensor takes a second.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from opgrad.call.libraries import torch_private
from opgrad.contract import Operator, Tensor
from opgrad.ops.attention import PACKED
from opgrad.torch.schema import REGISTERED, Registered

Given = Mapping[str, Any]  # a call's arguments by parameter name; DTensor's specs stand for the tensors
Shapes = Mapping[str, tuple[int, ...]]
Placements = dict[str, Placement]  # of arguments and results; those that are not named are whole on every device


def _along(op: Operator, shapes: Shapes, given: Given, reduced: Sequence[int]) -> Iterator[Placements]:
    """Shards of all that has an entry for each element, along each axis but these."""
    tensors = {**op.inputs, **op.results}
    first = next(name for name, tensor in op.inputs.items() if tensor.role == "element")
    for axis in range(len(shapes[first])):
        if axis not in reduced:
            yield {name: Shard(axis) for name, tensor in tensors.items() if tensor.role == "element"}


def _rows(op: Operator, shapes: Shapes, given: Given) -> Iterator[Placements]:
    rank, axis = len(shapes[op.arrays[0]]), given["axis"]
    return _along(op, shapes, given, [each % rank for each in ([axis] if isinstance(axis, int) else axis)])


def _classes(op: Operator, shapes: Shapes, given: Given) -> Iterator[Placements]:
    """Shards of the samples, whose losses are added up; a mean needs all of them, for the sum of their weights."""
    if given.get("reduction") == "mean":
        return
    samples = shapes["labels"]
    for placements in _along(op, shapes, given, (1,)):
        axis = next(iter(placements.values())).dim  # type: ignore[attr-defined]
        for name, tensor in {**op.inputs, **op.results}.items():
            if tensor.role == "sample":
                has_samples = _shape(name, tensor, shapes, given) == samples
                summed = Partial("sum") if name in op.results else Replicate()
                placements[name] = Shard(max(axis - 1, 0)) if has_samples else summed
        yield placements


def _shape(name: str, tensor: Tensor, shapes: Shapes, given: Given) -> tuple[int, ...] | None:
    """The shape of an argument or of a result."""
    return shapes[name] if name in shapes else tensor.shape and tensor.shape(shapes, given)


def _slices(op: Operator, shapes: Shapes, given: Given) -> Iterator[Placements]:
    """Shards of what the slices hold, or of the indices, whose gradients are added up."""
    backward = "shape" in given
    table, slices = (next(iter(op.results)), "dy") if backward else ("x", next(iter(op.results)))
    rank, picked = len(given["shape"] if backward else shapes["x"]), len(shapes["indices"])
    axis = given["axis"] % rank
    for index in range(rank):
        if index != axis:
            yield {table: Shard(index), slices: Shard(index if index < axis else index - 1 + picked)}
    for index in range(picked):
        yield {"indices": Shard(index), slices: Shard(axis + index), table: Partial("sum") if backward else Replicate()}


def _rotary(op: Operator, shapes: Shapes, given: Given) -> Iterator[Placements]:
    """Shards of sequences, tokens or heads; tables and positions go with their tokens."""
    array, result = op.arrays[0], next(iter(op.results))
    packed = len(shapes[array]) == PACKED
    heads_first = not packed and given["layout"] == "BHLD"
    cos, both = shapes["cos_cache"], ("cos_cache", "sin_cache")
    positions = "position_ids" in shapes
    by_batch = [array, result, *(["position_ids"] if positions else [])]
    yield {name: Shard(0) for name in (*by_batch, *(both if len(cos) == PACKED and cos[0] > 1 else ()))}
    tokens = 2 if heads_first else 1
    if positions:
        yield {array: Shard(tokens), result: Shard(tokens), "position_ids": Shard(1)}
    elif len(cos) == PACKED:
        yield {array: Shard(tokens), result: Shard(tokens), **{name: Shard(1) for name in both}}
    if not packed:
        yield {array: Shard(3 - tokens), result: Shard(3 - tokens)}


def _normalization(op: Operator, shapes: Shapes, given: Given) -> Iterator[Placements]:
    """Shards along the axes before those that are normalized; gradients of scale and bias are added up."""
    rank, axis = len(shapes["x"]), given["axis"]
    first = (axis[0] if isinstance(axis, list | tuple) else axis) % rank
    for index in range(first):
        rows: Placements = {name: Shard(index) for name in ("dy", "x", "mean", "inv_std", "y", "dx")}
        yield {**rows, "dscale": Partial("sum"), "dbias": Partial("sum")}


def _attention(op: Operator, shapes: Shapes, given: Given) -> Iterator[Placements]:
    """Shards of sequences, and of heads where every device gets as many heads of keys.

    With dropout nothing is shared out: an element's place in the whole decides.
    """
    if given.get("dropout"):
        return
    mask, heads = shapes.get("mask", ()), shapes["k"][1]
    arrays = [name for name in (*op.inputs, *op.results) if name != "mask" and (name in shapes or name in op.results)]
    for axis in (0, 1) if heads % given["q"].mesh.size() == 0 else (0,):
        found: Placements = {name: Shard(axis) for name in arrays}
        place = axis - (len(shapes["q"]) - len(mask))
        if mask and place >= 0 and mask[place] > 1:
            found["mask"] = Shard(place)
        yield found


# By the name of an operator, or of the one whose gradient it is.
RULES: dict[str, Callable[[Operator, Shapes, Given], Iterator[Placements]]] = {
    "rotary_embedding": _rotary,
    "attention": _attention,
    "attention_grad": _attention,
    "layer_normalization": _normalization,
    "simplified_layer_normalization": _normalization,
    # Along any axis of all arrays; along none where an element's place decides, or heads have an axis of their own.
    "gated_linear_unit": lambda op, shapes, given: (
        {name: Shard(axis) for name in (*op.inputs, *op.results)} for axis in range(len(shapes[op.arrays[0]]))
    ),
    "dropout": lambda op, shapes, given: iter(()),
    "sink_softmax": lambda op, shapes, given: iter(()),
}
KINDS: dict[str, Callable[[Operator, Shapes, Given], Iterator[Placements]]] = {
    "elements": lambda op, shapes, given: _along(op, shapes, given, ()),
    "rows": _rows,
    "classes": _classes,
    "slices": _slices,
}


def _rule(operator: Registered, *arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    """The placements of results and arguments among which DTensor chooses, for one axis of a mesh."""
    op = operator.op
    given = {**op.attributes, **dict(zip(operator.names, arguments, strict=False))}
    shapes = {name: tuple(given[name].shape) for name in op.inputs if given.get(name) is not None}
    whole = Replicate()
    return [
        (
            [placements.get(name, whole) for name in op.results],
            [placements.get(name, whole) if name in shapes else None for name in operator.names[: len(arguments)]],
        )
        for placements in ({}, *(RULES.get(op.forward or op.name) or KINDS[op.kind])(op, shapes, given))
    ]


def register() -> None:
    """Tell DTensor the rules."""
    describe, propagator = torch_private.sharding_tables()
    for operator in REGISTERED.values():
        register_sharding(operator.overload)(partial(_rule, operator))
        # What is registered counts an int as part of a call's signature, but not a list of them, as axis and shape are.
        propagator.op_to_schema_info[operator.overload] = describe(0)
        if "shape" in operator.names:  # each device is given the shape of its own part
            propagator.op_to_shape_and_stride_idx[operator.overload] = operator.names.index("shape")
