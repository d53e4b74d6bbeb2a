"""The gradients of picking elements and slices in stock onnxruntime, against the float64 references."""

import numpy as np
import pytest
from graph_cases import check_close
from onnx_models import one_node, run

from opgrad.cli.examples import expected
from opgrad.contract import DTYPES, FLOATS, INTEGERS
from opgrad.onnxruntime.overloads import overloads
from opgrad.ops import graph_operators

OPERATORS = graph_operators()
NAMES = {"GatherElementsGrad": "gather_elements_grad", "GatherNDGrad": "gather_nd_grad", "SliceGrad": "slice_grad"}


def check(name, inputs, **attributes):
    """Run a node whose inputs are given in ONNX's order, None for absent ones."""
    ports = [None if array is None else (parameter, array.dtype.name) for parameter, array in inputs.items()]
    dtype = inputs["dy"].dtype.name
    feeds = {parameter: array for parameter, array in inputs.items() if array is not None}
    (found,) = run(one_node(name, ports, [("dx", dtype)], **attributes), feeds)
    values = {
        parameter: array if parameter in ("dy", "indices") else tuple(array.tolist())
        for parameter, array in feeds.items()
    }
    op = OPERATORS[NAMES[name]]
    check_close([found.astype(inputs["dy"].dtype)], expected(op, values | attributes), 8)


def test_every_dtype_is_registered():
    for name in NAMES:
        mine = [overload for overload in overloads() if overload.onnx.name == name]
        dtypes = {tuple(port.dtype for port in overload.inputs) for overload in mine}
        assert len(dtypes) == len(mine) == len(FLOATS) * len(INTEGERS)


@pytest.mark.parametrize("integer", INTEGERS)
def test_gather_elements_grad(dtype, integer, rng):
    for shape, given, axis in (((3, 4), (2, 6), 1), ((5,), (3,), 0), ((2, 7, 3), (2, 4, 3), -2)):
        indices = rng.integers(-shape[axis], shape[axis], given).astype(integer)
        inputs = {"dy": rng.normal(size=given).astype(DTYPES[dtype]), "shape": np.array(shape), "indices": indices}
        check("GatherElementsGrad", inputs, axis=axis)
    check("GatherElementsGrad", inputs | {"indices": indices % 2})


@pytest.mark.parametrize("integer", INTEGERS)
def test_gather_nd_grad(dtype, integer, rng):
    for shape, given, batch in (((3, 4), (6, 2), 0), ((2, 5, 3), (2, 4, 1), 1), ((2, 5, 3), (4, 1), 0)):
        sizes = shape[batch : batch + given[-1]]
        indices = np.stack([rng.integers(-size, size, given[:-1]) for size in sizes], -1).astype(integer)
        dy = rng.normal(size=given[:-1] + shape[batch + given[-1] :]).astype(DTYPES[dtype])
        inputs = {"shape": np.array(shape), "indices": indices, "dy": dy}
        check("GatherNDGrad", inputs, **({"batch_dims": batch} if batch else {}))


@pytest.mark.parametrize("integer", INTEGERS)
def test_slice_grad(dtype, integer, rng):
    dy = rng.normal(size=(2, 2)).astype(DTYPES[dtype])
    starts, ends, axes, steps = (np.array(each, integer) for each in ((4, 0), (-100, 4), (-1, 0), (-3, 2)))
    every = {"dy": dy, "shape": np.array((4, 5)), "starts": starts, "ends": ends, "axes": axes, "steps": steps}
    check("SliceGrad", every)
    full = {"dy": rng.normal(size=(2, 5)).astype(DTYPES[dtype]), "shape": np.array((4, 5))}
    first = {"starts": np.array([1], integer), "ends": np.array([-1], integer)}
    check("SliceGrad", full | first)
    check("SliceGrad", full | first | {"axes": None, "steps": np.array([1], integer)})
    check("SliceGrad", full | first | {"axes": np.array([0], integer)})


def test_messages_reach_the_caller():
    inputs = [("dy", "float32"), ("shape", "int64"), ("indices", "int64")]
    model = one_node("GatherElementsGrad", inputs, [("dx", "float32")], axis=1)
    feeds = {"dy": np.ones((1, 3), np.float32), "shape": np.array([1, 4]), "indices": np.array([[0, 4, 2]])}
    with pytest.raises(Exception, match=r"gather_elements_grad: indices\[0, 1\] is 4, expected -4 to 3"):
        run(model, feeds)
    inputs = [("dy", "float32"), ("shape", "int64"), ("starts", "int64"), ("ends", "int64")]
    feeds = {"dy": np.ones((3, 5), np.float32), "shape": np.array([4, 5]), "starts": np.zeros(1, int), "ends": [2]}
    with pytest.raises(Exception, match=r"slice_grad: dy has shape \(3, 5\), expected \(2, 5\)"):
        run(one_node("SliceGrad", inputs, [("dx", "float32")]), feeds)
