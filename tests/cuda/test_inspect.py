"""What opgrad.cuda.inspect tells of kernels, and how the gate chooses what it compiles (cuda_gate)."""

import itertools
import subprocess
import sys
import textwrap

import pytest
from cuda_gate import Gate, environment, specialised


def test_nothing_is_compiled_in_the_interpreter(monkeypatch):
    triton = pytest.importorskip("triton", reason="needs Triton")
    from opgrad.cuda.execute import Program
    from opgrad.cuda.inspect import compiled

    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compiled(Program(()))


def test_the_example_of_compiled():
    """It prints the PTX for an architecture, and leaves Triton's driver as it was."""
    pytest.importorskip("triton", reason="needs Triton")
    from opgrad.cuda.inspect import compiled

    example = textwrap.dedent(compiled.__doc__.partition("For example")[2].partition("\n\n")[2])
    example = example.replace("problem)", "problem), arch=100")
    example = f"import triton\nbefore = triton.runtime.driver._active\n{example}"
    example += "\nassert triton.runtime.driver._active is before"
    run = subprocess.run([sys.executable, "-c", example], env=environment(), capture_output=True, text=True)
    assert ".target sm_100" in run.stdout, run.stderr
    assert "gradient" in run.stdout.splitlines()[0]


def test_kinds_contain_every_level():
    """But for what no kind has; those that are to be combined in every way are."""
    pytest.importorskip("triton", reason="needs Triton")
    factors = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2, 3), "d": (False, True), "arch": (80, 90)}
    choice = {"a": (1, 2), "d": (False, True)}
    gate = Gate(factors, lambda kind: None if kind["a"] == kind["b"] else "program", choice, tuple(choice))
    kinds = [kind for kind, _ in gate.kinds().values()]
    assert len(kinds) < 20
    assert {(kind["a"], kind["d"]) for kind in kinds} >= set(itertools.product(*choice.values()))
    for name, levels in factors.items():
        assert {kind[name] for kind in kinds} == set(levels), name


def test_kernels_are_told_apart_as_triton_does():
    """By the dtypes and the alignment of arrays; of numbers, by 1, multiples of 16, and how many bits they need."""
    pytest.importorskip("triton", reason="needs Triton")
    from opgrad.contract.signature import Operand
    from opgrad.cuda.execute import Scratch

    arrays = [Operand(0, "float32"), Operand(0, "float16"), Scratch(0, "float32")]
    assert len({specialised(each, aligned) for each in arrays for aligned in (False, True)}) == 4
    numbers = [specialised(each, aligned=True) for each in (1, 2, 3, 16, 0, 1 << 31, (1 << 31) + 1, 1 << 63, None)]
    assert numbers[1] == numbers[2]
    assert numbers[3] == numbers[4]
    assert len(set(numbers)) == 7
