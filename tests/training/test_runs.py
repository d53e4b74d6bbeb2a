"""Training runs: resumption, validation, early end, schedules, accumulation, clipping, interruption."""

import csv
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from artifact_sets import EXAMPLES, linear_rows, write_linear_set
from command import fails, succeeds

import opgrad
from opgrad.training import ArtifactSet, Dataset, Trainer, read_checkpoint
from opgrad.training.files.checkpoint import write_checkpoint
from opgrad.training.run import fit, job
from opgrad.training.run.fit import Interrupted
from opgrad.training.run.metrics import EpochMetrics, best_epoch, plot_losses
from opgrad.training.run.recipe import Recipe, Schedule
from opgrad.training.run.state import BEST, LAST, PROPERTY, Resumption, RunState

FULL = Recipe(
    dataset="digits",
    divide={"pixels": 16.0},
    epochs=6,
    batch_size=48,
    schedule="linear",
    warmup=5,
    accumulate=3,
    clip_norm=0.5,
    validation=0.1,
    seed=3,
)


@pytest.fixture(autouse=True)
def one_thread(threads):
    """With more, a run may find another number faster than the run that it is compared with."""
    opgrad.set_num_threads(1)


@pytest.fixture(scope="module")
def digits():
    return ArtifactSet.load(EXAMPLES / "digits")


def nothing(*_):
    """Progress that nobody watches."""


def interrupt_at(rows):
    """Progress that is interrupted as by Ctrl-C when so many rows are done."""

    def progress(done, *_):
        if done >= rows:
            signal.raise_signal(signal.SIGINT)

    return progress


def assert_same_checkpoint(first, second):
    """Bit for bit, but for the time it took."""
    a, b = read_checkpoint(first), read_checkpoint(second)
    assert a.parameters.keys() == b.parameters.keys()
    for name, array in a.parameters.items():
        np.testing.assert_array_equal(array, b.parameters[name], err_msg=name)
    (one,), (other,) = a.optimizers.values(), b.optimizers.values()
    assert (one.step, one.learning_rate) == (other.step, other.learning_rate)
    for name, moments in one.moments.items():
        for moment, array in moments.items():
            np.testing.assert_array_equal(array, other.moments[name][moment], err_msg=f"{name} {moment}")
    states = [RunState.from_text(each.properties[PROPERTY]) for each in (a, b)]
    assert timeless(states[0]) == timeless(states[1])


def timeless(state):
    history = [replace(epoch, seconds=0, samples_per_second=0) for epoch in state.history]
    return replace(state, history=history, seconds=0)


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3 * 1294, 3 * 1294 + 500], ids=["after 3 epochs", "within the 4th"])
def test_a_resumed_run_gives_what_one_in_one_go_gives(digits, tmp_path, rows):
    """AdamW, a linear schedule with warm-up, accumulation, clipping, validation."""
    whole = job.train(digits, FULL, None, tmp_path / "whole", nothing)
    assert whole.train_rows == 1294
    with pytest.raises(Interrupted, match="interrupted after 3 of 6 epochs"):
        job.train(digits, FULL, None, tmp_path / "parts", interrupt_at(rows))
    resumption = Resumption.read(tmp_path / "parts" / LAST)
    assert resumption.state is not None
    assert (resumption.state.rows > 0) == (rows > 3 * 1294)
    parts = job.train(digits, resumption.state.recipe, None, tmp_path / "parts", nothing, resumption)
    assert timeless(parts.state) == timeless(whole.state)
    assert parts.test == whole.test
    for name in (LAST, BEST):
        assert_same_checkpoint(tmp_path / "parts" / name, tmp_path / "whole" / name)
    assert (tmp_path / "parts" / "model.onnx").read_bytes() == (tmp_path / "whole" / "model.onnx").read_bytes().replace(
        b"whole", b"parts"
    )


def test_a_run_goes_on_wherever_it_was_killed(digits, tmp_path, monkeypatch):
    """Between its two checkpoints, and after its last epoch."""
    recipe, writes = replace(FULL, epochs=2), [write_checkpoint] * 3
    whole = job.train(digits, recipe, None, tmp_path / "whole", nothing)
    monkeypatch.setattr(fit, "write_checkpoint", lambda *given: writes.pop()(*given))
    with pytest.raises(IndexError):
        job.train(digits, recipe, None, tmp_path / "parts", nothing)
    monkeypatch.undo()
    parts = job.train(digits, recipe, None, tmp_path / "parts", nothing, Resumption.read(tmp_path / "parts" / LAST))
    assert (parts.best_epoch, parts.test) == (whole.best_epoch, whole.test)
    assert_same_checkpoint(tmp_path / "parts" / BEST, tmp_path / "whole" / BEST)


def test_a_folder_is_for_one_run_at_a_time(digits, tmp_path):
    given = digits, replace(FULL, epochs=1, batch_size=1294, accumulate=1, warmup=0), None, tmp_path

    def another(*_):
        with pytest.raises(OSError, match=r"metrics.jsonl: another one is writing there"):
            job.train(*given, nothing)

    job.train(*given, another)


def test_the_checkpoint_of_another_program_begins_a_run_with_its_moments(digits, tmp_path):
    trainer = Trainer(digits, 0.01)
    data = job.load_data(digits, FULL, None)
    for _ in range(3):
        trainer.step(data.take(np.arange(20)).arrays)
    write_checkpoint(trainer.checkpoint({"epoch": 5}), tmp_path / "theirs")
    resumption = Resumption.read(tmp_path / "theirs")
    assert resumption.state is None
    job.train(digits, replace(FULL, epochs=1, warmup=0), None, tmp_path / "out", nothing, resumption)
    after = read_checkpoint(tmp_path / "out" / LAST)
    assert after.optimizers["group0"].step == 3 + 9
    assert after.properties["epoch"] == 5


def test_a_state_is_restored_whole_or_not_at_all(digits, tmp_path):
    trainer = Trainer(digits)
    before = {name: array.copy() for name, array in trainer.parameters.items()}
    good = trainer.checkpoint()
    for change, message in (
        ({"trainable": {"W1": good.trainable["W1"]}}, "has the parameters W1, expected W1, W2"),
        ({"trainable": {**good.trainable, "b3": np.zeros(9, np.float32)}}, r"'b3' is float32 of shape \(9,\)"),
        ({"optimizers": {"group0": replace(good.optimizers["group0"], moments={"W1": {"m": before["W1"]}})}}, "W1/m"),
    ):
        other = replace(good, **change)
        other.trainable["W1"] = other.trainable["W1"] + 1
        with pytest.raises(ValueError, match=message):
            trainer.restore(other)
    for name, array in before.items():
        np.testing.assert_array_equal(trainer.parameters[name], array)


def test_what_cannot_be_resumed_is_told_before_anything_is_written(digits, tmp_path):
    job.train(digits, replace(FULL, epochs=2), None, tmp_path / "run", nothing)
    checkpoint, out = tmp_path / "run" / LAST, tmp_path / "out"
    lone = tmp_path / "lone.checkpoint"
    state = RunState.from_text(read_checkpoint(checkpoint).properties[PROPERTY])
    worse = replace(state.history[-1], epoch=3, validation_loss=99.0)
    text = replace(state, history=[*state.history, worse]).to_text()
    write_checkpoint(replace(read_checkpoint(checkpoint), properties={PROPERTY: text}), lone)
    (tmp_path / "bad").write_bytes(checkpoint.read_bytes()[:1000])
    for words, message in (
        ((checkpoint,), "has 2 epochs done, expected epochs to be more than 2"),
        ((checkpoint, "--epochs", "9", "--validation", "9"), "the training rows are others"),
        ((lone, "--epochs", "9"), "best.checkpoint is missing, expected the parameters of epoch 2"),
        ((EXAMPLES / "digits_attention" / "checkpoint",), "the checkpoint has the parameters W1, Wk"),
        ((tmp_path / "bad",), "truncated"),
    ):
        told = fails("train", EXAMPLES / "digits", "--output", out, "--resume", *words)
        assert message in told
        assert not out.exists()
    shutil.copy(checkpoint, tmp_path / BEST)
    # The best epoch is the second, of which this is the checkpoint.
    succeeds("train", EXAMPLES / "digits", "--output", out, "--resume", lone, "--epochs", "9")
    write_checkpoint(replace(read_checkpoint(checkpoint), properties={PROPERTY: "{}"}), checkpoint)
    told = fails("train", EXAMPLES / "digits", "--resume", checkpoint)
    assert told == f"opgrad: resume: {checkpoint}: the property {PROPERTY} is none that this version of opgrad wrote\n"


def test_ctrl_c_leaves_a_whole_checkpoint_and_says_how_to_go_on(tmp_path):
    words = ["train", str(EXAMPLES / "digits"), "--epochs", "100000", "--output", "my run"]
    command = [sys.executable, "-m", "opgrad"]
    with subprocess.Popen([*command, *words], cwd=tmp_path, stdout=-3, stderr=-1, text=True) as process:
        end = time.monotonic() + 600
        while not (tmp_path / "my run" / "metrics.csv").exists() and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        told = process.communicate()[1]
    assert process.returncode == 1
    expected = f"opgrad train {EXAMPLES / 'digits'} --resume 'my run/{LAST}' --output 'my run'"
    assert told.startswith("opgrad: interrupted after ")
    assert told.endswith(f"to go on: {expected}\n")
    state = RunState.from_text(read_checkpoint(tmp_path / "my run" / LAST).properties[PROPERTY])
    assert state.steps > 0
    assert sorted(path.name for path in (tmp_path / "my run").iterdir()) == [LAST, "metrics.csv", "metrics.jsonl"]


# --- validation ------------------------------------------------------------------------------------------------------


def test_rows_are_parted_by_chance_but_always_alike():
    data = Dataset({"a": np.arange(100)})
    recipe = Recipe(test_rows=20, validation=0.1, split_seed=4)
    training, validation, test = job.split(data, recipe)
    assert validation is not None
    assert (training.rows, validation.rows, test.rows) == (72, 8, 20)
    parts = [part.arrays["a"] for part in (training, validation, test)]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(100))
    np.testing.assert_array_equal(job.split(data, replace(recipe, validation=None))[2].arrays["a"], parts[2])
    again = job.split(data, replace(recipe, validation=8))[1]
    assert again is not None
    np.testing.assert_array_equal(again.arrays["a"], parts[1])
    assert job.split(data, replace(recipe, validation=None))[1] is None
    with pytest.raises(ValueError, match="validation is 80, expected fewer than the 80 rows"):
        job.split(data, replace(recipe, validation=80))


def test_training_ends_early_and_keeps_the_best_parameters(digits, tmp_path):
    """Labels by chance: what is learnt by heart makes the validation loss rise."""
    random = np.random.default_rng(0)
    file = tmp_path / "data.npz"
    np.savez(file, x=random.uniform(0, 1, (200, 64)), y=random.integers(0, 10, 200))
    recipe = Recipe(epochs=200, learning_rate=0.01, validation=40, patience=3)
    run = job.train(digits, recipe, file, tmp_path / "out", nothing)
    best = run.best_epoch
    assert best is not None
    assert len(run.state.history) == best + 3 < 200
    losses = [epoch.validation_loss for epoch in run.state.history]
    assert min(losses) == losses[best - 1]
    parameters = read_checkpoint(tmp_path / "out" / BEST).parameters
    trainer = Trainer(digits)
    trainer.restore(read_checkpoint(tmp_path / "out" / BEST))
    _, validation, test = job.split(job.load_data(digits, recipe, file), recipe)
    assert validation is not None
    assert trainer.evaluate(validation).loss == losses[best - 1]
    assert trainer.evaluate(test) == run.test
    model = (tmp_path / "out" / "model.onnx").read_bytes()
    assert all(array.tobytes() in model for array in parameters.values())
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (metrics["best_epoch"], metrics["stopped_early"]) == (best, True)
    with pytest.raises(ValueError, match=f"the run ended early in epoch {best + 3}, expected a patience above 3"):
        job.train(digits, recipe, file, tmp_path / "out", nothing, Resumption.read(tmp_path / "out" / LAST))
    more = replace(recipe, patience=4, epochs=best + 10)
    run = job.train(digits, more, file, tmp_path / "out", nothing, Resumption.read(tmp_path / "out" / LAST))
    assert len(run.state.history) >= best + 4


def test_the_best_epoch_is_the_first_with_the_lowest_loss():
    def history(*losses):
        return [EpochMetrics(n + 1, n, 0.1, 1.0, loss, None, 1.0, 1.0) for n, loss in enumerate(losses)]

    assert best_epoch([]) is None
    assert best_epoch(history(None, None)) is None
    assert best_epoch(history(3, 1, 2, 1)) == 2
    assert best_epoch(history(math.nan, 5, math.inf)) == 2
    assert best_epoch(history(math.nan, math.nan)) == 1


def test_losses_are_drawn(tmp_path):
    """Of runs with validation and without, that broke off, that were over when they went on."""
    plain = [EpochMetrics(number, number, 0.1, 1.0 / number, None, None, 1.0, 1.0) for number in (1, 2)]
    several = [replace(each, validation_loss=loss) for each, loss in zip(plain, (math.nan, 2.0), strict=True)]
    broken = [replace(each, train_loss=math.nan) for each in plain]
    for history, losses, last in ((plain, [[2.0, 1.0], [0.5]], 0.3), (several, [], None), (broken, [[math.nan]], 1.0)):
        plot_losses(history, losses, last, "losses", tmp_path / "loss.png")
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_state_survives_the_way_through_text():
    epoch = EpochMetrics(1, 2, 0.1, math.nan, 0.3, None, 1e-9, 1e300)
    state = RunState(FULL, 7, 2, [epoch], 5, 5, 7, 6, 0.1 + 0.2, 1 / 3, 2.5)
    again = RunState.from_text(state.to_text())
    assert repr(again) == repr(state)
    for text in ("", "[]", "{}", 3, state.to_text().replace('"format": 1', '"format": 2')):
        with pytest.raises(ValueError, match=PROPERTY):
            RunState.from_text(text)


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "accumulate"), [(10, 3), (7, 2), (30, 50)])
def test_accumulated_batches_are_one_large_batch(digits, tmp_path, batch, accumulate):
    """Also where the last step of an epoch has fewer batches, and the last batch fewer rows."""
    random = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=random.uniform(0, 1, (130, 64)), y=random.integers(0, 10, 130))
    recipe = Recipe(epochs=3, test_rows=30, clip_norm=0.3, schedule="cosine")
    parameters = []
    for size, times in ((batch, accumulate), (batch * accumulate, 1)):
        each = replace(recipe, batch_size=size, accumulate=times)
        job.train(digits, each, tmp_path / "d.npz", tmp_path / str(times), nothing)
        parameters.append(read_checkpoint(tmp_path / str(times) / LAST))
    first, second = parameters
    assert first.optimizers["group0"].step == second.optimizers["group0"].step == 3 * -(-100 // (batch * accumulate))
    for name, array in first.trainable.items():
        # AdamW's step is at most 1e-3 in length, its direction known to the gradients' accuracy.
        np.testing.assert_allclose(array, second.trainable[name], rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("largest", [0.5, 100.0])
def test_clipping_scales_the_gradient_down(tmp_path, largest):
    """One step of gradient descent on a linear model, from w = 0 and b = 0.5."""
    write_linear_set(tmp_path)
    file = linear_rows(tmp_path / "data.npz", 40)
    artifacts = ArtifactSet.load(tmp_path)
    recipe = Recipe(epochs=1, batch_size=64, learning_rate=0.1, clip_norm=largest)
    job.train(artifacts, recipe, file, tmp_path / "out", nothing)
    arrays = {name: array.astype(np.float64) for name, array in job.load_data(artifacts, recipe, file).arrays.items()}
    order = np.random.default_rng(0).permutation(40)[:32]
    x, y = (arrays[name][order] for name in "xy")
    gradient = x.T @ (0.5 - y) * 0.03125  # of the set's loss, made for 64 values
    norm = np.linalg.norm(gradient)
    expected = -0.1 * gradient * min(1, largest / norm)
    assert (norm > largest) == (largest < 1)
    found = read_checkpoint(tmp_path / "out" / LAST).trainable["w"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # the operator divides by the norm and 1e-6


def test_schedules():
    linear, cosine = (Schedule(2.0, kind, 4, 12) for kind in ("linear", "cosine"))
    warmup = [0.0, 0.5, 1.0, 1.5, 2.0]
    assert [linear.at(step) for step in range(5)] == [cosine.at(step) for step in range(5)] == warmup
    assert [linear.at(step) for step in (8, 11, 12, 20)] == [1.0, 0.25, 0.0, 0.0]
    assert [cosine.at(step) for step in (8, 12, 20)] == pytest.approx([1.0, 0.0, 0.0])
    assert cosine.at(6) == pytest.approx(1 + math.cos(math.pi / 4))
    constant = Schedule(2.0, "constant", 1, 3)
    assert [constant.at(step) for step in range(5)] == [0.0, 2.0, 2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="warmup is 3, expected fewer than all 3 steps"):
        Schedule(1.0, "linear", 3, 3)
    with pytest.raises(ValueError, match="kind is 'step', expected one of constant, linear, cosine"):
        Schedule(1.0, "step", 0, 3)


# --- the command -----------------------------------------------------------------------------------------------------


def test_metrics_of_every_epoch_are_written(tmp_path):
    options = ("--epochs", "3", "--validation", "100", "--schedule", "linear", "--accumulate", "4")
    assert "validation loss" in succeeds("train", EXAMPLES / "digits", *options, "--output", tmp_path)
    with (tmp_path / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["validation_rows"] == 100
    assert [line["epoch"] for line in lines] == ["1", "2", "3"]
    for line, epoch in zip(lines, metrics["epochs"], strict=True):
        assert {name: float(value) for name, value in line.items()} == epoch
    assert [epoch["steps"] for epoch in metrics["epochs"]] == [7, 14, 21]
    assert metrics["epochs"][-1]["learning_rate"] == pytest.approx(0.001 / 21)
    assert metrics["settings"]["accumulate"] == 4
    assert {path.name for path in tmp_path.iterdir()} == {
        "model.onnx", "loss.png", "metrics.json", "metrics.csv", "metrics.jsonl", LAST, BEST
    }  # fmt: skip


def figures(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_figures_are_written_while_a_run_goes(digits: ArtifactSet, tmp_path: Path) -> None:
    """A run that goes on writes those anew of the steps that it makes again."""
    recipe = replace(FULL, epochs=2)
    seen: list[int] = []  # how many figures there are after the first epoch

    def count(done: int, *_: object) -> None:
        if done > 1294 and not seen:
            seen.append(len(figures(tmp_path / "whole")))

    whole = job.train(digits, recipe, None, tmp_path / "whole", count)
    found = figures(tmp_path / "whole")
    assert seen == [len(found) // 2]
    epochs = [each for each in found if "epoch" in each]
    steps = [each["step"] for each in found if "loss" in each]
    assert steps == list(range(1, whole.state.steps + 1))
    assert [(each["step"], each["validation_loss"]) for each in epochs] == [
        (each.steps, each.validation_loss) for each in whole.state.history
    ]
    with pytest.raises(Interrupted):
        job.train(digits, recipe, None, tmp_path / "parts", interrupt_at(1294 + 500))
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1000, "loss": 1.0}\n{"step": 10')
    resumption = Resumption.read(tmp_path / "parts" / LAST)
    job.train(digits, recipe, None, tmp_path / "parts", nothing, resumption)
    timed = ("samples_per_second", "seconds")
    kept = [[{name: each[name] for name in each if name not in timed} for each in lines]
            for lines in (found, figures(tmp_path / "parts"))]  # fmt: skip
    assert kept[0] == kept[1]


def test_figures_for_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    output = tmp_path / "run"
    words = ("--epochs", "2", "--validation", "100", "--log", "tensorboard", "--output", output)
    succeeds("train", EXAMPLES / "digits", *words)
    (file,) = (output / "tensorboard").iterdir()
    content, found = file.read_bytes(), []
    while content:  # a length and its checksum, an event and its checksum
        size = int.from_bytes(content[:8], "little")
        found += [(each.tag, each.simple_value) for each in Event.FromString(content[12 : 12 + size]).summary.value]
        content = content[16 + size :]
    for name in ("loss", "validation_loss"):
        values = [value for tag, value in found if tag == name]
        assert values == pytest.approx([each[name] for each in figures(output) if name in each])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--validation", "ten"), "train: --validation is 'ten', expected a number of rows or a fraction"),
        (("--validation", "1500"), "Recipe: validation is 1500, expected fewer than the 1500 rows beside the test"),
        (("--warmup", "300"), "Schedule: warmup is 300, expected fewer than all 300 steps"),
    ],
)
def test_settings_that_make_no_sense_leave_nothing_behind(tmp_path, options, message):
    assert message in fails("train", EXAMPLES / "digits", *options, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()
