"""The main function of a process that compiles kernels for another one: it reads requests, and fills the cache.

The process that started this one (`opgrad.cpu.compiler.processes`) sends pickled requests. The answer to a request is
one line: the request's name if the cache has the object now, or if the work ended without an exception, else an empty
line. This process ends when its input ends, so it never outlives the process that started it.
"""

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from queue import SimpleQueue
from typing import Any, BinaryIO

from opgrad.contract import DTYPES, Spec, only, public_operators, spread
from opgrad.cpu.compiler.decorators import Kernel, host, noting, object_cache
from opgrad.cpu.compiler.requests import Call, Named, Request, Work
from opgrad.native.plans import plan


def main() -> None:
    """Answer requests until the input ends."""
    # Ctrl-C is meant for the process that started this one; when that ends, so does the input
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # anything else that is printed goes to stderr, and is not taken for an answer
    waiting: SimpleQueue[Request] = SimpleQueue()
    threading.Thread(target=_read, args=(requests, waiting.put), daemon=True).start()
    host()  # writes what LLVM says of the CPU to the cache
    while True:
        name, what = waiting.get()
        try:
            _compile(name, what)
            done = isinstance(what, Work) or object_cache().read(name) is not None
        except Exception:  # the process that sent the request does it itself, and raises the error
            done = False
        print(name if done else "", file=answers, flush=True)


def _read(requests: BinaryIO, put: Callable[[Request], None]) -> None:
    """Queue requests as they come.

    When the input ends, end the process at once; files are written in one atomic step.
    """
    try:
        while True:
            put(pickle.load(requests))
    except BaseException:
        os._exit(0)


def _compile(name: str, what: Named | Call | Work) -> None:
    if isinstance(what, Work):
        what.function(*what.arguments)
        return
    if isinstance(what, Named):
        found = getattr(import_module(what.module), what.name)
        if isinstance(found, Kernel):
            kind, _, dtypes = what.interface.rstrip(")").partition("(")
            found.task(dtypes.split(",") if dtypes else [], kind)
        else:
            found.link()
        return
    with noting([name]):
        plan(_operator(what), _specs(what), what.attributes)


def _operator(call: Call) -> Any:
    found = public_operators()[call.operator]
    if call.needs is not None:
        return only(found, tuple(call.needs))
    return found if call.lists is None else spread(found, *call.lists)


def _specs(call: Call) -> Sequence[Spec | None]:
    return [None if each is None else Spec(each[0], DTYPES[each[1]]) for each in call.specs]
