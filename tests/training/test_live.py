"""The curve in the terminal."""

import io

import pytest
from rich.console import Console
from rich.text import Text

pytest.importorskip("plotext")

from opgrad.training.live import POINTS, Curve, LiveCurve


def test_a_long_run_keeps_few_points_evenly():
    curve = Curve()
    for number in range(10 * POINTS):
        curve.add(number, 1.0)
    assert POINTS / 2 <= len(curve.places) <= POINTS
    steps = {after - before for before, after in zip(curve.places, curve.places[1:], strict=False)}
    assert len(steps) <= 2
    assert curve.places[-1] > 9.9 * POINTS


def test_what_is_not_finite_is_left_out():
    curve = Curve()
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
