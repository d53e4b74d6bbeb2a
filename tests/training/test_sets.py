"""Artifact sets of 1.19.2 with convolutions, attention, embeddings and clipping train with its losses, unchanged."""

import json
from pathlib import Path

import numpy as np
import pytest
from lowered_sets import NAMES, batch_inputs
from sklearn.datasets import load_digits

from opgrad.training.api import CheckpointState, Module, Optimizer

ARTIFACTS = Path(__file__).parents[1] / "artifacts"


def batches(name, reference):
    """The batches of the training steps, and those of the evaluation, as the reference describes them."""
    inputs, size = batch_inputs(name), reference["batch_size"]
    rows = np.random.default_rng(1).permutation(len(load_digits().target))
    order = rows[:1500][np.random.default_rng(100).permutation(1500)]
    steps = [order[start : start + size] for start in range(0, size * len(reference["loss_per_step"]), size)]
    test = [rows[1500 + start : 1500 + start + 50] for start in range(0, 250, 50)]
    return ([[inputs[each][part] for each in reference["inputs"]] for part in parts] for parts in (steps, test))


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_the_original(name):
    folder = ARTIFACTS / name
    reference = json.loads((folder / "reference.json").read_text())
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(reference["learning_rate"])
    steps, test = batches(name, reference)
    losses = []
    for batch in steps:
        losses.append(float(module(*batch)))
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(losses, reference["loss_per_step"], rtol=2e-4)
    module.eval()
    evaluated = [float(module(*batch)) for batch in test]
    np.testing.assert_allclose(evaluated, reference["eval_loss_per_batch"], rtol=2e-4)
    for frozen, values in reference["frozen_after"].items():
        np.testing.assert_allclose(state.parameters[frozen].data, values, rtol=1e-3, atol=1e-4)
