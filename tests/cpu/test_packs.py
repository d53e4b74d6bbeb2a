"""Packs of kernels: what they serve without a compiler, what they lack, and which are refused."""

import io
import json
import os
import platform
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import wheels
from samples import refused
from subprocesses import run_python
from typer.testing import CliRunner

from opgrad.cli import compile as packing
from opgrad.cli.app import app
from opgrad.cpu.compiler import machine_code, sources, target
from opgrad.cpu.compiler.cache import ObjectCache
from opgrad.cpu.compiler.target import MADE_WITH, PROCESSORS, Pack, PackedObjects, PackError, Processor, is_here, packed
from opgrad.cpu.runtime.plan import execute

pytestmark = [pytest.mark.any_cpu, pytest.mark.skipif(os.name != "posix", reason="packs are for Linux")]

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"
PACKED = ROOT / "tools" / "packed.py"
HERE = next((name for name in reversed(PROCESSORS) if is_here(PROCESSORS[name])), "x86-64-v3")
ELSEWHERE = "aarch64" if platform.machine() == "x86_64" else "x86-64-v3"
# Neither Numba nor llvmlite is found, as if they were not installed.
WITHOUT = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
import numpy as np
"""
CALLS = (
    WITHOUT
    + """
import opgrad
x = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
for _ in range(3):  # the second call is native
    assert (opgrad.relu(x) == np.maximum(x, 0)).all()
    assert (opgrad.relu_grad(x, x) == np.where(x > 0, x, 0)).all()
opgrad.set_num_threads(2)
assert (opgrad.relu(np.ones(1 << 21, "float32")) == 1).all()
try:
    opgrad.tanh(x)
except NotImplementedError as error:
    print(error)
"""
)
PROGRAM = "import numpy as np, opgrad\nprint(opgrad.tanh(np.zeros((2, 3), 'float32')).sum())\n"


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """A pack of relu and its gradient, for the processor here and for one that is not."""
    path = tmp_path_factory.mktemp("packs") / "kernels.pack"
    compile_pack("--for", f"{HERE},{ELSEWHERE}", "--ops", "relu,relu_grad", "--dtypes", "float32", "-o", path)
    return path


def compile_pack(*words):
    done = subprocess.run(
        [sys.executable, "-m", "opgrad", "compile", "--jobs", "1", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def opened(path):
    return Pack(str(path))


def codes(pack):
    """All code, by processor and name."""
    return {
        processor: {name: PackedObjects(pack, processor).read(name) for name in names}
        for processor, names in pack.names.items()
    }


def test_calls_without_a_compiler(pack):
    told = run_python(CALLS, OPGRAD_KERNELS=str(pack), OPGRAD_CACHE_DIR="/dev/null")
    assert told.startswith(f"tanh: {pack} has no kernel opgrad.cpu.kernels.")
    assert f'for {HERE}; pip install "opgrad[compiler]" compiles it here; or, where Numba' in told
    assert f"`opgrad compile --for {HERE} --run " in told


def test_a_compiler_makes_what_a_pack_lacks(pack, tmp_path):
    """The code is kept, and the pack is as it was."""
    before = pack.read_bytes()
    for environment in ({"OPGRAD_COMPILERS": "0"}, {"OPGRAD_COMPILERS": "1"}):
        own = {"OPGRAD_KERNELS": str(pack), "OPGRAD_CACHE_DIR": str(tmp_path / environment["OPGRAD_COMPILERS"])}
        for compiled in ("True", "False"):
            told = run_python(f"{PROGRAM}import sys\nprint('numba.core' in sys.modules)", **own, **environment)
            assert told.split() == ["0.0", compiled]
        assert len(list(tmp_path.glob(f"{environment['OPGRAD_COMPILERS']}/*/*.o"))) > 0
    assert pack.read_bytes() == before


def test_training_without_a_compiler(pack, tmp_path):
    """A training run takes what a run of the set took before; the pack that was there keeps what it had."""
    path = tmp_path / "kernels.pack"
    path.write_bytes(pack.read_bytes())
    text = compile_pack("--for", HERE, "--model", DIGITS, "-o", path)
    assert f" kernels for {ELSEWHERE}" in text
    before, after = opened(pack).names, opened(path).names
    assert before[ELSEWHERE] == after[ELSEWHERE]
    assert set(before[HERE]) < set(after[HERE])
    train = f"import runpy\nrunpy.run_path({str(PACKED)!r})['main']({str(DIGITS)!r})\n"
    told = run_python(WITHOUT + train, OPGRAD_KERNELS=str(path), OPGRAD_CACHE_DIR="/dev/null")
    assert told.splitlines()[-1] == "packed: no compiler was imported"


def test_a_program_is_run_for_its_kernels(pack, tmp_path):
    """For a processor that is not here, stand-ins run: with vectors as long as there."""
    program, path = tmp_path / "a program.py", tmp_path / "kernels.pack"
    program.write_text(PROGRAM)
    compile_pack("--for", f"{HERE},{ELSEWHERE}", "--run", f"'{program}'", "-o", path)
    names = opened(path).names
    assert len(names[HERE]) == len(names[ELSEWHERE])
    assert run_python(WITHOUT + PROGRAM, OPGRAD_KERNELS=str(path)) == "0.0"


def test_a_program_that_fails(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import opgrad\nraise ValueError('wrong')\n")
    result = CliRunner().invoke(app, ["compile", "--for", HERE, "--run", str(program), "-o", str(tmp_path / "pack")])
    assert (result.exit_code, result.output) == (1, f"opgrad: compile: for {HERE}: ValueError: wrong\n")
    assert not (tmp_path / "pack").exists()


def test_code_is_for_the_processor_that_is_named(pack):
    numbers = {name: machine_code.LINKAGES[PROCESSORS[name].architecture].number for name in (HERE, ELSEWHERE)}
    for name, found in codes(opened(pack)).items():
        assert len(found) > 10
        assert {struct.unpack_from("<H", code, 18)[0] for code in found.values()} == {numbers[name]}


# --- which are refused -----------------------------------------------------------------------------------------------


def with_files(data, change):
    """The pack with other files: a function changes their bytes by name."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, contents in files.items():
            archive.writestr(name, contents)
    return made.getvalue()


def made_with(**changes):
    return lambda files: files.update({MADE_WITH: json.dumps(json.loads(files[MADE_WITH]) | changes)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "is no pack of kernels, or is damaged: expected a file made by"),
        (lambda data: data[:100], "is no pack of kernels, or is damaged"),
        (lambda data: data[: len(data) // 2], "is no pack of kernels, or is damaged"),
        (lambda data: data[:60] + b"\xff" + data[61:], "is no pack of kernels, or is damaged"),
        (lambda data: with_files(data, lambda files: files.pop(MADE_WITH)), "is no pack of kernels, or is damaged"),
        (lambda data: with_files(data, lambda files: files.update({MADE_WITH: "{"})), "is no pack of kernels, or is"),
        (lambda data: with_files(data, lambda files: files.update({MADE_WITH: "1"})), "was made with opgrad None, not"),
        (lambda data: with_files(data, made_with(opgrad="0.1")), "was made with opgrad 0.1, not "),
        (lambda data: with_files(data, made_with(python=["cpython-27"])), "was made with python cpython-27, not "),
        (lambda data: with_files(data, made_with(sources="0")), "was made with other sources of opgrad: make"),
    ],
)
def test_a_damaged_or_foreign_pack(pack, tmp_path, change, message):
    path = tmp_path / "pack"
    path.write_bytes(change(pack.read_bytes()))
    refused(PackError, message, opened, path)


def damaged(data):
    """The pack with a wrong bit in the compressed code of its first kernel."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        place = archive.infolist()[1].header_offset + 200
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def swap(files):
    """Code under another name."""
    _, first, second, *_ = files
    files[first], files[second] = files[second], files[first]


@pytest.mark.parametrize("change", [damaged, lambda data: with_files(data, swap)])
def test_damaged_code(pack, tmp_path, change):
    path = tmp_path / "pack"
    path.write_bytes(change(pack.read_bytes()))
    refused(PackError, "is damaged: its checksum is wrong", codes, opened(path))


def test_an_outdated_pack_is_made_anew(pack, tmp_path):
    path = tmp_path / "pack"
    path.write_bytes(with_files(pack.read_bytes(), made_with(opgrad="0.1")))
    packing._unpack(path, str(tmp_path / "folder"))
    assert not (tmp_path / "folder").exists()


def test_a_pack_that_others_can_write(pack, tmp_path):
    path = tmp_path / "pack"
    path.write_bytes(pack.read_bytes())
    path.chmod(0o666)
    refused(PackError, r"others can write to .*pack; if what is in it can be trusted, chmod go-w", opened, path)
    path.chmod(0o644)
    opened(path)
    tmp_path.chmod(0o777)
    refused(PackError, "others can write to", opened, path)
    tmp_path.chmod(0o1777)  # as /tmp
    opened(path)


@pytest.mark.parametrize("kind", ["missing", "folder", "link", "pipe"])
def test_no_regular_file(kind, pack, tmp_path):
    path = tmp_path / "pack"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(pack)
    elif kind == "pipe":
        os.mkfifo(path)
    refused(PackError, r"cannot be read|is no pack", opened, path)


def fill(path, folder, names):
    for name in names:
        ObjectCache(name, str(folder)).write("kernel", b"code")
    path.write_bytes(packed(str(folder)))


def test_processors(tmp_path):
    """The best that is here is taken, NUMBA_CPU_NAME chooses another, and a pack for others alone is refused."""
    path = tmp_path / "pack"
    fitting = [name for name in PROCESSORS if is_here(PROCESSORS[name])]
    fill(path, tmp_path / "all", PROCESSORS)
    assert opened(path).processor(None) == fitting[-1]
    assert opened(path).processor(fitting[0]) == fitting[0]
    assert opened(path).processor(ELSEWHERE) == fitting[-1]
    fill(path, tmp_path / "other", [ELSEWHERE])
    with pytest.raises(PackError, match=f"has kernels for {ELSEWHERE}, not for the processor here, which is {HERE}"):
        opened(path).processor(None)


def test_a_wheel_for_other_processors(tmp_path, monkeypatch):
    """Where Numba is installed, it compiles; a pack that the user names is refused."""
    path = tmp_path / "pack"
    fill(path, tmp_path / "other", [ELSEWHERE])
    monkeypatch.setattr(target, "CARRIED", str(path))
    monkeypatch.delenv("OPGRAD_KERNELS", raising=False)
    assert target.served.__wrapped__() is None
    monkeypatch.setattr(target, "is_compiler_installed", lambda: False)
    refused(PackError, r'pip install "opgrad\[compiler\]" compile them here', target.served.__wrapped__)
    monkeypatch.undo()
    monkeypatch.setenv("OPGRAD_KERNELS", str(path))
    refused(PackError, "not for the processor here", target.served.__wrapped__)


def test_what_a_processor_must_have():
    """One bit that no processor sets, and registers that no system saves, are enough to refuse it."""
    if platform.machine() != "x86_64":
        assert is_here(PROCESSORS["aarch64"])
        return
    own = PROCESSORS[HERE]
    assert not is_here(own._replace(needs=(*own.needs, (0xFFFF, 0, "a", (0,)))))
    assert not is_here(own._replace(xcr0=own.xcr0 | 1 << 60))
    assert not is_here(Processor("riscv64", "generic", ""))
    assert len({target.cpu(), target.cpu.__wrapped__()}) == 1


def test_served_objects(pack, monkeypatch, tmp_path):
    """The pack stands before the cache, and nothing is written to it; the variable set to nothing turns a pack off."""
    monkeypatch.setattr(target, "CARRIED", str(pack))
    monkeypatch.delenv("OPGRAD_KERNELS", raising=False)
    monkeypatch.delenv("NUMBA_CPU_NAME", raising=False)
    served = target.served.__wrapped__()
    found = PackedObjects(*served)
    name = sources.object_name(execute.function, execute.interface)
    assert found.read(name).startswith(b"\x7fELF")
    assert found.read("0" * 32) is None
    assert found.count() == len(found.pack.names[HERE])
    assert str(pack) in found.problem()
    behind = PackedObjects(*served, ("environment", str(tmp_path)))
    behind.write("0" * 32, b"code")
    assert (behind.read("0" * 32), behind.count(), behind.problem()) == (b"code", found.count() + 1, "")
    monkeypatch.setenv("OPGRAD_KERNELS", "")
    assert target.served.__wrapped__() is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--for", "pentium", "-o", "p"), "compile: processor is 'pentium', expected one of x86-64-v2, "),
        (("--for", HERE), "compile: a pack needs processors and a file"),
        (("-o", "p"), "compile: a pack needs processors and a file"),
        (("--run", "p.py"), "compile: a pack needs processors and a file"),
        (("--for", HERE, "-o", __file__), f"{__file__} is no pack of kernels, or is damaged: expected a file made by"),
    ],
)
def test_words(words, message):
    result = CliRunner().invoke(app, ["compile", *words])
    assert result.exit_code == 1
    assert result.output.startswith(f"opgrad: {message}")


def test_code_that_cannot_be_run_here(monkeypatch):
    """Kernels of a set are found by running it, which nothing stands in for on a lesser x86-64."""
    monkeypatch.setattr(packing, "is_here", lambda processor: processor == PROCESSORS["x86-64-v2"])
    with pytest.raises(ValueError, match="compile: set has to be run to find its kernels, and code for x86-64-v4"):
        packing._check_runs("x86-64-v4", [("set", None)])
    packing._check_runs("aarch64", [("set", None)])
    packing._check_runs("x86-64-v4", [])


def test_a_wheel_that_carries_a_pack(tmp_path):
    """The same wheel but for its pack, its name, and the compiler; its record has the digest of each file."""
    plain, own = tmp_path / "opgrad-1.2-py3-none-any.whl", "opgrad-1.2.dist-info"
    metadata = (
        "Metadata-Version: 2.4\nName: opgrad\nVersion: 1.2\nRequires-Dist: numpy>=1\n"
        "Requires-Dist: opgrad[compiler]\nRequires-Dist: numba<2; extra == 'compiler'\n\nText"
    )
    with zipfile.ZipFile(plain, "w") as file:
        file.writestr("opgrad/__init__.py", "text")
        file.writestr(f"{own}/METADATA", metadata)
        file.writestr(f"{own}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{own}/RECORD", "")
    made = wheels.carrying(plain, b"pack", "aarch64", "+kernels")
    python = f"cp3{sys.version_info.minor}"
    assert made.name == f"opgrad-1.2+kernels-{python}-{python}-manylinux_2_17_aarch64.whl"
    with zipfile.ZipFile(made) as file:
        found = {path: file.read(path).decode() for path in file.namelist()}
    own = "opgrad-1.2+kernels.dist-info"
    assert found[wheels.PACK] == "pack"
    assert str(target.CARRIED).endswith(wheels.PACK)
    assert found["opgrad/__init__.py"] == "text"
    assert found[f"{own}/WHEEL"].splitlines()[1:] == [
        "Root-Is-Purelib: false", f"Tag: {python}-{python}-manylinux_2_17_aarch64"
    ]  # fmt: skip
    assert found[f"{own}/METADATA"] == metadata.replace("\nVersion: 1.2", "\nVersion: 1.2+kernels").replace(
        f"{wheels.COMPILER}\n", ""
    )
    lines = dict(line.split(",", 1) for line in found[f"{own}/RECORD"].splitlines())
    assert lines.keys() == found.keys()
    assert lines["opgrad/__init__.py"] == "sha256=mC2ePrmW9VnmM_TRlN7zdh2Qn1o7ZH0ahR_q1nwyydE,4"


# --- linking on arm64 ------------------------------------------------------------------------------------------------

BASE = 0x40000000


def written(kind, word, address, jump=0, place=0x100, addend=0):
    image = bytearray(0x200)
    struct.pack_into("<I", image, place, word)
    given = machine_code.Relocation(place, kind, 0, addend)
    machine_code.LINKAGES["aarch64"].write(image, BASE, given, address, jump)
    return image[place : place + 8]


def test_arm64_relocations():
    """As an assembler writes the same instructions."""
    bl, adrp, add, load = 0x94000000, 0x90000001, 0x91000021, 0xF9400021
    assert struct.unpack("<I", written(283, bl, BASE + 0x110)[:4]) == (0x94000004,)
    assert struct.unpack("<I", written(283, bl, BASE + 0xF0)[:4]) == (0x97FFFFFC,)
    assert struct.unpack("<I", written(283, bl, BASE + (1 << 40), jump=0x180)[:4]) == (0x94000020,)
    assert struct.unpack("<I", written(275, adrp, BASE + 0x5123)[:4]) == (0xB0000021,)
    assert struct.unpack("<I", written(275, adrp, BASE - 0x1000)[:4]) == (0xF0FFFFE1,)
    assert struct.unpack("<I", written(277, add, BASE + 0x5123)[:4]) == (0x91048C21,)
    assert struct.unpack("<I", written(286, load, BASE + 0x5128)[:4]) == (0xF9409421,)
    assert struct.unpack("<I", written(312, load, 0, jump=0x180)[:4]) == (0xF940C421,)
    assert struct.unpack("<Q", written(257, 0, BASE, addend=8)) == (BASE + 8,)
    assert struct.unpack("<i", written(261, 0, BASE)[:4]) == (-0x100,)
    for kind, address in ((275, BASE + (1 << 33)), (999, BASE)):
        with pytest.raises(machine_code.UnforeseenError):
            written(kind, adrp, address)
