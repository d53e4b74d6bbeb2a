"""Training steps of artifact sets: graph, optimizer and Python, beside torch and the old runtime.

Those of onnxruntime-training, and ours as a user starts it, run in processes of their own.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import opgrad
from bench import measure
from bench.cells import check
from bench.command import CommandLine
from bench.measure import hot_turns, measure_each, take_turns
from bench.run import dated, surroundings
from bench.steps import api_step, generated
from bench.steps.generated import TORCH, best_of_torch, disagreements, measure_attention, thread_counts
from opgrad.cli.options import opt
from opgrad.training import ArtifactSet, Checkpoint, api
from opgrad.training.engine.memory import FlatOptimizer, TrainingMemory
from opgrad.training.engine.training_graph import BoundGraph, open_training, session_options
from opgrad.training.run.job import sample_batch

OLD_API, OWN_API = "onnxruntime.training.api", "opgrad.training.api"
COLD, WARM = "cold", "warm"
STARTS = 3  # processes whose median counts, but for the cold one
TURNS = 3  # of steps before memory is looked at: what the second step needs is there then


class Refused(RuntimeError):
    """The API that trains cannot load the set, or not run its step: opgrad has operators that the old runtime lacks."""


class StepProcess:
    """A process that takes its turns when told to; see `api_step`.

    process: newly started. messages: where it writes what goes wrong. began: when it was started.

    loss: of the first step. seconds: how long it took from the start to the end of the first step.
    Raises RuntimeError without the package, and `Refused`.
    """

    def __init__(self, process: "subprocess.Popen[str]", messages: Path, began: float):
        self._process, self._messages = process, messages
        self._read()
        self.loss = self._read(Refused)["loss"]
        self.seconds = time.perf_counter() - began
        self.versions = self._read()["versions"]

    def turn(self, what: str) -> Any:
        """Seconds of some calls: "step", or "optimizer" alone. Or bytes: "resident"."""
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self, error: type[RuntimeError] = RuntimeError) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        last = self._messages.read_text(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise error(f"bench: the process that trains ended: {last[0]}")


@contextmanager
def step_process(
    python: Path, api: str, folder: Path, data: Mapping[str, np.ndarray], environment: Mapping[str, str] | None = None
) -> Iterator[StepProcess]:
    """The step of an API on a set and a batch.

    python: the interpreter. environment: variables beside those of this process.
    Raises RuntimeError if it cannot be run or lacks the package, `Refused` for a set that it cannot train.
    """
    with TemporaryDirectory() as scratch:
        batch, messages = Path(scratch) / "batch.npz", Path(scratch) / "messages"
        np.savez(batch, **data)  # type: ignore[arg-type]
        words = python, api_step.__file__, measure.__file__, api, folder, batch, opgrad.get_num_threads()
        pipe, variables = subprocess.PIPE, os.environ | (environment or {})
        with messages.open("w") as errors:
            began = time.perf_counter()
            try:
                process = subprocess.Popen(
                    list(map(str, words)), stdin=pipe, stdout=pipe, stderr=errors, text=True, env=variables
                )
            except OSError as error:
                raise RuntimeError(f"bench: {python} cannot be run: {error.strerror}") from None
        with process:
            try:
                yield StepProcess(process, messages, began)
            finally:
                process.kill()


def start(artifacts: ArtifactSet, batch: int, old_python: Path | None) -> dict[str, Any]:
    """Seconds from the start of a process to the end of its first step, and its bytes in memory some steps later.

    By name: ours with nothing compiled yet, ours with all kernels in the cache, and the old runtime's. Why it cannot
    be told under "left_out".
    """
    found: dict[str, tuple[float, float | None]] = {}
    known = {"set": artifacts.name, "batch": batch}
    given = artifacts.directory, sample_batch(artifacts, batch)
    with TemporaryDirectory(prefix="opgrad-bench-") as cache:
        paths = [str(Path(opgrad.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        ours = {"OPGRAD_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(paths)}
        own = Path(sys.executable), OWN_API, *given, ours
        try:
            found |= {COLD: _started(1, *own), WARM: _started(STARTS, *own)}
        except RuntimeError as error:
            return {**known, "left_out": str(error)}
    if old_python is not None:
        with suppress(Refused):  # the table of steps says so
            found[OLD] = _started(STARTS, old_python, OLD_API, *given)
    resident = {name: size for name, (_, size) in found.items() if size is not None}
    return {**known, "first": {name: seconds for name, (seconds, _) in found.items()}, "resident": resident}


def _started(count: int, *given: Any) -> tuple[float, float | None]:
    """The medians of seconds and bytes of so many processes, one after the other."""
    seconds, sizes = [], []
    for _ in range(count):
        with step_process(*given) as process:
            seconds.append(process.seconds)
            for _ in range(TURNS):
                process.turn("step")
            sizes.append(process.turn("resident"))
    return statistics.median(seconds), None if None in sizes else statistics.median(sizes)


ROOT = Path(__file__).parents[2]
BATCHES = (4, 50, 500)
SECONDS = 2.0  # a cell
STEP, GRAPH, OPTIMIZER = "step", "graph", "optimizer"  # ours
OLD, OLD_OPTIMIZER = "old", "old optimizer"

Progress = Callable[[int, int, str], None]  # how many cells are done, of how many, and the next
Turn = Callable[[], list[float]]
Job = tuple[str, Callable[[], dict[str, Any]]]  # what is measured, with its name


@dataclass(frozen=True)
class StepOptions(CommandLine):
    """What to measure, as the command line has it."""

    batches: str = opt("Default: 4,50,500.", default="", metavar="ROWS,…")
    models: str = opt(
        "Of GPT-2, BERT, ViT, MobileNetV2, small ones, and GPT-2-1024, Llama-1024, with attention in tiles and "
        "without; default: all, and the examples.",
        default="",
        metavar="NAME,…",
    )
    old_python: Path | None = opt("A Python with onnxruntime-training, measured as well.", metavar="PATH")


def examples() -> list[Path]:
    """The artifact sets of the source tree."""
    return [path.parent for path in sorted((ROOT / "examples").glob("*/training_model.onnx"))]


def run(options: StepOptions, progress: Progress, folders: Sequence[Path] = ()) -> dict[str, Any]:
    """Measure every set with every batch and return what a result file holds: what is done so far, if interrupted.

    folders: of the sets; without any, and without models, the examples of the source tree and all models. progress:
    called before each cell. Raises what `ArtifactSet.load` raises, ValueError for unknown models and wrong batches, and
    RuntimeError if the old runtime does not start.
    """
    began = time.perf_counter()
    batches = _batches(options.batches) if options.batches else BATCHES
    seconds = options.seconds_of(SECONDS)
    alone = bool(folders or options.models)
    models = in_pytorch()
    known = (*models.MODELS, *models.LONG_MODELS) if models else ("none, without PyTorch",)
    check("models", options.names("models"), known)
    names = options.names("models") or (known if models and not alone else ())
    sets = [ArtifactSet.load(folder) for folder in folders or ([] if alone else examples())]
    cells = [(artifacts, batch) for artifacts in sets for batch in batches]
    how = seconds, options.old_python
    jobs: dict[str, list[Job]] = {"training": [], "starts": [], "generated": [], "attention": []}
    for artifacts, batch in cells:
        name = artifacts.name
        jobs["training"].append((f"{name}, batch {batch}", partial(measure_set, artifacts, batch, *how)))
        jobs["generated"].append((f"{name}, generated, batch {batch}", partial(_generated, artifacts, batch, seconds)))
    for name in names:
        if name in models.MODELS:
            jobs["training"].append((name, partial(_architecture, name, *how)))
            if not alone:
                jobs["generated"].append((f"{name}, generated", partial(_of_torch, generated.measure, name, seconds)))
        else:
            jobs["attention"].append((f"{name}, attention", partial(_of_torch, measure_attention, name, seconds)))
    for artifacts in sets:
        first = partial(start, artifacts, batches[0], options.old_python)
        jobs["starts"].append((f"{artifacts.name}, first step", first))
    every = [job for part in jobs.values() for job in part]
    measured = iter(measure_each(every, lambda job: job[1](), lambda done, count, job: progress(done, count, job[0])))
    return {
        "format": 1,
        **dated(began),
        **surroundings(),
        "options": {"batches": list(batches), "seconds": seconds},
        "cells": [],
        **{name: list(islice(measured, len(part))) for name, part in jobs.items()},
    }


def _batches(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"bench: batches is {text!r}, expected numbers of rows such as 4,50,500")
    return tuple(map(int, words))


def in_pytorch() -> Any:
    """The module with models in PyTorch, which tables of results do without; None without PyTorch."""
    try:
        from bench.steps import models
    except ImportError:
        return None
    return models


def _architecture(name: str, seconds: float, old_python: Path | None) -> dict[str, Any]:
    """The step of an architecture, whose artifact set is made now."""
    with TemporaryDirectory() as folder:
        artifacts, rows, batch, step, with_scores = in_pytorch().architecture(name, Path(folder))
        return measure_set(artifacts, rows, seconds, old_python, batch, step, with_scores)


def _of_torch(measure: Callable[..., dict[str, Any]], name: str, seconds: float) -> dict[str, Any]:
    """What is measured of the gradients of a model in PyTorch."""
    return measure(in_pytorch().subject(name), seconds)


def _generated(artifacts: ArtifactSet, batch: int, seconds: float) -> dict[str, Any]:
    """The gradients of a set's model, generated anew, beside its own training graph; or why there are none."""
    data = sample_batch(artifacts, batch)
    try:
        return generated.measure(generated.of_set(artifacts, data, _graph(artifacts, data)), seconds)
    except (ValueError, RuntimeError) as error:
        return {"model": artifacts.name, "batch": batch, "left_out": " ".join(str(error).split())}


def measure_set(
    artifacts: ArtifactSet,
    batch: int,
    seconds: float,
    old_python: Path | None,
    data: Mapping[str, np.ndarray] | None = None,
    in_torch: Callable[[int], Callable[[], Any]] | None = None,
    of_old: Path | None = None,
) -> dict[str, Any]:
    """One set with one batch: the times of all contestants, which take turns; or why our step cannot be made.

    data: the batch; None: that of `sample_batch`. in_torch: gives torch's step for so many threads; None: `chain_step`.
    of_old: the folder of the set that the old runtime trains; None: the set's own.
    The learning rate is 0: every step computes the same, however many there are.
    """
    data = sample_batch(artifacts, batch) if data is None else data
    losses, contestants = dict[str, float](), dict[str, Turn]()
    notes, versions = dict[str, str](), dict[str, str]()
    with ExitStack() as stack:
        try:
            arrays, threads = list(data.values()), opgrad.get_num_threads()
            step = api_step.calls(api, artifacts.directory, arrays, threads)[0]
            losses[STEP] = float(np.asarray(step()))
            contestants[STEP] = hot_turns(step)
            contestants[GRAPH] = hot_turns(_graph(artifacts, data))
            contestants[OPTIMIZER] = hot_turns(_optimizer(artifacts))
        except (ValueError, RuntimeError) as error:
            return {"set": artifacts.name, "batch": batch, "left_out": " ".join(str(error).split())}
        try:
            if (models := in_pytorch()) is None:
                raise NotImplementedError("PyTorch is not installed")
            make = in_torch or partial(models.chain_step, artifacts, data)
            for count in thread_counts():
                theirs = make(count)
                losses[TORCH] = float(theirs())
                contestants[f"{TORCH} {count}"] = hot_turns(theirs)
        except NotImplementedError as error:
            notes[TORCH] = str(error)
        try:
            if old_python is not None:
                process = step_process(old_python, OLD_API, of_old or artifacts.directory, data)
                old = stack.enter_context(process)  # which ends with the stack
                contestants |= {OLD: partial(old.turn, STEP), OLD_OPTIMIZER: partial(old.turn, OPTIMIZER)}
                losses[OLD], versions = old.loss, old.versions
        except Refused as error:
            notes[OLD] = str(error)
        times = best_of_torch(take_turns(contestants, seconds))
    others = disagreements(losses, losses[STEP])
    more = {"notes": notes | others, "old_versions": versions}
    return {
        "set": artifacts.name,
        "batch": batch,
        "parameters": sum(array.size for array in artifacts.trainable.values()),
        "loss": losses[STEP],
        "times": {name: taken for name, taken in times.items() if name.split()[0] not in others},
        **{name: value for name, value in more.items() if value},
    }


# --- ours ------------------------------------------------------------------------------------------------------------


def _graph(artifacts: ArtifactSet, data: Mapping[str, np.ndarray]) -> Callable[[], BoundGraph]:
    """The training graph alone, as the step runs it on the batch."""
    frozen = {name: array.copy() for name, array in artifacts.frozen.items()}
    memory = TrainingMemory(Checkpoint(dict(artifacts.trainable), frozen), unchanged=False)
    options = session_options(opgrad.get_num_threads())
    graph = open_training(artifacts.training()[0], artifacts.gradients, memory, {}, options, "bench")
    return partial(graph, list(data.values()))


def _optimizer(artifacts: ArtifactSet) -> Callable[[], object]:
    """The optimizer's step alone, over as many parameters in one piece."""
    size = sum(array.size for array in artifacts.trainable.values())
    random = np.random.default_rng(0)
    parameters, gradients = (random.standard_normal(size).astype(np.float32) for _ in range(2))
    return FlatOptimizer(artifacts.rule, parameters, gradients, 0.0).step
