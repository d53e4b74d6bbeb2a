"""Training steps in a process of their own: onnxruntime-training's, and ours as a user starts it."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

import opgrad
from bench import measure
from bench.steps import api_step

OLD_API, OWN_API = "onnxruntime.training.api", "opgrad.training.api"
COLD, WARM, OLD = "cold", "warm", "old"
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
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self, error: type[RuntimeError] = RuntimeError) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = self._messages.read_text(errors="replace").strip().splitlines()[-1:] or ["no message"]
            raise error(f"bench: the process that trains ended: {last[0]}")
        return json.loads(line)


@contextmanager
def step_process(
    python: Path,
    api: str,
    folder: Path,
    data: Mapping[str, np.ndarray],
    threads: int,
    environment: Mapping[str, str] | None = None,
) -> Iterator[StepProcess]:
    """The step of an API on a set and a batch.

    python: the interpreter. environment: variables beside those of this process.
    Raises RuntimeError if it cannot be run or lacks the package, `Refused` for a set that it cannot train.
    """
    with tempfile.TemporaryDirectory() as scratch:
        batch, messages = Path(scratch) / "batch.npz", Path(scratch) / "messages"
        np.savez(batch, **data)  # type: ignore[arg-type]
        command = list(map(str, (python, api_step.__file__, measure.__file__, api, folder, batch, threads)))
        pipe, variables = subprocess.PIPE, os.environ | (environment or {})
        with messages.open("w") as errors:
            began = time.perf_counter()
            try:
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=variables)
            except OSError as error:
                raise RuntimeError(f"bench: {python} cannot be run: {error.strerror}") from None
        with process:
            try:
                yield StepProcess(process, messages, began)
            finally:
                process.kill()


def start(folder: Path, data: Mapping[str, np.ndarray], old_python: Path | None, threads: int) -> dict[str, Any]:
    """Seconds from the start of a process to the end of its first step, and its bytes in memory some steps later.

    By name: ours with nothing compiled yet, ours with all kernels in the cache, and the old runtime's. Why it cannot
    be told under "left_out".
    """
    with tempfile.TemporaryDirectory(prefix="opgrad-bench-") as cache:
        source = str(Path(opgrad.__file__).parents[1])
        paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
        ours = {"OPGRAD_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(paths)}
        own, found = (Path(sys.executable), OWN_API, folder, data, threads, ours), {}
        try:
            found[COLD] = _started([own])
            found[WARM] = _started([own] * STARTS)
        except RuntimeError as error:
            return {"left_out": str(error)}
    if old_python is not None:
        with suppress(Refused):  # the table of steps says so
            found[OLD] = _started([(old_python, OLD_API, folder, data, threads)] * STARTS)
    seconds = {name: times for name, (times, _) in found.items()}
    return {"first": seconds, "resident": {name: size for name, (_, size) in found.items() if size is not None}}


def _started(processes: list[tuple[Any, ...]]) -> tuple[float, float | None]:
    """The medians of seconds and bytes of processes like these, one after the other."""
    seconds, sizes = [], []
    for arguments in processes:
        with step_process(*arguments) as process:
            seconds.append(process.seconds)
            for _ in range(TURNS):
                process.turn("step")
            sizes.append(process.turn("resident"))
    return statistics.median(seconds), None if None in sizes else statistics.median(sizes)
