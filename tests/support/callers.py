"""Python threads that call at once, and what Python a call meets."""

import gc
import sys
import threading
from pathlib import Path

from subprocesses import TIMEOUT

import opgrad

PACKAGE = str(Path(opgrad.__file__).parent)


def call_at_once(count, function):
    """function(number) in so many threads, which begin together; fails if one does, or does not end."""
    gate, failed = threading.Barrier(count), []

    def begin(number):
        gate.wait()
        try:
            function(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=begin, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in threads)
    assert not failed, failed


def functions_met(function, *args, **kwargs):
    """The Python functions of opgrad's that a call meets."""
    met = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            met.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        function(*args, **kwargs)
    finally:
        sys.setprofile(None)
    return met


def is_native(function, *args, **kwargs):
    """Whether a call, which has been made before, meets none but what takes large results from the pool."""
    return set(functions_met(function, *args, **kwargs)) <= {"_maker.<locals>.make"}


def check_nothing_is_kept(watched, *repeated):
    """Some function, so many times: counts of references stay, and so does how much memory there is."""
    for function, _ in repeated * 3:
        function()
    gc.collect()
    before, blocks = [sys.getrefcount(each) for each in watched], sys.getallocatedblocks()
    for function, times in repeated:
        for _ in range(times):
            function()
    gc.collect()
    assert [sys.getrefcount(each) for each in watched] == before
    assert sys.getallocatedblocks() - blocks < 10_000  # other tests' threads take and return some; a leak, far more
