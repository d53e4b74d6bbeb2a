"""The tool that counts what innermost loops cost reads assembly as it is meant."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "tools" / "loop_costs" / "assembly.py"
X86 = """
task:
	pushq	%rbp
.LBB0_1:                                # =>This Loop Header: Depth=1
	xorl	%eax, %eax
.LBB0_2:                                #   Parent Loop BB0_1 Depth=1
	vmovups	(%rdi,%rax,4), %ymm0
	vaddps	32(%rsp), %ymm0, %ymm0          # 32-byte Folded Reload
	vmovups	%ymm0, 96(%rsp)                 # 32-byte Spill
	vmovups	%ymm0, (%rsi,%rax,4)
	addq	$8, %rax
	cmpq	%rax, %rdx
	jne	.LBB0_2
	decq	%rcx
	jne	.LBB0_1
	retq
"""
ARM64 = """
task:
.LBB0_1:                                // %loop
	ldp	q0, q1, [x0], #32
	ldr	q2, [sp, #16]                   // 16-byte Folded Reload
	fadd	v0.4s, v0.4s, v2.4s
	stp	q0, q1, [x1], #32
	subs	x2, x2, #8
	b.ne	.LBB0_1
	ret
"""


def loaded(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def assembly():
    return loaded(FILE, "assembly")


@pytest.fixture(scope="module")
def tool(assembly):
    return loaded(FILE.parent / "__main__.py", "loop_costs")


# The most loads from the stack in a loop over whole vectors: what elementwise kernels need, and what sums of
# exponentials need, which keep two sums, what these lost, and the numbers of several vectors.
SPILLS = {"avx2": (4, 24), "avx512": (4, 20), "arm64": (2, 16)}


@pytest.mark.any_cpu
@pytest.mark.parametrize("name", SPILLS)
def test_values_of_the_headline_kernels_stay_in_registers(assembly, tool, name):
    """Of assembly alone: it is compiled for each instruction set, whatever the processor here is."""
    elementwise, sums = SPILLS[name]
    operators = ["softmax_grad", "sigmoid", "tanh", "relu_grad", "log_softmax"]
    for label, text in tool.kernels(tool.SETS[name], operators).items():
        most = sums if label.startswith("log_softmax ") else elementwise
        loops = [loop for loop in assembly.innermost_loops(text) if not loop.is_masked and len(loop.lines) > 9]
        assert max((loop.stack_loads for loop in loops), default=0) <= most, label


@pytest.mark.any_cpu
@pytest.mark.parametrize(("text", "instructions", "stored_bytes"), [(X86, 7, 32), (ARM64, 6, 32)], ids=["x86", "arm64"])
def test_innermost_loop(assembly, text, instructions, stored_bytes):
    (loop,) = assembly.innermost_loops(text)
    assert len(loop.lines) == instructions
    assert loop.stack_loads == 1
    assert loop.stored_bytes == stored_bytes
    assert not loop.is_masked


@pytest.mark.any_cpu
@pytest.mark.parametrize(
    ("line", "masked"),
    [
        ("vmovups (%rdi,%rax,4), %zmm0 {%k1} {z}", True),
        ("vmovdqu16 %zmm0, (%rsi) {%k2}", True),
        ("vmaskmovps %ymm0, %ymm1, (%rsi)", True),
        ("vmaxps %zmm0, %zmm1, %zmm2 {%k1}", False),
        ("vmovaps %zmm0, %zmm2 {%k1}", False),
        ("vmovups (%rdi), %zmm0", False),
    ],
)
def test_masked_moves(assembly, line, masked):
    assert assembly.Loop((line,)).is_masked == masked
