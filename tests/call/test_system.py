"""What is asked of operating systems, their control groups, and processes that compile kernels ahead."""

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from subprocesses import TIMEOUT, run_python

from opgrad.base import limits
from opgrad.cpu.runtime import pool, threads
from opgrad.cpu.runtime.system import HEAP, Posix, Windows, address, system

pytestmark = pytest.mark.any_cpu

CALL = ctypes.CFUNCTYPE(ctypes.c_size_t, *[ctypes.c_size_t] * 4)


class Library:
    """A library that has some functions, each with an address, and writes down what is called with which words."""

    def __init__(self, names, results=()):
        self.names, self.results, self.called, self.functions = names, dict(results), [], {}

    def __getattr__(self, name):
        if name not in self.names:
            raise AttributeError(name)
        return self.functions.setdefault(name, self._function(name))

    def _function(self, name):
        library = self

        class Function(CALL):
            _flags_, _restype_, _argtypes_ = CALL._flags_, CALL._restype_, CALL._argtypes_

            def __call__(self, *words):
                library.called.append((name, *(getattr(word, "value", word) for word in words)))
                return library.results.get(name, 0)

        return Function(lambda *words: 0)


PTHREADS = [
    *HEAP,
    *("mmap", "munmap", "madvise", "pthread_mutex_init", "pthread_cond_init", "pthread_create"),
    *("pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_wait", "pthread_cond_broadcast"),
]
KERNEL32 = [
    *("InitializeSRWLock", "InitializeConditionVariable", "CreateThread", "CloseHandle"),
    *("AcquireSRWLockExclusive", "ReleaseSRWLockExclusive", "SleepConditionVariableSRW", "WakeAllConditionVariable"),
]


def macos(**results):
    library = Library(PTHREADS, results)
    return Posix(library), library


def windows(**results):
    kernel = Library(KERNEL32, results)
    return Windows(Library(HEAP), kernel), kernel


def test_macos_waits_with_pthreads():
    given, library = macos()
    assert given.waiting(640, 768) == [address(library, name) for name in PTHREADS[-4:]]
    assert library.called == [("pthread_mutex_init", 640, None), ("pthread_cond_init", 768, None)]


def test_windows_waits_with_slim_locks():
    given, kernel = windows()
    assert given.waiting(640, 768) == [address(kernel, name) for name in KERNEL32[-4:]]
    assert kernel.called == [("InitializeSRWLock", 640), ("InitializeConditionVariable", 768)]


def test_a_system_without_gettid_leaves_threads_where_they_are():
    assert macos()[0].affinity() == windows()[0].affinity() == []


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_thread_of_posix_blocks_signals_and_a_refusal_is_told():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    given, library = macos()
    assert given.start_thread(5, 7) == ""
    ((name, _, attributes, entry, argument),) = library.called
    assert (name, attributes, entry, argument) == ("pthread_create", None, 5, 7)
    assert macos(pthread_create=11)[0].start_thread(5, 7) == os.strerror(11)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_windows_closes_the_handle_of_a_thread_that_goes_on():
    handle = 0x7FF600000010  # more than 32 bits
    given, kernel = windows(CreateThread=handle)
    assert given.start_thread(5, 7) == ""
    assert kernel.called == [("CreateThread", None, 0, 5, 7, 0, None), ("CloseHandle", handle)]
    assert kernel.CreateThread.restype is ctypes.c_void_p


def test_windows_tells_why_it_refuses(monkeypatch):
    monkeypatch.setattr(ctypes, "get_last_error", lambda: 8, raising=False)
    monkeypatch.setattr(ctypes, "FormatError", lambda code: f"error {code}", raising=False)
    given, kernel = windows()
    assert given.start_thread(5, 7) == "error 8"
    assert [name for name, *_ in kernel.called] == ["CreateThread"]


@pytest.mark.parametrize("make", [macos, windows])
def test_the_pool_of_another_system(monkeypatch, make):
    """Without mappings all blocks are the heap's; functions come from the system that is asked."""
    given, _ = make()
    monkeypatch.setattr(pool, "system", lambda: given)
    made = pool._made()
    assert made.c_malloc == given.heap("malloc")
    assert made.c_free == given.heap("free")
    mappings = given.mappings() or (0, 0, 0, 0)
    assert [made.c_map, made.c_unmap, made.c_advise, made.flags] == list(mappings)


@pytest.mark.parametrize("make", [macos, windows])
def test_the_workers_of_another_system(monkeypatch, make):
    given, library = make(CreateThread=1)
    monkeypatch.setattr(threads, "system", lambda: given)
    team = threads.ThreadPool()
    assert team.start(3) == ""
    started = [call for call in library.called if call[0] in ("pthread_create", "CreateThread")]
    assert len(started) == team.workers == 3
    assert all(threads.work.address in call and team.address in call for call in started)
    assert team._block.c_get_cpu == team._block.c_set_affinity == 0
    assert library.called[0][1] == team._block.mutex


def test_this_system_has_all_that_is_asked_for():
    assert all(system().heap(name) for name in HEAP)
    block = (ctypes.c_int64 * 32)()
    assert all(system().waiting(ctypes.addressof(block), ctypes.addressof(block) + 128))


UNLIMITED = 9223372036854771712  # what version 1 says of memory that has no limit
OTHERS = "21 1 0:20 / / rw,relatime shared:1 - ext4 /dev/root rw\n24 21 0:22 / /proc rw - proc proc rw"
NEW = "30 21 0:26 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
OLD_CPU = "31 21 0:27 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
OLD_MEMORY = "32 21 0:28 {top} /sys/fs/cgroup/me\\040mory rw - cgroup cgroup rw,memory"


def folders(root, group, mounts, files):
    """A system whose process lies in these groups, with these files below /sys/fs/cgroup."""
    process = root / "proc" / "self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text(group)
    (process / "mountinfo").write_text("\n".join([OTHERS, *mounts]) + "\n")
    for name, text in files.items():
        path = root / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def found(*arguments):
    root = folders(*arguments)
    return limits.cpus(root), limits.memory(root)


def test_version_2_takes_the_smallest_on_the_way_up(tmp_path):
    files = {
        "cpu.stat": "usage_usec 1",
        "a/cpu.max": "250000 100000",
        "a/memory.max": "max",
        "a/b/cpu.max": "800000 100000",
        "a/b/memory.max": "5000",
        "a/b/c d/cpu.max": "max 100000",
        "a/b/c d/memory.max": "7000",
        "a/other/cpu.max": "1000 100000",
    }
    assert found(tmp_path, "0::/a/b/c d\n", [NEW.format(top="/")], files) == (2.5, 5000)


def test_free_memory_is_what_is_left_within_the_limit(tmp_path):
    files = {"a/memory.max": "5000000"}
    root = folders(tmp_path, "0::/a\n", [NEW.format(top="/")], files)
    assert limits.free_memory(root) is None
    for left, expected in ((4000, 4096000), (9000, 5000000)):
        (root / "proc" / "meminfo").write_text(f"MemTotal:  9999 kB\nMemAvailable:  {left} kB\n")
        assert limits.free_memory(root) == expected


def test_version_1_has_a_hierarchy_for_each_controller(tmp_path):
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/x/cpu.cfs_quota_us": "150000",
        "cpu,cpuacct/x/cpu.cfs_period_us": "50000",
        "cpu,cpuacct/x/y/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/x/y/cpu.cfs_period_us": "50000",
        "me mory/memory.limit_in_bytes": UNLIMITED,
        "me mory/m/memory.limit_in_bytes": 4096,
    }
    group = "4:memory:/m\n3:cpu,cpuacct:/x/y\n1:name=systemd:/elsewhere\n0::/x\n"
    assert found(tmp_path, group, [OLD_CPU.format(top="/"), OLD_MEMORY.format(top="/")], files) == (3.0, 4096)


def test_both_versions_at_once(tmp_path):
    """Memory is version 1's there, CPUs version 2's."""
    files = {"unified/u/cpu.max": "50000 100000", "me mory/memory.limit_in_bytes": 8192}
    mounts = [OLD_MEMORY.format(top="/"), NEW.format(top="/").replace("cgroup rw", "cgroup/unified rw", 1)]
    assert found(tmp_path, "4:memory:/\n0::/u\n", mounts, files) == (0.5, 8192)


@pytest.mark.parametrize(
    ("top", "group"),
    [("/docker/1", "/docker/1"), ("/docker/1", "/docker/1/inner"), ("/", "/../../sibling"), ("/docker/1", "/other")],
    ids=["mounted itself", "below what is mounted", "out of sight", "beside what is mounted"],
)
def test_containers_see_their_own_group_as_the_root(tmp_path, top, group):
    files = {"cpu.max": "400000 100000", "memory.max": "9000", "inner/cpu.max": "100000 100000", "inner/memory.max": 10}
    inner = group.endswith("inner")
    assert found(tmp_path, f"0::{group}\n", [NEW.format(top=top)], files) == ((1.0, 10) if inner else (4.0, 9000))


@pytest.mark.parametrize("text", ["", "max", "max 100000", "100000", "-1 100000", "5 0", "five 5"])
def test_what_is_no_limit(tmp_path, text):
    """Also of a system that has none of these files."""
    files = {"cpu.max": text, "memory.max": text.split(" ")[0].replace("100000", "max").replace("5", "max")}
    assert found(tmp_path / "1", "0::/\n", [NEW.format(top="/")], files) == (math.inf, math.inf)
    assert limits.cpus(tmp_path) == limits.memory(tmp_path) == math.inf


def test_a_file_that_is_no_text(tmp_path):
    root = folders(tmp_path, "0::/\n", [NEW.format(top="/")], {"cpu.max": ""})
    (root / "sys/fs/cgroup/cpu.max").write_bytes(b"\xff\xfe")
    assert limits.cpus(root) == math.inf


@pytest.mark.parametrize(("quota", "count"), [(0.5, 1), (1.0, 1), (2.5, 2), (7.99, 7), (math.inf, 8)])
def test_threads_stay_within_the_quota(monkeypatch, quota, count):
    monkeypatch.delenv("OPGRAD_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(limits, "cpus", lambda: quota)
    assert threads.default_threads() == count
    monkeypatch.setenv("OPGRAD_NUM_THREADS", "16")
    assert threads.default_threads() == 16


def test_the_pool_stays_within_the_limit(monkeypatch):
    monkeypatch.setattr(limits, "memory", lambda: 12345)
    assert pool._memory() == 12345
    monkeypatch.setattr(limits, "memory", lambda: math.inf)
    assert pool._memory() > 12345


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
