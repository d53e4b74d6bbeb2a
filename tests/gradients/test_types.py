"""Gradients in float16, bfloat16 and float64: every node has inputs of types that go together."""

import itertools

import numpy as np
import pytest
from differences import in_float64
from gradient_cases import CASES, NEWEST
from onnx import TensorProto, helper, numpy_helper, shape_inference

from opgrad.gradients import gradients

KINDS = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "float64": TensorProto.DOUBLE}
NOT_IN_BFLOAT16 = ("FusedConv",)  # but nothing declares what the operator takes


def newest_and_oldest():
    """The cases of every form, in the first and in the last opset that has it."""
    known = sorted((case for case in CASES if case.opset <= NEWEST), key=lambda case: (case.domain, case.op, case.form))
    for _, group in itertools.groupby(known, lambda case: (case.domain, case.op, case.form)):
        cases = sorted(group, key=lambda case: case.opset)
        yield from {each.opset: each for each in (cases[0], cases[-1])}.values()


def typed(case, kind):
    """A model of a case in a float type, with what is not differentiated as constants."""
    model = in_float64(case.model(), kind)
    wanted = [f"x{place}" for place in case.wanted]
    if case.domain:
        model.graph.output[0].type.tensor_type.elem_type = kind
    for value in list(model.graph.input):
        array = case.feeds[value.name]
        if array.dtype == np.float32:  # scales, which are always of this type
            value.type.tensor_type.elem_type = TensorProto.FLOAT
        elif array.dtype == np.float64:
            array = array.astype(helper.tensor_dtype_to_np_dtype(kind))
        if value.name not in wanted:
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
            model.graph.input.remove(value)
    return model, wanted


def allowed(model):
    """Whether the operator takes the type."""
    try:
        shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except shape_inference.InferenceError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_types_go_together(kind):
    count = 0
    for case in newest_and_oldest():
        model, wanted = typed(case, KINDS[kind])
        if not allowed(model) or (kind == "bfloat16" and case.op in NOT_IN_BFLOAT16):
            continue
        try:
            graph = gradients(model, "y0", wanted, plain=True)
            shape_inference.infer_shapes(graph, check_type=True, strict_mode=True)
        except Exception as error:
            error.add_note(f"case: {case}")
            raise
        count += 1
    assert count > 250
