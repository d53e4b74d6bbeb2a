"""The cache of machine code: who is trusted, what an entry is bound to, and what becomes of failures."""

import ast
import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from opgrad.cpu import softmax
from opgrad.cpu.compiler import native, sources, trust
from opgrad.cpu.compiler.cache import MOST_BYTES, ObjectCache, directory
from opgrad.cpu.runtime import execute

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
            monkeypatch.setattr(trust.os, "geteuid", lambda: SOMEBODY)
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


# --- sources ---------------------------------------------------------------------------------------------------------


def files_of(functions):
    """What the sources of functions import, by Python's own parser."""
    found, waiting = set(), [Path(each.__code__.co_filename) for each in functions]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += imports(path)
    return found


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import, which the digest does not see"
            names = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            if module.split(".")[0] == "opgrad":
                yield file_of(f"{module}.{name}") or file_of(module)


def file_of(module):
    path = PACKAGE.parent.joinpath(*filter(None, module.split(".")))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((each for each in candidates if each.is_file()), None)


def test_every_import_of_a_kernel_is_seen():
    for path in (PACKAGE / "cpu").rglob("*.py"):
        seen = set(map(Path, sources.imported(path.read_bytes())))
        assert set(imports(path)) <= seen, path


CHANGES = """
import sys
from pathlib import Path
from opgrad.cpu.compiler import native
from opgrad.cpu.compiler import sources
from {module} import {name} as kernel

digest = sources.digest(kernel.function)
for line in sys.stdin.read().splitlines():
    path = Path(sources.ROOT, line)
    text = path.read_bytes()
    path.write_bytes(text + b"# changed")
    sources._read.cache_clear()
    print(line, sources.digest(kernel.function) != digest)
    path.write_bytes(text)
"""


@pytest.mark.parametrize("module", [softmax.rows, execute], ids=lambda module: module.__name__)
def test_changing_any_file_that_a_kernel_uses_gives_another_digest(tmp_path, module):
    name, kernel = next(
        (name, value)
        for name, value in vars(module).items()
        if hasattr(value, "function") and value.function.__module__ == module.__name__
    )
    for path in PACKAGE.rglob("*.py"):
        copy = tmp_path / path.relative_to(PACKAGE.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    used = {path.relative_to(PACKAGE.parent).as_posix() for path in files_of(sources.made_from(kernel.function))}
    assert {
        "opgrad/cpu/compiler/native.py",
        "opgrad/cpu/compiler/simd.py",
        "opgrad/cpu/compiler/lowering/build.py",
    } <= used
    unused = {"opgrad/cli.py", "opgrad/training/fit.py"}
    done = subprocess.run(
        [sys.executable, "-c", CHANGES.format(module=module.__name__, name=name)],
        input="\n".join(sorted(used | unused)),
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found == dict.fromkeys(used, "True") | dict.fromkeys(unused, "False")


def test_functions_that_a_kernel_was_made_from_count():
    """The kernel's own file knows nothing of them."""

    def other(x):
        return x

    def make(function):
        def kernel(part):
            function(part)

        return kernel

    from opgrad.cpu.loops.elements import elementwise

    assert sources.digest(elementwise(other).function) != sources.digest(elementwise(softmax.softmax).function)
    assert {each.__name__ for each in sources.made_from(make(make(other)))} == {"kernel", "other"}


def test_kernels_made_from_others_have_names_of_their_own():
    """Several formulas may stand in a line, and differ in nothing but an operator, a word, or a number."""

    def make(formula, number=0):
        def kernel(part):
            return formula(part) + number

        return kernel

    formulas = [lambda x: x > 1.0, lambda x: x < 1.0, lambda x: x < 2.0, lambda x: x.real < 1.0]  # fmt: skip
    kernels = [*map(make, formulas), make(formulas[0], 1)]
    assert len({native._name(each) for each in kernels}) == len(kernels)


def test_code_without_a_source_is_not_kept():
    space = {}
    exec("def function(part):\n    pass", space)
    assert sources.digest(space["function"]) is None
