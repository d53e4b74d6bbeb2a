"""The result of `python -m bench.steps`: tables, and a picture."""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure as Drawing

from bench import instruction_sets
from bench.figures import few_samples, machine_line, medians
from bench.plots import PLAIN_NUMBERS, ROW, blank
from bench.steps.generated import GENERATED, OLD_GRAPH, RECOMPUTED, SCORES, TILES, TORCH
from bench.steps.run import COLD, GRAPH, OLD, OLD_OPTIMIZER, OPTIMIZER, STEP, WARM
from bench.tables import Table, duration

COLUMNS = ("set", "batch", "step", "graph", "optimizer", "Python", "torch", "old step", "old optimizer", "ratio")
START_COLUMNS = (
    "set", "batch", "first step, nothing compiled", "first step", "old first step", "memory",
    "memory, nothing compiled", "old memory", "more",
)  # fmt: skip
GENERATED_COLUMNS = (
    "model", "batch", "nodes", "made in", "graph", "2 segments", "old graph", "torch", "peak", "2 segments' peak",
    "ratio",
)  # fmt: skip
ATTENTION_COLUMNS = (
    "model", "parameters", "in tiles", "with scores", "ratio", "peak in tiles", "peak with scores", "of that",
)  # fmt: skip


def rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """One row for each set and batch. Python is what the step takes beyond graph and optimizer."""
    for cell in _measured(result, "training"):
        times = medians(cell)
        python = max(0.0, times[STEP] - times[GRAPH] - times[OPTIMIZER])
        others = (times.get(name) for name in (TORCH, OLD, OLD_OPTIMIZER))
        shown = [times[STEP], times[GRAPH], times[OPTIMIZER], python, *others]
        yield [cell["set"], str(cell["batch"]), *map(_time, shown), _ratio(times, STEP, (TORCH, OLD))]


def start_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """One row for each set: the time to the first step, and the memory some steps later."""
    for cell in _measured(result, "starts"):
        first, resident = cell["first"], cell["resident"]
        times = ["" if name not in first else f"{first[name]:.2f} s" for name in (COLD, WARM, OLD)]
        sizes = ["" if name not in resident else _megabytes(resident[name]) for name in (WARM, COLD, OLD)]
        both = resident.keys() >= {WARM, OLD}
        more = _megabytes(resident[WARM] - resident[OLD]) if both else ""
        yield [cell["set"], str(cell["batch"]), *times, *sizes, more]


def generated_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """One row for each generated graph. Peaks are the bytes of results that are alive at once."""
    for cell in _measured(result, "generated"):
        times = medians(cell)
        shown = [cell["generating"], *(times.get(name) for name in (GENERATED, RECOMPUTED, OLD_GRAPH, TORCH))]
        peaks = [f"{cell['peak'][name] / 1e6:.2f} MB" for name in (GENERATED, RECOMPUTED)]
        known = [cell["model"], str(cell["batch"]), str(cell["nodes"])]
        yield [*known, *map(_time, shown), *peaks, _ratio(times, GENERATED, (OLD_GRAPH, TORCH))]


def attention_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """One row for each model with long sequences: steps with attention in tiles and with matrices of scores."""
    for cell in _measured(result, "attention"):
        times, peaks = medians(cell), cell["peak"]
        shown = [_time(times[TILES]), _time(times[SCORES]), _ratio(times, TILES, (SCORES,))]
        sizes = [_megabytes(peaks[TILES]), _megabytes(peaks[SCORES]), f"{peaks[TILES] / peaks[SCORES]:.2f}"]
        yield [cell["model"], f"{cell['parameters'] / 1e6:.1f} million", *shown, *sizes]


def _measured(result: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    return [cell for cell in result.get(part, ()) if "left_out" not in cell]


def _time(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _ratio(times: Mapping[str, float], ours: str, rivals: tuple[str, ...]) -> str:
    """The time of the fastest of these over ours."""
    found = [times[name] for name in rivals if name in times]
    return f"{min(found) / times[ours]:.2f}" if found else ""


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.0f} MB"


def parts(result: Mapping[str, Any]) -> Iterator[str | Table]:
    """What is said of a result of steps: where and when, how fast steps are, tables, and what was left out."""
    yield from filter(None, (surroundings(result), few_samples(result)))
    if both := [cell["times"] for cell in result["training"] if OLD in cell.get("times", ())]:
        mean = statistics.geometric_mean(times[OLD]["median"] / times[STEP]["median"] for times in both)
        yield f"Over {len(both)} cells a step is {mean:.2f} times as fast as the old runtime's (geometric mean)."
    tables = (COLUMNS, rows), (START_COLUMNS, start_rows), (GENERATED_COLUMNS, generated_rows)
    for columns, made in (*tables, (ATTENTION_COLUMNS, attention_rows)):
        if found := list(made(result)):
            yield Table(columns, found, align="l")
    if notes := "\n".join(f"* left out: {note}" for note in _notes(result)):
        yield notes


def _notes(result: Mapping[str, Any]) -> Iterator[str]:
    """What could not be measured, and why."""
    for part, said in (("training", ""), ("starts", ", first step"), ("generated", ", generated"), ("attention", "")):
        for cell in result.get(part, ()):
            batch = "" if part == "starts" else f", batch {cell['batch']}"
            where = f"{cell.get('set') or cell['model']}{said}{batch}"
            if "left_out" in cell:
                yield f"{where}: {cell['left_out']}"
            yield from (f"{where}, {name}: {note}" for name, note in cell.get("notes", {}).items())


def surroundings(result: Mapping[str, Any]) -> str:
    """Machine, threads and versions, also those of the old runtime."""
    old: Mapping[str, str] = next((cell["old_versions"] for cell in result["training"] if "old_versions" in cell), {})
    said = ", ".join(f"{name} {version}" for name, version in old.items())
    return f"{machine_line(result)} Old runtime: {said}." if said else machine_line(result)


# --- the picture ----------------------------------------------------------------------------------------------------

NAMED = {STEP: "opgrad", GRAPH: "opgrad, the graph alone", OLD: "onnxruntime-training 1.19.2", TORCH: "torch"}


def drawing(*results: Mapping[str, Any]) -> Drawing | None:
    """The times of training steps: a bar for each contestant, by artifact set, batch and instruction set."""
    cells = [
        (", ".join(filter(None, (cell["set"], f"{cell['batch']} rows", name))), medians(cell))
        for name, result in instruction_sets.titled(results).items()
        for cell in _measured(result, "training")
    ]
    if not cells:
        return None
    names = {key: name for key, name in NAMED.items() if any(key in times for _, times in cells)}
    figure = blank(8.0, 1.0 + ROW * len(names) * len(cells))
    axes = figure.subplots()
    for number, (key, name) in enumerate(names.items()):
        shift = (number - (len(names) - 1) / 2) / (len(names) + 1)
        bars = {place + shift: 1e3 * times[key] for place, (_, times) in enumerate(cells) if key in times}
        axes.barh([*bars], [*bars.values()], height=1 / (len(names) + 1), label=name)
    axes.set_yticks(range(len(cells)), [label for label, _ in cells], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(PLAIN_NUMBERS)
    axes.set_xlabel("milliseconds of a training step")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(fontsize=8, loc="outside upper center", ncols=2)
    return figure
