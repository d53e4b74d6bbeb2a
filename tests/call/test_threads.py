"""Threads: never another result, many callers at once, forks, other runtimes in the process."""

import importlib.util
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from samples import bits, call, sample
from subprocesses import TIMEOUT, run_python

import opgrad
from opgrad.base import limits
from opgrad.cpu.runtime import threads

SHAPES = [(7, 40_000), (3000, 37), (40, 33, 65), (1, 300_000), (20_000, 4)]
GATHERED = 1 << 18  # elements, about, that indices name


@pytest.fixture(autouse=True)
def workers(monkeypatch):
    """Our own workers, though another test may have loaded torch."""
    before = threads._team.value
    monkeypatch.setattr(threads, "_forked", True)
    monkeypatch.setattr(threads, "_pool", None)
    threads._team.value = threads.UNSETTLED
    yield
    threads._team.value = before


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.one_in(2)
def test_results_do_not_depend_on_the_number_of_threads(op, dtype, rng):
    for shape in SHAPES:
        arguments = sample(op, shape, dtype, rng, indices=(GATHERED // math.prod(shape[1:]),))
        results = []
        for count in (1, 2, 3, 8):
            opgrad.set_num_threads(count)
            results.append([bits(array) for array in call(op, arguments)])
        assert all(result == results[0] for result in results), shape


STRESS = Path(__file__).parents[1] / "support" / "stress_threads.py"


def test_stress():
    """OPGRAD_STRESS_SECONDS=60 is the long form."""
    seconds = os.environ.get("OPGRAD_STRESS_SECONDS", "2")
    done = subprocess.run([sys.executable, STRESS, seconds], timeout=TIMEOUT + float(seconds), check=False)
    assert done.returncode == 0


REFUSED = """
import resource, warnings
import numpy as np, opgrad
x = np.random.default_rng(0).normal(size=(64, 20000)).astype("float32")
opgrad.set_num_threads(2)
expected, out = opgrad.softmax(x), np.empty_like(x)
resource.setrlimit(resource.RLIMIT_STACK, (1 << 23, resource.getrlimit(resource.RLIMIT_STACK)[1]))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20), limit[1]))
for _ in range(2):  # each setting asks the system again
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        opgrad.set_num_threads(32)
        same = np.array_equal(opgrad.softmax(x, out=out), expected)
    fewer = opgrad.get_num_threads()
    print(same, len(told), 2 <= fewer < 32, str(told[0].message).endswith(f"calls use {fewer} of 32 threads"))
resource.setrlimit(resource.RLIMIT_AS, limit)
opgrad.set_num_threads(32)
print(opgrad.get_num_threads(), np.array_equal(opgrad.softmax(x), expected))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux's")
def test_threads_that_the_system_refuses():
    assert run_python(REFUSED).splitlines() == ["True 1 True True"] * 2 + ["32 True"]


REFUSED_AT_FIRST = """
import warnings
import numpy as np, opgrad
from opgrad.cpu.runtime import threads
threads.system().start_thread = lambda function, argument: "no"
warnings.simplefilter("error")
x = np.ones((64, 20000), "float32")
opgrad.set_num_threads(4)
try:
    opgrad.softmax(x)
except RuntimeWarning as warning:
    print(warning)
print(np.allclose(opgrad.softmax(x), 1 / 20000), opgrad.get_num_threads())
"""


def test_threads_refused_at_first_are_told_once():
    told = "opgrad: the system refused to start a thread (no): calls use 1 of 4 threads"
    assert run_python(REFUSED_AT_FIRST).splitlines() == [told, "True 1"]


MANY = """
import os
os.cpu_count = lambda: 40
import numpy as np, opgrad
rng = np.random.default_rng(0)
x, dy, indices = rng.normal(size=(64, 20000)), rng.normal(size=(50_000, 8)), rng.integers(0, 1000, 50_000)
x, dy, results = x.astype("float32"), dy.astype("float32"), []
for count in (1, 160, 65, 3):
    opgrad.set_num_threads(count)
    results.append((opgrad.softmax(x).tobytes(), opgrad.gather_grad((1000, 8), indices, dy).tobytes()))
print(all(result == results[0] for result in results))
"""


def test_more_threads_than_shares():
    assert run_python(MANY) == "True"


FORK = """
import os, threading, warnings
warnings.simplefilter("ignore")
import numpy as np, opgrad
opgrad.set_num_threads(4)
x = np.random.default_rng(0).normal(size=(64, 20000)).astype("float32")
small = x[:1, :100].copy()
for _ in range(3): expected, little = opgrad.softmax(x), opgrad.softmax(small)  # natively from the second call on
busy = threading.Thread(target=lambda: [opgrad.softmax(x) for _ in range(50)])
busy.start()
children = []
for _ in range(4):
    child = os.fork()
    if not child:
        same = all(np.array_equal(opgrad.softmax(x), expected) for _ in range(5))
        same &= all(np.array_equal(opgrad.softmax(small), little) for _ in range(3))
        grandchild = os.fork()
        if not grandchild:
            os._exit(not np.array_equal(opgrad.softmax(x), expected))
        os._exit(not (same and os.waitpid(grandchild, 0)[1] == 0))
    children.append(child)
busy.join()
print(all(os.waitpid(child, 0)[1] == 0 for child in children) and np.array_equal(opgrad.softmax(x), expected))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_fork():
    assert run_python(FORK) == "True"


OPENMP = """
import ctypes, os, threading, time, warnings
warnings.simplefilter("ignore")
import numpy as np, opgrad, torch
from opgrad.cpu.runtime import threads
from opgrad.base import limits
torch.set_num_threads(2)
x = torch.randn(64, 20000)
expected = opgrad.softmax(x)
print(0 if threads._pool.openmp else threads._pool.workers, "of its own")
def same(): return np.array_equal(opgrad.softmax(x).numpy(), expected.numpy())
counts = [count for count in (1, 2, 3, 8) if opgrad.set_num_threads(count) is None and same()]
print("same with", *counts)
wrong = []
callers = [threading.Thread(target=lambda: [same() or wrong.append(1) for _ in range(40)]) for _ in range(4)]
for caller in callers: caller.start()
for caller in callers: caller.join()
print("same for", len(callers) - len(wrong), "callers")
seen = set()
@ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
def part(arguments, number):
    seen.add(threading.get_native_id())
    time.sleep(0.005)
def at_work(where):
    seen.clear()
    threads.run.call(threads.team(), ctypes.cast(part, ctypes.c_void_p).value, 0, 20)
    print(len(seen), where)
at_work("at work")
torch.set_num_threads(1)
at_work("when torch may use one")
thread = threading.Thread(target=at_work, args=("in a new thread",))
thread.start()
thread.join()
torch.set_num_threads(2)
opgrad.set_num_threads(1)
at_work("when opgrad may use one")
opgrad.set_num_threads(2)
torch.set_num_threads(1)
print(opgrad.get_num_threads(), "where torch uses one")
child = os.fork()
if not child:
    one = opgrad.get_num_threads()
    torch.set_num_threads(2)
    os._exit(not (one == 1 and opgrad.get_num_threads() == 2))
print("as torch in a child" if os.waitpid(child, 0)[1] == 0 else "more than torch in a child")
torch.set_num_threads(2)
child = os.fork()
if not child:
    os._exit(not (same() and threads._pool.workers and not threads._pool.openmp))
print("same in a child" if os.waitpid(child, 0)[1] == 0 else "lost")
"""


# Calls from one CPU and then another; where the system moves the caller between them, from any.
CPUS = """
import ctypes, os, time
import numpy as np
from pathlib import Path
import opgrad
from opgrad.cpu.runtime import threads
from opgrad.cpu.runtime import threads
x = np.random.default_rng(0).normal(size=(64, 20000)).astype("float32")
def tasks(): return [int(path.name) for path in Path("/proc/self/task").iterdir()]
def masks(): return {thread: os.sched_getaffinity(thread) for thread in tasks()}
def choose(cpus):
    for thread in tasks(): os.sched_setaffinity(thread, cpus)
def call_from(cpu):
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    os.sched_setaffinity(0, allowed)
    opgrad.softmax(x)
everywhere = os.sched_getaffinity(0)
first, second, *_ = sorted(everywhere)
opgrad.set_num_threads(2)
others = set(tasks())
opgrad.softmax(x)
(worker,) = set(tasks()) - others
def word(name): return ctypes.c_int64.from_address(getattr(threads._pool._block, name)).value
while word("threads") != worker: time.sleep(0.01)
"""
OWN = """
found = []
for cpu in (first, second) * 5:
    call_from(cpu)
    if word("cpu") != threads.NO_CPU:  # as the worker leaves it, once
        found.append(os.sched_getaffinity(worker) == everywhere - {word("cpu")})
print(len(found) > 0 and all(found))
"""
CHOSEN = """
found = []
for cpus in ({first}, {second}, {first}, everywhere) * 3:
    for cpu in (first, second): call_from(cpu)
    choose(cpus)
    for cpu in sorted(cpus): call_from(cpu)
    found.append(all(mask <= cpus for mask in masks().values()))
print(all(found) and os.sched_getaffinity(worker) < everywhere)
"""
OF_TORCH = """
import torch
from opgrad.cpu.compiler.decorators import native
from opgrad.cpu.compiler.words import at
from opgrad.cpu.runtime.threads import Block
@native(2)
def move_off(pool: int, thread: int) -> int:
    threads.move_off(at(Block, pool), thread)
    return 0
torch.set_num_threads(2)
torch.relu(torch.ones(1 << 20))
before = masks()
opgrad.softmax(x[:50])
print(threads._pool.openmp, len(before) > 2)
for cpu in (first, second): call_from(cpu)
print(masks() == before)
choose({second})
for _ in range(3): opgrad.softmax(x)
print(set(map(frozenset, masks().values())) == {frozenset({second})})
choose(everywhere)
move_off.call(threads._pool.address, next(iter(set(masks()) - {os.getpid()})))
move_off.call(threads._pool.address, 2**31 - 1)  # a thread that is gone
print(set(map(frozenset, masks().values())) == {frozenset(everywhere)})
"""


def few_cpus():
    return not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2


@pytest.mark.xfail(few_cpus(), reason="the system has one CPU alone, or does not let threads choose", run=False)
@pytest.mark.parametrize("code", [OWN, CHOSEN], ids=["the caller's CPU", "masks that change"])
def test_workers_leave_the_callers_cpu_within_their_mask(code):
    """Whoever changes the CPUs of all threads, as taskset does, is respected from the next call on."""
    assert run_python(CPUS + code) == "True"


FORKED = """
import ctypes, os, sys, threading, time, warnings
warnings.simplefilter("ignore")
import numpy as np, opgrad
from opgrad.cpu.runtime import threads
{before}
opgrad.set_num_threads(3)
x = np.random.default_rng(0).normal(size=(64, 20000)).astype("float32")
opgrad.softmax(x)
seen = set()
@ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
def part(arguments, number):
    seen.add(threading.get_native_id())
    time.sleep(0.005)
def at_work(most):
    torch.set_num_threads(most)
    seen.clear()
    threads.run.call(threads.team(), ctypes.cast(part, ctypes.c_void_p).value, 0, 30)
    return len(seen) <= most
if child := os.fork():
    sys.exit(os.waitpid(child, 0)[1])
opgrad.softmax(x)
{after}
opgrad.softmax(x[:50])  # a new plan, which finds torch
print(all(map(at_work, (1, 2, 1))), threads._pool.workers, threads._pool.openmp, flush=True)
os._exit(0)
"""


TOGETHER = """
import numpy as np
{first}
{second}
torch.set_num_threads(2)
opgrad.set_num_threads(2)
x = np.random.default_rng(0).normal(size=(64, 20000)).astype("float32")
t = torch.from_numpy(x)
for _ in range(20):
    ours = opgrad.softmax(x)
    theirs = torch.softmax(t, -1).numpy()
print(np.allclose(ours, theirs, rtol=1e-5))
"""


if importlib.util.find_spec("torch"):

    @pytest.mark.parametrize("order", [("import torch", "import opgrad"), ("import opgrad", "import torch")])
    def test_beside_torch(order):
        assert run_python(TOGETHER.format(first=order[0], second=order[1])) == "True"

    @pytest.mark.xfail(few_cpus(), reason="the system has one CPU alone, or does not let threads choose", run=False)
    def test_threads_of_torch_are_left_alone():
        assert run_python(CPUS + OF_TORCH).splitlines() == ["True True", "True", "True", "True"]

    @pytest.mark.skipif(sys.platform != "linux", reason="torch's OpenMP can be asked for its threads on Linux alone")
    @pytest.mark.parametrize("places", [("import torch", ""), ("", "import torch")], ids=["before", "in the child"])
    def test_a_forked_child_uses_no_more_threads_than_torch(places):
        """As the workers of a DataLoader, each of which has torch use one."""
        before, after = places
        assert run_python(FORKED.format(before=before, after=after)) == "True 2 False"

    @pytest.mark.skipif(sys.platform != "linux", reason="torch's OpenMP can be asked for its threads on Linux alone")
    def test_help_from_openmp():
        assert run_python(OPENMP).splitlines() == [
            "0 of its own",
            "same with 1 2 3 8",
            "same for 4 callers",
            "2 at work",
            "1 when torch may use one",
            "1 in a new thread",
            "1 when opgrad may use one",
            "1 where torch uses one",
            "as torch in a child",
            "same in a child",
        ]


@pytest.mark.parametrize(("given", "count"), [("3", 3), ("100000", threads.MOST_THREADS)])
def test_environment_variable(given, count):
    code = "import opgrad; print(opgrad.get_num_threads())"
    assert run_python(code, OPGRAD_NUM_THREADS=given) == str(count)


WRONG = """
import os, opgrad
for wrong in ("0", "-1", "two", "1.5", ""):
    os.environ["OPGRAD_NUM_THREADS"] = wrong
    try: opgrad.get_num_threads()
    except ValueError as error: print(str(error).replace(repr(wrong), "…"))
"""


def test_wrong_environment_variable():
    expected = "OPGRAD_NUM_THREADS is …, expected a whole number of at least 1"
    assert run_python(WRONG).splitlines() == [expected] * 5


@pytest.mark.usefixtures("threads")
def test_set_and_get():
    for count in (1, 2, np.int64(3), 5):
        opgrad.set_num_threads(count)
        assert opgrad.get_num_threads() == min(count, threads.openmp_most() or count)  # PyTorch may be loaded
    before = opgrad.get_num_threads()
    most = threads.MOST_THREADS
    assert most == max(64, 4 * os.cpu_count())
    for wrong in (0, -3, most + 1, 100_000, 10**30):
        with pytest.raises(ValueError, match=f"n is {wrong}, expected at least 1 and at most {most}$"):
            opgrad.set_num_threads(wrong)
    for wrong in (1.5, "2", None, True):
        with pytest.raises(TypeError, match=f"^set_num_threads: n is {wrong!r}, expected an int"):
            opgrad.set_num_threads(wrong)
    assert opgrad.get_num_threads() == before


def test_default_is_the_process_s_cpus():
    code = "import opgrad; print(opgrad.get_num_threads())"
    given = run_python(code, without=["OPGRAD_NUM_THREADS"])
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert int(given) == max(1, int(min(cpus, limits.cpus())))


FAULT = """
import ctypes, faulthandler, threading, time
import opgrad
from opgrad.cpu.runtime import threads
from opgrad.base import limits
faulthandler.enable()
opgrad.set_num_threads(2)
@ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
def part(arguments, number):
    if threading.current_thread() is threading.main_thread():
        time.sleep(0.01)
    else:
        ctypes.string_at(0)
threads.run.call(threads.team(), ctypes.cast(part, ctypes.c_void_p).value, 0, 200)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_fault_in_a_worker_is_reported():
    done = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.startswith("Fatal Python error: Segmentation fault"), done.stderr
