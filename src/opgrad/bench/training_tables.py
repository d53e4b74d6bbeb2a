"""The result of `opgrad bench --training` as text: a table in the terminal, and Markdown for the documents."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from opgrad.bench.generated import GENERATED, OLD_GRAPH, RECOMPUTED
from opgrad.bench.step_process import COLD, WARM
from opgrad.bench.tables import PIPE_WIDTH, duration, machine_line
from opgrad.bench.training import GRAPH, OLD, OLD_OPTIMIZER, OPTIMIZER, STEP, TORCH

COLUMNS = ("set", "batch", "step", "graph", "optimizer", "Python", "torch", "old step", "old optimizer", "ratio")
START_COLUMNS = (
    *("set", "batch", "first step, nothing compiled", "first step", "old first step", "memory"),
    *("memory, nothing compiled", "old memory", "more"),
)
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


def start_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """One row for each set: the time to the first step, and the memory some steps later."""
    for cell in result.get("starts", ()):
        if "left_out" in cell:
            continue
        first, resident = cell["first"], cell["resident"]
        times = ["" if name not in first else f"{first[name]:.2f} s" for name in (COLD, WARM, OLD)]
        sizes = ["" if name not in resident else _megabytes(resident[name]) for name in (WARM, COLD, OLD)]
        both = resident.keys() >= {WARM, OLD}
        more = _megabytes(resident[WARM] - resident[OLD]) if both else ""
        yield [cell["set"], str(cell["batch"]), *times, *sizes, more]


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.0f} MB"


def speed(result: Mapping[str, Any]) -> str:
    """How fast steps are beside the old runtime's, over all sets and batches; "" where it was not measured."""
    both = [cell["times"] for cell in result["training"] if OLD in cell.get("times", ())]
    if not both:
        return ""
    ratios = [times[OLD]["median"] / times[STEP]["median"] for times in both]
    mean = statistics.geometric_mean(ratios)
    return f"Over {len(ratios)} cells a step is {mean:.2f} times as fast as the old runtime's (geometric mean)."


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
    for cell in result.get("starts", ()):
        if "left_out" in cell:
            yield f"{cell['set']}, first step: {cell['left_out']}"
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
    for columns, made in ((COLUMNS, rows), (START_COLUMNS, start_rows), (GENERATED_COLUMNS, generated_rows)):
        found = list(made(result))
        if found or columns is COLUMNS:
            console.print(_table(columns, found))
    if speed(result):
        console.print(speed(result), highlight=False)
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
    lines = [surroundings(result), "", *([speed(result), ""] if speed(result) else []), *_lines(COLUMNS, rows(result))]
    for columns, made in ((START_COLUMNS, list(start_rows(result))), (GENERATED_COLUMNS, list(generated_rows(result)))):
        lines += ["", *_lines(columns, made)] if made else []
    return "\n".join([*lines, *(["", *left_out] if left_out else [])])


def _lines(columns: Sequence[str], found: Iterable[Sequence[str]]) -> list[str]:
    rules = [":--"] * LEFT + ["--:"] * (len(columns) - LEFT)
    return [f"| {' | '.join(row)} |" for row in (columns, rules, *found)]
