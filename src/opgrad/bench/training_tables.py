"""The result of `opgrad bench --training` as text: a table in the terminal, and Markdown for the documents."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from opgrad.bench.generated import GENERATED, OLD_GRAPH, RECOMPUTED
from opgrad.bench.tables import PIPE_WIDTH, duration, machine_line
from opgrad.bench.training import GRAPH, OLD, OLD_OPTIMIZER, OPTIMIZER, STEP, TORCH

COLUMNS = ("set", "batch", "step", "graph", "optimizer", "Python", "torch", "old step", "old optimizer", "ratio")
LEFT = 1  # columns with text
GENERATED_COLUMNS = (
    *("model", "batch", "nodes", "made in", "graph", "2 segments", "old graph", "torch", "peak", "2 segments' peak"),
    "ratio",
)


def is_training(result: Mapping[str, Any]) -> bool:
    """Whether a result file is of training steps."""
    return "training" in result


def rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """One row for each set and batch. Python is what the step takes beyond graph and optimizer."""
    for cell in result["training"]:
        if "left_out" in cell:
            continue
        medians = {name: taken["median"] for name, taken in cell["times"].items()}
        python = max(0.0, medians[STEP] - medians[GRAPH] - medians[OPTIMIZER])
        rivals = [medians[name] for name in (TORCH, OLD) if name in medians]
        times = [medians[STEP], medians[GRAPH], medians[OPTIMIZER], python]
        times += [medians.get(name) for name in (TORCH, OLD, OLD_OPTIMIZER)]
        ratio = f"{min(rivals) / medians[STEP]:.2f}" if rivals else ""
        shown = ["" if seconds is None else duration(seconds) for seconds in times]
        yield [cell["set"], str(cell["batch"]), *shown, ratio]


def generated_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """One row for each generated graph. Peaks are the bytes of results that are alive at once."""
    for cell in result.get("generated", ()):
        if "left_out" in cell:
            continue
        medians = {name: taken["median"] for name, taken in cell["times"].items()}
        rivals = [medians[name] for name in (OLD_GRAPH, TORCH) if name in medians]
        times = [cell["generating"], *(medians.get(name) for name in (GENERATED, RECOMPUTED, OLD_GRAPH, TORCH))]
        shown = ["" if seconds is None else duration(seconds) for seconds in times]
        peaks = [f"{cell['peak'][name] / 1e6:.2f} MB" for name in (GENERATED, RECOMPUTED)]
        ratio = f"{min(rivals) / medians[GENERATED]:.2f}" if rivals else ""
        yield [cell["model"], str(cell["batch"]), str(cell["nodes"]), *shown, *peaks, ratio]


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """What could not be measured, and why."""
    for cell in result["training"]:
        if "left_out" in cell:
            yield f"{cell['set']}, batch {cell['batch']}: {cell['left_out']}"
        for name, note in cell.get("notes", {}).items():
            yield f"{cell['set']}, batch {cell['batch']}, {name}: {note}"
    for cell in result.get("generated", ()):
        left_out = [("", cell["left_out"])] if "left_out" in cell else []
        for name, note in [*left_out, *cell.get("notes", {}).items()]:
            yield f"{cell['model']}, generated, batch {cell['batch']}{name and ', '}{name}: {note}"


def surroundings(result: Mapping[str, Any]) -> str:
    """Machine, threads and versions, also those of the old runtime."""
    found = [cell["old_versions"] for cell in result["training"] if "old_versions" in cell]
    line = machine_line(dict(result))
    if not found:
        return line
    return f"{line} Old runtime: {', '.join(f'{name} {version}' for name, version in found[0].items())}."


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Print the table."""
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    for columns, found in ((COLUMNS, list(rows(result))), (GENERATED_COLUMNS, list(generated_rows(result)))):
        if found or columns is COLUMNS:
            console.print(_table(columns, found))
    console.print(surroundings(result), highlight=False)
    for note in notes(result):
        console.print(f"  left out: {note}", highlight=False, markup=False)


def _table(columns: Sequence[str], found: Iterable[Sequence[str]]) -> Table:
    table = Table()
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < LEFT else "right", no_wrap=True)
    for row in found:
        table.add_row(*row)
    return table


def markdown(result: Mapping[str, Any]) -> str:
    """The tables for the documents."""
    left_out = [f"* left out: {note}" for note in notes(result)]
    made = list(generated_rows(result))
    lines = [surroundings(result), "", *_lines(COLUMNS, rows(result))]
    lines += ["", *_lines(GENERATED_COLUMNS, made)] if made else []
    return "\n".join([*lines, *(["", *left_out] if left_out else [])])


def _lines(columns: Sequence[str], found: Iterable[Sequence[str]]) -> list[str]:
    rules = [":--"] * LEFT + ["--:"] * (len(columns) - LEFT)
    return [f"| {' | '.join(row)} |" for row in (columns, rules, *found)]
