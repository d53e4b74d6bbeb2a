"""Lowered artifact sets train in onnxruntime alone, with the losses and gradients of onnxruntime-training 1.19.2."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from artifact_sets import EXAMPLES, SETS
from lowered_sets import NAMES, batch_inputs
from lowering_models import feedback
from sklearn.datasets import load_digits

from opgrad.onnxruntime import lower
from opgrad.training import read_checkpoint
from opgrad.training.run.recipe import Recipe

ARTIFACTS = Path(__file__).parents[1] / "artifacts"
BUFFER = "_grad.accumulation.buffer"


def session_of(path):
    lowered = lower(path)
    onnx.checker.check_model(lowered)
    again = lower(lowered)
    assert again.SerializeToString(deterministic=True) == lowered.SerializeToString(deterministic=True)
    back = feedback(lowered) if lowered.metadata_props else {}
    return onnxruntime.InferenceSession(lowered.SerializeToString(), providers=["CPUExecutionProvider"]), back


class Lowered:
    """Training with the lowered graphs of a set: whatever they give back goes into their inputs."""

    def __init__(self, folder, learning_rate):
        self.training, self.back = session_of(folder / "training_model.onnx")
        self.optimizer, self.optimizer_back = session_of(folder / "optimizer_model.onnx")
        self.evaluation, _ = session_of(folder / "eval_model.onnx")
        checkpoint = read_checkpoint(folder / "checkpoint")
        self.trainable = list(checkpoint.trainable)
        self.state = {name: np.array(each) for name, each in checkpoint.parameters.items()}
        self.state["lazy_reset_grad"] = np.array([True])
        for name in self.trainable:  # reset gradients may hold anything
            self.state[name + BUFFER] = np.full_like(self.state[name], np.nan)
        moments = [np.zeros_like(self.state[name]) for name in self.trainable]
        self.sequences = {"first_order_moments": moments, "second_order_moments": moments}
        self.learning_rate, self.steps = np.array([learning_rate], np.float32), 0

    def loss(self, session, batch):
        """The first output; what it is to be fed back with is kept."""
        feeds = {value.name: (self.state | batch)[value.name] for value in session.get_inputs()}
        names = [value.name for value in session.get_outputs()]
        results = dict(zip(names, session.run(None, feeds), strict=True))
        self.state |= {source: results[name] for name, source in self.back.items() if name in results}
        return results[names[0]]

    def step(self, batch):
        loss = self.loss(self.training, batch)
        self.steps += 1
        feeds = self.sequences | {
            "params": [self.state[name] for name in self.trainable],
            "gradients": [self.state[name + BUFFER] for name in self.trainable],
            "learning_rate": self.learning_rate,
            "step": np.array([self.steps]),
        }
        names = [value.name for value in self.optimizer.get_outputs()]
        inputs = {value.name for value in self.optimizer.get_inputs()}
        results = dict(
            zip(names, self.optimizer.run(None, {k: v for k, v in feeds.items() if k in inputs}), strict=True)
        )
        self.sequences |= {source: results[name] for name, source in self.optimizer_back.items() if source != "params"}
        changed = results[next(name for name, source in self.optimizer_back.items() if source == "params")]
        self.state |= dict(zip(self.trainable, changed, strict=True))
        return loss


@pytest.mark.parametrize("name", NAMES)
def test_artifact_sets_give_the_losses_and_gradients_of_the_old_runtime(name):
    reference = json.loads((ARTIFACTS / name / "reference.json").read_text())
    arrays = {key: each for key, each in batch_inputs(name).items() if key in reference["inputs"]}
    rows, size = np.random.default_rng(1).permutation(1797), reference["batch_size"]
    order = rows[:1500][np.random.default_rng(100).permutation(1500)]
    trained = Lowered(ARTIFACTS / name, reference["learning_rate"])

    def batch(rows, index):
        return {key: each[rows[size * index : size * (index + 1)]] for key, each in arrays.items()}

    losses = [trained.step(batch(order, 0))]
    check_gradients(trained, np.load(ARTIFACTS / name / "gradients.npz"))
    losses += [trained.step(batch(order, index)) for index in range(1, len(reference["loss_per_step"]))]
    np.testing.assert_allclose(losses, reference["loss_per_step"], rtol=1e-4)
    for key, exact in reference["frozen_after"].items():
        np.testing.assert_allclose(trained.state[key], exact, rtol=1e-3, atol=1e-4)
    test = [trained.loss(trained.evaluation, batch(rows[1500:], index)) for index in range(5)]
    np.testing.assert_allclose(test, reference["eval_loss_per_batch"], rtol=1e-3)


def check_gradients(trained, gradients):
    """Within 1e-5 of the largest gradient of any parameter: some are 0 but for what rounding leaves."""
    assert set(gradients.files) == set(trained.trainable)
    largest = max(np.abs(gradients[name]).max() for name in gradients.files)
    for name in gradients.files:
        np.testing.assert_allclose(trained.state[name + BUFFER], gradients[name], rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("name", SETS)
def test_examples_give_the_loss_of_the_old_runtime(name):
    folder = EXAMPLES / name
    reference, recipe = json.loads((folder / "reference.json").read_text()), Recipe.load(folder)
    digits, labels = load_digits(return_X_y=True)
    data = (digits / 16).astype(np.float32) if name == "digits" else digits.astype(np.int64)
    rows = np.random.default_rng(recipe.split_seed).permutation(1797)[:1500]
    order = rows[np.random.default_rng(recipe.seed).permutation(1500)]
    trained = Lowered(folder, recipe.learning_rate)
    first = trained.evaluation.get_inputs()[0].name
    batches = [order[start : start + 50] for start in range(0, 1500, 50)]
    losses = [trained.step({first: data[rows], "labels": labels[rows].astype(np.int64)}) for rows in batches]
    assert np.mean(losses) == pytest.approx(reference["train_loss_per_epoch"][0], rel=1e-4)
