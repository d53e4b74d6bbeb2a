"""Operators of onnxruntime that have kernels of their own: results and gradients against formulas in PyTorch."""

import pytest
import runtime_cases_attention
import runtime_cases_fused
import runtime_cases_newer
import runtime_cases_packed
from gradient_cases import OF_RUNTIME
from runtime_cases import check

CASES = {
    **runtime_cases_packed.CASES,
    **runtime_cases_attention.CASES,
    **runtime_cases_fused.CASES,
    **runtime_cases_newer.CASES,
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_pytorch(name):
    check(CASES[name])


def test_every_operator_of_the_list_is_checked():
    assert {(case.domain, case.op) for case in CASES.values()} == set(OF_RUNTIME) - {
        ("com.microsoft", "NGramRepeatBlock")
    }
