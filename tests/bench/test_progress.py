"""What `python -m bench` says while it measures."""

import io

import pytest
from rich.console import Console

from bench import command
from bench.cells import select
from bench.command import BenchOptions, duration, told
from bench.measure import measure_each
from bench.peers import COMPILE
from bench.run import prepared


@pytest.fixture
def screen(monkeypatch):
    """Where there is no terminal, on a machine that is still."""
    made = Console(file=io.StringIO(), width=200, force_terminal=False)
    monkeypatch.setattr(command, "console", lambda **_: made)
    monkeypatch.setattr(command, "LOOK", 0.0)
    monkeypatch.setattr(command.Load, "others", lambda self: 0.0)
    return made


def measured(screen, monkeypatch, cells, seconds, limit=None):
    """The lines said while cells are measured that take so many seconds, and what was measured."""
    clock = [100.0]
    monkeypatch.setattr(command.time, "perf_counter", lambda: clock[0])

    def measure(cell):
        clock[0] += seconds
        return {"cell": cell}

    with told(seconds, limit) as tell:
        found = measure_each(cells, measure, tell)
    return screen.file.getvalue().splitlines(), found


def test_lines_say_how_far_it_is_and_how_long_it_takes(screen, monkeypatch):
    lines, found = measured(screen, monkeypatch, [f"cell {number}" for number in range(40)], 6.0)
    assert len(found) == 40
    assert lines[:2] == ["40 cells, about 4 min; Ctrl-C ends it with what is measured by then", "1/40 cell 0"]
    assert lines[2] == "3/40 cell 2, about 4 min left"
    assert lines[-1] == "39/40 cell 38, about 12 s left"
    assert len(lines) == 21


def test_a_limit_ends_it(screen, monkeypatch):
    lines, found = measured(screen, monkeypatch, [str(number) for number in range(40)], 6.0, 30.0)
    assert len(found) == 6
    assert lines[0] == "40 cells, about 30 s; Ctrl-C ends it with what is measured by then"
    assert lines[-1] == "6 of 40 cells are measured: --quick ends here, --ops and --groups choose others"
    assert command.QUICK_LIMIT <= 100


def test_other_work_is_warned_of(screen, monkeypatch):
    monkeypatch.setattr(command.Load, "others", lambda self: 1.26)
    monkeypatch.setattr(command, "CORES", 2)
    lines, _ = measured(screen, monkeypatch, ["one"], 1.0)
    warning = "other work on this machine {} 1.3 of 2 cores busy: figures are off"
    assert (lines[0], lines[-1]) == (warning.format("keeps"), warning.format("kept"))


def test_own_work_is_none_of_others():
    load = command.Load()
    total = sum(number * number for number in range(300_000))
    others = load.others()
    assert total
    assert 0 <= others <= command.CORES + 0.5


def test_a_name_with_controls_is_written_out(screen, monkeypatch):
    lines, _ = measured(screen, monkeypatch, ["set\x1b[31m"], 1.0)
    assert lines[1] == r"1/1 set\x1b[31m"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "about 1 s"), (89, "about 89 s"), (90, "about 2 min"), (2220, "about 37 min")]
)
def test_times_are_said_in_the_unit_that_fits(seconds, text):
    assert duration(seconds) == text


def test_a_quick_run_begins_with_one_cell_of_each_operator_and_without_torch_compile():
    _, cells, peers, *_ = prepared(BenchOptions(quick=True)).args
    operators = [cell.op.name for cell in cells]
    first = operators[: len(set(operators))]
    assert len(set(first)) == len(first)
    assert sorted(map(str, cells)) == sorted(map(str, select([], [], [], quick=True)))
    assert COMPILE not in peers
    if COMPILE in prepared(BenchOptions()).args[2]:
        assert COMPILE in prepared(BenchOptions(quick=True, peers=COMPILE)).args[2]
