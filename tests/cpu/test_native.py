"""Compiled code: the cache on disk, CPUs without special instructions, and what the assembly holds."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from samples import call, sample
from subprocesses import run_python
from tasks import run_task

from opgrad.contract import FLOATS
from opgrad.cpu.compiler import decorators, simd, target, words
from opgrad.cpu.compiler.parameters import Pointer
from opgrad.cpu.compiler.words import CACHE_LINE
from opgrad.ops import operators

SUPPORT = Path(__file__).parents[1] / "support"
X86 = platform.machine() in ("x86_64", "AMD64")
FAMILIES = ["softmax", "log_softmax_grad", "quick_gelu_grad", "softmax_cross_entropy_loss_and_grad", "gather_grad"]

HOMES = ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "USERPROFILE", "HOMEPATH", "OPGRAD_CACHE_DIR")

CALL = """
import sys, numpy as np, opgrad
x = np.arange(-6, 6, dtype="float32").reshape(3, 4)
assert (opgrad.relu(x) == np.maximum(x, 0)).all()
print(any(name.split(".")[0] == "numba" or "lowering" in name for name in sys.modules))
"""

CHECK = """
import sys, numpy as np
sys.path.insert(0, {tests!r})
from accuracy import check
from samples import sample
from opgrad.ops import operators
for name, (dtype, shape) in {families!r}.items():
    op = operators()[name]
    check(op, sample(op, shape, dtype, np.random.default_rng(0)), f"{{name}}, {{shape}}, {{dtype}}")
print("right")
"""


def start(code, cache, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"OPGRAD_CACHE_DIR": str(cache)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return output.strip()


def objects(cache):
    return sorted(cache.rglob("*.o"))


BLAS = """
import sys
import numpy as np, opgrad
opgrad.relu(np.ones(3, "float32"))
print("numba" in sys.modules, "scipy.linalg" in sys.modules, "scipy" in sys.modules)
import numba
a = np.arange(6.0).reshape(2, 3)
print(np.array_equal(numba.njit(lambda a: np.dot(a, a.T))(a), a @ a.T), "scipy.linalg" in sys.modules)
"""


@pytest.mark.any_cpu
@pytest.mark.one_case
@pytest.mark.parametrize("first", range(len(FLOATS)))
def test_a_cold_process_then_a_warm_one(first, tmp_path):
    """And one for another kind of CPU at the same time, with a cache of its own.

    Its plain instruction set has no F16C, no FMA, vectors of 16 bytes; a dtype and a layout a family, in turns.
    Compiling loads no OpenBLAS, which starts threads, and ends the process where it may not; others' functions have it.
    """
    pytest.importorskip("scipy")
    shapes = [(3, 77), (2, 5, 33)]
    turns = [(FLOATS[(first + each) % len(FLOATS)], shapes[(first // 2 + each) % 2]) for each in range(len(FAMILIES))]
    code = BLAS + CHECK.format(tests=str(SUPPORT), families=dict(zip(FAMILIES, turns, strict=True)))
    other = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "-sse4.2"}  # which no run of the suite is held to
    own, others = start(CALL, tmp_path), start(code, tmp_path, **other)
    assert finish(own) == "True"
    assert finish(others).split("\n") == ["True False True", "True True", "right"]
    assert len(list(tmp_path.iterdir())) == 2
    compiled = {path: path.stat().st_mtime_ns for path in objects(tmp_path)}
    assert compiled
    assert finish(start(CALL, tmp_path)) == "False", "a warm start must not import Numba"
    assert {path: path.stat().st_mtime_ns for path in objects(tmp_path)} == compiled
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} - {""} == {".o"}


def test_code_that_could_fail_is_refused():
    """A report of an error would need Numba, which a process with a warm cache has not loaded."""

    def steps(a: int, b: int) -> int:
        total = 0
        for i in range(0, a, b):
            total += i
        return total

    with pytest.raises(RuntimeError, match="report_an_error"):
        decorators.native(2)(steps).link()


def test_numba_compiles_for_others_as_ever():
    """Kernels are compiled with fewer passes than others' functions, which use the same functions of Numba."""
    import numba

    def capped(a: int, b: int) -> int:
        total = 0
        for i in range(a, b):
            total += min(i, 7) + (a, b)[1]
        return total

    before = numba.njit(capped)
    assert before(1, 9) == capped(1, 9)
    decorators.native(2)(capped).link()
    assert before(2, 9) == capped(2, 9)
    assert numba.njit(error_model="numpy")(capped)(1, 9) == capped(1, 9)


@pytest.mark.any_cpu
def test_no_home_and_an_unknown_user():
    code = f"""
try:
    import pwd
    pwd.getpwuid = {{}}.__getitem__  # it knows nobody
except ImportError:
    pass
{CALL}"""
    assert run_python(code, without=HOMES, PYTHONWARNINGS="error") == "True"


def kernels(op, dtype, monkeypatch):
    """The kernels that a call on long rows uses, each with the dtypes of its pointers and its interface."""
    used = []
    task = decorators.Kernel.task

    def record(self, dtypes, interface="task"):
        used.append((self, tuple(dtypes), interface))
        return task(self, *used[-1][1:])

    monkeypatch.setattr(decorators.Kernel, "task", record)
    # A shape that no other test uses, so that its plan is made now.
    call(op, sample(op, (3, 1237), dtype, np.random.default_rng(0)))
    return used


@pytest.mark.skipif(not X86, reason="register names are those of x86-64")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_assembly_holds_vectors_and_no_calls(name, dtype, monkeypatch):
    register = {64: "zmm", 32: "ymm", 16: "xmm"}[decorators.vector_bytes()]
    used = kernels(operators()[name], dtype, monkeypatch)
    texts = {kernel.__name__: decorators.assembly(kernel.function, *compiled) for kernel, *compiled in used}
    assert any(f"%{register}" in text for text in texts.values()), list(texts)
    for name, text in texts.items():
        # LLVM fills long runs of memory by memset and memcpy.
        assert not re.findall(r"^\s+call\w*\s+(?!\*|mem(?:set|cpy)@PLT)\S+", text, re.MULTILINE), name


def test_operations_exist_in_kernels_alone():
    with pytest.raises(TypeError, match="load_masked exists only inside compiled kernels"):
        simd.load_masked(0, 0, True, 0.0)
    with pytest.raises(TypeError, match="atomic_add exists only inside compiled kernels"):
        words.atomic_add(0, 1)


def test_vector_loops_with_a_tail_stand_in_one_place():
    folder = Path(decorators.__file__).parents[1]
    written = {path.parent.relative_to(folder) for path in folder.rglob("*.py") if "while i + w <=" in path.read_text()}
    assert written == {Path("kernels", "loops")}


@pytest.mark.parametrize("register", [16, 32, 64])
def test_vectors_of_whole_lines(register, monkeypatch):
    """Each kind of register: a line of results if four registers hold it, and never less than two registers."""
    monkeypatch.setattr(target, "vector_bytes", lambda: register)
    for dtype, item in (("float32", 4), ("float64", 8)):
        for size in (1, 2, 4, 8):
            lanes = target.line_lanes(dtype, size)
            assert 2 * register <= lanes * item <= 4 * register
            assert lanes * size >= CACHE_LINE or lanes * item == 4 * register


@decorators.kernel
def count_lanes(result: Pointer):
    simd.store_one(result, 0, float(simd.lanes(result)))


def test_a_form_names_the_lanes():
    result = np.zeros(1, np.float32)
    for form, lanes in (("task", decorators.vector_lanes("float32")), ("task of 64", 64), ("task of 16", 16)):
        run_task(count_lanes.task(["float32"], form), [result.ctypes.data])
        assert result[0] == lanes
