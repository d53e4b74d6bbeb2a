"""Forks while other threads settle something, and calls while the interpreter ends, each in a process of its own."""

import os
import re
import sys
from pathlib import Path

import pytest
from subprocesses import run_python

import opgrad

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

PACKAGE = Path(opgrad.__file__).parent
OWN = re.compile(r"threading\.(R?Lock|Condition|Semaphore|Barrier)\(|functools\.cached_property|import cached_property")


def test_the_package_has_one_lock():
    """Another would be held forever in the child of a fork; before Python 3.12 functools.cached_property has one."""
    found = [path.name for path in PACKAGE.rglob("*.py") if OWN.search(path.read_text(encoding="utf-8"))]
    assert found == ["locks.py"]


CHILD = """
import os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore")
import numpy as np, opgrad
x = np.linspace(-1, 1, 1000, dtype="float32")

def in_child(function):
    child = os.fork()
    if child == 0:
        signal.alarm(100)
        os._exit(not function())
    return child

def in_children_while(other, function, pause=0.05):  # while another thread runs `other`
    thread, children = threading.Thread(target=other), []
    thread.start()
    while thread.is_alive():
        time.sleep(pause)
        children.append(in_child(function))
    return children

def all_went_well(children):
    return all([os.waitpid(child, 0)[1] == 0 for child in children])
"""

COMPILING = """
def right():  # modules are imported, then Numba, then the kernel is compiled
    return np.array_equal(opgrad.relu(x), np.maximum(x, 0))
children = in_children_while(lambda: opgrad.relu(x), right)
children.append(in_child(lambda: np.array_equal(opgrad.relu_grad(x, x), np.where(x > 0, x, 0))))
print(all_went_well(children))
"""


@forks
def test_a_fork_while_another_thread_compiles(tmp_path):
    tmp_path.chmod(0o700)
    assert run_python(CHILD + COMPILING, OPGRAD_CACHE_DIR=str(tmp_path)) == "True"


HOLDING = """
import llvmlite.binding as llvm
from numba.core.compiler_lock import global_compiler_lock
from opgrad.base.locks import settling
locks = [settling, global_compiler_lock, llvm.ffi.lib._lock]

def hold():
    for lock in locks:
        lock.__enter__()
        time.sleep(0.2)
        lock.__exit__(None, None, None)

def take():
    for lock in locks:
        lock.__enter__()
        lock.__exit__(None, None, None)
    return True

children = in_children_while(hold, take, 0.01)
with settling:  # a thread that forks under the lock has it in the child, too
    children.append(in_child(take))
take()
print(all_went_well(children))
"""


@forks
def test_a_child_finds_every_lock_free():
    assert run_python(CHILD + HOLDING) == "True"


REGISTERING = """
import onnxruntime
from opgrad.onnxruntime import register
def registers():
    return register(onnxruntime.SessionOptions()) is None
print(all_went_well(in_children_while(registers, registers)))
"""


@forks
def test_a_fork_while_another_thread_registers_operators():
    assert run_python(CHILD + REGISTERING) == "True"


# A module that took the lock while it is imported could wait for a thread that has the lock and imports it. These are
# some that are imported under the lock.
IMPORTING = """
import importlib, pkgutil
from opgrad.base import locks
taken = []
class Watched(locks.Settling):
    def __enter__(self):
        taken.append(importing)
        return super().__enter__()
locks.settling.__class__ = Watched
importing = "opgrad"
import opgrad
names = [each.name for each in pkgutil.walk_packages(importlib.import_module("opgrad.cpu").__path__, "opgrad.cpu.")]
for importing in [*names, "opgrad.onnxruntime.custom_ops"]:
    importlib.import_module(importing)
print(taken)
"""


def test_imports_take_no_lock():
    assert run_python(IMPORTING) == "[]"


EXIT = """
import atexit, threading, time, numpy as np, opgrad
x = np.ones((64, 20000), "float32")
opgrad.set_num_threads(4)
def call(name=None):
    same = np.allclose(opgrad.softmax(x), 1 / 20000)
    if name:
        print(name, same)
"""

AFTER = {
    "daemon": "for _ in range(3): threading.Thread(target=lambda: [call() for _ in iter(int, 1)], daemon=True).start()",
    "atexit": "atexit.register(call, 'exit')",
    "thread": "threading.Thread(target=lambda: [time.sleep(0.3), call('exit')]).start()",
    "shutdown": "threading._register_atexit(call, 'exit')",
}


@pytest.mark.parametrize("what", AFTER)
@pytest.mark.parametrize("warm", [True, False])
def test_calls_while_the_interpreter_ends(what, warm):
    code = EXIT + ("call()\n" if warm else "") + AFTER[what] + "\ntime.sleep(0.1)"
    assert run_python(code) == ("" if what == "daemon" else "exit True")


STOPPED = """
import os, sys, threading, time, types
from opgrad.base.locks import settling
def hold():
    with settling:
        held.set()
        time.sleep(1000)
class Last:
    def __init__(self):
        self.settling, self.write = settling, os.write
    def __del__(self):
        try:
            self.settling.__enter__()
        except RuntimeError as error:
            self.write(1, str(error).encode())
held = threading.Event()
threading.Thread(target=hold, daemon=True).start()
held.wait()
sys.modules["last"] = types.ModuleType("last")
sys.modules["last"].object = Last()
"""


def test_the_end_never_waits_for_a_thread_that_it_has_stopped():
    expected = "opgrad: the interpreter ended while another thread compiled; no new call can be made"
    assert run_python(STOPPED) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no file is written")
def test_a_forked_child_leaves_the_parent_s_files(tmp_path):
    code = f"""
import atexit, os, tempfile
tempfile.tempdir = {str(tmp_path)!r}
def refuse(*_): raise OSError
os.memfd_create = refuse
from opgrad.onnxruntime import sessions
path = sessions.write(b"stub")
child = os.fork()
if child == 0:  # onnxruntime itself may hang at the end of a child
    atexit._run_exitfuncs()
    os._exit(0)
os.waitpid(child, 0)
print(os.path.exists(path))
"""
    assert run_python(code) == "True"
    assert not list(tmp_path.iterdir())
