"""What a process does that compiles for another: it reads requests, and puts the code into the cache.

A request comes pickled from the process that started this one, see `opgrad.native.compilers`. The answer is one
line: the entry, if it is in the cache now. The process ends when its input does, so it never outlives the other.
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

from opgrad.contract import DTYPES, Spec, graph_operators, only, operators, spread
from opgrad.cpu.compiler.native import Kernel, host, noting, object_cache
from opgrad.native.planning import plan
from opgrad.native.requests import Call, Made, Named, Request


def main(nice: int = 0) -> None:
    """Answer until the input ends; `nice`: how far this stands back behind other processes."""
    if hasattr(os, "nice"):
        os.nice(nice)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started this, whose end ends the input
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    waiting: SimpleQueue[Request] = SimpleQueue()
    threading.Thread(target=_read, args=(requests, waiting.put), daemon=True).start()
    host()  # leaves word of the CPU in the cache
    while True:
        entry, what = waiting.get()
        try:
            _compile(entry, what)
            kept = object_cache().read(entry) is not None
        except Exception:  # whoever needs it compiles it then, and meets the error
            kept = False
        print(entry if kept else "", file=answers, flush=True)


def _read(requests: BinaryIO, put: Callable[[Request], None]) -> None:
    """Take requests as they come, and end the process with them, whatever it is at: the cache gets whole files."""
    try:
        while True:
            put(pickle.load(requests))
    except BaseException:
        os._exit(0)


def _compile(entry: str, what: Named | Call | Made) -> None:
    if isinstance(what, Made):
        _task(getattr(import_module(what.module), what.function)(*what.arguments)[what.number], what.form)
        return
    if isinstance(what, Named):
        found = getattr(import_module(what.module), what.name)
        if isinstance(found, Kernel):
            _task(found, what.form)
        else:
            found.link()
        return
    with noting([entry]):
        plan(_operator(what), _specs(what), what.attributes)


def _task(kernel: Kernel, form: str) -> None:
    kind, _, dtypes = form.rstrip(")").partition("(")
    kernel.task(dtypes.split(",") if dtypes else [], kind)


def _operator(call: Call) -> Any:
    found = {**operators(), **graph_operators()}[call.operator]
    if call.needs is not None:
        return only(found, call.needs)
    return found if call.lists is None else spread(found, *call.lists)


def _specs(call: Call) -> Sequence[Spec | None]:
    return [None if each is None else Spec(each[0], DTYPES[each[1]]) for each in call.specs]
