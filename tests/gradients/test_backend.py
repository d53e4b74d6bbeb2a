"""The ONNX project's tests of single operators as forward graphs, whose gradients are checked."""

import warnings
from unittest import mock

import numpy as np
from differences import check, float_inputs, in_float64, run
from onnx.reference.ops import op_pool_common

from opgrad.onnx.rules.coverage import zero
from opgrad.onnx.rules.node import RULES

MOST_ELEMENTS, MOST_CASES = 150, 2
# What the reference evaluator does not compute in float64, or not at all, or has wrong; other tests have these.
NOT_BY_REFERENCE = ("GridSample", "MeanVarianceNormalization", "Upsample", "Scatter", "SplitToSequence", "Det")
NOT_DIFFERENTIABLE = {
    "test_einsum_batch_diagonal": "takes a diagonal",
    "test_maxunpool_export_with_output_shape": "has an output_shape",
    "test_acosh_example": "is at the edge of what the function takes",
    "test_l2normalization_axis_0": "divides by 0",
    "test_maxpool_1d_default": "has indices that the reference evaluator counts anew for each channel",
    "test_scan_sum": "is a Scan with an axis for batches",
    "test_scan9_multi_state": "has an input on which the first result does not depend",
    "test_clip_min_greater_than_max": "has no gradient to the lower bound",
    **dict.fromkeys(
        (
            "test_basic_deform_conv_with_padding",
            "test_basic_deform_conv_without_padding",
            "test_deform_conv_with_mask_bias",
            "test_deform_conv_with_multiple_offset_groups",
        ),
        "samples at the elements themselves, where the derivative with respect to the offset jumps",
    ),
}


def unpooled(padded, shape, kernel, strides, out_shape, *_, **__):
    """Zeros in the shape of what ONNX computes in Python, which takes most of the time, and no test looks at."""
    return np.zeros((*shape[:2], *out_shape), padded.dtype)


def collect():
    """The tests of single operators that have a rule, by operator."""
    with warnings.catch_warnings(), mock.patch.object(op_pool_common, "pool", unpooled):
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        found = collect_testcases(None)
    for case in found:
        node = case.model.graph.node[0]
        declared = RULES.get((node.domain, node.op_type))
        if (
            len(case.model.graph.node) > 1
            or declared is None
            or declared.rule is zero
            or declared.replaces
            or node.domain
        ):
            continue
        if node.op_type not in NOT_BY_REFERENCE and case.name not in NOT_DIFFERENTIABLE:
            yield case, node, declared


def feeds_of(case):
    """The inputs of a test by name; None if they are not all arrays, or large."""
    names = [value.name for value in case.model.graph.input]
    arrays = case.data_sets[0][0]
    if any(not isinstance(array, np.ndarray | np.generic) for array in arrays):
        return None
    feeds = dict(zip(names, map(np.asarray, arrays), strict=True))
    if sum(array.size for array in feeds.values()) > MOST_ELEMENTS:
        return None
    return {name: each.astype(np.float64) if each.dtype.kind == "f" else each for name, each in feeds.items()}


def test_backend_cases():
    counts = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case, node, declared in collect():
            feeds = feeds_of(case)
            if feeds is None or counts.get(node.op_type, 0) >= MOST_CASES:
                continue
            model = in_float64(case.model)
            places = [name for place, name in enumerate(node.input) if place not in declared.constant]
            wanted = [name for name in float_inputs(model, feeds) if name in places]
            if wanted:
                differentiate(case.name, model, feeds, wanted)
                counts[node.op_type] = counts.get(node.op_type, 0) + 1
    assert len(counts) > 80


def differentiate(name, model, feeds, wanted):
    outputs = [model.graph.output[0].name]
    if not np.issubdtype(run(model, feeds)[0].dtype, np.floating):
        return
    try:
        check(model, feeds, wanted, outputs)
    except Exception as error:
        error.add_note(f"case: {name}")
        raise
