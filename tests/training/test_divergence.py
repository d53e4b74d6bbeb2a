"""A run that diverges says so, and is no success."""

import json
import math

import numpy as np
import onnx
import pytest
from artifact_sets import linear_rows, write_linear_set
from command import cli, succeeds
from small_models import build, normal

from opgrad.training import read_checkpoint
from opgrad.training.artifacts import generate_artifacts
from opgrad.training.onnxblock import loss, optim
from opgrad.training.run.metrics import EpochMetrics
from opgrad.training.run.recipe import Recipe
from opgrad.training.run.state import BEST, LAST, Resumption, RunState


def train(folder, *words):
    write_linear_set(folder)
    data = linear_rows(folder / "data.npz")
    return cli("train", folder, "--data", data, "--batch-size", 5, "--output", folder / "out", *words)


@pytest.mark.parametrize("more", [(), ("--validation", 0.2), ("--accumulate", 2)])
def test_parameters_that_are_no_numbers_end_a_run_at_once(tmp_path, more):
    status, text = train(tmp_path, "--lr", 1e30, "--epochs", 50, *more)
    assert status == 1, text
    assert "train: the training diverged: after step " in text
    assert "in epoch 1, the parameter 'w' is not finite; expected a learning rate below 1e+30 (--lr)" in text
    assert "the parameters of" not in text
    assert not (tmp_path / "out" / "model.onnx").exists()


def test_what_was_kept_before_stays(tmp_path):
    """A rate with which it takes some epochs until numbers end; the checkpoint is one to go on from."""
    status, text = train(tmp_path, "--lr", 60, "--epochs", 50, "--validation", 0.2)
    assert status == 1, text
    assert "the training diverged" in text
    epoch = json.loads(json.dumps(text)).partition("has the parameters of epoch ")[2].split()[0]
    kept = tmp_path / "out" / BEST
    assert str(kept) in text
    assert Resumption.read(tmp_path / "out" / LAST).state.history[-1].epoch >= int(epoch)
    assert all(np.isfinite(array).all() for array in read_checkpoint(kept).parameters.values())
    status, text = train(tmp_path, "--lr", 3, "--resume", kept, "--epochs", 60)
    assert (status, (tmp_path / "out" / "model.onnx").exists()) == (0, True), text


def test_a_loss_that_has_grown_is_no_success(tmp_path):
    """All are numbers still; everything is written."""
    status, text = train(tmp_path, "--lr", 30, "--epochs", 1, "--export", tmp_path / "exported.onnx")
    assert status == 1, text
    assert "train: the training diverged: the training loss of the last epoch is " in text
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["test_loss"] > 1e3
    assert not (tmp_path / "exported.onnx").exists()


def test_a_batch_whose_labels_are_all_ignored_is_no_divergence(tmp_path):
    """Its mean is that of no label, and may be no number; the parameters stay numbers."""
    onnx.save(build("g (float[n, 4] x) => (float[n, 3] y) { y = MatMul(x, w) }", normal(w=(4, 3))), tmp_path / "m.onnx")
    block = loss.CrossEntropyLoss(ignore_index=-1)
    generate_artifacts(tmp_path / "m.onnx", loss=block, optimizer=optim.AdamW(), artifact_directory=tmp_path)
    np.savez(tmp_path / "data.npz", x=np.ones((60, 4)), y=np.where(np.arange(60) % 10, -1, 1))
    words = "--data", tmp_path / "data.npz", "--batch-size", 2, "--epochs", 2, "--output", tmp_path / "out"
    succeeds("train", tmp_path, *words)


def state_values():
    """A state as plain values, with an epoch done and a part of the next."""
    epoch = EpochMetrics(1, 4, 0.1, 1.0, 0.5, None, 1.0, 10.0)
    return json.loads(RunState(Recipe(), 7, 2, [epoch], 6, 6, 20, 2, 3.0, 0.5, 4.0).to_text())


@pytest.mark.parametrize("name", [name for name in state_values() if name not in ("format", "recipe", "history")])
def test_fields_of_a_state_that_no_run_had(name):
    values = state_values()
    wrong = ["1", [], {}, True, 10**400] + [-1, 10**30, None, 0.5] * (
        name not in ("loss_sum", "seconds", "initial_loss")
    )
    for value in wrong + [-1.0, math.inf, math.nan] * (name == "seconds"):
        with pytest.raises(ValueError, match=rf"^resume: file: opgrad.run: {name} is .*, expected a .*number"):
            RunState.from_text(json.dumps({**values, name: value}), "file")
    assert RunState.from_text(json.dumps(values)).threads == 2


def test_fields_of_a_state_that_contradict_each_other():
    values = state_values()
    second = {**values["history"][0], "epoch": 2}
    for changed, text in (
        ({"batches": 21}, "batches is 21, expected the batches of 20 rows"),
        ({"batches": 0}, "batches is 0, expected the batches of 20 rows"),
        ({"steps": 3}, "steps is 3, expected at least 4"),
        ({"history": [second]}, "epoch 1 has the number 2 and ends at step 4"),
        ({"history": [*values["history"], {**second, "steps": 3}]}, "epoch 2 has the number 2 and ends at step 3"),
        ({"history": [*values["history"], {**second, "validation_loss": None}]}, "validation_loss is missing in some"),
        ({"other": 1}, "is none that this version of opgrad wrote"),
    ):
        with pytest.raises(ValueError, match=text):
            RunState.from_text(json.dumps({**values, **changed}))
