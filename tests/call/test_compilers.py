"""Processes that compile kernels ahead: what they leave, and what becomes of those who start them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from subprocesses import TIMEOUT, run_python

pytestmark = pytest.mark.any_cpu

ARTIFACTS = Path(__file__).parents[1] / "artifacts"

BEGIN = """
import os, signal, sys, time
from opgrad.cpu.compiler import processes
from opgrad.cpu.runtime import plan
from opgrad.cpu.runtime import threads
found = processes.compilers()
"""

LIFE = """
found.add(processes.missing([plan.execute]), first=True)
plan.execute.link()
done = ["numba" not in sys.modules]
if hasattr(os, "fork"):
    child = os.fork()
    if child == 0:
        os._exit(0 if not processes._running else 1)
    done.append(os.waitpid(child, 0)[1] == 0)
found.add(processes.missing([threads.run]))
for process in found._processes:
    process.kill()
threads.run.link()  # which is not waited for in vain
done.append("numba" in sys.modules)
print(all(done))
"""

STOPPED = """
found.wait_for_cpu()
found._patience = 0.5
for process in found._processes:
    os.kill(process.pid, signal.SIGSTOP)
found.add(processes.missing([plan.execute]))
plan.execute.link()
print("numba" in sys.modules, [process.wait() for process in found._processes])
"""

ORPHANS = """
found.add(processes.missing([threads.run, threads.work]))
print(*[process.pid for process in found._processes], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

TRAINING = """
import sys
import numpy as np
from opgrad.training.api import CheckpointState, Module, Optimizer
folder = {folder!r}
state = CheckpointState.load_checkpoint(folder + "/checkpoint")
module = Module(folder + "/training_model.onnx", state)
optimizer = Optimizer(folder + "/optimizer_model.onnx", module)
random = np.random.default_rng(0)
loss = module(random.standard_normal((5, 64), np.float32), random.standard_normal((5, 10), np.float32))
optimizer.step()
print(loss > 0, [name for name in ("numba", "llvmlite") if name in sys.modules])
"""


@pytest.fixture
def empty(tmp_path):
    """A cache with nothing in it, for one process that compiles."""
    tmp_path.chmod(0o700)
    return {"OPGRAD_CACHE_DIR": str(tmp_path), "OPGRAD_COMPILERS": "1"}


def test_code_comes_from_there_or_is_made_here(empty):
    """Also when the process dies; a forked child has nothing to do with it."""
    assert run_python(BEGIN + LIFE, **empty) == "True"


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="a system without signals that stop a process")
def test_a_process_that_hangs_is_not_waited_for(empty):
    """Whoever needs the kernel ends it, and compiles."""
    assert run_python(BEGIN + STOPPED, **empty) == f"True [{-signal.SIGKILL}]"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="this system does not show processes as files")
def test_processes_end_with_who_started_them(empty):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + ORPHANS], env=os.environ | empty, capture_output=True, text=True, timeout=TIMEOUT
    )
    pids = done.stdout.split()
    assert pids, done.stderr
    for _ in range(10 * TIMEOUT):
        if not any(os.path.isdir(f"/proc/{pid}") and "Z" not in _state(pid) for pid in pids):
            break
        time.sleep(0.1)
    else:
        raise AssertionError(f"still there: {pids}")


def _state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_the_number_of_processes_may_be_given():
    code = "from opgrad.cpu.compiler import processes\nprint(processes.compilers())"
    assert run_python(code, OPGRAD_COMPILERS="0") == "None"
    wrong = code.replace("print(", "try:\n print(").replace("())", "())\nexcept ValueError as error:\n print(error)", 1)
    assert "OPGRAD_COMPILERS is 'x'" in run_python(wrong, OPGRAD_COMPILERS="x")


def test_training_leaves_compiling_to_others(empty):
    """All that a first step needs was foreseen: neither Numba nor LLVM is loaded here."""
    pytest.importorskip("onnxruntime")
    assert run_python(TRAINING.format(folder=str(ARTIFACTS / "mlp_mse")), **empty) == "True []"
