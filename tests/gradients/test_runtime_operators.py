"""Operators of onnxruntime that have kernels of their own: results and gradients against formulas in PyTorch."""

import numpy as np
import onnxruntime
import pytest
import runtime_cases_attention
import runtime_cases_fused
import runtime_cases_newer
import runtime_cases_packed
import runtime_cases_regions
from gradient_cases import OF_RUNTIME
from runtime_cases import check, check_in_bfloat16, session_of, tensors_of

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


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("SparseAttention")])
def test_sparse_attention_is_that_of_its_kernel(name):
    """Which writes the new keys and values into the memory of the past ones."""
    case = CASES[name]
    session = session_of(case.model())
    binding = session.io_binding()
    for key, array in case.feeds.items():
        binding.bind_ortvalue_input(key, value := onnxruntime.OrtValue.ortvalue_from_numpy(array))
        if key in ("x3", "x4"):
            binding.bind_ortvalue_output("y1" if key == "x3" else "y2", value)
    binding.bind_output("y0")
    session.run_with_iobinding(binding)
    expected = case.formula(*tensors_of(case)).detach().numpy()
    np.testing.assert_allclose(binding.get_outputs()[-1].numpy(), expected, rtol=1e-4, atol=1e-4)


# The operators that onnxruntime computes in bfloat16, by their cases in float16.
IN_BFLOAT16 = ("ScaledSiLU", "GatedRMSNorm", "LinearAttentionGate")


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_in_bfloat16_sums_are_float32(name):
    """Each gradient is rounded to bfloat16 once, against float64 on the same rounded inputs."""
    check_in_bfloat16(CASES[f"{name}, float16"])
