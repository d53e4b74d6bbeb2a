"""The first run of a graph: several processes compile its kernels, and onnxruntime's memory is freed afterwards."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import onnx
import onnxruntime

from opgrad.cpu.compiler import processes
from opgrad.cpu.compiler.processes import Progress
from opgrad.cpu.runtime import plan, pool, workers
from opgrad.onnxruntime import compute

CALLS = (
    compute.compute, compute.close, plan.execute, compute.parallel_for, pool.malloc, pool.free,
    workers.work, workers.run,
)  # fmt: skip
ROWS = 8  # the guess for an open size of a graph; most kernels are chosen by the other sizes


def begin(model: onnx.ModelProto, options: onnxruntime.SessionOptions) -> None:
    """Start to compile the kernels that the graph will probably need, in the background, if the cache is still empty.

    options: the session options that the graph will run with.
    """
    missing = processes.missing(CALLS)
    if missing and (found := processes.compilers()):
        found.add(missing, first=True)
        found.wait_for_cpu()
        from opgrad.onnxruntime.needed_kernels import requests

        sizes = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
        likely = {name: tuple(size.dim_value or ROWS for size in dims) for name, dims in sizes.items()}
        found.add(requests(model, likely, options))


@contextmanager
def first_run(
    model: onnx.ModelProto, shapes: Callable[[], Mapping[str, tuple[int, ...]]], options: onnxruntime.SessionOptions
) -> Iterator[onnxruntime.RunOptions]:
    """Within the `with` block, the first kernel that the cache lacks starts the compilation of all of the graph's.

    shapes: returns the shapes of the inputs, for which they are compiled. The value of the block is the options of the
    run. After this run onnxruntime frees the memory of its arena: it then knows how much it needs, and allocates that
    in one piece for the next run.
    """

    def compile_all() -> None:
        found = processes.compilers()
        if found:
            from opgrad.onnxruntime.needed_kernels import requests

            entries = found.add(requests(model, shapes(), options))
            with bar() as progress:
                found.wait(entries, progress)

    run = onnxruntime.RunOptions()
    if options.enable_cpu_mem_arena:
        run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    with processes.before_missing(compile_all):
        yield run


@contextmanager
def bar() -> Iterator[Progress]:
    """A function that shows in a terminal how many kernels are compiled.

    It shows nothing without a terminal, or if another progress bar is shown.
    """
    if not (sys.stderr and sys.stderr.isatty()):
        yield _ignore
        return
    try:
        from rich.console import Console
        from rich.errors import LiveError
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Shown
    except ImportError:
        yield _ignore
        return
    console = Console(stderr=True)
    columns = TextColumn("compiling kernels, once"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    shown = Shown(*columns, console=console, transient=True)
    task = shown.add_task("")
    try:
        shown.start()
    except LiveError:
        yield _ignore
        return
    try:
        yield lambda done, total: shown.update(task, completed=done, total=total)
    finally:
        shown.stop()


def _ignore(done: int, total: int) -> None:
    """Show nothing."""
