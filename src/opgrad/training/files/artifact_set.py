"""The four files that onnxruntime-training makes of a model, read together and checked against each other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from shlex import quote

import numpy as np
import onnx
from onnx.helper import tensor_dtype_to_np_dtype

from opgrad.base.locks import once
from opgrad.base.writing import finish_interrupted
from opgrad.onnx.graph.batch_norm import evaluating, written_inputs
from opgrad.onnx.graph.halves import compute_in_float32, in_float32, is_half
from opgrad.onnx.graph.loading import read_model
from opgrad.onnx.graph.messages import copied
from opgrad.training.files.batches import TensorSpec, located
from opgrad.training.files.checkpoint import read_checkpoint
from opgrad.training.files.names import BUFFER_SUFFIX, RESET
from opgrad.training.files.objective import Objective, find_objective
from opgrad.training.files.rules import Rule, read_rule
from opgrad.training.files.tensor_values import read_shared, with_inputs

FILES = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")


@dataclass(frozen=True)
class ArtifactSet:
    """An artifact set of onnxruntime-training.

    directory: where it was read from.
    training_model: the graph that computes loss and gradients: its file, or the model with placeholders for the
        tensors in `constants`.
    eval_model: the graph that computes the loss alone, in the types of the model that the set was made of.
    rule: how the optimizer changes the parameters.
    trainable, frozen: the initial parameters, read-only, by name; only the trainable ones have gradients. Those that
        training changes are float32 where the models have float16 or bfloat16.
    constants: large tensors that are no parameters and that both graphs share, read-only, by name; `eval_model` has
        inputs in their places.
    files: for those of them that lie in a file, the file, the first byte and the number of bytes.
    tune: of a fine-tuning what identifies it, as JSON.
    inputs: the arrays of a batch, in the graph's order.
    loss: the graphs' first output.
    batch_rows: the only number of rows that the graphs take; None if any will do.
    """

    directory: Path
    training_model: Path | onnx.ModelProto
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
        checkpoint = read_checkpoint(checkpoint_file)
        graph = read_model(training_model, "ArtifactSet", outside=False).graph
        if not graph.output:
            raise ValueError(f"ArtifactSet: {training_model} has no outputs, expected the loss")
        specs = _specs(graph, f"ArtifactSet: {training_model}")
        check_parameters("ArtifactSet", specs, checkpoint.trainable, checkpoint.frozen)
        written = written_inputs(graph)
        buffers = {name + BUFFER_SUFFIX for name in checkpoint.trainable}
        others = checkpoint.parameters.keys() | buffers | {RESET}
        inputs, batch_rows = located(tuple(spec for name, spec in specs.items() if name not in others))
        evaluation, constants = read_shared(eval_model, "ArtifactSet")
        evaluating(evaluation)
        return cls(
            directory=folder,
            training_model=training_model,
            eval_model=evaluation,
            rule=read_rule(read_model(optimizer_model, "ArtifactSet")),
            trainable={name: in_float32(array) for name, array in checkpoint.trainable.items()},
            frozen={name: in_float32(array) if name in written else array for name, array in checkpoint.frozen.items()},
            inputs=inputs,
            batch_rows=batch_rows,
            loss=graph.output[0].name,
            constants=constants,
        )

    @property
    def title(self) -> str:
        """The training graph's name in messages."""
        return str(self.training_model if isinstance(self.training_model, Path) else self.directory)

    def training(self, who: str, in_halves: bool = False) -> tuple[onnx.ModelProto, Mapping[str, np.ndarray]]:
        """A copy of the training graph, and the values of its inputs that are constants, by name.

        in_halves: whether a graph that computes in float16 or bfloat16 stays so; else it computes in float32.
        """
        if isinstance(self.training_model, Path):
            model, constants = read_shared(self.training_model, who)
            if not in_halves:
                compute_in_float32(model, changed_inputs(self.trainable, model.graph))
            return model, constants
        model = with_inputs(self.training_model)
        held = {each.name for each in model.graph.input}
        return model, {name: array for name, array in self.constants.items() if name in held}

    @once
    def evaluation(self) -> onnx.ModelProto:
        """The eval graph as it is run: it computes in float32, from parameters as they are here."""
        if not isinstance(self.training_model, Path):
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


def changed_inputs(trainable: Iterable[str], graph: onnx.GraphProto) -> set[str]:
    """The inputs of a training graph that training changes: parameters, their gradients, running statistics."""
    return {*trainable, *(name + BUFFER_SUFFIX for name in trainable), *written_inputs(graph)}


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
