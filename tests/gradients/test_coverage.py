"""The list of operators, with and without gradients, is that of onnxruntime's own registry."""

import pytest
import runtime_registry
from differences import build
from onnx import defs

from opgrad.gradients import gradients
from opgrad.onnx.rules.coverage import NONE, NOT_YET, REFUSED, coverage
from opgrad.onnx.rules.node import RULES

OPERATORS = runtime_registry.operators()


def test_something_is_said_of_every_operator_of_onnxruntime():
    assert [key for key in OPERATORS if coverage(*key) is None] == []


def test_something_is_said_of_every_operator_of_onnx():
    """But for those without inputs that a gradient could go to."""
    names = {schema.name for schema in defs.get_all_schemas() if not schema.domain} - {"Constant", "ImageDecoder"}
    assert [name for name in sorted(names) if coverage("", name) is None] == []


def test_nothing_is_listed_that_onnxruntime_does_not_run():
    assert (NONE.keys() | REFUSED.keys()) - set(OPERATORS) == set()


def test_nothing_is_refused_or_without_gradient_that_has_a_rule():
    assert (NONE.keys() | REFUSED.keys()) & RULES.keys() == set()
    assert NONE.keys() & REFUSED.keys() == set()


def test_the_error_gives_the_reason_of_the_list():
    model = build(
        "g (float[1, 1, 4, 4] x, int32[1, 1, 4, 4] m) => (float y) "
        "{ y = com.microsoft.MaxpoolWithMask <kernel_shape = [2, 2]> (x, m) }"
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    said = coverage("com.microsoft", "MaxpoolWithMask")
    assert said.kind == NOT_YET
    with pytest.raises(NotImplementedError, match=said.text):
        gradients(model, "y", "x")
