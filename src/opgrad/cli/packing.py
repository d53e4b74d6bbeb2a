"""Makes packs of kernels: processes compile those of a processor, and one file gets the kernels of all processors."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from opgrad.base.writing import destination, replace_file
from opgrad.cpu.compiler import processes
from opgrad.cpu.compiler.cache import ObjectCache, directory
from opgrad.cpu.compiler.decorators import host, packing
from opgrad.cpu.compiler.packs import MAGIC, VARIABLE, Pack, PackError, packed
from opgrad.cpu.compiler.processes import LONG_PATIENCE, Compilers
from opgrad.cpu.compiler.processors import PROCESSORS, is_here
from opgrad.cpu.compiler.requests import Work
from opgrad.cpu.compiler.target import VARIABLE as COMPILES_FOR
from opgrad.cpu.compiler.target import environment

Todo = Sequence[tuple[str, Work]]
NOTHING: Mapping[str, str] = MappingProxyType({})
WITHOUT_END = 1e9  # seconds: a program that is run for its kernels may take any time


def make(path: Path, names: Sequence[str], plans: Todo, runs: Todo, count: int, screen: Console) -> dict[str, int]:
    """Make a pack of kernels for these processors, or add them to the pack that is at this path.

    plans: work that only needs kernels compiled; runs: work that runs them. count: of processes. Returns how many
    kernels the pack has then, by processor. Raises ValueError if a processor's kernels would have to be run, and cannot
    be, PackError if the file is no pack, and RuntimeError if work fails.
    """
    path = destination(path)
    kernels = _old(path)
    for name in names:
        _check(name, runs)
    for name in names:
        kernels.setdefault(name, {}).update(_compiled(name, plans, runs, count, screen))
    replace_file(path, packed(kernels))
    path.chmod(path.stat().st_mode & ~0o022)
    return {name: len(kernels[name]) for name in kernels}


def _compiled(processor: str, plans: Todo, runs: Todo, count: int, screen: Console) -> dict[str, bytes]:
    """The kernels that work takes on a processor."""
    variables = {COMPILES_FOR: processor, VARIABLE: "", processes.VARIABLE: "0"}
    with tempfile.TemporaryDirectory() as reports:
        todo: list[tuple[str, Work]] = []
        for name, work in (*runs, *plans):
            path = os.path.join(reports, f"{len(todo)}.json")
            todo.append((name, Work(report, (work.function, work.arguments, (name, work) in runs, path))))
        failed = done_elsewhere(todo, count, screen, variables, WITHOUT_END if runs else None)
        return _collected(Path(reports), processor, failed)


def _old(path: Path) -> dict[str, dict[str, bytes]]:
    """The kernels of the pack at a path; none if there is no file, or an outdated pack, which is made anew."""
    if not path.exists():
        return {}
    with suppress(PackError):
        return Pack(os.path.abspath(path)).everything()
    if not path.read_bytes()[: len(MAGIC)] == MAGIC:
        raise PackError(f"compile: {path} is no pack of kernels: name another file")
    return {}


def _check(name: str, runs: Todo) -> None:
    processor = PROCESSORS[name]
    own = next(each for each in PROCESSORS.values() if is_here(each))
    if runs and processor.architecture == own.architecture and not is_here(processor):
        raise ValueError(
            f"compile: {runs[0][0]} has to be run to find its kernels, and code for {name} cannot be run here: compile"
            " it on a machine with such a processor, or name operators (--ops)"
        )


def done_elsewhere(
    todo: Todo, count: int, console: Console, environment: Mapping[str, str] = NOTHING, patience: float | None = None
) -> set[str]:
    """Do all work in other processes, with a progress bar; the names of what failed there."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    pool = Compilers(min(count, len(todo)), patience or LONG_PATIENCE, environment)
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=len(todo))
            return pool.wait(pool.add(todo), lambda done, total: bar.update(task, completed=done))
    finally:
        pool.close()


# --- what a process reports ------------------------------------------------------------------------------------------


def report(function: Callable[..., None], arguments: tuple[Any, ...], runs: bool, path: str) -> None:
    """Do work, and write which kernels it has compiled or why it failed, and where they are in the cache."""
    found: dict[str, Any] = {"environment": environment()}
    try:
        host()
        with packing(runs) as names:
            function(*arguments)
        found["names"] = sorted(names)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    replace_file(Path(path), json.dumps(found).encode())


def _collected(folder: Path, processor: str, failed: set[str]) -> dict[str, bytes]:
    """The code of all kernels that processes have reported."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    errors = [each["error"] for each in reports if "error" in each]
    if errors or failed:
        raise RuntimeError(f"compile: for {processor}: {errors[0] if errors else f'{min(failed)} ended the process'}")
    kernels = {}
    for each in reports:
        cache = ObjectCache(each["environment"], directory())
        for name in each["names"]:
            code = cache.read(name)
            if code is None:
                raise RuntimeError(f"compile: the cache in {cache.folder} has lost a kernel: compile again")
            kernels[name] = code
    return kernels
