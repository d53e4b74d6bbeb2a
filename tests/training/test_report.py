"""What a training shows: a bar with blocks in a terminal, lines elsewhere."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from opgrad.cli.app import app
from opgrad.training.run import report
from opgrad.training.run.report import BLOCKS, BLOCKS_OF_A_RUN, LossBlocks, TrainingBar

DIGITS = Path(__file__).parents[2] / "examples" / "digits"


@pytest.mark.parametrize("most", [1.0, 300.0])
def test_blocks_fall_as_losses_do(most):
    """Evenly, or by powers where the losses span more than one of 10."""
    blocks = LossBlocks()
    for step in range(300):
        blocks.add((step + 1) / 300, most * 0.97**step)
    found = str(blocks)
    assert len(found) == BLOCKS_OF_A_RUN
    assert (found[0], found[-1]) == (BLOCKS[-1], BLOCKS[0])
    assert [*found] == sorted(found, reverse=True)
    assert len({*found}) == len(BLOCKS)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_gets_a_bar_with_blocks(encoding):
    printed = io.TextIOWrapper(io.BytesIO(), encoding)
    with TrainingBar(
        Console(file=printed, force_terminal=True, width=120, _environ={"TERM": "xterm"}), "digits [1]"
    ) as bar:
        for step in range(1, 51):
            bar(step * 10, 500, 2.0 / step, 1.0 / step if step > 10 else None, 1234.0)
    printed.flush()
    text = Text.from_ansi(printed.buffer.getvalue().decode(encoding)).plain
    for part in ("digits [1]", "loss 0.0400", "validation 0.0200", "100 %", "1,234 samples/s"):
        assert part in text
    assert (BLOCKS[-1] in text) == (encoding == "utf-8")


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
