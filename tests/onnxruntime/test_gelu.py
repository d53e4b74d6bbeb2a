"""The gradients of gelu as nodes of stock onnxruntime."""

import numpy as np
import pytest
from graph_cases import check_close
from onnx_models import one_node, run

from opgrad.cli.examples import expected as reference
from opgrad.contract import DTYPES, FLOATS
from opgrad.ops import graph_operators

NODES = {
    "GeluGrad": "gelu_grad",
    "FastGeluGrad": "fast_gelu_grad",
    "BiasGeluGrad_dX": "bias_gelu_grad_dx",
    "BiasFastGeluGrad_dX": "bias_fast_gelu_grad_dx",
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op_type", NODES)
def test_node(op_type, dtype, rng):
    op = graph_operators()[NODES[op_type]]
    feeds = {name: rng.normal(0, 2, (5, 37)).astype(DTYPES[dtype]) for name in ("dy", "x")}
    if "bias" in op.inputs:
        feeds["bias"] = rng.normal(size=37).astype(DTYPES[dtype])
    model = one_node(op_type, [(name, dtype) for name in feeds], [("dx", dtype)])
    (dx,) = run(model, feeds)
    check_close([dx.astype(DTYPES[dtype])], reference(op, feeds), 1)


@pytest.mark.parametrize("op_type", ["BiasGeluGrad_dX", "BiasFastGeluGrad_dX"])
def test_a_bias_of_another_length(op_type):
    model = one_node(op_type, [(name, "float32") for name in ("dy", "x", "bias")], [("dx", "float32")])
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(Exception, match=rf"{NODES[op_type]}: bias has shape \(2,\), expected \(3,\)"):
        run(model, {"dy": x, "x": x, "bias": x[:, 0]})
