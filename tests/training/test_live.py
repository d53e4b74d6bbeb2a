"""The curve in the terminal."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

pytest.importorskip("plotext")

from opgrad.cli.app import app
from opgrad.training.run import report
from opgrad.training.run.live import POINTS, LiveCurve, RunCurve

DIGITS = Path(__file__).parents[2] / "examples" / "digits"


def test_a_long_run_keeps_few_points_evenly():
    curve = RunCurve()
    for number in range(10 * POINTS):
        curve.add(number, 1.0)
    assert POINTS / 2 <= len(curve.places) <= POINTS
    steps = {after - before for before, after in zip(curve.places, curve.places[1:], strict=False)}
    assert len(steps) <= 2
    assert curve.places[-1] > 9.9 * POINTS


def test_what_is_not_finite_is_left_out():
    curve = RunCurve()
    for value in (1.0, float("nan"), float("inf"), 2.0):
        curve.add(len(curve.values), value)
    assert curve.values == [1.0, 2.0]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_picture_shows_both_losses_and_the_bar(terminal):
    screen = Console(file=io.StringIO(), force_terminal=terminal, width=100, height=40)
    with LiveCurve(screen, "digits [1]") as curve:
        for step in range(1, 51):
            curve(step * 10, 500, 2.0 / step, 1.0 / step if step % 10 == 0 else None, 1234.0)
    text = Text.from_ansi(screen.file.getvalue()).plain
    for part in ("digits [1]: loss", "loss of a batch", "validation", "rows trained", "100 %", "1,234 samples/s"):
        assert part in text
    assert screen.file.getvalue().endswith("\n") or terminal


def test_a_run_of_losses_without_a_number_has_a_picture():
    screen = Console(file=io.StringIO(), width=80)
    with LiveCurve(screen, "nothing") as curve:
        curve(10, 10, float("nan"), None, 1.0)
    assert "nothing: loss" in screen.file.getvalue()


def test_without_a_step_nothing_is_shown():
    screen = Console(file=io.StringIO(), width=80)
    with LiveCurve(screen, "nothing"):
        pass
    assert not screen.file.getvalue()


def lines_of(values, validation=()):
    """The rows of the picture in which a dot of the curve stands, and the marks of the axis, from the top."""
    screen = Console(file=io.StringIO(), width=90)
    with LiveCurve(screen, "run") as curve:
        for step, value in enumerate(values):
            curve(50 * step + 50, 50 * len(values), value, None, 1.0)
        lines = Text.from_ansi(curve.picture()).plain.splitlines()
    inside = [line.partition("│")[2] or line.partition("┤")[2] for line in lines if "┤" in line or "│" in line]
    dots = [place for place, line in enumerate(inside) if any("\u2800" < mark <= "\u28ff" for mark in line[25:])]
    return dots, [line.partition("┤")[0].strip() for line in lines if "┤" in line], lines


def test_a_curve_that_falls_by_powers_fills_the_picture():
    dots, marks, lines = lines_of([3 * 0.97**step for step in range(300)])
    assert dots[-1] - dots[0] >= 6
    assert [float(mark) for mark in marks] == sorted(map(float, marks), reverse=True)
    assert "0.01" in marks
    assert any("5,000" in line and "15,000" in line for line in lines)


def test_one_loss_far_above_does_not_press_down_the_others():
    values = [1 + 0.5 * 0.98**step for step in range(300)]
    usual = lines_of(values)[1]
    values[5] = 400.0
    dots, marks, _ = lines_of(values)
    assert max(map(float, marks)) < 2
    assert dots
    assert usual


@pytest.mark.parametrize("value", [0.0, 1e-30, -5.0, 7e23, 1e299])
def test_a_loss_that_stays_has_a_picture(value):
    dots, marks, _ = lines_of([value] * 20)
    assert dots
    assert marks
    assert lines_of([value])[2]


def test_losses_below_0_have_round_marks():
    _, marks, _ = lines_of([-0.01 * step for step in range(300)])
    assert marks == ["0", "-1", "-2"]


# --- lines where no terminal is ---


def lines_after(steps, monkeypatch, epochs, seconds):
    """What a pipe gets of steps of 10 rows, each of so many seconds."""
    clock = iter(range(10**6))
    monkeypatch.setattr(report.time, "perf_counter", lambda: seconds * next(clock))
    screen = Console(file=io.StringIO(), width=40)
    with report.TrainingBar(screen, "digits [1]", epochs=epochs) as bar:
        for step in range(1, steps + 1):
            bar(10 * step, 10 * steps, 1.0 / step, 0.25 if 10 * step > 100 else None, 1234.0)
    return screen.file.getvalue().splitlines()


def test_a_pipe_gets_a_line_an_epoch(monkeypatch):
    found = lines_after(30, monkeypatch, 3, 2.0)
    assert found == [
        "digits [1]: epoch 1 of 3, 33%, loss 0.2929, 1,234 samples/s, 0:00:40 left",
        "digits [1]: epoch 2 of 3, 67%, loss 0.0669, validation 0.2500 after epoch 1, 1,234 samples/s, 0:00:20 left",
        "digits [1]: epoch 3 of 3, 100%, loss 0.0397, validation 0.2500 after epoch 2, 1,234 samples/s, 0:00:00 left",
    ]


def test_a_pipe_gets_a_line_each_half_minute_of_an_epoch(monkeypatch):
    found = lines_after(10, monkeypatch, 1, 11.0)
    assert [line.split(",")[1].strip() for line in found] == ["40%", "70%", "100%"]
    assert len(lines_after(4, monkeypatch, 1, 100.0)) == 3  # steps of more than half a minute; the first says no speed


def test_commands_print_lines_into_a_pipe(tmp_path):
    found = CliRunner().invoke(
        app, ["train", str(DIGITS), "--epochs", "3", "--output", str(tmp_path)], env={"COLUMNS": "80"}
    )
    assert [line[:21] for line in found.output.splitlines()[:3]] == [f"digits: epoch {n} of 3," for n in (1, 2, 3)]
