"""The command `opgrad compile`: kernels are compiled ahead, in several processes, into the cache."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from opgrad.contract import FLOATS, Operator, public_operators
from opgrad.cpu.compiler.native import Native, object_cache
from opgrad.cpu.compiler.processes import LONG_PATIENCE, Compilers
from opgrad.cpu.compiler.requests import Work
from opgrad.limits import default_threads
from opgrad.terminal import console, folders_argument

if TYPE_CHECKING:
    from opgrad.training import ArtifactSet

FEW_ROWS = 1  # of a batch: what is left at the end of an epoch may take other kernels than a whole batch


def compile_kernels(
    folders: Annotated[
        list[Path] | None, folders_argument("Artifact sets: the kernels of their graphs and optimizers.")
    ] = None,
    ops: Annotated[
        str, typer.Option(metavar="NAME,…", help="Operators; default: all, or with DIR those of the graphs.")
    ] = "",
    dtypes: Annotated[str, typer.Option(metavar="NAME,…", help="Of operators; default: " + ",".join(FLOATS))] = "",
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Processes; default: one for each CPU.")
    ] = None,
) -> None:
    """Compile kernels into the cache, so that no later process has to.

    Without arguments the kernels that plain calls of all operators take;
    with DIR those that training and evaluation of artifact sets take. Meant
    for images of containers, which then start warm: docs/cache.md. Kernels
    fit the kind of CPU that they are compiled on.

    Example: opgrad compile examples/digits
    """
    cache = object_cache()
    if problem := cache.problem():
        raise RuntimeError(f"compile: compiled kernels cannot be kept: {problem}")
    todo = [("calls", Work(compile_calls)), *_work(folders or [], _names(ops), _names(dtypes))]
    before, start = cache.count(), time.perf_counter()
    screen = console()
    run(todo, jobs or default_threads(), screen)
    now, seconds = cache.count(), time.perf_counter() - start
    screen.print(f"{now - before} kernels compiled in {seconds:.0f} s, {now} in {cache.folder}", soft_wrap=True)


def run(todo: Sequence[tuple[str, Work]], processes: int, console: Console) -> None:
    """Do all work in other processes, with a progress bar; what fails there is done here, and raises its exception."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    pool = Compilers(min(processes, len(todo)), patience=LONG_PATIENCE)
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=len(todo))
            failed = pool.wait(pool.add(todo), lambda done, total: bar.update(task, completed=done))
    finally:
        pool.close()
    for name, work in todo:
        if name in failed:
            work.function(*work.arguments)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _work(folders: Sequence[Path], ops: Sequence[str], dtypes: Sequence[str]) -> Iterator[tuple[str, Work]]:
    """The work for artifact sets, and for operators unless only sets are named."""
    declared = public_operators()
    _check("operator", ops, declared)
    _check("dtype", dtypes, FLOATS)
    for folder in folders:
        yield str(folder.resolve()), Work(compile_set, (folder,))
    for name in ops or (() if folders else declared):
        for dtype in _taken(declared[name], dtypes or FLOATS):
            yield f"{name} {dtype}", Work(compile_operator, (name, dtype))


def _check(what: str, names: Sequence[str], known: Any) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"compile: {what} is {name!r}, expected one of {', '.join(known)}")


def _taken(op: Operator, dtypes: Sequence[str]) -> Sequence[str]:
    """The dtypes that an operator takes; one of them for an operator without floats."""
    floats = {name for tensor in op.inputs.values() for name in tensor.dtypes if name in FLOATS}
    return [dtype for dtype in dtypes if dtype in floats] if floats else dtypes[:1]


# --- what a process does ---------------------------------------------------------------------------------------------


def compile_calls() -> None:
    """Compile what runs the kernels: the functions for callers, those of the threads, those for onnxruntime."""
    from opgrad.native import calls, plan, pool
    from opgrad.native.threads import workers

    modules: list[Any] = [calls, plan, pool, workers]
    if find_spec("onnxruntime"):
        from opgrad.onnxruntime import compute

        modules.append(compute)
    for function in (each for module in modules for each in vars(module).values() if isinstance(each, Native)):
        function.link()


def compile_operator(name: str, dtype: str, most: int | None = None) -> None:
    """Compile the kernels that plain calls of an operator take, by making the plans of its examples, or of so many."""
    from opgrad.native.plans import plan
    from opgrad.testing.examples import signatures

    op = public_operators()[name]
    for of, specs, attributes in islice(signatures(op, dtype), most):
        plan(of, specs, attributes)


def compile_set(folder: Path) -> None:
    """Compile the kernels that an artifact set takes, by doing a little of all that is done with it."""
    from opgrad.bench.training import batch_of
    from opgrad.training import ArtifactSet, Recipe
    from opgrad.training.engine.trainer import BATCH_ROWS

    artifacts = ArtifactSet.load(folder)
    rows = artifacts.batch_rows
    _run_once(artifacts, batch_of(artifacts, rows or Recipe.load(folder).batch_size))
    if rows is None:
        _run_once(artifacts, batch_of(artifacts, BATCH_ROWS))
        with suppress(ValueError, RuntimeError):  # a graph may refuse it; then nobody trains with it either
            _run_once(artifacts, batch_of(artifacts, FEW_ROWS))


def _run_once(artifacts: "ArtifactSet", batch: dict[str, np.ndarray]) -> None:
    """Train and evaluate with a batch, through the trainer and through the API, with gradients added up, too."""
    from opgrad.training import CheckpointState, Dataset, Module, Optimizer, Trainer

    folder = artifacts.directory
    trainer = Trainer(artifacts, learning_rate=0.0)
    trainer.step(batch)
    trainer.evaluate(Dataset(batch))
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(artifacts.training_model, state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.0)
    for _ in range(2):
        module(*batch.values())  # the second call adds to the gradients of the first
    optimizer.step()
    module.eval()(*batch.values())
