"""The cache of machine code: who is trusted, what an entry is bound to, and what becomes of failures."""

import errno
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import opgrad.cpu
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


@pytest.mark.parametrize("place", ["", "..", "../.."], ids=["folder", "parent", "grandparent"])
def test_folders_of_others_are_refused(tmp_path, give_away, place):
    cache = ObjectCache("environment", str(tmp_path / "shared" / "cache"))
    cache.write("name", CODE)
    give_away(os.path.normpath(os.path.join(cache.folder, place)))
    assert refused(cache, rf"belongs to user \d+, expected .*root.*{'OPGRAD_CACHE_DIR'}")


@pytest.mark.parametrize("mode", [0o770, 0o707])
@pytest.mark.parametrize("place", ["", "..", "../.."], ids=["folder", "parent", "grandparent"])
def test_folders_that_others_can_write_to_are_refused(tmp_path, place, mode):
    cache = ObjectCache("environment", str(tmp_path / "shared" / "cache"))
    cache.write("name", CODE)
    os.chmod(os.path.normpath(os.path.join(cache.folder, place)), mode)
    assert refused(cache, "others can write to .* chmod go-w .*OPGRAD_CACHE_DIR")


def test_a_sticky_bit_protects_what_is_in_a_shared_folder(cache, tmp_path):
    os.chmod(tmp_path / "cache", 0o1777)
    assert cache.read("name") == CODE
    os.chmod(cache.folder, 0o1777)  # but anybody could add files to it
    assert refused(cache, "others can write")


def test_files_of_others_are_refused(cache, give_away):
    give_away(os.path.join(cache.folder, "name.o"))
    with pytest.warns(RuntimeWarning, match="belongs to user"):
        assert cache.read("name") is None


def test_files_that_others_can_write_to_are_refused(cache):
    os.chmod(os.path.join(cache.folder, "name.o"), 0o622)
    with pytest.warns(RuntimeWarning, match=r"others can write to .*name\.o"):
        assert cache.read("name") is None


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


def pipe(path):
    os.mkfifo(path, 0o600)


def endless(path):
    os.symlink("/dev/zero", path)


def too_large(path):
    path.write_bytes(b"")
    os.truncate(path, MOST_BYTES + 1)


def folder(path):
    path.mkdir()


@pytest.mark.parametrize("make", [pipe, endless, too_large, folder])
def test_only_regular_files_of_a_sane_size_are_read(cache, make):
    path = Path(cache.folder) / "name.o"
    path.unlink()
    make(path)
    assert cache.read("name") is None
    cache.write("name", CODE)
    assert cache.read("name") == (None if make is folder else CODE)
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

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupted)
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
        if ".lowering" not in module.name and ".interpret" not in module.name:
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, decorators.Kernel | decorators.Native) and value.__module__ == module.name:
                    yield f"{module.name}.{name}", value


ROOMS = ("cpu/compiler/", "cpu/kernels/loops/", "cpu/kernels/numerics/")  # what kernels of all families are made of


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
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment | variables, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return done.stdout.split()


DIGESTS = """
from opgrad.cpu.compiler import sources
from opgrad.cpu.kernels import activation, indexing
from opgrad.cpu.kernels.softmax import rows

for function in activation.relu, rows.softmax_rows, indexing.SLICES_BY_TARGET[0]:
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
from pathlib import Path
import numpy as np
import opgrad
from opgrad.cpu.kernels import activation

path, before, after = EDIT
if path:
    text = Path(path).read_text(encoding="utf-8")
    Path(path).write_text(text.replace(before, after), encoding="utf-8")
print(opgrad.relu(np.float32([-1, 2]))[1])
"""
OLD, NEW = "v.select(x <= 0.0, 0.0, x)", "v.select(x <= 0.0, 0.0, 3.0 * x)"


def call(copy, *edit, compilers="0"):
    """relu(2) in a process that edits a file between its import and its first call."""
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
    """Its Python function refuses calls, or interprets: nothing that machine code is made of."""

    def kernel(x):
        return words.load_word(x, 0)

    assert sources.digest(kernel) is not None
    assert [each.__name__ for each in sources.reached(kernel)] == ["kernel"]
    assert sources.digest(plan.execute.function) is not None
