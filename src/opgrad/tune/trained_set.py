"""What is trained of a language model: its adapters, or weights of its own, as an artifact set in memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from opgrad.onnx.graph.halves import without_casts
from opgrad.onnx.graph.messages import copied
from opgrad.training.files.artifact_set import ArtifactSet
from opgrad.training.files.batches import TensorSpec
from opgrad.training.files.rules import AdamWRule
from opgrad.training.files.tensor_values import Held, inputs_of_all
from opgrad.training.make.models import MODEL, take_parameters, training_models, widened
from opgrad.training.make.patterns import matching
from opgrad.training.make.selection import Candidates, torn_layers, torn_note
from opgrad.tune.insertion import DRAW, insert
from opgrad.tune.language.memory import MemoryPlan, Room, plan
from opgrad.tune.language.model import WHO, LanguageModel
from opgrad.tune.language.packed_weights import use_tiles
from opgrad.tune.language.packing import PLACES, STARTS, packed_rows
from opgrad.tune.lora import Adapter, without_adapters
from opgrad.tune.tasks import Task, Write
from opgrad.tune.tasks.base import tokens_spec

Torn = tuple[tuple[str, str], ...]  # biases, each with the weight of the same layer
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
    model, more = _adapted(base, adapters, values, seed, drawn=not plain)
    if pack:
        model = packed_rows(model, f"{WHO}: {folder}")
        more |= {STARTS: TensorSpec(STARTS, np.dtype(np.int64), (1, "bounds")), PLACES: tokens_spec(PLACES)}
    weights, torn = _weights(model, [*train, *task.trained(base)], base.values)
    names, stored = [*values, *weights], _widen(model, weights, base.values)
    trained, inputs = task.with_loss(replace(base, model=model), weights, form, plain)
    layers = cuts.layers if isinstance(cuts, Room) else cuts or ()
    if isinstance(cuts, Room):
        layers = task.ends_of_layers(layers, trained.model)
        cuts = replace(cuts, layers=layers)
    loss = [trained.loss]
    models, chosen = (
        training_models(copied(trained.model), loss, names, [], WHO, None, stored, MODEL, ends=layers),
        None,
    )
    if isinstance(cuts, Room):
        chosen, model = plan(models.made, cuts, WHO)
        models = models.of(model)
    elif cuts:
        models = models.of(models.made.model(cuts))
    for each in (models.training, models.evaluation):
        _finish(each, plain)
    inputs |= more
    specs = [inputs[each.name] for each in trained.model.graph.input if each.name in inputs]
    artifacts = models.artifact_set(folder, rule, specs)
    files = {name: place for name, each in artifacts.constants.items() if (place := base.file_of(each)) is not None}
    notes = tuple(torn_note(*each) for each in [*torn, *without_adapters(base, adapters)])
    return Setting(replace(artifacts, files=files), notes, chosen)


def _adapted(
    base: LanguageModel, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray], seed: int, drawn: bool
) -> tuple[onnx.ModelProto, dict[str, TensorSpec]]:
    """The model with its adapters, and the input that counts the draws of their dropout, where they have any."""
    model = copied(base.model)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in values.items())
    insert(model, adapters, seed=seed, drawn=drawn)
    if not any(node.op_type == "DropoutTraining" for node in model.graph.node):
        return model, {}
    model.graph.input.append(helper.make_tensor_value_info(DRAW, onnx.TensorProto.INT64, [1]))
    return model, {DRAW: TensorSpec(DRAW, np.dtype(np.int64), (1,))}


def _weights(model: onnx.ModelProto, train: Iterable[str], values: Mapping[str, Held]) -> tuple[list[str], Torn]:
    """The names of the weights of the model that are trained, and biases that patterns take without their weights."""
    if not (given := list(train)):
        return [], ()
    candidates = Candidates(model, values)
    named, matched = matching("train", given, candidates.tensors, candidates.weights, candidates.modules)
    chosen = list(dict.fromkeys([*named, *matched]))
    return chosen, torn_layers(candidates, matched, chosen)


def _widen(model: onnx.ModelProto, weights: Sequence[str], values: Mapping[str, Held]) -> dict[str, Held]:
    """Let weights that are halves be float32, as training changes them; returns the values of placeholders then."""
    found = dict(values)
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(widened(tensor, found))
    without_casts(model.graph, weights)
    return found


def scoring(
    base: LanguageModel, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray], each: bool = False
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The graph that gives the scores of the next token for each token, and the values of large constants.

    values: those of what is trained, which are inputs, as the constants are. each: whether the graph gives the losses
    of the tokens instead, see `LanguageModel.with_loss`.
    """
    model = copied(base.model)
    held = {each.name for each in model.graph.initializer}
    new = {name: array for name, array in values.items() if name not in held}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in new.items())
    insert(model, adapters)
    _widen(model, [name for name in values if name in held], base.values)
    if each:
        model = replace(base, model=model).with_loss(values, each=True).model
    take_parameters(model, list(values))
    _finish(model, plain=False)
    return inputs_of_all(model, base.values)


def _finish(model: onnx.ModelProto, plain: bool) -> None:
    """Replace nodes that stand for something until a graph is differentiated, and products of packed weights."""
    for node in model.graph.node:
        if node.op_type == "StopGradient":
            node.op_type, node.domain = "Identity", ""
    if not plain:
        use_tiles(model)
