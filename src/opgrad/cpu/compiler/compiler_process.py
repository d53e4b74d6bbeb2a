"""The main function of a process that compiles kernels for another one: it reads requests, and fills the cache.

The process that started this one (`opgrad.cpu.compiler.processes`) sends pickled requests. The answer to a request is
one line: in JSON, an empty text if the cache has the object now, or if the work ended without an exception, else the
reason. This process ends when its input ends, so it never outlives the process that started it.
"""

import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import BinaryIO

from opgrad.cpu.compiler.requests import Request
from opgrad.cpu.compiler.target import host


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
            reason = "" if what.compile(name) else "the cache does not keep it"
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
