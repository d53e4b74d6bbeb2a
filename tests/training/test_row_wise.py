"""Embedding tables of which a step changes the rows alone that its batches have read."""

import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from model_sets import ARTIFACTS, SETS

from opgrad.training import ArtifactSet, Trainer, read_checkpoint, write_checkpoint
from opgrad.training.files.artifact_set import AdamWRule, SGDRule
from opgrad.training.run import job
from opgrad.training.run.fit import Interrupted
from opgrad.training.run.job import Resumption
from opgrad.training.run.recipe import Recipe
from opgrad.training.run.state import LAST

TABLES = ["items.weight", "users.weight", "places.weight"]
(ITEMS,) = (each for each in SETS if each.name == "several_inputs")


def items(rule=None):
    artifacts = ArtifactSet.load(ITEMS.folder)
    return replace(artifacts, rule=rule) if rule else artifacts


def trained(rule, row_wise, steps):
    trainer = Trainer(items(rule), 0.05, row_wise=row_wise)
    losses = [trainer.step(batch) for batch in ITEMS.batches()[0][:steps]]
    return trainer, losses


def test_gradient_descent_is_the_dense_one():
    dense, expected = trained(SGDRule(), [], 8)
    rows, losses = trained(SGDRule(), TABLES, 8)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert not set(TABLES) & set(rows.gradients)
    for name, array in dense.parameters.items():
        np.testing.assert_allclose(rows.parameters[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("adam_mode", [0, 1])
def test_adam_leaves_rows_alone_that_no_batch_reads(adam_mode):
    """In the first step the others are the dense one's, whose moments begin at 0, too."""
    rule = AdamWRule(weight_decay=0.1, adam_mode=adam_mode)
    dense, _ = trained(rule, [], 1)
    rows, _ = trained(rule, TABLES[:1], 1)
    read = np.unique(ITEMS.batches()[0][0]["items"])
    before = items().trainable["items.weight"]
    found, others = rows.parameters["items.weight"], np.setdiff1d(np.arange(len(before)), read)
    np.testing.assert_allclose(found[read], dense.parameters["items.weight"][read], rtol=1e-4, atol=1e-6)
    assert others.size
    np.testing.assert_array_equal(found[others], before[others])


def test_a_checkpoint_has_tables_and_their_moments(tmp_path: Path):
    first, _ = trained(None, TABLES, 3)
    write_checkpoint(first.checkpoint(), tmp_path / "some")
    other = Trainer(items(), 0.05, row_wise=TABLES)
    other.restore(read_checkpoint(tmp_path / "some"))
    batch = ITEMS.batches()[0][3]
    assert first.step(batch) == other.step(batch)
    for name, array in first.parameters.items():
        np.testing.assert_array_equal(other.parameters[name], array, err_msg=name)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_gives_what_one_in_one_go_gives(tmp_path: Path, accumulate):
    np.savez(tmp_path / "data.npz", **ITEMS.rows())
    recipe = Recipe(epochs=3, batch_size=8, accumulate=accumulate, learning_rate=0.01, row_wise=TABLES)

    def run(output, stop_at=np.inf, resumption=None):
        progress = lambda done, *_: signal.raise_signal(signal.SIGINT) if done >= stop_at else None  # noqa: E731
        return job.train(items(), recipe, tmp_path / "data.npz", tmp_path / output, progress, resumption)

    whole = run("whole")
    with pytest.raises(Interrupted):
        run("parts", stop_at=40)
    resumption = Resumption.read(tmp_path / "parts" / LAST)
    assert resumption.state.recipe == recipe
    assert run("parts", resumption=resumption).test == whole.test


@pytest.mark.parametrize(
    ("folder", "names", "message"),
    [
        (
            "language_model",
            ["embed.weight"],
            "row_wise has 'embed.weight', which is read by Gather, .*, expected one Gather along its first",
        ),
        ("several_inputs", ["nothing"], "row_wise has 'nothing', which is no parameter that is trained"),
        ("several_inputs", ["item.weight"], "row_wise has 'item.weight', .*; did you mean 'items.weight'"),
        ("several_inputs", ["nothing*"], "row_wise has .nothing.*, which matches no table that is trained"),
        ("several_inputs", ["*.bias"], "row_wise has .*bias., which matches no table, but .*: name those in full"),
    ],
)
def test_tables_that_are_refused(folder, names, message):
    with pytest.raises(ValueError, match=f"^Trainer: {message}"):
        Trainer(ArtifactSet.load(ARTIFACTS / folder), row_wise=names)


def test_patterns_are_those_of_other_places():
    """A module's path finds a table that an exporter has renamed."""
    trainer = Trainer(items(), row_wise=["[pu]*.weight", "items.weight"])
    assert {*trainer.rows.tables} == {*TABLES}
    model, _ = items().training()
    for node in model.graph.node:
        if node.op_type == "Gather" and "items.weight" in node.input:
            node.name = "/goods/Gather"
    for given in ("goods.weight", "goods.*"):
        assert {*Trainer(replace(items(), training_model=model), row_wise=[given]).rows.tables} == {"items.weight"}
