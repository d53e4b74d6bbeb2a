"""What a model of the time says of the benchmark's cells: tools/predict.py makes it, from kernels executed on the CPU.

Beside each prediction stands what decides about it, and the regime that the kernel ran in.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.figures import medians
from bench.measure import NEW, OURS
from bench.tables import Table, print_parts

FILE = Path(__file__).with_name("predictions.json")
GPUS = ("A100", "H100", "H200", "B200")
TITLE = "Predicted by a model of the time (docs/explain/cuda.md)"
BESIDE = ("operator", "shape", "dtype", "regime", "bound", "predicted", "measured", "measured / predicted")

Predictions = Mapping[str, Mapping[str, Mapping[str, Any]]]  # by the cell's name and the device's


def predictions() -> Predictions:
    """All that there are."""
    found: Predictions = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def show(console: Console, ops: Sequence[str], dtypes: Sequence[str]) -> None:
    """Print the predictions of these operators and dtypes, all where none are named."""
    rows = [row for row in every() if row[0] in (ops or row) and row[2] in (dtypes or row)]
    print_parts(console, [Table(("operator", "shape", "dtype", *GPUS), rows, TITLE)])


def show_beside(console: Console, result: Mapping[str, Any]) -> None:
    """Print the predictions of the device that was measured, beside its times."""
    measured = result["device"]["name"]
    if device := next((name for name in GPUS if name in measured), ""):
        print_parts(console, [Table(BESIDE, list(_beside(device, result)), TITLE)])
    else:
        console.print(f"No prediction for {measured}: there are some for {', '.join(GPUS)}.")


def _parts(name: str) -> tuple[str, str, str]:
    """Operator, shape and dtype of a cell."""
    operator, _, rest = name.partition(" ")
    shape, _, dtype = rest.rpartition(" ")
    return operator, shape, dtype


def _beside(device: str, result: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """The predictions of a device for the cells that were measured, with what was measured."""
    taken = {f"{cell['operator']} {cell['workload']} {cell['dtype']}": cell for cell in result["cells"]}
    for name, own in predictions().items():
        if name in taken and device in own:
            yield *_parts(name), *_compared(own[device], taken[name])


def _compared(said: Mapping[str, Any], cell: Mapping[str, Any]) -> Sequence[str]:
    """The regime that ran, what bounds it, predicted and measured time and their ratio: no ratio of two regimes."""
    regime, measured = cell["regime"], medians(cell["ways"][NEW])[OURS]
    if regime != said["regime"]:
        return regime, "", f"{_micro(said['seconds'])} for {said['regime']}", _micro(measured), ""
    return regime, said["bound"], _micro(said["seconds"]), _micro(measured), f"{measured / said['seconds']:.2f}"


def every() -> Iterator[Sequence[str]]:
    """All predictions, a column for each device."""
    for name, own in predictions().items():
        yield *_parts(name), *(_cell(own.get(gpu)) for gpu in GPUS)


def _cell(said: Mapping[str, Any] | None) -> str:
    """Time, share of memory's published rate, what decides if it is not memory."""
    if said is None:
        return ""
    bound = "" if said["bound"] == "memory" else f", {said['bound']}"
    return f"{_micro(said['seconds'])} ({said['share']:.0%}{bound})"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} µs"
