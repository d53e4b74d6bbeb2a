"""The command `opgrad bench`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

DEFAULT_SECONDS, QUICK_SECONDS = 0.6, 0.2


def bench(
    ops: Annotated[str, typer.Option(metavar="NAME,…", help="Operators; default: all.")] = "",
    dtypes: Annotated[
        str, typer.Option(metavar="NAME,…", help="Default: float32,bfloat16,float16; there is float64 too.")
    ] = "",
    shapes: Annotated[
        str, typer.Option(metavar="SHAPE,…", help="Shapes such as 4096x1000; default: those of the table.")
    ] = "",
    peers: Annotated[
        str,
        typer.Option(metavar="NAME,…", help="Of torch, onnxruntime, scipy, numpy; default: those installed."),
    ] = "",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the result into a PNG.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="How long to measure each cell.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few small cells, in less than a minute.")] = False,
) -> None:
    """Measure the operators beside torch, onnxruntime, SciPy and NumPy.

    Everybody uses the same memory and number of threads, and takes turns.
    GB/s count each input and each result once; "of copy" compares that with
    a copy of as many bytes; "ratio" is the best peer's time over ours; "ulp"
    is the worst error against float64. Other work on the machine spoils the
    figures.

    Example: opgrad bench --ops relu,softmax_grad --json result.json
    """
    from opgrad.bench.cells import select
    from opgrad.bench.peers import chosen
    from opgrad.bench.tables import show

    if plot is not None:
        from opgrad.bench.plot import plot as draw
    cells = select(_names(ops), _names(dtypes), _names(shapes), quick)
    if not cells:
        raise ValueError("bench: no operator takes this shape")
    given = {"ops": ops, "dtypes": dtypes, "shapes": shapes, "peers": peers, "quick": quick}
    length = seconds if seconds is not None else (QUICK_SECONDS if quick else DEFAULT_SECONDS)
    console = Console()
    result = _run(console, cells, chosen(_names(peers)), length, {**given, "seconds": length})
    show(console, result)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        draw(result, plot)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _run(console: Console, cells: Any, peers: list[str], seconds: float, options: dict[str, Any]) -> Any:
    """Measure with a progress bar."""
    from opgrad.bench.run import run

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("", total=len(cells))

        def progress(done: int, cell: Any) -> None:
            bar.update(task, completed=done, description=cell.name)

        return run(cells, peers, seconds, options, progress)
