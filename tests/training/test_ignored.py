"""Losses of batches in which no label counts, or only some: 0 and no NaN, whoever runs the graph."""

import numpy as np
import onnxruntime
import pytest
from small_models import build, normal, perceptron

from opgrad.onnxruntime import lower
from opgrad.training import ArtifactSet, Dataset, Trainer, read_checkpoint
from opgrad.training.api import CheckpointState, Module
from opgrad.training.artifacts import OptimType, generate_artifacts
from opgrad.training.onnxblock.loss import CrossEntropyLoss, NLLLoss

X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
WEIGHT = np.array([1, 2, 0.5], np.float32)
IGNORED = -7
NOTHING = np.array([0, 1, 0.5], np.float32)  # of the weights of classes
ALL, SOME = np.full(6, IGNORED), np.array([0, IGNORED, 2, 1, IGNORED, 2])


def of_log_probabilities(function):
    """Log-probabilities by LogSoftmax, which training joins with the loss, or by other nodes."""
    text = f"g (float[batch, 4] x) => (float[batch, 3] scores) {{ h = Gemm(x, w0, b0)  m = MatMul(h, w1)  {function} }}"
    return build(text, normal(w0=(4, 5), b0=(5,), w1=(5, 3)))


LOSSES = {
    "cross-entropy": (perceptron, CrossEntropyLoss(ignore_index=IGNORED)),
    "weighted": (perceptron, CrossEntropyLoss(WEIGHT, ignore_index=IGNORED)),
    "smoothed": (perceptron, CrossEntropyLoss(ignore_index=IGNORED, label_smoothing=0.1)),
    "weighted, smoothed": (perceptron, CrossEntropyLoss(WEIGHT, ignore_index=IGNORED, label_smoothing=0.1)),
    "nll": (lambda: of_log_probabilities("scores = LogSoftmax(m)"), NLLLoss(ignore_index=IGNORED)),
    "nll of others": (
        lambda: of_log_probabilities("p = Softmax(m) scores = Log(p)"),
        NLLLoss(WEIGHT, ignore_index=IGNORED),
    ),
}


WITHOUT_WEIGHT = {  # labels 0 have the weight 0
    "of weight 0": (perceptron, CrossEntropyLoss(NOTHING)),
    "of weight 0, smoothed": (perceptron, CrossEntropyLoss(NOTHING, label_smoothing=0.1)),
    "nll of weight 0": (LOSSES["nll"][0], NLLLoss(NOTHING)),
    "nll of others of weight 0": (LOSSES["nll of others"][0], NLLLoss(NOTHING)),
}


@pytest.mark.parametrize("name", [*LOSSES, *WITHOUT_WEIGHT])
def test_no_label_counts(name, tmp_path):
    (model, loss), labels = (LOSSES | WITHOUT_WEIGHT)[name], ALL if name in LOSSES else np.zeros_like(ALL)
    generate_artifacts(model(), None, None, loss, OptimType.SGD, tmp_path)
    artifacts, batch = ArtifactSet.load(tmp_path), {"x": X, "labels": labels}
    trainer, values = Trainer(artifacts, 0.5), read_checkpoint(tmp_path / "checkpoint").parameters
    found = [trainer.step(batch), trainer.evaluate(Dataset(batch, artifacts.axes)).loss]
    for key, array in values.items():
        np.testing.assert_array_equal(trainer.parameters[key], array)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    for mode in (module.train, module.eval):
        mode()
        found.append(np.asarray(module(X, labels)).item())
    feeds = {**batch, **values}
    found.append(onnxruntime.InferenceSession(tmp_path / "eval_model.onnx").run(None, feeds)[0].item())
    lowered = lower(tmp_path / "eval_model.onnx").SerializeToString()
    found.append(onnxruntime.InferenceSession(lowered).run(None, feeds)[0].item())
    assert found == [0.0] * 6


@pytest.mark.parametrize("name", LOSSES)
def test_labels_that_count_have_the_same_mean_as_before(name, tmp_path):
    """Also over batches of which one has no label that counts."""
    model, loss = LOSSES[name]
    generate_artifacts(model(), None, None, loss, OptimType.SGD, tmp_path)
    artifacts = ArtifactSet.load(tmp_path)
    batch, values = {"x": X, "labels": SOME}, read_checkpoint(tmp_path / "checkpoint").parameters
    trainer = Trainer(artifacts, 0.0)
    hidden = X @ values["w0"] + values["b0"]
    scores = (np.maximum(hidden, 0) if "b1" in values else hidden) @ values["w1"] + values.get("b1", 0)
    log_prob = scores - np.log(np.exp(scores.astype(np.float64)).sum(1, keepdims=True))
    counted = SOME != IGNORED
    weights = WEIGHT if "weighted" in name or name == "nll of others" else np.ones(3)
    share, labels = (0.1 if "smoothed" in name else 0.0), SOME[counted]
    rows = (1 - share) * weights[labels] * -log_prob[counted, labels]
    rows += share * -(log_prob[counted] * weights).mean(1)
    exact = rows.sum() / weights[labels].sum()
    plain = onnxruntime.InferenceSession(tmp_path / "eval_model.onnx").run(None, {**batch, **values})[0]
    found = [trainer.step(batch), plain.item()]
    longer = Dataset({"x": np.concatenate([X, X]), "labels": np.concatenate([SOME, ALL])}, artifacts.axes)
    found += [trainer.evaluate(longer, batch_size=size).loss for size in (2, 6, 12)]
    np.testing.assert_allclose(found, exact, rtol=1e-5)


def test_a_label_that_int32_does_not_hold(tmp_path):
    text = """g (float[n, 4] x, int32[n] labels) => (float loss) {
        s = MatMul(x, w)  loss = SoftmaxCrossEntropyLoss<ignore_index = 4294967296>(s, labels)
    }"""
    generate_artifacts(build(text, normal(w=(4, 3))), None, None, None, OptimType.SGD, tmp_path)
    labels = np.arange(len(X)).astype(np.int32) % 3
    batch, w = {"x": X, "labels": labels}, read_checkpoint(tmp_path / "checkpoint").parameters["w"]
    scores = (X @ w).astype(np.float64)
    exact = np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(len(X)), labels])
    artifacts = ArtifactSet.load(tmp_path)
    found = [Trainer(artifacts, 0.0).step(batch), Trainer(artifacts, 0.0).evaluate(Dataset(batch, artifacts.axes)).loss]
    np.testing.assert_allclose(found, exact, rtol=1e-5)
