"""Gradients in float16, bfloat16 and float64: every node has inputs of types that go together."""

import itertools

import pytest
from gradient_cases import CASES, NEWEST
from onnx import TensorProto, shape_inference
from typed_cases import allowed, typed

from opgrad.gradients import gradients

KINDS = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "float64": TensorProto.DOUBLE}


def newest_and_oldest():
    """The cases of every form, in the first and in the last opset that has it."""
    known = sorted((case for case in CASES if case.opset <= NEWEST), key=lambda case: (case.domain, case.op, case.form))
    for _, group in itertools.groupby(known, lambda case: (case.domain, case.op, case.form)):
        cases = sorted(group, key=lambda case: case.opset)
        yield from {each.opset: each for each in (cases[0], cases[-1])}.values()


@pytest.mark.one_case  # test_narrow_rules computes in all of them, in the last opset
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_types_go_together(kind):
    count = 0
    for case in newest_and_oldest():
        if not allowed(case, KINDS[kind]):
            continue
        model, fed = typed(case, KINDS[kind])
        try:
            graph = gradients(model, "y0", list(fed), plain=True)
            shape_inference.infer_shapes(graph, check_type=True, strict_mode=True)
        except Exception as error:
            error.add_note(f"case: {case}")
            raise
        count += 1
    assert count > 250
