"""What a model is trained for: how it is read, how lines become examples, what the loss is, and what is written."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import onnx

from opgrad.base.arguments import require
from opgrad.base.files import alone
from opgrad.training.engine.trainer import Trainer
from opgrad.training.files.dataset import TensorSpec
from opgrad.tune import outputs
from opgrad.tune.examples import RowData, TokenData, TokenExamples
from opgrad.tune.language_model import LABELS, WEIGHTS, LanguageModel, read
from opgrad.tune.lora import Adapter
from opgrad.tune.tokenizer import Tokenizer

DEFAULTS: dict[str, Any] = {"epochs": 1, "batch_size": 4, "learning_rate": 2e-4, "schedule": "cosine", "clip_norm": 1.0}
TRAIN_ON = "assistant"
Learned: TypeAlias = tuple[LanguageModel, dict[str, TensorSpec]]  # a model with its loss, and the inputs of a batch


class TaskModel(Protocol):
    """A model and what is trained of it, as tasks see it; see `AdaptedModel`."""

    file: Path
    folder: Path
    base: LanguageModel
    adapters: list[Adapter]
    values: dict[str, np.ndarray]
    max_length: int
    pack: bool

    @property
    def tokenizer(self) -> Tokenizer: ...

    def computing(self, each: bool = False, tuned: bool = True) -> Callable[[Mapping[str, np.ndarray]], np.ndarray]: ...

    def about(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Task:
    """A task; the fields of its class are its options, and `NAME, option=value` is its text.

    DEFAULTS: what a recipe says unless it is told otherwise. WRITES: whether the model writes texts: then it has
    prompts, samples and packed rows. PERPLEXITY: whether the loss is that of tokens.
    """

    NAME: ClassVar[str]
    DEFAULTS: ClassVar[dict[str, Any]] = DEFAULTS
    WRITES: ClassVar[bool] = False
    PERPLEXITY: ClassVar[bool] = False

    def longest(self, folder: Path) -> int | None:
        """The most tokens of an example that the model of a folder takes; None if that is not known."""
        return None

    def read(self, file: Path) -> LanguageModel:
        """The model of a file. Raises ValueError for one that is for another task."""
        raise NotImplementedError

    def trained(self, base: LanguageModel) -> tuple[str, ...]:
        """Names of weights of the model that are trained beside adapters, such as those of a new head."""
        return ()

    def examples(self, model: TaskModel, data: Path, train_on: str, skip_bad: bool) -> Any:
        """The examples of a file or a folder, of a class of the task's. Raises ValueError that names a wrong line.

        All have a length, what was `told` of the lines, a `checksum`, and a `form`: what decides about the graph of the
        loss, such as whether tokens have weights; 0 unless something does.
        """
        raise NotImplementedError

    def rows(self, model: TaskModel, examples: Any, batch_size: int) -> RowData:
        """Examples, as `examples` made them, as the rows of batches."""
        raise NotImplementedError

    def with_loss(self, base: LanguageModel, trained: Collection[str], form: int, plain: bool) -> Learned:
        """A model, which has its adapters, with its loss as the only output, and the inputs of a batch by name.

        trained: names of trained weights. form: of the examples. plain: for other runtimes, with scores as values.
        """
        raise NotImplementedError

    def ends_of_layers(self, layers: Sequence[str], model: onnx.ModelProto) -> Sequence[str]:
        """The values with which the layers of the model with its loss end. layers: those of the model without it."""
        return layers

    def trainer(self, model: TaskModel) -> Callable[..., Trainer]:
        """What makes a trainer, with the arguments of `Trainer`."""
        return Trainer

    def figures(self, model: TaskModel, held: RowData) -> Mapping[str, float]:
        """How good the present model is with the examples that validate, beside their loss."""
        return {}

    def try_output(self, model: TaskModel, folder: Path) -> None:
        """Make what will be written into a folder, and drop it, but for copies of the base: no error comes late."""
        if not model.adapters:
            outputs.replaced(model.base, model.values)
            return
        outputs.check_names(folder, model.base)
        with alone(folder / "trial") as trial:
            written = trial, model.base, model.file, model.adapters, model.values, model.about()
            outputs.write_tuned(*written, with_base=False)

    def save(self, model: TaskModel, folder: Path, about: Mapping[str, Any]) -> list[str]:
        """Write what was trained into a folder; returns the files' names."""
        if model.adapters:
            return outputs.write_tuned(folder, model.base, model.file, model.adapters, model.values, about)
        return outputs.write_merged(folder, model.file, *outputs.replaced(model.base, model.values), about)

    def merge(self, model: TaskModel, folder: Path, about: Mapping[str, Any]) -> list[str]:
        """Write one model that needs no adapter file into a folder; returns the files' names."""
        return outputs.write_merged(
            folder, model.file, *outputs.merged(model.base, model.adapters, model.values), about
        )

    def about(self) -> dict[str, Any]:
        """What identifies the task among others, as plain values."""
        return {"task": {"name": self.NAME, **asdict(self)}}

    def refuse(self, **given: Any) -> None:
        """Raise ArgumentError for options that are of language models alone and differ from their defaults."""
        for name, value in given.items():
            require(self.WRITES or not value, name, value, f"none for the task {self.NAME}")


def tokens_spec(name: str) -> TensorSpec:
    """An input of integers for each token."""
    return TensorSpec(name, np.dtype(np.int64), ("batch", "length"))


@dataclass(frozen=True)
class Write(Task):
    """The loss is the cross-entropy of the tokens that follow; the form of examples is whether these have weights."""

    NAME: ClassVar[str] = "write"
    WRITES: ClassVar[bool] = True
    PERPLEXITY: ClassVar[bool] = True

    def read(self, file: Path) -> LanguageModel:
        return read(file)

    def examples(self, model: TaskModel, data: Path, train_on: str, skip_bad: bool) -> TokenExamples:
        found = TokenExamples(data, model.tokenizer, model.max_length, train_on, skip_bad)
        if model.tokenizer.size > model.base.vocabulary:
            raise ValueError(
                f"the tokenizer has {model.tokenizer.size} tokens, expected at most {model.base.vocabulary}, "
                "for which the model has scores"
            )
        return found

    def rows(self, model: TaskModel, examples: TokenExamples, batch_size: int) -> RowData:
        return TokenData(examples, np.arange(len(examples)), batch_size, model.base.tokens, LABELS, packed=model.pack)

    def with_loss(self, base: LanguageModel, trained: Collection[str], form: int, plain: bool) -> Learned:
        """The mean over all labels that count; see `LanguageModel.with_loss`."""
        weighted = bool(form) and not plain
        inputs = {name: tokens_spec(name) for name in (base.tokens, LABELS)}
        if weighted:
            inputs[WEIGHTS] = TensorSpec(WEIGHTS, np.dtype(np.float32), ("batch", "length"))
        return base.with_loss(trained, plain, weighted), inputs

    def about(self) -> dict[str, Any]:
        """Nothing: adapters and checkpoints without a task are of this one."""
        return {}
