"""Gradients of batches without rows: a size that is open while the graph is made, and 0 when it runs."""

import numpy as np
import onnxruntime
import pytest
from differences import computed, with_types
from gradient_cases import CASES, NEWEST
from onnx import TensorProto
from typed_cases import typed

from opgrad.gradients import gradients
from opgrad.onnxruntime import LOWERED, lower

# Of older releases Conv never returns from tensors without channels, to which ConvGrad's plain form turns a batch
# without rows, GatherND ends the process, and AffineGrid takes another batch than its sizes have.
IS_CHECKED = tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 32)
pytestmark = pytest.mark.skipif(not IS_CHECKED, reason="onnxruntime before 1.32 fails on batches without rows")
OTHERS = ("RNN", "GRU", "LSTM")  # onnxruntime ends the process when their batch is empty
REFUSED = {"Tile-13": False}  # Reshape finds no size beside one of 0: in the plain form, or in sessions of opgrad


def open_batch(case):
    """The model of a case whose batch is open, with arrays without rows; None where a constant has the batch, too."""
    model, fed = typed(case, TensorProto.FLOAT)
    first = fed[f"x{case.wanted[0]}"]
    if not first.ndim:
        return None
    rows = {
        name
        for name, array in case.feeds.items()
        if array.ndim == first.ndim and array.shape[0] == first.shape[0] and case.op not in ("Gemm", "MatMul", "Einsum")
    } | {f"x{case.wanted[0]}"}
    if not rows <= fed.keys():
        return None
    for value in model.graph.input:
        if value.name in rows:
            value.type.tensor_type.shape.dim[0].dim_param = "N"
    return model, {name: array[:0] if name in rows else array for name, array in fed.items()}


def runs(model, feeds):
    """Whether onnxruntime takes the batch at all."""
    try:
        computed(with_types(lower(model)), feeds)
    except Exception:
        return False
    return True


NAMED = {
    str(case): case
    for case in sorted(CASES, key=lambda case: case.opset)
    if case.opset <= NEWEST and not case.domain and case.op not in OTHERS
}
LAST = {(case.op, case.form): name for name, case in NAMED.items()}


@pytest.mark.parametrize("name", sorted(LAST.values()))
@pytest.mark.one_in(3)
def test_gradients_have_the_shapes_of_their_values(name):
    made = open_batch(NAMED[name])
    if made is None or not runs(*made):
        return
    model, feeds = made
    for plain in (False, True):
        graph = gradients(model, "y0", list(feeds), plain=plain)
        is_plain = plain or not any(node.domain or node.op_type in LOWERED for node in graph.graph.node)
        if plain is REFUSED.get(name):
            with pytest.raises(Exception, match="Reshape"):
                computed(graph, feeds, is_plain)
            continue
        found = computed(graph, feeds, is_plain)[-len(feeds) :]
        assert [each.shape for each in found] == [each.shape for each in feeds.values()]
        assert all(np.isfinite(each).all() for each in found)
        if is_plain:
            break  # the other form is this one
