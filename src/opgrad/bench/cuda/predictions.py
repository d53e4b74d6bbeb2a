"""What a model of the time says of the benchmark's cells: tools/predict.py makes it, from kernels executed on the CPU.

Beside each prediction stands what decides about it, and the regime that the kernel ran in.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from opgrad.bench.measure import OURS

FILE = Path(__file__).with_name("predictions.json")
GPUS = ("A100", "H100", "H200", "B200")
LEFT = 3  # columns with text

Predictions = Mapping[str, Mapping[str, Mapping[str, Any]]]  # by the cell's name and the device's


def predictions() -> Predictions:
    """All that there are."""
    found: Predictions = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def show(console: Console, ops: str, dtypes: str, result: dict[str, Any] | None = None) -> None:
    """Print the predictions of these operators and dtypes, all where none are named; those of the device that was
    measured, beside its times, where there is a result."""
    device = "" if result is None else next((name for name in GPUS if name in result["device"]["name"]), "")
    if result is not None and not device:
        console.print(f"No prediction for {result['device']['name']}: there are some for {', '.join(GPUS)}.")
        return
    taken = {} if result is None else {_name(cell): cell["times"][OURS]["median"] for cell in result["cells"]}
    chosen = (_listed(ops), _listed(dtypes))
    columns, rows = _beside(device, taken) if result is not None else _alone(*chosen)
    table = Table(title="Predicted by a model of the time (docs/cuda.md)", title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < LEFT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _name(cell: Mapping[str, Any]) -> str:
    return f"{cell['operator']} {cell['workload']} {cell['dtype']}"


def _parts(name: str) -> tuple[str, str, str]:
    """Operator, shape and dtype of a cell."""
    operator, _, rest = name.partition(" ")
    shape, _, dtype = rest.rpartition(" ")
    return operator, shape, dtype


def _beside(device: str, taken: Mapping[str, float]) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    columns = ("operator", "shape", "dtype", "regime", "bound", "predicted", "measured", "measured / predicted")
    rows: list[tuple[str, ...]] = []
    for name, own in predictions().items():
        if name in taken and device in own:
            said, measured = own[device], taken[name]
            ratio = f"{measured / said['seconds']:.2f}"
            rows.append(
                (*_parts(name), said["regime"], said["bound"], _micro(said["seconds"]), _micro(measured), ratio)
            )
    return columns, rows


def _alone(ops: Sequence[str], dtypes: Sequence[str]) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    return ("operator", "shape", "dtype", *GPUS), list(_rows(ops, dtypes))


def _rows(ops: Sequence[str] = (), dtypes: Sequence[str] = ()) -> Iterator[tuple[str, ...]]:
    for name, own in predictions().items():
        operator, shape, dtype = _parts(name)
        if (not ops or operator in ops) and (not dtypes or dtype in dtypes):
            yield (operator, shape, dtype, *[_cell(own.get(gpu)) for gpu in GPUS])


def _cell(said: Mapping[str, Any] | None) -> str:
    """Time, share of memory's published rate, what decides if it is not memory."""
    if said is None:
        return ""
    bound = "" if said["bound"] == "memory" else f", {said['bound']}"
    return f"{_micro(said['seconds'])} ({said['share']:.0%}{bound})"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} µs"


def markdown() -> str:
    """The table of docs/cuda.md: all predictions, and how many bytes memory moves for the fewest possible."""
    lines = ["| operator | shape | dtype | regime | traffic / fewest | " + " | ".join(GPUS) + " |"]
    lines += ["|:--|:--|:--|:--|--:|" + "--:|" * len(GPUS)]
    for name, own in predictions().items():
        operator, shape, dtype = _parts(name)
        regimes = dict.fromkeys(said["regime"] for said in own.values())
        traffic = max(said["traffic"] for said in own.values())
        cells = [_cell(own.get(gpu)) for gpu in GPUS]
        lines.append(
            f"| `{operator}` | {shape} | {dtype} | {' / '.join(regimes)} | {traffic:.3f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)
