"""Every rule by central differences in float64, in several opsets and forms."""

import itertools

import numpy as np
import pytest
from differences import OWN, check, in_onnxruntime, run
from gradient_cases import CASES, ELSEWHERE, NEWEST, REFERENCE_FROM

from opgrad.onnx.rules.coverage import zero
from opgrad.onnx.rules.node import RULES

# What onnx cannot convert with the gradients in it, or the reference only has in newer opsets.
PLAIN = ("MaxPool", "AveragePool", "BatchNormalization")
BY_OPERATOR = {
    op: list(cases) for op, cases in itertools.groupby(sorted(CASES, key=lambda case: case.op), lambda case: case.op)
}


@pytest.mark.parametrize("op", BY_OPERATOR)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradients_are_those_of_central_differences(op):
    for case in BY_OPERATOR[op]:
        if case.opset > NEWEST:
            continue
        try:
            check_case(case)
        except Exception as error:
            error.add_note(f"case: {case}")
            raise


@pytest.mark.parametrize("operator", OWN, ids=lambda operator: operator.__name__)
def test_what_stands_for_the_reference_is_what_onnxruntime_computes(operator):
    even = [case for case in CASES if case.op == operator.__name__ and "even" not in case.form]
    case = min(even, key=lambda case: case.opset)
    np.testing.assert_allclose(
        run(case.model(), case.feeds)[0], in_onnxruntime(case.model(), case.feeds)[0], rtol=1e-5, atol=1e-5
    )


def test_every_rule_is_checked():
    checked = {(case.domain, case.op) for case in CASES} | ELSEWHERE.keys()
    through = {(declared.domain, declared.name) for declared in RULES.values() if declared.rule is not zero}
    assert through - checked == set()


def check_case(case):
    wanted = [f"x{place}" for place in case.wanted]
    own_forward = bool(case.domain) or case.opset < REFERENCE_FROM.get(case.op, 0)
    check(case.model(), case.feeds, wanted, own_forward=own_forward, plain=case.op in PLAIN)
