"""Plans of softmax calls by shape and dtype; `opgrad.plan` takes the arrays of an example call."""

import numpy as np
from samples import several

import opgrad
from opgrad.contract import DTYPES


def _example(shape, dtype, strides=None):
    array = np.zeros(shape, DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    if strides is None:
        return array
    return np.lib.stride_tricks.as_strided(np.zeros(1 + np.dot(strides, shape), array.dtype), shape, strides)


def _plan(function, inputs, out_strides, keywords):
    results = function(*inputs, **keywords)
    outputs = tuple(
        _example(each.shape, each.dtype, None if place else out_strides) for place, each in enumerate(several(results))
    )
    return opgrad.plan(function, *inputs, out=outputs if isinstance(results, tuple) else outputs[0], **keywords)


def softmax_plan(shape, dtype, *, strides=None, out_strides=None, function=opgrad.softmax, **keywords):
    return _plan(function, [_example(shape, dtype, strides)], out_strides, keywords)


def softmax_grad_plan(shape, dtype, *, y_dtype=None, function=opgrad.softmax_grad, **keywords):
    return _plan(function, [_example(shape, dtype), _example(shape, y_dtype or dtype)], None, keywords)
