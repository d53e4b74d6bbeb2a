"""Processes that need the same kernels: each is compiled once, and nobody waits long for an owner that is lost."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
from subprocesses import TIMEOUT

from opgrad.cpu.compiler import cache
from opgrad.cpu.compiler.cache import ObjectCache

pytestmark = pytest.mark.any_cpu

fcntl = pytest.importorskip("fcntl")  # elsewhere nobody waits
NAME = "name"
FILE = f".{NAME}.claim"

# Each says, once all have started, what it compiles; the kernels are some of the runtime's own.
COMPILES = """
import sys
from opgrad.cpu.compiler import decorators
from opgrad.cpu.runtime import plan, pool
compile = decorators.object_code
def told(function, form, symbol):
    print(symbol, flush=True)
    return compile(function, form, symbol)
decorators.object_code = told
print("ready", flush=True)
sys.stdin.readline()
for each in (plan.execute, pool.malloc, pool.drop): each.link()
"""

OWNS = """
import sys, time
from opgrad.cpu.compiler import cache
with cache.claimed(sys.argv[1], sys.argv[2]):
    print("mine", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return str(tmp_path)


@pytest.fixture
def start():
    """Start a Python that says something first; none is left behind."""
    started = []

    def begin(code, *words, **environment):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", code, *words], env=os.environ | environment, **pipes))
        assert started[-1].stdout.readline().strip() in ("mine", "ready")
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def no_patience(monkeypatch):
    """Whoever waits for an owner gives up at once; without it, whoever waits in vain makes the test run for long."""
    monkeypatch.setattr(cache, "PATIENCE", 0.05)


def claim(folder):
    """Get the claim and give it back; whether it was there."""
    with cache.claimed(folder, NAME):
        return FILE in os.listdir(folder)


def locked(path):
    """Whether somebody has the lock of a file."""
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_processes_at_once_compile_each_kernel_once(folder, start):
    processes = [start(COMPILES, OPGRAD_CACHE_DIR=folder, OPGRAD_COMPILERS="0") for _ in range(4)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=TIMEOUT)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    compiled = sorted(line for lines in said for line in lines)
    assert len(compiled) == len(set(compiled)) == 3
    (environment,) = os.listdir(folder)
    assert all(name.endswith(".o") for name in os.listdir(os.path.join(folder, environment)) if name != "host")


def test_a_claim_waits_for_its_owner(folder, start):
    owner, order = start(OWNS, folder, NAME), []

    def wait():
        with cache.claimed(folder, NAME):
            order.append("waited")

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(5 * cache.LOOK)
    order.append("owned")
    owner.communicate("go on\n", timeout=TIMEOUT)
    waiting.join(TIMEOUT)
    assert order == ["owned", "waited"]
    assert claim(folder)
    assert os.listdir(folder) == []


def test_an_owner_that_dies_is_not_waited_for(folder, start):
    owner = start(OWNS, folder, NAME)
    owner.kill()
    owner.wait()
    assert os.listdir(folder) == [FILE]
    assert claim(folder)
    assert os.listdir(folder) == []


@pytest.mark.usefixtures("no_patience")
def test_an_owner_that_stops_is_not_waited_for_long(folder, start):
    """It keeps its claim, and takes the file with it when it goes on."""
    owner = start(OWNS, folder, NAME)
    os.kill(owner.pid, signal.SIGSTOP)
    with cache.claimed(folder, NAME):
        assert locked(os.path.join(folder, FILE))
    assert os.listdir(folder) == [FILE]
    os.kill(owner.pid, signal.SIGCONT)
    owner.communicate("go on\n", timeout=TIMEOUT)
    assert os.listdir(folder) == []


def test_a_child_that_is_forked_meanwhile_has_no_part_in_it(folder):
    """The lock belongs to the open file, which both have."""
    with cache.claimed(folder, NAME), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other tests have left threads
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
        file = os.open(os.path.join(folder, FILE), os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(file)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_lock_that_others_may_hold_is_not_waited_for(folder, mode):
    path = os.path.join(folder, FILE)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.chmod(path, mode)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with cache.claimed(folder, NAME):
        assert locked(path)
    os.close(descriptor)
    assert os.listdir(folder) == [FILE]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("elsewhere", path)])
def test_what_is_no_file_is_left_alone(folder, make):
    make(os.path.join(folder, FILE))
    with cache.claimed(folder, NAME):
        pass
    assert os.listdir(folder) == [FILE]


def test_where_nothing_can_be_written_nothing_is_claimed(folder):
    with open(os.path.join(folder, "file"), "w"):
        pass
    for place in (None, os.path.join(folder, "file"), "/proc/nowhere"):
        with cache.claimed(place, NAME):
            pass
    os.chmod(folder, 0o777)  # others could put their own there
    with cache.claimed(folder, NAME):
        assert os.listdir(folder) == ["file"]


def test_an_error_gives_the_claim_back(folder):
    kept = ObjectCache("environment", folder)

    def interrupted():
        with kept.claim(NAME):
            assert os.listdir(kept.folder) == [FILE]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(kept.folder) == []
