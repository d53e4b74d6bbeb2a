"""The task of preferences: of two answers to a prompt, the chosen one shall become likelier than the rejected one."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from onnx import TensorProto, helper

from opgrad.base.arguments import require
from opgrad.onnx.graph.formulas import GraphBody, Value
from opgrad.onnx.graph.messages import opset_of
from opgrad.onnx.graph.nodes import names_in
from opgrad.training.files.dataset import Dataset, TensorSpec
from opgrad.tune.examples import RowData, TokenExamples, token_rows
from opgrad.tune.language_model import EACH, IGNORED, LABELS, LOSS, WEIGHTS, LanguageModel, finish
from opgrad.tune.lines import ASKED, GIVEN, SYSTEM, system_of
from opgrad.tune.tasks.base import TRAIN_ON, Learned, Task, TaskModel, Write, tokens_spec
from opgrad.tune.template_process import common

LOSSES = ("dpo", "orpo", "simpo")
REFERENCE = "reference"  # the input with what the base says of each pair


@dataclass(frozen=True)
class Prefer(Write):
    """A loss of the logarithms of the probabilities of a pair of answers, c and r, the chosen and the rejected one.

    loss: "dpo": -log sigmoid(beta * (c - r - what the base has for c - r)), of the sums over an answer's tokens.
        "simpo": -log sigmoid(beta * (c - r) - gamma), of the means over an answer's tokens; there is no reference.
        "orpo": the cross-entropy of the chosen text, prompt included, and beta * -log sigmoid(log odds c - log odds r),
        of the means.
    beta: how much a difference weighs; None: 0.1, of simpo 2. gamma: how far c shall be above r, of simpo; None: 0.5.
    label_smoothing: the share of pairs that are taken the other way round, of dpo and simpo.

    Source: DPO, arXiv 2305.18290; ORPO, arXiv 2403.07691; SimPO, arXiv 2405.14734; as TRL 1.16 computes them.
    """

    loss: str = "dpo"
    beta: float | None = None
    gamma: float | None = None
    label_smoothing: float = 0.0

    NAME: ClassVar[str] = "prefer"
    PERPLEXITY: ClassVar[bool] = False
    DEFAULTS: ClassVar[dict[str, Any]] = {**Write.DEFAULTS, "learning_rate": 5e-5}

    def __post_init__(self) -> None:
        require(self.loss in LOSSES, "loss", self.loss, f"one of {', '.join(LOSSES)}")
        require(self.beta is None or self.beta > 0, "beta", self.beta, "a number above 0")
        require(self.gamma is None or self.loss == "simpo", "gamma", self.gamma, "none, as the loss is not simpo")
        most = 0.0 if self.loss == "orpo" else 0.5
        share = self.label_smoothing
        require(0 <= share < 0.5 and share <= most, "label_smoothing", share, "a number from 0 to below 0.5, of orpo 0")

    @property
    def scale(self) -> float:
        """`beta`, or what it is by default."""
        return self.beta if self.beta is not None else 2.0 if self.loss == "simpo" else 0.1

    def examples(self, model: TaskModel, data: Path, train_on: str, skip_bad: bool) -> TokenExamples:
        require(not model.pack, "pack", model.pack, f"none for the task {self.NAME}")
        require(train_on == TRAIN_ON, "train_on", train_on, f"{TRAIN_ON} for the task {self.NAME}")
        return Answers(data, model.tokenizer, model.max_length, train_on, skip_bad)

    def rows(self, model: TaskModel, examples: Any, batch_size: int) -> "PairData":
        """Pairs; for dpo with what the base says of them, which is computed here once."""
        every = np.arange(len(examples))
        data = PairData(examples, every, batch_size, model.base.tokens, whole=self.loss == "orpo")
        return replace(data, reference=self._differences(model, data, tuned=False)) if self.loss == "dpo" else data

    def with_loss(self, base: LanguageModel, trained: Collection[str], form: int, plain: bool) -> Learned:
        """The mean over the pairs of a batch."""
        found = base.with_loss(trained, plain, each=True)
        graph, inputs = found.model.graph, {name: tokens_spec(name) for name in (base.tokens, LABELS)}
        inputs[WEIGHTS] = TensorSpec(WEIGHTS, np.dtype(np.float32), ("batch", "length"))
        graph.input.append(helper.make_tensor_value_info(WEIGHTS, TensorProto.FLOAT, ["batch", "length"]))
        if self.loss == "dpo":
            inputs[REFERENCE] = TensorSpec(REFERENCE, np.dtype(np.float32), ("pairs",))
            graph.input.append(helper.make_tensor_value_info(REFERENCE, TensorProto.FLOAT, ["pairs"]))
        body = GraphBody(opset_of(found.model), names_in(graph))
        body.scope("preferences")
        each, weights, reference = (Value(body, name, TensorProto.FLOAT) for name in (EACH, WEIGHTS, REFERENCE))
        loss = self._loss(each, weights, reference, Value(body, LABELS, TensorProto.INT64))
        finish(found.model, loss, LOSS, [])
        return replace(found, loss=LOSS), inputs

    def _loss(self, each: Value, weights: Value, reference: Value, labels: Value) -> Value:
        """The loss of a batch. each: the losses of all tokens, of the chosen answers and then of the rejected ones."""
        losses = each.reshape(weights.shape())
        answers = -(losses * weights).sum([1], keepdims=False)
        if self.loss != "dpo":
            answers = answers / weights.sum([1], keepdims=False)
        both = answers.reshape([2, -1])
        chosen, rejected = (both.slice(index, index + 1).squeeze(0) for index in range(2))
        if self.loss == "orpo":
            odds = (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))
            first = [
                x.reshape(x.body.concat(x.body.ints([2, -1]), x.shape(1, 2))).slice(0, 1) for x in (losses, labels)
            ]
            counted = (first[1] > IGNORED).cast(TensorProto.FLOAT).sum(keepdims=False)
            written = first[0].sum(keepdims=False) / counted
            return written + (-odds).apply("Softplus").mean(0).squeeze(0) * self.scale
        if self.loss == "dpo":
            margin = (chosen - rejected - reference) * self.scale
        else:
            margin = (chosen - rejected) * self.scale - (0.5 if self.gamma is None else self.gamma)
        right = (-margin).apply("Softplus")
        if self.label_smoothing:
            wrong = margin.apply("Softplus")
            right = right * (1 - self.label_smoothing) + wrong * self.label_smoothing
        return right.mean(0).squeeze(0)

    def _differences(self, model: TaskModel, data: "PairData", tuned: bool) -> np.ndarray:
        """The differences of the pairs' logarithms, float32 [n], by the model as it is tuned or by its base."""
        compute, found = model.computing(each=True, tuned=tuned), np.zeros(len(data.examples.pairs), np.float32)
        order = np.argsort(data.lengths(np.arange(data.rows)), kind="stable")
        for start in range(0, data.rows, data.batch_size):
            rows = order[start : start + data.batch_size]
            arrays = data.arrays(rows).arrays
            weights = arrays[WEIGHTS]
            losses = compute({name: arrays[name] for name in (data.tokens, LABELS)}).reshape(weights.shape)
            answers = -(losses * weights).sum(1, dtype=np.float64) / (1 if self.loss == "dpo" else weights.sum(1))
            found[data.chosen[rows]] = answers[: len(rows)] - answers[len(rows) :]
        return found

    def figures(self, model: TaskModel, held: RowData) -> Mapping[str, float]:
        """How far the rewards of chosen answers are above those of rejected ones, and how often."""
        assert isinstance(held, PairData)
        found = self._differences(model, held, tuned=True) - held.reference
        margins = found[held.chosen] * self.scale
        return {"reward margin": float(margins.mean()), "reward accuracy": float((margins > 0).mean())}

    about = Task.about


def _log_of_rest(x: Value) -> Value:
    """log(1 - exp(x)) for x below 0, without the loss of digits near 0: 1 - exp(x) = 2t / (1 + t), t = tanh(-x / 2)."""
    t = x.body.node("Max", (x * -0.5).apply("Tanh"), x.body.number(1e-30, x))
    return (t * 2 / (t + 1)).apply("Log")


def _pair(values: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected of an object. Raises ValueError."""
    if not {"chosen", "rejected"} <= values.keys():
        raise ValueError(f"it has {', '.join(map(repr, values)) or 'nothing'}, expected {Answers.KINDS}")
    prompt = next((values[each] for each in ("prompt", *ASKED) if values.get(each) is not None), None)
    texts = [values["chosen"], values["rejected"]]
    if texts[0] == texts[1] or not (all(isinstance(x, str) for x in texts) or all(isinstance(x, list) for x in texts)):
        raise ValueError(
            "chosen and rejected are the same or of different kinds, expected two texts or lists of messages"
        )
    if isinstance(texts[0], str):
        if prompt is not None:
            return prompt, *texts
        same = common(*texts)
        same -= same > 0 and texts[0][same - 1] == " "  # a blank belongs to the token behind it
        return texts[0][:same], texts[0][same:], texts[1][same:]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    chats = [_behind(before, each) for each in texts]
    same = common(*chats)
    return chats[0][:same], chats[0][same:], chats[1][same:]


def _behind(prompt: list[Any], answer: list[Any]) -> list[Any]:
    """The chat of a prompt and an answer, or the answer if that is a chat with the prompt. Raises ValueError."""
    roles = [each.get("role") for each in (*answer[:1], *prompt[-1:]) if isinstance(each, dict)]
    if answer[: len(prompt)] == prompt or (roles[:1] == ["system"] and answer[1 : len(prompt) + 1] == prompt):
        return answer
    if roles in (["system", "user"], ["user", "user"]):
        raise ValueError("chosen and rejected are chats that do not begin with the prompt, expected ones that do")
    return [*prompt, *answer]


class Answers(TokenExamples):
    """The answers of all pairs as examples. pairs: the numbers of both answers of each pair, int64 [n, 2].

    Its length is the number of pairs; its items are answers.
    """

    KINDS = "chosen and rejected, texts or lists of messages, perhaps prompt"

    def __init__(self, *given: Any):
        super().__init__(*given)
        after = enumerate(zip(self._numbers, self._numbers[1:], strict=False))
        found = [(place, place + 1) for place, (number, following) in after if number == following]
        if not found:
            raise ValueError(f"{self.path}: it has no pair of which both answers have a token to learn from")
        self.pairs, told = np.array(found, np.int64), self.told
        lines = (told.lines - told.bad) // 2
        self.told = replace(told, lines=lines + told.bad, empty=lines - len(found))

    def _objects(self, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """The prompt with each answer as its completion."""
        prompt, *answers = _pair(values)
        are_texts = isinstance(answers[0], str)
        beside = {each: values[each] for each in ("tools", *SYSTEM) if values.get(each)}
        if are_texts and (system_of(values) or ("prompt" not in values and any(each in values for each in ASKED))):
            beside |= {each: values[each] for each in (*ASKED, *GIVEN) if each in values}
            return [{**beside, "output": each} for each in answers]
        given = {"prompt": prompt} if prompt or are_texts else {}
        return [{**beside, **given, "completion" if given else "messages": each} for each in answers]

    def __len__(self) -> int:
        return len(self.pairs)


@dataclass(frozen=True)
class PairData(RowData):
    """Pairs as batches: the chosen answers of all rows with their prompts, then the rejected ones.

    tokens: the input's name. whole: whether prompts have labels, too; their weights are 0.
    reference: what is subtracted from the differences of all pairs, float32 [n], or 0.
    """

    examples: Answers
    tokens: str
    whole: bool = False
    reference: np.ndarray = field(default_factory=lambda: np.zeros(1, np.float32))

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """The tokens of the longer answer of each row with its prompt, but the last."""
        return np.asarray(self.examples.lengths[self.examples.pairs[self.chosen[rows]]].max(1) - 1)

    def shape(self) -> tuple[int, int]:
        """Two rows of tokens for each pair."""
        rows, length = super().shape()
        return 2 * rows, length

    def arrays(self, rows: np.ndarray) -> Dataset:
        numbers = self.examples.pairs[self.chosen[rows]].T.ravel()
        answers = [self.examples[int(number)] for number in numbers]
        tokens, labels, weights, *_ = token_rows(answers, whole=self.whole)
        reference = np.broadcast_to(self.reference, len(self.examples.pairs))[self.chosen[rows]]
        return Dataset({REFERENCE: reference, self.tokens: tokens, LABELS: labels, WEIGHTS: weights})
