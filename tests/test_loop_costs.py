"""The tool that counts what innermost loops cost reads assembly as it is meant."""

from pathlib import Path

import pytest
from artifact_sets import loaded

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


@pytest.fixture(scope="module")
def assembly():
    return loaded(FILE, "assembly")


@pytest.fixture(scope="module")
def tool(assembly):
    return loaded(FILE.parent / "__main__.py", "loop_costs")


# The most loads from the stack in a loop over whole vectors, of kernels that have any; all others have none. One or two
# are an address or the loop's end, an integer. Columns in float32 keep where the arrays of two strips begin, and how
# far their lines are apart; rows in results and groups, what they prefetch. Each cell is compiled past a cache and
# through one. Sums of exponentials of two vectors at once hold 10 constants, two sums, what these lost, the row's
# largest number, and what the row before is divided by while it is written: more than 16 registers, and than the 32 of
# NEON, of half the width.
STACK_LOADS = {
    "avx2": {
        "log_softmax float32 32768x128: log_softmax_groups": 5,
        "log_softmax bfloat16 32768x128: log_softmax_groups": 4,
        "log_softmax float32 4096x1000: log_softmax_rows": 10,
        "log_softmax bfloat16 2048x32000: log_softmax_rows": 7,
        "log_softmax float32 4096x1000: log_softmax_rows_in_result": 9,
        "log_softmax bfloat16 4096x1000: log_softmax_rows_in_result": 5,
        "log_softmax bfloat16 16x1000x56x56, axis 1: log_softmax_columns": 5,
        "softmax_grad bfloat16 32768x128: by_rows": 8,
        "softmax_grad float32 16x1000x56x56, axis 1: by_columns": 11,
        "softmax_grad bfloat16 16x1000x56x56, axis 1: by_columns": 1,
        "sigmoid float32 16777216: elements": 1,
        "tanh float32 16777216: elements": 1,
    },
    "avx512": {
        "log_softmax float32 4096x1000: log_softmax_rows": 4,
        "log_softmax bfloat16 2048x32000: log_softmax_rows": 6,
        "log_softmax float32 4096x1000: log_softmax_rows_in_result": 3,
        "log_softmax bfloat16 4096x1000: log_softmax_rows_in_result": 4,
        "softmax_grad float32 4096x1000: by_rows": 2,
        "softmax_grad bfloat16 32768x128: by_rows": 2,
        "softmax_grad float32 16x1000x56x56, axis 1: by_columns": 11,
        "softmax_grad bfloat16 16x1000x56x56, axis 1: by_columns": 2,
        "sigmoid float32 16777216: elements": 1,
        "sigmoid bfloat16 16777216: elements": 1,
        "tanh float32 16777216: elements": 1,
        "tanh bfloat16 16777216: elements": 1,
        "log_softmax float32 16x1000x56x56, axis 1: log_softmax_columns": 10,
    },
    "arm64": {
        "log_softmax float32 32768x128: log_softmax_rows_in_result": 10,
        "log_softmax float32 4096x1000: log_softmax_rows": 10,
        "log_softmax bfloat16 2048x32000: log_softmax_rows": 10,
        "log_softmax bfloat16 4096x1000: log_softmax_rows_in_result": 10,
        "log_softmax float32 16x1000x56x56, axis 1: log_softmax_columns": 5,
        "log_softmax bfloat16 16x1000x56x56, axis 1: log_softmax_columns": 1,
    },
}


@pytest.mark.any_cpu
@pytest.mark.one_case
@pytest.mark.parametrize("name", STACK_LOADS)
def test_values_of_the_headline_kernels_stay_in_registers(assembly, tool, name):
    """Of assembly alone: it is compiled for each instruction set, whatever the processor here is."""
    operators = ["softmax_grad", "sigmoid", "tanh", "relu_grad", "log_softmax"]
    found = {}
    for label, text in tool.kernels(tool.SETS[name], operators).items():
        loops = [loop for loop in assembly.innermost_loops(text) if not loop.is_masked and len(loop.lines) > 9]
        if most := max((loop.stack_loads for loop in loops), default=0):
            found[label] = most
    more = {label: most for label, most in found.items() if most > STACK_LOADS[name].get(label, 0)}
    assert more == {}


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
