"""BiasSoftmax and SoftmaxDropoutGrad, which onnxruntime has on GPUs alone, as nodes of its CPU sessions."""

import numpy as np
import pytest
from graph_cases import check_close
from onnx_models import one_node, run

from opgrad.cli.examples import expected as reference
from opgrad.contract import DTYPES, FLOATS
from opgrad.ops import graph_operators


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "attributes"), [((2, 1, 1, 33), (3, 1)), ((4, 33), (3, 0)), ((4, 33), (-2, 0))])
def test_bias_softmax(dtype, shape, attributes, rng):
    given = dict(zip(("axis", "is_inner_broadcast"), attributes, strict=True))
    op = graph_operators()["bias_softmax"]
    feeds = {"x": rng.normal(size=(2, 3, 4, 33)).astype(DTYPES[dtype]), "bias": rng.normal(size=shape)}
    feeds["bias"] = feeds["bias"].astype(DTYPES[dtype])
    (y,) = run(one_node("BiasSoftmax", [(name, dtype) for name in feeds], [("y", dtype)], **given), feeds)
    check_close([y.astype(DTYPES[dtype])], reference(op, {**feeds, **given}), 4 * 33)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ratio", [None, "float32", "float16"])
def test_softmax_dropout_grad(dtype, ratio, rng):
    op = graph_operators()["softmax_dropout_grad"]
    y = np.exp(rng.normal(size=(2, 4, 33)))
    feeds = {"dy": rng.normal(size=y.shape).astype(DTYPES[dtype]), "mask": y > 0.5}
    feeds["y"] = (y / y.sum((1, 2), keepdims=True)).astype(DTYPES[dtype])
    ports = [("dy", dtype), ("mask", "bool"), ("y", dtype)]
    expected = reference(op, {**feeds, "axis": 1, "ratio": 0.25 if ratio else 0.5})
    if ratio:
        feeds["ratio"] = np.asarray(0.25, ratio)
        ports.append(("ratio", ratio))
    (dx,) = run(one_node("SoftmaxDropoutGrad", ports, [("dx", dtype)], axis=1), feeds)
    check_close([dx.astype(DTYPES[dtype])], expected, 4 * 33)
