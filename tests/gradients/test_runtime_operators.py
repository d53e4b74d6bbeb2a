"""Operators of onnxruntime that have kernels of their own: results and gradients against formulas in PyTorch."""

import pytest
import runtime_cases_attention
import runtime_cases_fused
import runtime_cases_newer
import runtime_cases_packed
import runtime_cases_regions
from gradient_cases import OF_RUNTIME
from runtime_cases import check, check_in_bfloat16

CASES = {
    **runtime_cases_packed.CASES,
    **runtime_cases_attention.CASES,
    **runtime_cases_fused.CASES,
    **runtime_cases_newer.CASES,
    **runtime_cases_regions.CASES,
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_pytorch(name):
    check(CASES[name])


def test_every_operator_of_the_list_is_checked():
    assert {(case.domain, case.op) for case in CASES.values()} == set(OF_RUNTIME)


# The operators that onnxruntime computes in bfloat16, by their cases in float16.
IN_BFLOAT16 = ("ScaledSiLU", "GatedRMSNorm", "LinearAttentionGate")


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_in_bfloat16_sums_are_float32(name):
    """Each gradient is rounded to bfloat16 once, against float64 on the same rounded inputs."""
    check_in_bfloat16(CASES[f"{name}, float16"])
