"""Makes packs of kernels: processes fill a cache folder for each processor, and one file gets all folders."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from opgrad.base.writing import destination, replace_file
from opgrad.cpu.compiler import packs, processes, target
from opgrad.cpu.compiler.cache import ObjectCache
from opgrad.cpu.compiler.packs import OutdatedError, Pack, PackedObjects, packed
from opgrad.cpu.compiler.processes import LONG_PATIENCE, Compilers
from opgrad.cpu.compiler.processors import PROCESSORS, is_here
from opgrad.cpu.compiler.requests import Work

Todo = Sequence[tuple[str, Work]]
DEVICES = ("sm_80", "sm_90", "sm_100")  # the architectures of CUDA devices for which packs have kernels
NOTHING: Mapping[str, str] = MappingProxyType({})
WITHOUT_END = 1e9  # seconds: a program that is run for its kernels may take any time


def make(
    path: Path, names: Sequence[str], plans: Todo, runs: Todo, on_devices: Todo, count: int, screen: Console
) -> dict[str, int]:
    """Make a pack of kernels for these processors and devices, or add them to the pack that is at this path.

    plans: work that only needs kernels compiled; runs: work that runs them. on_devices: work for a device, before whose
    arguments come its architecture and the folder that gets the kernels. count: of processes. Returns how many
    kernels the pack has then, by processor. Raises ValueError if a processor's kernels would have to be run, and cannot
    be, PackError if the file is no pack, and RuntimeError if work fails.
    """
    path = destination(path)
    processors = [name for name in names if name not in DEVICES]
    for name in processors:
        _check(name, runs)
    with tempfile.TemporaryDirectory() as folder:
        _unpack(path, folder)
        for name in (each for each in names if each in DEVICES):
            architecture = int(name.removeprefix("sm_"))
            todo = [(what, Work(do, (architecture, folder, *given))) for what, (do, given) in on_devices]
            _compile(name, todo, count, screen, {packs.VARIABLE: "", processes.VARIABLE: "0"}, LONG_PATIENCE)
        for name in processors:
            if problem := ObjectCache(name, folder).problem():
                raise RuntimeError(f"compile: compiled kernels cannot be kept: {problem}")
            variables = {target.VARIABLE: name, target.PACKS_INTO: folder, packs.VARIABLE: "", processes.VARIABLE: "0"}
            _compile(name, plans, count, screen, variables, LONG_PATIENCE)
            _compile(name, runs, count, screen, variables | {target.STANDS_IN: "1"}, WITHOUT_END)
        replace_file(path, packed(folder))
        path.chmod(path.stat().st_mode & ~0o022)
        return {name: ObjectCache(name, folder).count() for name in sorted(os.listdir(folder))}


def _compile(processor: str, todo: Todo, count: int, screen: Console, variables: dict[str, str], most: float) -> None:
    """Have processes with these variables compile the kernels that work takes on a processor."""
    failed = done_elsewhere(todo, count, screen, variables, most) if todo else {}
    if failed:
        raise RuntimeError(f"compile: for {processor}: {min(failed.values())}")


def _unpack(path: Path, folder: str) -> None:
    """Write the kernels of the pack at a path into cache folders; none if there is no file, or an outdated pack."""
    if path.exists():
        with suppress(OutdatedError):
            pack = Pack(os.path.abspath(path))
            for processor, names in pack.names.items():
                source, cache = PackedObjects(pack, processor), ObjectCache(processor, folder)
                for name in names:
                    cache.write(name, source.read(name) or b"")


def _check(name: str, runs: Todo) -> None:
    processor = PROCESSORS[name]
    own = next(each for each in PROCESSORS.values() if is_here(each))
    if runs and processor.architecture == own.architecture and not is_here(processor):
        raise ValueError(
            f"compile: {runs[0][0]} has to be run to find its kernels, and code for {name} cannot be run here: compile"
            " it on a machine with such a processor, or name operators (--ops)"
        )


def done_elsewhere(
    todo: Todo, count: int, console: Console, environment: Mapping[str, str] = NOTHING, patience: float = LONG_PATIENCE
) -> dict[str, str]:
    """Do all work in other processes, with a progress bar; the names of what failed there, and the reasons."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    pool = Compilers(min(count, len(todo)), patience, environment)
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=len(todo))
            return pool.wait(pool.add(todo), lambda done, total: bar.update(task, completed=done))
    finally:
        pool.close()
