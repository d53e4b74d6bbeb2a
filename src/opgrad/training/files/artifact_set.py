"""The four files that onnxruntime-training makes of a model, read together and checked against each other."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from shlex import quote

import numpy as np
import onnx
from onnx.helper import tensor_dtype_to_np_dtype

from opgrad.base.locks import once
from opgrad.base.writing import finish_interrupted
from opgrad.onnx.graph.conversion import compute_in_float32, evaluating, in_float32, is_half, written_inputs
from opgrad.onnx.graph.loading import read_model
from opgrad.onnx.graph.messages import copied
from opgrad.training.files.accumulators import BUFFER_SUFFIX, RESET, without_accumulators
from opgrad.training.files.batches import TensorSpec, located
from opgrad.training.files.checkpoint import read_checkpoint
from opgrad.training.files.objective import Objective, find_objective
from opgrad.training.files.rules import Rule, read_rule
from opgrad.training.files.tensor_values import Held, inputs_of_all, read_apart, shared

FILES = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")


@dataclass(frozen=True)
class ArtifactSet:
    """An artifact set of onnxruntime-training.

    directory: where it was read from.
    training_model: the graph that computes loss and gradients, its outputs.
    gradients: by trainable parameter, the output with its gradient.
    eval_model: the graph that computes the loss alone, in the types of the model that the set was made of.
    rule: how the optimizer changes the parameters.
    trainable, frozen: the initial parameters, read-only, by name; only the trainable ones have gradients. Those that
        training changes are float32 where the models have float16 or bfloat16.
    constants: large tensors that are no parameters and that graphs share, read-only, by name; these have inputs in
        their places.
    files: for those of them that lie in a file, the file, the first byte and the number of bytes.
    tune: of a fine-tuning what identifies it, as JSON.
    inputs: the arrays of a batch, in the graph's order.
    loss: the graphs' first output.
    batch_rows: the only number of rows that the graphs take; None if any will do.
    in_halves: whether the graphs compute in float16 and bfloat16 where they have these types; else in float32.
    """

    directory: Path
    training_model: onnx.ModelProto
    gradients: Mapping[str, str]
    eval_model: onnx.ModelProto
    rule: Rule
    trainable: Mapping[str, np.ndarray]
    frozen: Mapping[str, np.ndarray]
    inputs: tuple[TensorSpec, ...]
    loss: str
    batch_rows: int | None = None
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    files: Mapping[str, tuple[Path, int, int]] = field(default_factory=dict)
    tune: str = ""
    in_halves: bool = False

    @classmethod
    def load(cls, directory: str | PathLike[str]) -> "ArtifactSet":
        """Read an artifact set.

        directory: the folder with training_model.onnx, eval_model.onnx, optimizer_model.onnx and checkpoint.
        Raises FileNotFoundError if one is missing and NotADirectoryError for a file, which say what makes a set,
        ValueError if one of the files is damaged or belongs to another model, and NotImplementedError if the optimizer
        is none that opgrad has.
        """
        folder = Path(directory)
        finish_interrupted(folder)
        _check_folder(folder)
        training_model, eval_model, optimizer_model, checkpoint_file = (folder / name for name in FILES)
        checkpoint, who = read_checkpoint(checkpoint_file), f"ArtifactSet: {training_model}"
        training, values = read_apart(training_model, "ArtifactSet")
        if not training.graph.output:
            raise ValueError(f"{who} has no outputs, expected the loss")
        check_parameters("ArtifactSet", _specs(training.graph, who), checkpoint.trainable, checkpoint.frozen)
        gradients = without_accumulators(training, who)
        evaluation, others = read_apart(eval_model, "ArtifactSet")
        rule = read_rule(read_model(optimizer_model, "ArtifactSet"))
        models, parameters = (training, evaluation), (checkpoint.trainable, checkpoint.frozen)
        return cls.of(folder, models, gradients, {**others, **values}, rule, parameters)

    @classmethod
    def of(
        cls,
        directory: Path,
        models: tuple[onnx.ModelProto, onnx.ModelProto],
        gradients: Mapping[str, str],
        values: Mapping[str, Held],
        rule: Rule,
        parameters: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]],
        inputs: Sequence[TensorSpec] = (),
    ) -> "ArtifactSet":
        """An artifact set of its graphs.

        models: the training graph, whose last outputs are the gradients, and the eval graph, both with placeholders.
        values: those of the placeholders. parameters: the trainable and the frozen ones.
        inputs: those of a batch, for a language model, whose graphs share all large tensors, and compute in the types
            that they have; else they are those of the graph.
        """
        given, (trainable, frozen), written = tuple(inputs), parameters, written_inputs(models[0].graph)
        specs = [tensor_spec(each) for each in models[0].graph.input if each.name not in {*trainable, *frozen}]
        own, batch_rows = (given, None) if given else located(specs)
        share = inputs_of_all if given else shared
        (training, constants), (evaluation, others) = (share(each, values) for each in models)
        evaluating(evaluation)
        return cls(
            directory=directory,
            training_model=training,
            gradients=gradients,
            eval_model=evaluation,
            rule=rule,
            trainable={name: in_float32(array) for name, array in trainable.items()},
            frozen={name: in_float32(array) if name in written else array for name, array in frozen.items()},
            inputs=own,
            loss=training.graph.output[0].name,
            batch_rows=batch_rows,
            constants={**constants, **others},
            in_halves=bool(given),
        )

    @property
    def title(self) -> str:
        """The training graph's name in messages."""
        file = self.directory / FILES[0]
        return str(file if file.is_file() else self.directory)

    def training(self, in_halves: bool = False) -> tuple[onnx.ModelProto, Mapping[str, np.ndarray]]:
        """A copy of the training graph, and the values of its inputs that are constants, by name.

        in_halves: whether a graph that computes in float16 or bfloat16 stays so; else it computes in float32.
        """
        model = copied(self.training_model)
        if not (in_halves or self.in_halves):
            compute_in_float32(model, {*self.trainable, *written_inputs(model.graph)})
        held = {each.name for each in model.graph.input}
        return model, {name: array for name, array in self.constants.items() if name in held}

    @once
    def evaluation(self) -> onnx.ModelProto:
        """The eval graph as it is run: it computes in float32, from parameters as they are here."""
        if self.in_halves:
            return self.eval_model
        model = copied(self.eval_model)
        floats = {name for name, array in {**self.trainable, **self.frozen}.items() if array.dtype == np.float32}
        compute_in_float32(model, floats)
        return model

    @property
    def values(self) -> dict[str, np.ndarray]:
        """The initial values of all inputs of the graphs that are not those of a batch, by name."""
        return {**self.trainable, **self.frozen, **self.constants}

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.directory.resolve().name

    @property
    def axes(self) -> dict[str, int | None]:
        """By input, the axis of the examples; None for an input that is the same for all examples."""
        return {spec.name: spec.axis for spec in self.inputs}

    @once
    def objective(self) -> Objective:
        """The tensors that the loss compares, and those that an exported model returns."""
        names = [spec.name for spec in self.inputs if spec.axis is not None]
        return find_objective(self.eval_model, self.loss, names)

    @property
    def label(self) -> TensorSpec:
        """The batch's input that the loss compares the scores with; the last input if that cannot be found out."""
        own = [spec for spec in self.inputs if spec.axis is not None]
        return next((spec for spec in own if spec.name == self.objective.label), own[-1])

    @property
    def scores(self) -> str | None:
        """The tensor that the loss compares with the label; None if there is none."""
        return self.objective.scores


def _check_folder(folder: Path) -> None:
    """Raise unless there is a folder with the files of a set."""
    if folder.is_file():
        if not _missing(folder.parent):
            raise NotADirectoryError(
                f"ArtifactSet: {folder} is a file, expected the folder of its set, {folder.parent}"
            )
        raise NotADirectoryError(
            f"ArtifactSet: {folder} is a file, expected the folder of an artifact set; of a model "
            f"`{_maker(folder)} -o FOLDER` makes one"
        )
    if missing := _missing(folder):
        models = sorted(folder.glob("*.onnx"))
        model = models[0] if len(models) == 1 else Path("MODEL.onnx")
        raise FileNotFoundError(
            f"ArtifactSet: {folder} has no {', '.join(missing)}; of a model `{_maker(model)} -o {quote(str(folder))}` "
            "makes these files"
        )


def _missing(folder: Path) -> list[str]:
    return [name for name in FILES if not (folder / name).is_file()]


def _maker(model: Path) -> str:
    return f"opgrad artifacts {quote(str(model))} --loss LOSS"


def _specs(graph: onnx.GraphProto, what: str) -> dict[str, TensorSpec]:
    """The inputs of a graph by name. what: for messages."""
    try:
        return {value.name: tensor_spec(value) for value in graph.input}
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def tensor_spec(value: onnx.ValueInfoProto, texts: bool = False) -> TensorSpec:
    """The name, dtype and shape that a graph declares for a tensor. texts: whether it may be one of texts."""
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "any" for dim in tensor.shape.dim)
    try:
        dtype = np.dtype(tensor_dtype_to_np_dtype(tensor.elem_type))
    except KeyError:
        number = tensor.elem_type
        raise ValueError(f"the graph's {value.name!r} has the element type {number}, expected a known one") from None
    if dtype.kind == "O" and not texts:
        raise ValueError(f"the graph's {value.name!r} is text, expected numbers")
    return TensorSpec(value.name, dtype, shape)


def check_parameters(
    who: str,
    specs: Mapping[str, TensorSpec],
    trainable: Mapping[str, np.ndarray],
    frozen: Mapping[str, np.ndarray],
) -> None:
    """Raise ValueError unless checkpoint and training graph have the same parameters, with equal dtypes and shapes.

    Values of float32 fit a parameter in float16 or bfloat16: training keeps them so.
    who: the caller, for messages. specs: the training graph's inputs by name.
    """
    if RESET not in specs:
        raise ValueError(f"{who}: the graph has no input {RESET}, expected a training graph")
    have = {name.removesuffix(BUFFER_SUFFIX) for name in specs if name.endswith(BUFFER_SUFFIX)}
    given = [name for name in have - trainable.keys() - frozen.keys() if name in specs]
    if given and trainable.keys() <= have:
        raise ValueError(
            f"{who}: the training graph has gradients of its inputs {_list(given)}, which are no parameters of the "
            "checkpoint: parameters are initializers of the model that the set is made of; give them values there"
        )
    if have != trainable.keys():
        raise ValueError(
            f"{who}: the checkpoint has the trainable parameters {_list(trainable)}, "
            f"expected those of the training graph, {_list(have)}"
        )
    for name, array in (*trainable.items(), *frozen.items()):
        if name not in specs:
            raise ValueError(f"{who}: the checkpoint has {name!r}, expected inputs of the training graph")
        spec = specs[name]
        alike = array.dtype == spec.dtype or (array.dtype == np.float32 and is_half(spec.dtype))
        if array.shape != spec.shape or not alike:
            raise ValueError(
                f"{who}: the checkpoint's {name!r} is {array.dtype} of shape {array.shape}, "
                f"expected {spec.dtype} of shape {spec.shape}, as in the training graph"
            )


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
