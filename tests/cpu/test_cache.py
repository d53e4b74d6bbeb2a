"""The cache of machine code: who is trusted, what an entry is bound to, failures, processes that need one kernel."""

import errno
import importlib
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
from subprocesses import TIMEOUT, run_python

import opgrad.cpu
from opgrad.cpu.compiler import cache as claiming
from opgrad.cpu.compiler import decorators, sources, words
from opgrad.cpu.compiler.cache import MOST_BYTES, ObjectCache, directory
from opgrad.cpu.kernels import activation
from opgrad.cpu.runtime import plan

pytestmark = pytest.mark.any_cpu

pwd, resource = pytest.importorskip("pwd"), pytest.importorskip("resource")  # on Windows nothing is checked

CODE = b"object code"
SOMEBODY = 54321  # a user that is neither root nor, presumably, the caller
PACKAGE = Path(sources.ROOT) / "opgrad"


@pytest.fixture
def cache(tmp_path):
    """A cache with one entry."""
    made = ObjectCache("environment", str(tmp_path / "cache"))
    made.write("name", CODE)
    assert made.read("name") == CODE
    return made


@pytest.fixture
def give_away(monkeypatch):
    """What makes files belong to somebody else: really as root, else by taking another user for the caller."""

    def give(path):
        if os.geteuid():
            monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
        else:
            os.chown(path, SOMEBODY, -1, follow_symlinks=False)

    return give


def refused(cache, match):
    """Whether the cache is left alone, with one warning."""
    before = {path: path.lstat().st_mtime_ns for path in Path(cache.folder).glob("*")}
    with pytest.warns(RuntimeWarning, match=match) as found:
        assert cache.read("name") is None
    cache.write("name", CODE)
    assert cache.read("name") is None
    return len(found) == 1 and before == {path: path.lstat().st_mtime_ns for path in Path(cache.folder).glob("*")}


# --- trust -----------------------------------------------------------------------------------------------------------


def test_what_is_made_is_the_callers_alone(tmp_path):
    before = os.umask(0)
    try:
        cache = ObjectCache("environment", str(tmp_path / "one" / "two"))
        cache.write("name", CODE)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"one": 0o700, "two": 0o700, "environment": 0o700, "name.o": 0o600}


@pytest.mark.parametrize("mode", [None, 0o770, 0o707], ids=["of others", "writable to a group", "writable to all"])
@pytest.mark.parametrize("place", ["", "..", "../.."], ids=["folder", "parent", "grandparent"])
def test_folders_that_are_not_the_callers_alone_are_refused(tmp_path, give_away, place, mode):
    cache = ObjectCache("environment", str(tmp_path / "shared" / "cache"))
    cache.write("name", CODE)
    path = os.path.normpath(os.path.join(cache.folder, place))
    if mode is None:
        give_away(path)
        assert refused(cache, r"belongs to user \d+, expected .*root.*OPGRAD_CACHE_DIR")
    else:
        os.chmod(path, mode)
        assert refused(cache, "others can write to .* chmod go-w .*OPGRAD_CACHE_DIR")


def test_a_sticky_bit_protects_what_is_in_a_shared_folder(cache, tmp_path):
    os.chmod(tmp_path / "cache", 0o1777)
    assert cache.read("name") == CODE
    os.chmod(cache.folder, 0o1777)  # but anybody could add files to it
    assert refused(cache, "others can write")


def test_files_that_are_not_the_callers_alone_are_refused(cache, give_away):
    path = os.path.join(cache.folder, "name.o")
    os.chmod(path, 0o622)
    with pytest.warns(RuntimeWarning, match=r"others can write to .*name\.o"):
        assert cache.read("name") is None
    os.chmod(path, 0o600)
    give_away(path)
    with pytest.warns(RuntimeWarning, match="belongs to user"):
        assert ObjectCache("environment", os.path.dirname(cache.folder)).read("name") is None


def test_links_are_followed_if_they_are_the_callers(cache, tmp_path, give_away):
    (tmp_path / "link").symlink_to("cache/../cache")
    (tmp_path / "absolute").symlink_to(tmp_path / "link")
    linked = ObjectCache("environment", str(tmp_path / "absolute"))
    assert linked.read("name") == CODE
    give_away(tmp_path / "link")
    assert refused(linked, "belongs to user")


def test_a_link_into_a_folder_of_others_is_refused(cache, tmp_path):
    os.chmod(tmp_path / "cache", 0o777)
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "own" / "link").symlink_to(tmp_path / "cache")
    assert refused(ObjectCache("environment", str(tmp_path / "own" / "link")), "others can write to .*cache;")


def test_links_in_a_circle_are_an_error(tmp_path):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    cache = ObjectCache("environment", str(tmp_path / "one"))
    assert cache.read("name") is None
    assert "links" in cache.problem()


def test_a_read_only_cache_of_root_is_used():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        cache = ObjectCache("environment", folder)
        cache.write("name", CODE)
        os.chmod(os.path.join(cache.folder, "name.o"), 0o444)
        os.chmod(cache.folder, 0o555)
        caller = os.geteuid()
        if not caller:
            os.seteuid(SOMEBODY)
        try:
            assert cache.read("name") == CODE
            cache.write("other", CODE)
            assert cache.read("other") is None
            assert cache.problem() == f"{cache.folder}: {os.strerror(errno.EACCES)}"
        finally:
            os.seteuid(caller)
            os.chmod(cache.folder, 0o755)
        assert os.listdir(cache.folder) == ["name.o"]


def test_two_may_try_a_cache_at_once(cache, monkeypatch):
    """Each makes a file and removes it; here one does both between the other's two steps."""
    unlink, other = os.unlink, []

    def after_another(path, **options):
        if not other:
            other.append("")
            other[0] = ObjectCache("environment", os.path.dirname(cache.folder)).problem()
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", after_another)
    assert (cache.problem(), other) == ("", [""])
    assert os.listdir(cache.folder) == ["name.o"]


def test_without_a_home_nothing_is_kept(monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "OPGRAD_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert directory() is None
    cache = ObjectCache("environment", directory())
    cache.write("name", CODE)
    assert cache.read("name") is None
    assert "no home directory" in cache.problem()


def test_a_relative_path_in_a_folder_that_is_gone(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("OPGRAD_CACHE_DIR", str(tmp_path))
    assert directory() == str(tmp_path)
    monkeypatch.setenv("OPGRAD_CACHE_DIR", "cache")
    assert directory() is None
    assert "cache is in the current folder, which is gone; name a folder" in ObjectCache("e", None).problem()


# --- entries ---------------------------------------------------------------------------------------------------------


DAMAGES = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "changed": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_not_read_and_are_written_again(cache, damage):
    path = Path(cache.folder) / "name.o"
    path.write_bytes(damage(path.read_bytes()))
    assert cache.read("name") is None
    cache.write("name", CODE)
    assert cache.read("name") == CODE


def test_entries_are_bound_to_their_names(cache):
    cache.write("other", b"other code")
    one, two = (os.path.join(cache.folder, f"{name}.o") for name in ("name", "other"))
    os.rename(one, one + ".kept")
    os.rename(two, one)
    os.rename(one + ".kept", two)
    assert cache.read("name") is None
    assert cache.read("other") is None


def test_entries_are_bound_to_their_environment(cache, tmp_path):
    os.rename(cache.folder, tmp_path / "cache" / "another")
    assert ObjectCache("another", str(tmp_path / "cache")).read("name") is None


def too_large(path):
    path.write_bytes(b"")
    os.truncate(path, MOST_BYTES + 1)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), too_large, os.mkdir])
def test_only_regular_files_of_a_sane_size_are_read(cache, make):
    path = Path(cache.folder) / "name.o"
    path.unlink()
    make(path)
    assert cache.read("name") is None
    cache.write("name", CODE)
    assert cache.read("name") == (None if make is os.mkdir else CODE)
    assert os.listdir(cache.folder) == ["name.o"]


def test_a_failed_write_leaves_nothing_behind(cache):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        cache.write("large", b"x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(cache.folder) == ["name.o"]


def test_an_interrupted_write_leaves_nothing_behind(cache, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.write("other", CODE)
    assert os.listdir(cache.folder) == ["name.o"]


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    cache = ObjectCache("environment", str(tmp_path / "file" / "below"))
    cache.write("name", CODE)
    assert cache.read("name") is None
    assert cache.problem().endswith(os.strerror(errno.ENOTDIR))


# --- what code is made of --------------------------------------------------------------------------------------------


def digest(source, **space):
    """The digest of a function that some source defines."""
    exec(source, space)
    return sources.digest(space["kernel"])


KERNEL = """
import math
from opgrad.cpu.compiler.parameters import Rows
LIMIT, SIZES = 2, (1, 2)
def twice(x): return 2 * x
def named(x): return x
def make(number, formula):
    def kernel(units, x: Rows, count=3):
        if count in {"one", "two", "three"}:
            return (lambda y: y + 1)(twice(x) + number)
        return formula(math.floor(x)) + LIMIT + SIZES[0]
    return kernel
kernel = make(5, named)
"""
CHANGES = {
    "a function that is called": ("2 * x", "3 * x"),
    "a function that it was made from": ("return x", "return -x"),
    "a number that it was made from": ("make(5,", "make(5.0,"),
    "a global number": ("LIMIT, SIZES = 2,", "LIMIT, SIZES = 4,"),
    "a global tuple": ("(1, 2)", "(1, 4)"),
    "a default": ("count=3", "count=4"),
    "an annotation": ("x: Rows", "x: int"),
    "a constant inside": ("y + 1", "y + 4"),
    "an operator inside": ("y + 1", "y - 1"),
    "a word of a module": ("math.floor", "math.ceil"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_machine_code_is_made_of_counts(change):
    one, other = digest(KERNEL), digest(KERNEL.replace(*change))
    assert one
    assert other
    assert one != other


def test_nothing_else_counts():
    """Neither comments, places and documentation, nor what a kernel does not use."""
    others = KERNEL + "def unused(): pass\n", "# a comment\n\n" + KERNEL, KERNEL.replace("2 * x", "2 * x  # twice")
    assert {*map(digest, others)} == {digest(KERNEL)}
    documented = [KERNEL.replace("twice(x):", f"twice(x):\n    '{text}'\n   ") for text in ("Twice.", "Two times.")]
    assert len({*map(digest, documented)}) == 1


def test_a_name_of_a_module_is_not_a_global_of_the_same_name():
    source = "import math\ndef floor(x): return {}\ndef kernel(x): return math.floor(x)\n"
    assert digest(source.format("x")) == digest(source.format("-x"))
    assert digest(source + "import os\nfloor = os.environ") == digest(source.format("x"))


def test_code_with_something_unknown_in_it_is_not_kept():
    assert digest("import os\nplace = os.environ\ndef kernel(x): return place") is None


def kernels():
    """Every kernel and native function that opgrad.cpu has under a name, with its name."""
    for module in pkgutil.walk_packages(opgrad.cpu.__path__, "opgrad.cpu."):
        if ".lowering" not in module.name:
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, decorators.Kernel | decorators.Native) and value.__module__ == module.name:
                    yield f"{module.name}.{name}", value


def test_kernels_depend_on_a_handful_of_files():
    found = {name: {place(each) for each in sources.reached(kernel.function)} for name, kernel in kernels()}
    assert len(found) > 100
    for name, files in found.items():
        assert len(files) <= 14, name
        assert not [each for each in files if not each.startswith(("cpu/", "native/"))], name
        if not name.startswith("opgrad.call"):
            assert not [each for each in files if each.startswith(("cpu/programs/", "native/"))], name
    relu = {place(each) for each in sources.reached(activation.relu.function)}
    assert relu == {"cpu/kernels/activation.py", "cpu/kernels/loops/map.py"}


def place(function):
    return Path(function.__code__.co_filename).relative_to(PACKAGE).as_posix()


def test_every_kernel_can_be_kept():
    assert [name for name, kernel in kernels() if sources.digest(kernel.function) is None] == []


@pytest.fixture
def copy(tmp_path):
    """A copy of the package that may be changed, with a cache of its own."""
    files = shutil.ignore_patterns("__pycache__", "results", "*.json", "*.md")
    shutil.copytree(PACKAGE, tmp_path / "copy" / "opgrad", ignore=files)
    return tmp_path / "copy"


def change(path, before, after):
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after), encoding="utf-8")
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)  # it goes by times and sizes of files


def run_copy(copy, script, **variables):
    """The lines that a script prints, with the copy for opgrad."""
    environment = {"PYTHONPATH": str(copy), "OPGRAD_CACHE_DIR": str(copy / "cache"), "OPGRAD_COMPILERS": "0"}
    return run_python(script, **environment | variables).split()


DIGESTS = """
from opgrad.cpu.compiler import sources
from opgrad.cpu.kernels import activation, indexing
from opgrad.cpu.programs import softmax

for function in activation.relu, softmax.PLAIN["softmax"]["rows"], indexing.SLICES_BY_TARGET[0]:
    print(sources.digest(function.function).hex())
"""


def test_which_changed_files_give_other_digests(copy):
    first = run_copy(copy, DIGESTS)
    paths = (
        "base/locks.py",
        "cpu/runtime/threads.py",
        "cpu/compiler/machine_code.py",
        "cpu/compiler/cache.py",
        "cli/app.py",
    )
    for path in paths:
        with open(copy / "opgrad" / path, "a", encoding="utf-8") as file:
            file.write("\nANOTHER = 1\n")
    change(copy / "opgrad/cpu/kernels/activation.py", "dy * y * (1.0 - y)", "dy * y * (2.0 - y)")
    assert run_copy(copy, DIGESTS) == first
    change(copy / "opgrad/cpu/kernels/activation.py", OLD, NEW)
    second = run_copy(copy, DIGESTS)
    assert [one == other for one, other in zip(first, second, strict=True)] == [False, True, True]
    change(copy / "opgrad/cpu/compiler/lowering/build.py", '"""Compiles', '"""Edited. Compiles')
    assert not {*first, *second} & {*run_copy(copy, DIGESTS)}


CALL = """
import ctypes
from pathlib import Path
import numpy as np
from opgrad.cpu.kernels import activation

path, before, after = EDIT
if path:
    text = Path(path).read_text(encoding="utf-8")
    Path(path).write_text(text.replace(before, after), encoding="utf-8")
x, y = np.float32([-1, 2]), np.zeros(2, np.float32)
words = np.array([1, 1, 1, 2, x.ctypes.data, 2, y.ctypes.data, 2, 0, 0])  # one part of one unit: a block of two numbers
task = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(activation.relu.task(["float32"] * 2))
task(words.ctypes.data, 0)
print(y[1])
"""
OLD, NEW = "v.select(x <= 0.0, 0.0, x)", "v.select(x <= 0.0, 0.0, 3.0 * x)"


def call(copy, *edit, compilers="0"):
    """relu(2) by the kernel alone, in a process that edits a file between its import and its first call."""
    script = CALL.replace("EDIT", repr(tuple(map(str, edit or ("", "", "")))))
    return float(run_copy(copy, script, OPGRAD_COMPILERS=compilers)[0])


@pytest.mark.one_case
@pytest.mark.parametrize("compilers", ["0", "1"])
def test_a_kernel_that_is_edited_under_a_living_process(copy, compilers):
    """The process goes on with what it has imported; the next one does not get that under the new source's name."""
    path = copy / "opgrad/cpu/kernels/activation.py"
    assert call(copy, path, OLD, NEW, compilers=compilers) == 2.0
    assert NEW in path.read_text(encoding="utf-8")
    assert call(copy) == 6.0
    change(path, NEW, OLD)
    assert call(copy) == 2.0


def test_a_compiler_that_is_edited_under_a_living_process(copy):
    """What it makes belongs to no source: it was imported after the edit, and the rest before. It runs, unkept."""
    path = copy / "opgrad/cpu/compiler/lowering/arithmetic.py"
    assert call(copy, path, "from typing", "# Edited.\nfrom typing") == 2.0
    assert list(copy.glob("cache/*/*.o")) == []
    assert call(copy) == 2.0
    assert list(copy.glob("cache/*/*.o")) != []


def test_what_a_word_does_is_the_compilers():
    """Its Python function refuses calls: nothing that machine code is made of."""

    def kernel(x):
        return words.load_word(x, 0)

    assert sources.digest(kernel) is not None
    assert [each.__name__ for each in sources.reached(kernel)] == ["kernel"]
    assert sources.digest(plan.execute.function) is not None


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
def claimed(tmp_path):
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
    monkeypatch.setattr(claiming, "PATIENCE", 0.05)


def claim(claimed):
    """Get the claim and give it back; whether it was there."""
    with claiming.claimed(claimed, NAME):
        return FILE in os.listdir(claimed)


def locked(path):
    """Whether somebody has the lock of a file."""
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_processes_at_once_compile_each_kernel_once(claimed, start):
    processes = [start(COMPILES, OPGRAD_CACHE_DIR=claimed, OPGRAD_COMPILERS="0") for _ in range(4)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=TIMEOUT)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    compiled = sorted(line for lines in said for line in lines)
    assert len(compiled) == len(set(compiled)) == 3
    (environment,) = os.listdir(claimed)
    assert all(name.endswith(".o") for name in os.listdir(os.path.join(claimed, environment)))


def test_a_claim_waits_for_its_owner(claimed, start):
    owner, order = start(OWNS, claimed, NAME), []

    def wait():
        with claiming.claimed(claimed, NAME):
            order.append("waited")

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(5 * claiming.LOOK)
    order.append("owned")
    owner.communicate("go on\n", timeout=TIMEOUT)
    waiting.join(TIMEOUT)
    assert order == ["owned", "waited"]
    assert claim(claimed)
    assert os.listdir(claimed) == []


def test_an_owner_that_dies_is_not_waited_for(claimed, start):
    owner = start(OWNS, claimed, NAME)
    owner.kill()
    owner.wait()
    assert os.listdir(claimed) == [FILE]
    assert claim(claimed)
    assert os.listdir(claimed) == []


@pytest.mark.usefixtures("no_patience")
def test_an_owner_that_stops_is_not_waited_for_long(claimed, start):
    """It keeps its claim, and takes the file with it when it goes on."""
    owner = start(OWNS, claimed, NAME)
    os.kill(owner.pid, signal.SIGSTOP)
    with claiming.claimed(claimed, NAME):
        assert locked(os.path.join(claimed, FILE))
    assert os.listdir(claimed) == [FILE]
    os.kill(owner.pid, signal.SIGCONT)
    owner.communicate("go on\n", timeout=TIMEOUT)
    assert os.listdir(claimed) == []


def test_a_child_that_is_forked_meanwhile_has_no_part_in_it(claimed):
    """The lock belongs to the open file, which both have."""
    with claiming.claimed(claimed, NAME), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other tests have left threads
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
        file = os.open(os.path.join(claimed, FILE), os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(file)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_lock_that_others_may_hold_is_not_waited_for(claimed, mode):
    path = os.path.join(claimed, FILE)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.chmod(path, mode)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with claiming.claimed(claimed, NAME):
        assert locked(path)
    os.close(descriptor)
    assert os.listdir(claimed) == [FILE]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("elsewhere", path)])
def test_what_is_no_file_is_left_alone(claimed, make):
    make(os.path.join(claimed, FILE))
    with claiming.claimed(claimed, NAME):
        pass
    assert os.listdir(claimed) == [FILE]


def test_where_nothing_can_be_written_nothing_is_claimed(claimed):
    with open(os.path.join(claimed, "file"), "w"):
        pass
    for place in (None, os.path.join(claimed, "file"), "/proc/nowhere"):
        with claiming.claimed(place, NAME):
            pass
    os.chmod(claimed, 0o777)  # others could put their own there
    with claiming.claimed(claimed, NAME):
        assert os.listdir(claimed) == ["file"]


def test_an_error_gives_the_claim_back(claimed):
    kept = ObjectCache("environment", claimed)

    def interrupted():
        with kept.claim(NAME):
            assert os.listdir(kept.folder) == [FILE]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(kept.folder) == []
