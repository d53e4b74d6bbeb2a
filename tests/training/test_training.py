"""Artifact sets and the training loop."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from artifact_sets import EXAMPLES, SETS, write_linear_set
from small_models import build
from training_sets import training_and_test_data

from opgrad.onnx.graph.graph import Graph
from opgrad.training import (
    ArtifactSet,
    Checkpoint,
    Dataset,
    TensorSpec,
    Trainer,
    load_named,
    read_checkpoint,
    write_checkpoint,
)
from opgrad.training.files.artifact_set import find_scores
from opgrad.training.run.job import train
from opgrad.training.run.recipe import Recipe


def trained(name):
    """A trainer after all epochs of an example's recipe, the mean loss of each, and the test data."""
    artifacts = ArtifactSet.load(EXAMPLES / name)
    recipe = Recipe.load(EXAMPLES / name)
    data, test = training_and_test_data(artifacts)
    trainer = Trainer(artifacts, recipe.learning_rate)
    losses = []
    for epoch in range(recipe.epochs):
        order = np.random.default_rng(recipe.seed + epoch).permutation(data.rows)
        losses.append(float(np.mean(list(trainer.epoch(data, recipe.batch_size, order)))))
    return trainer, losses, test


@pytest.mark.parametrize("name", SETS)
def test_training_gives_the_losses_of_the_old_runtime(name, tmp_path):
    reference = json.loads((EXAMPLES / name / "reference.json").read_text())
    trainer, losses, test = trained(name)
    np.testing.assert_allclose(losses, reference["train_loss_per_epoch"], rtol=1e-3)
    found = trainer.evaluate(test)
    assert found.loss == pytest.approx(reference["eval_loss"], rel=1e-3)
    assert found.accuracy == pytest.approx(reference["test_accuracy"], abs=1e-6)
    path = tmp_path / "model.onnx"  # in a session that knows nothing of opgrad
    trainer.export(path)
    onnx.checker.check_model(path, full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    data, label = trainer.artifacts.inputs
    (scores,) = session.run(None, {data.name: test.arrays[data.name]})
    assert (scores.argmax(axis=1) == test.arrays[label.name]).mean() == found.accuracy
    assert [item.name for item in session.get_inputs()] == [data.name]
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def digits_copy(tmp_path):
    return Path(shutil.copytree(EXAMPLES / "digits", tmp_path / "copy"))


def test_artifact_set_tells_inputs_loss_and_scores():
    artifacts = ArtifactSet.load(EXAMPLES / "digits_attention")
    assert [spec.name for spec in artifacts.inputs] == ["tokens", "labels"]
    assert artifacts.inputs[0] == TensorSpec("tokens", np.dtype(np.int64), ("batch", 64))
    assert (artifacts.loss, artifacts.scores) == ("onnx::loss::8", "logits")


def refused(folder, message, error=ValueError):
    with pytest.raises(error, match=message):
        ArtifactSet.load(folder)


def test_artifact_set_with_missing_damaged_or_foreign_files(digits_copy):
    (digits_copy / "eval_model.onnx").write_bytes(b"\xff" * 100)
    refused(digits_copy, r"eval_model\.onnx is no ONNX model, or damaged")
    (digits_copy / "eval_model.onnx").unlink()
    refused(digits_copy, r"has no eval_model\.onnx", FileNotFoundError)


def test_artifact_set_with_the_checkpoint_of_another_model(digits_copy):
    shutil.copy(EXAMPLES / "digits_attention" / "checkpoint", digits_copy / "checkpoint")
    refused(digits_copy, r"has the trainable parameters W1, Wk.*expected.*W1, W2, W3, b1")
    values = dict(read_checkpoint(EXAMPLES / "digits" / "checkpoint").trainable)
    values["b3"] = values["b3"].reshape(2, 5)
    write_checkpoint(Checkpoint(values, {}), digits_copy / "checkpoint")
    refused(digits_copy, r"'b3' is float32 of shape \(2, 5\), expected .* \(10,\)")
    values["b3"] = values["b3"].reshape(10)
    write_checkpoint(Checkpoint(values, {"extra": values["b3"]}), digits_copy / "checkpoint")
    refused(digits_copy, "the checkpoint has 'extra'")


def test_artifact_set_whose_training_model_computes_no_gradients(digits_copy):
    shutil.copy(digits_copy / "eval_model.onnx", digits_copy / "training_model.onnx")
    refused(digits_copy, "no input lazy_reset_grad, expected a training graph")


def test_artifact_set_with_a_fixed_batch_size(digits_copy):
    """Graphs for batches of 8 alone: training drops what makes no whole batch, and refuses all else."""
    for name in ("training_model.onnx", "eval_model.onnx"):
        model = onnx.load(digits_copy / name)
        for value in model.graph.input[:2]:
            value.type.tensor_type.shape.dim[0].dim_value = 8
        onnx.save(model, digits_copy / name)
    artifacts = ArtifactSet.load(digits_copy)
    assert artifacts.batch_rows == 8
    data = load_named("digits", artifacts.inputs, {"pixels": 16}).take(np.arange(30))
    assert data.whole(8).rows == 24
    assert data.whole(None).rows == data.whole(10).rows == 30
    trainer = Trainer(artifacts)
    assert len(list(trainer.epoch(data.whole(8), 8, np.arange(24)))) == 3
    assert trainer.evaluate(data.whole(8)).loss > 0
    for wrong in (
        lambda: trainer.step(data.arrays),
        lambda: next(trainer.epoch(data, 8, np.arange(30))),
        lambda: next(trainer.epoch(data, 10, np.arange(30))),
    ):
        with pytest.raises(ValueError, match=r"a batch has \d+ rows, expected 8, as the graphs say"):
            wrong()
    with pytest.raises(ValueError, match="there are 30 rows, expected whole batches of 8"):
        trainer.evaluate(data)
    with pytest.raises(ValueError, match="there are 7 rows, expected at least one batch of 8"):
        data.take(np.arange(7)).whole(8)
    with pytest.raises(ValueError, match="batch_size is 32, expected 8, the only one that the graphs take"):
        train(artifacts, Recipe(dataset="digits"), None, digits_copy / "run", lambda *_: None)


def test_artifact_set_with_inputs_of_different_batch_sizes(digits_copy):
    model = onnx.load(digits_copy / "training_model.onnx")
    for rows, value in zip((8, 9), model.graph.input[:2], strict=True):
        value.type.tensor_type.shape.dim[0].dim_value = rows
    onnx.save(model, digits_copy / "training_model.onnx")
    refused(digits_copy, r"the inputs have \[8, 9\] rows, expected one number of them", NotImplementedError)


def test_scores_are_the_last_tensor_before_the_label_comes_in():
    model = build(
        """binary_cross_entropy (float[n] x, float[n] target, float w) => (float loss) {
            h = Mul(x, w)  p = Sigmoid(h)  a = Log(p)  ta = Mul(a, target)  one = Constant<value_float=1.0>()
            q = Sub(one, p)  b = Log(q)  r = Sub(one, target)  rb = Mul(b, r)  s = Add(ta, rb)
            loss = ReduceMean(s)
        }"""
    )
    assert find_scores(Graph(model), ["x", "target"], "target") == "p"
    assert find_scores(Graph(build("g (float x, float t) => (float l) { l = Sub(x, t) }")), ["x", "t"], "t") is None
    model = build(
        "g (float[n, 3] x, float t, float[3] w) => (float l) { y, m = LayerNormalization(x, w)  l = Clip(y, , t) }"
    )
    model.graph.node[0].output[1] = ""  # which no node reads, though Clip has an input of that name
    assert find_scores(Graph(model), ["x", "t"], "t") == "y"


@pytest.fixture(scope="module")
def digits():
    return ArtifactSet.load(EXAMPLES / "digits")


def test_steps_change_the_parameters_along_the_gradients(digits):
    trainer = Trainer(digits, 0.01)
    data, _ = training_and_test_data(digits)
    batch = dict(data.take(np.arange(7)).arrays)
    before = {name: array.copy() for name, array in trainer.parameters.items()}
    first = trainer.compute_gradients(batch)
    for name, array in before.items():
        np.testing.assert_array_equal(trainer.parameters[name], array)
    assert trainer.step(batch) == first
    for name, gradient in trainer.gradients.items():
        moved = trainer.parameters[name] != before[name]
        np.testing.assert_array_equal(moved, gradient != 0)
    losses = [trainer.step(batch) for _ in range(20)]
    assert losses[-1] < 0.5 * first
    assert trainer.step({name: array[:3] for name, array in batch.items()}) < first


def test_batches_that_do_not_fit(digits):
    trainer = Trainer(digits)
    good = {"pixels": np.zeros((2, 64), np.float32), "labels": np.zeros(2, np.int64)}
    for change, kind, message in (
        ({"pixels": np.zeros((2, 63), np.float32)}, ValueError, r"\(2, 63\), expected \(batch, 64\)"),
        ({"labels": np.zeros(2, np.int32)}, TypeError, "labels is int32, expected an array of int64"),
    ):
        with pytest.raises(kind, match=message):
            trainer.step(good | change)
    with pytest.raises(ValueError, match="labels is missing"):
        trainer.step({"pixels": good["pixels"]})


def test_epochs_over_rows_that_are_not_there(digits):
    trainer = Trainer(digits)
    data = Dataset({"pixels": np.zeros((3, 64), np.float32), "labels": np.zeros(3, np.int64)})
    for order in ([0, 3], [-1]):
        with pytest.raises(ValueError, match="order names other rows, expected 0 to 2"):
            list(trainer.epoch(data, 2, np.array(order)))
    with pytest.raises(ValueError, match="batch_size is 0"):
        list(trainer.epoch(data, 0, np.arange(3)))
    with pytest.raises(ValueError, match="labels is missing"):
        list(trainer.epoch(Dataset({"pixels": data.arrays["pixels"]}), 2, np.arange(3)))


def test_labels_that_are_no_class(digits):
    trainer = Trainer(digits)
    data = Dataset({"pixels": np.zeros((3, 64), np.float32), "labels": np.array([0, 10, -1])})
    with pytest.raises(ValueError, match="labels: row 1 is 10, expected classes from 0 to 9"):
        list(trainer.epoch(data, 3, np.arange(3)))
    with pytest.raises(ValueError, match="labels: row 1 is 10"):
        trainer.evaluate(data)


def test_frozen_parameters_and_a_loss_without_classes(tmp_path):
    """A linear model with a mean squared error and a frozen bias, trained by gradient descent."""
    write_linear_set(tmp_path)
    random = np.random.default_rng(3)
    x = random.normal(size=(64, 2)).astype(np.float32)
    y = (x @ np.array([[2.0], [-1.0]]) + 0.5).astype(np.float32)
    trainer = Trainer(ArtifactSet.load(tmp_path), 0.1)
    losses = [trainer.step({"x": x, "y": y}) for _ in range(100)]
    assert losses[-1] < 1e-6 * losses[0]
    np.testing.assert_allclose(trainer.parameters["w"], [[2], [-1]], atol=1e-3)
    np.testing.assert_array_equal(trainer.parameters["b"], [0.5])
    found = trainer.evaluate(Dataset({"x": x, "y": y}), batch_size=10)
    assert found.accuracy is None
    assert found.loss == pytest.approx(losses[-1], abs=1e-6)
    trainer.export(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["p"], {"x": x})[0], y, atol=1e-2)


def test_the_learning_rate_is_an_attribute(tmp_path):
    """What is set is what the next step takes: of a linear model, the step is the rate times the gradient."""
    write_linear_set(tmp_path)
    batch = {"x": np.ones((4, 2), np.float32), "y": np.zeros((4, 1), np.float32)}
    trainer = Trainer(ArtifactSet.load(tmp_path), np.float32(0.25))
    assert trainer.learning_rate == 0.25
    for rate in (0.5, np.float64(0.125), 0):
        trainer.learning_rate = rate
        assert trainer.learning_rate == trainer.optimizer.learning_rate == rate
        before = trainer.parameters["w"].copy()
        trainer.step(batch)
        np.testing.assert_allclose(before - trainer.parameters["w"], rate * trainer.gradients["w"], rtol=1e-6)
    trainer.optimizer.learning_rate = 0.75
    assert trainer.learning_rate == 0.75
    with pytest.raises(TypeError, match=r"^Trainer: artifacts is str, expected the set of ArtifactSet\.load$"):
        Trainer(str(tmp_path))
