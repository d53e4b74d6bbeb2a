"""Starts other processes that compile kernels in parallel, before this process needs them.

Each is a new Python process, which gets pickled requests through a pipe (`main`) and writes code to the cache, where
this process finds it. Nothing is forked, and nothing of the caller's program is imported. If such a process fails, dies
or cannot be started, the kernel is compiled in this process. The processes end after a while without work, and when the
process that started them ends.
"""

import atexit
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from importlib import import_module
from queue import Empty, PriorityQueue, SimpleQueue
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from opgrad.base.limits import default_threads
from opgrad.base.locks import in_child, settling
from opgrad.cpu.compiler import sources
from opgrad.cpu.compiler.cache import VARIABLE as CACHE
from opgrad.cpu.compiler.target import object_cache


class Work(NamedTuple):
    """A function that compiles kernels, to be called in another process, and its arguments, which can be pickled.

    It returns False if the cache does not keep the kernel that is asked for.
    """

    function: Callable[..., bool | None]
    arguments: tuple[Any, ...] = ()


# The name of the object code; for work on several kernels, any name that tells it from other work.
Request = tuple[str, Work]


def main() -> None:
    """Answer requests until the input ends."""
    # Ctrl-C is meant for the process that started this one; when that ends, so does the input
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # anything else that is printed goes to stderr, and is not taken for an answer
    waiting: SimpleQueue[Request] = SimpleQueue()
    threading.Thread(target=_read, args=(requests, waiting.put), daemon=True).start()
    while True:
        _, (function, arguments) = waiting.get()
        try:
            reason = "the cache does not keep it" if function(*arguments) is False else ""
        except Exception as error:  # the process that sent the request may do it itself, and raises the error
            reason = f"{type(error).__name__}: {error}"
        print(json.dumps(reason), file=answers, flush=True)


def _read(requests: BinaryIO, put: Callable[[Request], None]) -> None:
    """Queue requests as they come.

    When the input ends, end the process at once; files are written in one atomic step.
    """
    try:
        while True:
            put(pickle.load(requests))
    except BaseException:
        os._exit(0)


VARIABLE = "OPGRAD_COMPILERS"
MOST = 16  # processes
IDLE = 10.0  # seconds without work after which a process ends: it takes 150 MB
LOOK = 0.1  # seconds between two looks at their progress
PATIENCE = 120.0  # seconds without any answer after which the processes are taken to hang; a kernel takes up to ten
LONG_PATIENCE = 1200.0  # the same for work on many kernels
MAIN = f"from {__name__} import main; main()"
BOOT = f"import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); {MAIN}"

Progress = Callable[[int, int], None]  # progress(kernels compiled, kernels in all)


class Compilers:
    """The processes, each with a thread that hands it one request after the other.

    count: how many. alive: how many take requests. patience: see PATIENCE. environment: variables that they get besides
    those of this process. Raises OSError if the system refuses to start them.
    """

    def __init__(self, count: int, patience: float = PATIENCE, environment: Mapping[str, str] = MappingProxyType({})):
        self._patience = patience
        self._todo: PriorityQueue[tuple[bool, int, Request]] = PriorityQueue()
        self._answers: dict[str, Future[str]] = {}  # by object name: why it could not be compiled, "" if it was
        self._answered = 0.0  # when the last answer came
        self._processes: list[Any] = []
        try:
            for _ in range(count):
                self._processes.append(_start(environment))
        except BaseException:
            self.close()
            raise
        self.alive = count
        for process in self._processes:
            threading.Thread(target=self._serve, args=(process,), daemon=True).start()

    def add(self, requests: Iterable[Request], first: bool = False) -> list[str]:
        """Queue the requests that are new, before others if `first`. Returns the names of their objects."""
        names = []
        for request in requests:
            names.append(request[0])
            if request[0] not in self._answers:
                self._answers[request[0]] = Future()
                self._todo.put((not first, len(self._answers), request))
        self._give_up_unless_alive()
        return names

    def wait(self, names: Iterable[str], progress: Progress = lambda done, total: None) -> dict[str, str]:
        """Wait until those of these that were requested are compiled, or no process is left; end processes that hang.

        Returns the names of those that no process could compile, and the reasons.
        """
        answers, began = {each: self._answers[each] for each in names if each in self._answers}, time.monotonic()
        while (left := wait(answers.values(), LOOK).not_done) and not self._hang(began):
            progress(len(answers) - len(left), len(answers))
        reasons = {name: each.result() if each.done() else _ended(name) for name, each in answers.items()}
        return {name: reason for name, reason in reasons.items() if reason}

    def _hang(self, began: float) -> bool:
        """Whether no process has answered for too long since `began`; if so, end them."""
        hang = time.monotonic() - max(began, self._answered) > self._patience
        if hang:
            for process in self._processes:
                process.kill()
        return hang

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            _end(process)

    def abandon(self) -> None:
        """Close the pipes in a forked child, or else the processes would not see the end of their input."""
        for process in self._processes:
            process.returncode = 0
            process.stdin.close()
            process.stdout.close()

    def _serve(self, process: Any) -> None:
        """Hand a process one request after the other, until there are none for a while, or it has died."""
        try:
            while True:
                _, _, request = self._todo.get(timeout=IDLE)
                reason = _ended(request[0])
                try:
                    process.stdin.write(pickle.dumps(request))
                    reason = json.loads(process.stdout.readline())
                    self._answered = time.monotonic()
                finally:
                    self._answers[request[0]].set_result(reason)
        except (Empty, OSError, ValueError):  # there was none, it has died, or its pipes were closed
            pass
        finally:
            self.alive -= 1
            self._give_up_unless_alive()
            _end(process)

    def _give_up_unless_alive(self) -> None:
        """If no process is left, end all waiting for the requests that are left."""
        with suppress(Empty):
            while not self.alive:
                _, _, (name, _) = self._todo.get_nowait()
                self._answers[name].set_result(_ended(name))


def _ended(name: str) -> str:
    return f"{name} ended the process"


def _start(more: Mapping[str, str]) -> Any:
    """Start a process that imports the same opgrad as this one, wherever it is started."""
    folder = os.path.dirname(object_cache().folder or "")
    environment = os.environ | {CACHE: folder, "OPENBLAS_NUM_THREADS": "1"} | more
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", BOOT],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, env=environment,
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
    )  # fmt: skip
    path = [each for each in sys.path if each]
    stdin: Any = process.stdin
    stdin.write(pickle.dumps(path if sources.ROOT in path else [sources.ROOT, *path]))
    return process


def _end(process: Any) -> None:
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


# --- those of this process -------------------------------------------------------------------------------------------

_running: Compilers | None = None
_prepare: list[Callable[[], None]] = []


def compilers() -> Compilers | None:
    """The compiling processes, started if there are none; None if they cannot be used."""
    global _running
    with settling:  # no fork may happen here: the child would keep the input of the processes open
        if _running is None or not _running.alive:
            _running, wanted = None, count()
            with suppress(OSError):
                _running = Compilers(wanted) if wanted else None
        return _running


def count() -> int:
    """How many processes: OPGRAD_COMPILERS, else as many as calls use threads.

    0 if a cache or a Python to start is missing.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted is not None and not wanted.isdecimal():
        raise ValueError(f"{VARIABLE} is {wanted!r}, expected a whole number of at least 0")
    possible = sys.executable and not getattr(sys, "frozen", False) and not object_cache().problem()
    return min(default_threads() if wanted is None else int(wanted), MOST) if possible else 0


def named(function: Any, interface: str) -> Request | None:
    """The request for a function that is a global of a module of opgrad; None for any other, or without a digest."""
    module, name = function.__module__, function.__qualname__
    found = getattr(sys.modules.get(module), name, None) if module.startswith("opgrad.") else None
    is_found = getattr(found, "function", None) is function
    kept_as = sources.object_name(function, interface) if is_found else None
    return (kept_as, Work(_compile_named, (module, name, interface, kept_as))) if kept_as else None


def _compile_named(module: str, name: str, interface: str, kept_as: str) -> bool:
    """Compile a kernel or native function that is a global of a module; returns whether the cache has it."""
    getattr(import_module(module), name).compile(interface)
    return object_cache().read(kept_as) is not None


def missing(functions: Iterable[Any]) -> list[Request]:
    """The requests for those native functions that the cache lacks."""
    requests = (named(each.function, each.interface) for each in functions if "address" not in vars(each))
    return [each for each in requests if each and object_cache().read(each[0]) is None]


@contextmanager
def before_missing(prepare: Callable[[], None]) -> Iterator[None]:
    """Within this context, `prepare` is called once, before the first kernel that the cache lacks is compiled."""
    _prepare.append(prepare)
    try:
        yield
    finally:
        _prepare[:] = [each for each in _prepare if each is not prepare]


def compile_first(function: Any, interface: str, name: str) -> None:
    """Have running processes compile a kernel: request it if they can find it, and wait for it.

    name: that of its object code.
    """
    while _prepare:
        _prepare.pop()()
    found = compilers() if _running else None
    if found is not None:
        request = named(function, interface)
        found.add([request] if request else [], first=True)
        found.wait([name])


def _close() -> None:
    if _running:
        _running.close()


def _forget_after_fork() -> None:
    global _running
    if _running:
        _running.abandon()
    _running = None


in_child(_forget_after_fork)
atexit.register(_close)
