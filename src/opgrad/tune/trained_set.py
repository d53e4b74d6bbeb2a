"""The artifact set that trains adapters, or weights of a language model, within a limit of memory.

What a step takes is estimated from the training graph: values live from the node that makes them to the last one that
reads them. The first layers are computed again, as few as the limit permits: their values would live longest.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from opgrad.base.limits import free_memory
from opgrad.onnx.gradients.differentiation import Differentiated
from opgrad.onnx.graph.conversion import without_casts
from opgrad.onnx.graph.messages import copied
from opgrad.onnx.graph.nodes import captured
from opgrad.training.files.artifact_set import AdamWRule, ArtifactSet
from opgrad.training.files.dataset import TensorSpec
from opgrad.training.files.tensor_values import Fed, Held, shared
from opgrad.training.make.blocks import ModelAccessor
from opgrad.training.make.models import MODEL, take_parameters, training_models, widened
from opgrad.training.make.selection import Candidates, shared_note, torn_layers, torn_note, turned_note
from opgrad.training.make.tensors import matching
from opgrad.tune.caches import PLACES, STARTS, packed_rows
from opgrad.tune.language_model import LanguageModel, use_tiles
from opgrad.tune.lora import DRAW, Adapter, experts_note, insert, without_adapters
from opgrad.tune.products import WeightProduct
from opgrad.tune.tasks import Task, Write
from opgrad.tune.tasks.base import tokens_spec

WORKING = 160 << 20  # bytes beside values: of kernels, above all the scores of some tokens and their exponentials
PROCESS = 350 << 20  # bytes of Python, onnxruntime and opgrad themselves
SPARE = 1.1  # what onnxruntime's arena takes for values of so many bytes
ALLOWANCE, TOKENS = 10**9, 512  # bytes that a step may take by default beside 1.5 times the base, for so many tokens
COPIES = 4  # of the gradients, in bytes: themselves, the values that are trained, and two moments


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
    limit: int

    @property
    def bytes(self) -> int:
        """What the process will take, the mapped base included."""
        return self.base + self.values + self.trained + WORKING + PROCESS

    @property
    def fits(self) -> bool:
        return self.bytes <= self.limit


def ends_of_layers(products: Sequence[WeightProduct]) -> tuple[str, ...]:
    """The result of the last product of each layer."""
    found = {each.layer: each.output for each in products if each.layer >= 0}
    return tuple(found[layer] for layer in sorted(found))


def limit_of(base: int, tokens: int) -> int:
    """The default: 1.5 times the base's bytes and a GB for each 512 tokens of a batch, but no more than is free."""
    wanted = base * 3 // 2 + math.ceil(ALLOWANCE * max(1.0, tokens / TOKENS))
    return min(filter(None, (wanted, free_memory())))


@dataclass(frozen=True)
class Room:
    """The memory for a step.

    layers: the ends of the layers. sizes: of the graph's axes, by name. base: the bytes of weights that stay.
    limit: the most bytes that the process shall take. is_given: whether the user said so; else it is a default.
    """

    layers: Sequence[str]
    sizes: Mapping[str, int]
    base: int
    limit: int
    is_given: bool


def plan(made: Differentiated, room: Room) -> tuple[MemoryPlan, onnx.ModelProto]:
    """Choose the layers that are computed again; returns the choice and the training graph.

    made: the graph of the loss and the gradients, its outputs.
    A default limit is kept if it can be. Raises ValueError if a step exceeds a given one though layers are recomputed.
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
    if above.fits or (not high and not room.is_given):
        return above, model
    chosen, model = planned(high)
    if not chosen.fits and room.is_given:
        least = math.ceil(chosen.bytes / 1e6)
        raise ValueError(
            f"memory is {limit // 10**6} MB, expected at least {least} MB for batches of this size; "
            "shorter examples or fewer rows take less"
        )
    while chosen.fits and high - low > 1:
        # Each layer saves about as much as the others: the guess is the first that fits if all save the same.
        share = (above.bytes - limit) / max(above.bytes - chosen.bytes, 1)
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


WRITE = Write()


@dataclass(frozen=True)
class Setting:
    """What trains adapters, or weights of a language model.

    artifacts: the graphs, with the parameters at the start. notes: what users are told of the choice.
    plan: what a step takes of memory, where that was estimated.
    """

    artifacts: ArtifactSet
    notes: tuple[str, ...]
    plan: MemoryPlan | None = None


def prepare(
    base: LanguageModel, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray], train: Iterable[str],
    folder: Path, rule: AdamWRule, cuts: Room | Sequence[str] | None = None, *, seed: int = 0, pack: bool = False,
    plain: bool = False, task: Task = WRITE, form: int = 0,
) -> Setting:  # fmt: skip
    """The graphs that train adapters, or weights of the model.

    values: those of the adapters' parameters at the start. train: names or patterns of weights. folder: for messages.
    cuts: the values at which the graph is cut, to keep fewer of them in memory, or the memory for which to choose them.
    seed: of dropout. pack: whether a batch is one row of several examples.
    plain: whether the graphs are for other runtimes: with scores, see `LanguageModel.with_loss`, and without operators
    of opgrad in the places of others. task: what the model is trained for. form: that of the task's examples.
    Raises what `training_models` raises, ArgumentError for a pattern that matches nothing.
    """
    model, more = copied(base.model), dict[str, TensorSpec]()
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in values.items())
    insert(model, adapters, seed=seed, drawn=not plain)
    if any(node.op_type == "DropoutTraining" for node in model.graph.node):
        model.graph.input.append(helper.make_tensor_value_info(DRAW, onnx.TensorProto.INT64, [1]))
        more[DRAW] = TensorSpec(DRAW, np.dtype(np.int64), (1,))
    if pack:
        model = packed_rows(model, str(folder))
        more |= {STARTS: TensorSpec(STARTS, np.dtype(np.int64), (1, "bounds")), PLACES: tokens_spec(PLACES)}
    weights, notes = list[str](), [*experts_note(base, adapters)]
    notes += [torn_note(*each) for each in without_adapters(base, adapters)]
    if patterns := [*train, *task.trained(base)]:
        candidates = Candidates(model, base.values)
        named, matched = matching("train", patterns, candidates.tensors, candidates.weights, candidates.modules)
        weights = list(dict.fromkeys([*named, *matched]))
        if shared := {name: layers for name, layers in candidates.shared.items() if name in weights}:
            notes.append(shared_note(shared, "trained", "let these differ before the export"))
        notes += [turned_note(*each) for each in candidates.turned(weights)]
        notes += [torn_note(*each) for each in torn_layers(candidates, matched, weights)]
    names, stored = [*values, *weights], _widen(model, weights, base.values)
    trained, inputs = task.with_loss(replace(base, model=model), weights, form, plain)
    room, chosen = cuts if isinstance(cuts, Room) else None, None
    layers = task.ends_of_layers(cuts.layers, trained.model) if isinstance(cuts, Room) else cuts or ()
    accessor = ModelAccessor(copied(trained.model), apart=stored)
    models = training_models(accessor, [trained.loss], names, [], None, MODEL, layers)
    if room is not None:
        chosen, cut = plan(models.made, replace(room, layers=layers))
        models = models.of(cut)
    elif layers:
        models = models.of(models.made.model(layers))
    for each in (models.training, models.evaluation):
        _finish(each, plain)
    inputs |= more
    specs = [inputs[each.name] for each in trained.model.graph.input if each.name in inputs]
    artifacts = models.artifact_set(folder, rule, specs)
    files = {name: place for name, each in artifacts.constants.items() if (place := base.file_of(each)) is not None}
    return Setting(replace(artifacts, files=files), tuple(notes), chosen)


def _widen(model: onnx.ModelProto, weights: Sequence[str], values: Mapping[str, Held]) -> dict[str, Held]:
    """Let weights that are halves be float32, as training changes them; returns the values of placeholders then."""
    found = dict(values)
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(widened(tensor, found))
    without_casts(model.graph, weights)
    return found


def scoring(
    base: LanguageModel, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray], each: bool = False,
    pack: bool = False,
) -> Fed:  # fmt: skip
    """The graph that gives the scores of the next token for each token, and the values of large constants.

    values: those of what is trained, which are inputs, as the constants are. each: whether the graph gives the losses
    of the tokens instead, see `LanguageModel.with_loss`. pack: whether it is for one row of several examples.
    """
    model = packed_rows(base.model, "") if pack else copied(base.model)
    held = {each.name for each in model.graph.initializer}
    new = {name: array for name, array in values.items() if name not in held}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in new.items())
    insert(model, adapters)
    _widen(model, [name for name in values if name in held], base.values)
    if each:
        model = replace(base, model=model).with_loss(values, each=True).model
    take_parameters(model, list(values))
    _finish(model, plain=False)
    return shared(model, base.values, every=True)


def _finish(model: onnx.ModelProto, plain: bool) -> None:
    """Replace nodes that stand for something until a graph is differentiated, and products of packed weights."""
    for node in model.graph.node:
        if node.op_type == "StopGradient":
            node.op_type, node.domain = "Identity", ""
    if not plain:
        use_tiles(model)
