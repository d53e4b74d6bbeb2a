"""What is trained of a language model: its adapters, or weights of its own, as an artifact set in memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import numpy_helper

from opgrad.graph.halves import without_casts
from opgrad.graph.large import without_large
from opgrad.graph.messages import copied, copied_without
from opgrad.training.building.models import MODEL, take_parameters, training_models, widened
from opgrad.training.building.selection import Candidates, matching
from opgrad.training.data.batches import TensorSpec
from opgrad.training.engine.optimizer import AdamWRule
from opgrad.training.formats.artifact_set import ArtifactSet
from opgrad.training.formats.tensor_values import Held, array_of, is_placeholder
from opgrad.training.language import Plan
from opgrad.training.tune.insertion import insert
from opgrad.training.tune.lora import WHO, Adapter

if TYPE_CHECKING:
    from opgrad.training.language import LanguageModel

AXES = ("batch", "length")
LABELS = "labels"  # the input for the labels


@dataclass(frozen=True)
class Setting:
    """A language model and what is trained of it.

    base: the model as it is. adapters: what is added to it. weights: the names of weights of its own that are trained.
    artifacts: the graphs, with the parameters at the start.
    scores: the graph that gives the scores of the next token for each token; its parameters are inputs.
    plan: what a step takes of memory, where that was estimated.
    """

    base: "LanguageModel"
    adapters: tuple[Adapter, ...]
    weights: tuple[str, ...]
    artifacts: ArtifactSet
    scores: onnx.ModelProto
    plan: Plan | None = None

    @property
    def size(self) -> int:
        """How many numbers are trained."""
        return sum(each.size for each in self.artifacts.trainable.values())


def prepare(
    base: "LanguageModel",
    adapters: Sequence[Adapter],
    values: Mapping[str, np.ndarray],
    train: Iterable[str],
    folder: Path,
    rule: AdamWRule,
    segments: Sequence[str] | None = None,
    seed: int = 0,
    with_scores: bool = False,
) -> Setting:
    """The graphs that train adapters, or weights of the model.

    values: those of the adapters' parameters at the start. train: names or patterns of weights. folder: for messages.
    segments: the values at which the graph is cut, to keep fewer of them in memory; see `opgrad.gradients.gradients`.
    seed: of dropout. with_scores: see `LanguageModel.with_loss`.
    Raises what `training_models` raises, ValueError for a pattern that matches nothing.
    """
    model = copied(base.model)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in values.items())
    insert(model.graph, adapters, seed=seed)
    weights = _weights(model, train, base.values)
    names, stored = [*values, *weights], _widen(model, weights, base.values)
    trained = replace(base, model=model).with_loss(weights, with_scores)
    models = training_models(copied(trained.model), [trained.loss], names, [], WHO, segments, stored, MODEL)
    held = models.values
    trainable, _ = models.arrays
    constants = _constants([models.training, models.evaluation], held)
    artifacts = ArtifactSet(
        directory=folder,
        training_model=models.training,
        eval_model=_with_inputs(models.evaluation),
        rule=rule,
        trainable=trainable,
        frozen={},
        inputs=tuple(TensorSpec(name, np.dtype(np.int64), AXES) for name in (base.tokens, LABELS)),
        loss=trained.loss,
        constants=constants,
        files={name: place for name in constants if (place := base.file_of(name)) is not None},
    )
    return Setting(base, tuple(adapters), tuple(weights), artifacts, _scores(base, adapters, weights, values))


def _weights(model: onnx.ModelProto, train: Iterable[str], values: Mapping[str, Held]) -> list[str]:
    """The names of the weights of the model that are trained."""
    if not (given := list(train)):
        return []
    candidates = Candidates(model, values)
    named, matched = matching("train", given, candidates.tensors, candidates.weights, WHO)
    return list(dict.fromkeys([*named, *matched]))


def _widen(model: onnx.ModelProto, weights: Sequence[str], values: Mapping[str, Held]) -> dict[str, Held]:
    """Let weights that are halves be float32, as training changes them; returns the values of placeholders then."""
    found = dict(values)
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(widened(tensor, found))
    without_casts(model.graph, weights)
    return found


def _scores(
    base: "LanguageModel", adapters: Sequence[Adapter], weights: Sequence[str], values: Mapping[str, np.ndarray]
) -> onnx.ModelProto:
    """The graph of the scores, whose large constants are inputs, too."""
    model = copied(base.model)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in values.items())
    insert(model.graph, adapters)
    _widen(model, weights, base.values)
    take_parameters(model, [*values, *weights])
    return _with_inputs(model)


def _with_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model with inputs in the places of large constants."""
    copy = copied_without(model, "graph")
    copy.graph.CopyFrom(without_large(model.graph, is_placeholder))
    return copy


def _constants(models: Iterable[onnx.ModelProto], values: Mapping[str, Held]) -> dict[str, np.ndarray]:
    """The values of the models' placeholders."""
    names = {each.name for model in models for each in model.graph.initializer if is_placeholder(each)}
    return {name: array_of(values[name]) for name in sorted(names)}
