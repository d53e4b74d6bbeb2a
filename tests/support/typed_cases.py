"""The cases of rules in other float types."""

import numpy as np
from differences import in_float64
from onnx import TensorProto, helper, numpy_helper, shape_inference

NOT_IN_BFLOAT16 = ("FusedConv",)  # but nothing declares what the operator takes


def typed(case, kind, feeds=None):
    """A model of a case in a float type, with what is not differentiated as constants; and what is fed to it.

    feeds: other arrays than those of the case; floats are given in float64.
    """
    model, fed = in_float64(case.model(), kind), {}
    if case.domain:
        model.graph.output[0].type.tensor_type.elem_type = kind
    for value in list(model.graph.input):
        array = (feeds or case.feeds)[value.name]
        if array.dtype == np.float32:  # scales, which are always of this type
            value.type.tensor_type.elem_type = TensorProto.FLOAT
        elif array.dtype == np.float64:
            array = array.astype(helper.tensor_dtype_to_np_dtype(kind))
        for dim, size in zip(value.type.tensor_type.shape.dim, array.shape, strict=True):
            dim.dim_value = size
        if int(value.name[1:]) in case.wanted:
            fed[value.name] = array
        else:
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
            model.graph.input.remove(value)
    return model, {f"x{place}": fed[f"x{place}"] for place in case.wanted}


def allowed(case, kind):
    """Whether the operator of a case takes the type."""
    if kind == TensorProto.BFLOAT16 and case.op in NOT_IN_BFLOAT16:
        return False
    try:
        shape_inference.infer_shapes(typed(case, kind)[0], check_type=True, strict_mode=True)
    except shape_inference.InferenceError:
        return False
    return True
