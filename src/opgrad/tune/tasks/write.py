"""The task of language models: they learn to write the tokens of texts."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from opgrad.training.files.batches import TensorSpec
from opgrad.tune.examples import TokenExamples
from opgrad.tune.language.loss import LABELS, WEIGHTS
from opgrad.tune.language.model import WHO, LanguageModel, read
from opgrad.tune.tasks.base import Task, TaskModel, tokens_spec
from opgrad.tune.token_data import RowData, TokenData


@dataclass(frozen=True)
class Write(Task):
    """The loss is the cross-entropy of the tokens that follow; the form of examples is whether these have weights."""

    NAME: ClassVar[str] = "write"
    WRITES: ClassVar[bool] = True
    PERPLEXITY: ClassVar[bool] = True

    def read(self, file: Path) -> LanguageModel:
        """The model of a file."""
        return read(file)

    def examples(self, model: TaskModel, data: Path, train_on: str, skip_bad: bool) -> TokenExamples:
        """Texts as tokens."""
        found = TokenExamples(data, model.tokenizer, model.max_length, train_on, skip_bad)
        if model.tokenizer.size > model.base.vocabulary:
            raise ValueError(
                f"{WHO}: the tokenizer has {model.tokenizer.size} tokens, expected at most {model.base.vocabulary}, "
                "for which the model has scores"
            )
        return found

    def rows(self, model: TaskModel, examples: TokenExamples, batch_size: int) -> RowData:
        """Texts as rows of tokens."""
        return TokenData(examples, np.arange(len(examples)), batch_size, model.base.tokens, LABELS, packed=model.pack)

    def with_loss(
        self, base: LanguageModel, trained: Collection[str], form: int, plain: bool
    ) -> tuple[LanguageModel, dict[str, TensorSpec]]:
        """The mean over all labels that count; see `LanguageModel.with_loss`."""
        weighted = bool(form) and not plain
        inputs = {name: tokens_spec(name) for name in (base.tokens, LABELS)}
        if weighted:
            inputs[WEIGHTS] = TensorSpec(WEIGHTS, np.dtype(np.float32), ("batch", "length"))
        return base.with_loss(trained, plain, weighted), inputs

    def about(self) -> dict[str, Any]:
        """Nothing: adapters and checkpoints without a task are of this one."""
        return {}
