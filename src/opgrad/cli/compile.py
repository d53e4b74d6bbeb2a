"""The command `opgrad compile`: processes compile kernels into the cache, or into a pack for other machines."""

import os
import runpy
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from opgrad.base.files import check_regular, destination, replace_file
from opgrad.base.limits import default_threads
from opgrad.base.terminal import console
from opgrad.contract import FLOATS, Operator
from opgrad.cpu.compiler import processes, target
from opgrad.cpu.compiler.cache import ObjectCache
from opgrad.cpu.compiler.decorators import Native, object_cache
from opgrad.cpu.compiler.processes import LONG_PATIENCE, Compilers, Work
from opgrad.cpu.compiler.target import PROCESSORS, OutdatedError, Pack, PackedObjects, is_here, packed
from opgrad.ops import public_operators

if TYPE_CHECKING:
    from opgrad.training import ArtifactSet

FEW_ROWS = 1  # of a batch: what is left at the end of an epoch may take other kernels than a whole batch
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
        _check_runs(name, runs)
    with tempfile.TemporaryDirectory() as folder:
        _unpack(path, folder)
        for name in (each for each in names if each in DEVICES):
            architecture = int(name.removeprefix("sm_"))
            todo = [(what, Work(do, (architecture, folder, *given))) for what, (do, given) in on_devices]
            _compile(name, todo, count, screen, {target.PACK_VARIABLE: "", processes.VARIABLE: "0"}, LONG_PATIENCE)
        for name in processors:
            if problem := ObjectCache(name, folder).problem():
                raise RuntimeError(f"compile: compiled kernels cannot be kept: {problem}")
            variables = {
                target.VARIABLE: name,
                target.PACKS_INTO: folder,
                target.PACK_VARIABLE: "",
                processes.VARIABLE: "0",
            }
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


def _check_runs(name: str, runs: Todo) -> None:
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
    compilers = Compilers(min(count, len(todo)), patience, environment)
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=len(todo))
            return compilers.wait(compilers.add(todo), lambda done, total: bar.update(task, completed=done))
    finally:
        compilers.close()


def compile_all(
    sets: list[Path], ops: str, dtypes: str, jobs: int | None, processors: str, program: str, output: Path | None
) -> None:
    """Compile what the command asks for, and say what there is then."""
    start = time.perf_counter()
    todo = [("calls", Work(compile_calls)), *_work(sets, _names(ops), _names(dtypes), only=bool(program))]
    screen, count = console(), jobs or default_threads()
    if processors or output is not None or program:
        names, on_devices = _names(processors), _on_devices(sets, todo)
        _check("processor", names, (*PROCESSORS, *DEVICES))
        if not names or output is None:
            raise ValueError("compile: a pack needs processors and a file: --for NAME,… -o FILE")
        runs = [(name, work) for name, work in todo if work.function is compile_set]
        plans = [each for each in todo if each not in runs]
        if program:
            check_regular(Path(shlex.split(program)[0]))
            runs.append((f"run {program}", Work(run_program, (program,))))
        counts = make(output, names, plans, runs, on_devices, count, screen)
        told = ", ".join(f"{count} kernels for {name}" for name, count in counts.items())
        size, seconds = f"{output.stat().st_size / 1e6:.1f} MB", time.perf_counter() - start
        screen.print(f"{output}: {told}; {size}, made in {seconds:.0f} s", soft_wrap=True)
        return
    cache = object_cache()
    if problem := cache.problem():
        raise RuntimeError(f"compile: compiled kernels cannot be kept: {problem}")
    before = cache.count()
    run(todo, count, screen)
    now, seconds = cache.count(), time.perf_counter() - start
    screen.print(f"{now - before} kernels compiled in {seconds:.0f} s, {now} in {cache.folder}", soft_wrap=True)


def run(todo: Sequence[tuple[str, Work]], processes: int, console: Console) -> None:
    """Do all work in other processes, with a progress bar; what fails there is done here, and raises its exception."""
    failed = done_elsewhere(todo, processes, console)
    for name, work in todo:
        if name in failed:
            work.function(*work.arguments)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _work(
    folders: Sequence[Path], ops: Sequence[str], dtypes: Sequence[str], only: bool = False
) -> Iterator[tuple[str, Work]]:
    """The work for artifact sets, and for operators unless only sets are named; only: operators must be named.

    Raises FileNotFoundError or NotADirectoryError for what is no set, before a process is started.
    """
    declared = public_operators()
    _check("operator", ops, declared)
    _check("dtype", dtypes, FLOATS)
    for folder in folders:
        from opgrad.training.files.artifact_set import check_folder

        check_folder(folder)
        yield str(folder.resolve()), Work(compile_set, (folder,))
    for name in ops or (() if folders or only else declared):
        for dtype in _taken(declared[name], dtypes or FLOATS):
            yield f"{name} {dtype}", Work(compile_operator, (name, dtype))


def _on_devices(sets: Sequence[Path], todo: Todo) -> Todo:
    """The part of the work that CUDA devices do in sessions of onnxruntime."""
    declared = public_operators()
    calls = [work.arguments for _, work in todo if work.function is compile_operator]
    graphs = [(f"{folder} on a device", Work(compile_set_on_device, (folder,))) for folder in sets]
    return [
        (f"{name} {dtype} on a device", Work(compile_operator_on_device, (name, dtype)))
        for name, dtype in calls
        if declared[name].onnx and "cuda" in declared[name].support.backends
    ] + graphs


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
    from opgrad.call import calls
    from opgrad.cpu.runtime import plan, pool, threads

    modules: list[Any] = [calls, plan, pool, threads]
    if find_spec("onnxruntime"):
        from opgrad.onnxruntime import compute, overloads

        modules += compute, overloads
    for function in (each for module in modules for each in vars(module).values() if isinstance(each, Native)):
        function.link()


def compile_operator(name: str, dtype: str, most: int | None = None) -> None:
    """Compile the kernels that plain calls of an operator take, by making the plans of its examples, or of so many."""
    from opgrad.cli.examples import signatures
    from opgrad.cpu.plans import plan

    op = public_operators()[name]
    for of, specs, attributes in islice(signatures(op, dtype), most):
        plan(of, specs, attributes)


def compile_operator_on_device(architecture: int, into: str, name: str, dtype: str) -> None:
    """Compile the CUDA kernels that plain calls of an operator take into a folder."""
    from opgrad.cli.examples import signatures
    from opgrad.onnxruntime.device_plans import compile_ahead

    for signature in signatures(public_operators()[name], dtype):
        compile_ahead(*signature, architecture, into)


def compile_set_on_device(architecture: int, into: str, folder: Path) -> None:
    """Compile the CUDA kernels that the graphs of an artifact set take into a folder, for batches as `compile_set`."""
    from opgrad.onnxruntime.device_plans import compile_ahead, compile_engine
    from opgrad.onnxruntime.needed_kernels import calls
    from opgrad.training import ArtifactSet
    from opgrad.training.engine.memory import FlatTensors

    artifacts = ArtifactSet.load(folder)
    flat = FlatTensors({name: array.shape for name, array in artifacts.trainable.items()}).flat
    compile_engine(flat.size, architecture, into)
    for batch in _samples(artifacts):
        shapes = {name: array.shape for name, array in batch.items()}
        for model in (artifacts.training_model, artifacts.eval_model):
            for op, specs, attributes in calls(model, shapes):
                if "cuda" in op.support.backends:
                    compile_ahead(op, specs, attributes, architecture, into)


def compile_set(folder: Path) -> None:
    """Compile the kernels that an artifact set takes, by doing a little of all that is done with it."""
    from opgrad.training import ArtifactSet

    artifacts = ArtifactSet.load(folder)
    for number, batch in enumerate(_samples(artifacts)):
        # A graph may refuse few rows; then nobody trains with them either.
        with suppress(ValueError, RuntimeError) if number > 1 else nullcontext():
            _run_once(artifacts, batch)


def _samples(artifacts: "ArtifactSet") -> Iterator[dict[str, np.ndarray]]:
    """Batches of the sizes with which a set is trained and evaluated, the last one of few rows."""
    from opgrad.training.engine.trainer import BATCH_ROWS
    from opgrad.training.run.job import sample_batch
    from opgrad.training.run.recipe import Recipe

    rows = artifacts.batch_rows
    for count in (rows,) if rows else (Recipe.load(artifacts.directory).batch_size, BATCH_ROWS, FEW_ROWS):
        yield sample_batch(artifacts, count)


def run_program(words: str) -> None:
    """Run a Python program in this process, as `python PROGRAM.py ARG…` does. RuntimeError if it ends with a status."""
    sys.argv[:] = shlex.split(words)
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as status:
        if status.code:
            raise RuntimeError(f"{words} ended with {status.code}") from None


def _run_once(artifacts: "ArtifactSet", batch: dict[str, np.ndarray]) -> None:
    """Train and evaluate with a batch, through the trainer and through the API, with gradients added up, too."""
    from opgrad.training import Dataset, Trainer
    from opgrad.training.api import CheckpointState, Module, Optimizer

    folder = artifacts.directory
    trainer = Trainer(artifacts, learning_rate=0.0)
    trainer.step(batch)
    trainer.evaluate(Dataset(batch))
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.0)
    for _ in range(2):
        module(*batch.values())  # the second call adds to the gradients of the first
    optimizer.step()
    module.eval()(*batch.values())
