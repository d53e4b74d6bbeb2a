"""The loss of an evaluation: the same for every number of rows that are computed at once, whatever the loss."""

import numpy as np
import pytest
from small_models import build, normal, perceptron, set_of

from opgrad.training import Dataset, Trainer, onnxblock
from opgrad.training.onnxblock import loss as losses

WEIGHTS = np.array([0.2, 1, 5], np.float32)
ROWS = 37
RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((ROWS, 4)).astype(np.float32)
LABELS = np.sort(RANDOM.integers(0, 3, ROWS))  # sorted, so that batches differ in their weights
TARGET = RANDOM.random((ROWS, 3)).astype(np.float32)


class Masked(onnxblock.Block):
    """The mean of the squares where a mask is not 0."""

    def build(self, scores):
        target, mask = onnxblock.blocks.InputLike(scores)("target"), onnxblock.blocks.InputLike(scores)("mask")
        each = onnxblock.blocks.Pow(2.0)(onnxblock.blocks.Sub()(scores, target))
        counted = onnxblock.blocks.ReduceSum(keepdims=False)(onnxblock.blocks.Mul()(each, mask))
        return onnxblock.blocks.Div()(counted, onnxblock.blocks.ReduceSum(keepdims=False)(mask))


def entropies(scores, smoothing=0.0, weight=WEIGHTS):
    """Of each row, times its weight; labels that are spread count each class by its own."""
    wide = scores.astype(np.float64)
    found = (np.log(np.exp(wide).sum(1, keepdims=True)) - wide) * weight
    return (1 - smoothing) * found[np.arange(ROWS), LABELS] + smoothing * found.mean(1)


MASK = (RANDOM.random((ROWS, 3)) < np.linspace(0.1, 0.9, ROWS)[:, None]).astype(np.float32)
ONES = np.ones(3, np.float32)

CASES = {
    "weights": (losses.CrossEntropyLoss(WEIGHTS), lambda s: entropies(s).sum() / WEIGHTS[LABELS].sum()),
    "sum": (losses.CrossEntropyLoss(reduction="sum"), lambda s: entropies(s, weight=ONES).mean()),
    "sum of weights": (losses.CrossEntropyLoss(WEIGHTS, "sum"), lambda s: entropies(s).mean()),
    "smoothed weights": (
        losses.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2),
        lambda s: entropies(s, 0.2).sum() / WEIGHTS[LABELS].sum(),
    ),
    "smoothed sum": (
        losses.CrossEntropyLoss(reduction="sum", label_smoothing=0.2),
        lambda s: entropies(s, 0.2, ONES).mean(),
    ),
    "ignored and weights": (
        losses.CrossEntropyLoss(WEIGHTS, ignore_index=1),
        lambda s: entropies(s)[LABELS != 1].sum() / WEIGHTS[LABELS[LABELS != 1]].sum(),
    ),
    "ignored sum": (
        losses.CrossEntropyLoss(reduction="sum", ignore_index=1),
        lambda s: entropies(s, weight=ONES)[LABELS != 1].mean(),
    ),
    "plain": (losses.CrossEntropyLoss(), lambda s: entropies(s, weight=ONES).mean()),
    "squares": (losses.MSELoss(), lambda s: np.square(s - TARGET).mean()),
    "sum of squares": (losses.MSELoss("sum"), lambda s: np.square(s - TARGET).sum() / ROWS),
    "sum of distances": (losses.HuberLoss("sum", 1e9), lambda s: np.square(s - TARGET).sum() / 2 / ROWS),
    "binary sum": (losses.BCEWithLogitsLoss(reduction="sum"), lambda s: (np.logaddexp(0, s) - TARGET * s).sum() / ROWS),
    "masked": (Masked(), lambda s: (np.square(s - TARGET) * MASK).sum() / MASK.sum()),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_does_not_depend_on_the_batch(name, tmp_path):
    block, expected = CASES[name]
    artifacts = set_of(perceptron(), tmp_path, block)
    trainer = Trainer(artifacts)
    held = {"x": X, "labels": LABELS, "target": TARGET, "mask": MASK}
    data = Dataset({spec.name: held[spec.name] for spec in artifacts.inputs})
    w0, b0, w1, b1 = (trainer.parameters[each] for each in ("w0", "b0", "w1", "b1"))
    wanted = expected((np.maximum(X @ w0 + b0, 0) @ w1 + b1).astype(np.float64))
    for size in (1, 5, 16, ROWS, 512):
        assert trainer.evaluate(data, size).loss == pytest.approx(wanted, rel=1e-5), size


def test_weights_that_are_inputs_or_frozen(tmp_path):
    """Weights of classes that the model has itself, as a parameter that stays as it is."""
    text = """g (float[batch, 4] x, int64[batch] labels) => (float loss) {
        s = MatMul(x, w)  loss = SoftmaxCrossEntropyLoss(s, labels, weights)
    }"""
    model = build(text, {**normal(w=(4, 3)), "weights": WEIGHTS})
    found = []
    for frozen in (None, ["weights"]):
        trainer = Trainer(set_of(model, tmp_path, None, requires_grad=["w"], frozen_params=frozen))
        data = Dataset({"x": X, "labels": LABELS})
        found += [trainer.evaluate(data, size).loss for size in (4, ROWS)]
    assert found == pytest.approx([found[0]] * 4, rel=1e-5)


def test_rows_without_weight(tmp_path):
    trainer = Trainer(set_of(perceptron(), tmp_path, losses.CrossEntropyLoss(np.array([0, 1, 1], np.float32))))
    data = Dataset({"x": X, "labels": LABELS})
    assert trainer.evaluate(data, 2).loss == pytest.approx(trainer.evaluate(data, ROWS).loss, rel=1e-5)
