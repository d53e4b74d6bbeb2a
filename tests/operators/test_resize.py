"""The gradient of resizing: onnxruntime's own forward, whose derivative it is, other layouts, and errors."""

import itertools

import numpy as np
import onnx
import onnxruntime
import pytest
from graph_cases import call, check_close
from lowering_models import graph_of, known_shapes, run
from onnx import TensorProto, helper

import opgrad
from opgrad.cli.examples import expected
from opgrad.onnxruntime import lower
from opgrad.ops import graph_operators
from opgrad.ops.pooling import COORDINATES, CROP, NEAREST_MODES

OP = graph_operators()["resize_grad"]
FORMS = [{"mode": "nearest", "nearest_mode": each} for each in NEAREST_MODES]
FORMS += [
    {"mode": mode, "antialias": antialias, "exclude_outside": outside}
    for mode, antialias, outside in itertools.product(("linear", "cubic"), (False, True), (False, True))
    if mode == "cubic" or not outside  # which onnxruntime takes with other modes only where they are antialiased
]
# x, y and whether scales are given, of which smaller sizes are no multiple. No middle of an odd number of elements
# falls on that of another: there half_pixel_symmetric would round to either side.
SIZES = [((4, 5), (8, 10), True), ((4, 5), (7, 4), False), ((5, 7), (2, 3), True), ((4, 5), (1, 5), False)]
REGION = (0.0, 0.0, 0.2, -0.1, 1.0, 1.0, 0.9, 1.3)


def forward(units, y, roi, scales, attributes):
    """What onnxruntime makes of each of these images."""
    constants = {"roi": (TensorProto.FLOAT, roi), "scales": (TensorProto.FLOAT, scales)}
    constants |= {} if scales else {"sizes": (TensorProto.INT64, (1, 1, *y))}
    opset = 11 if attributes["coordinate_transformation_mode"] == "tf_half_pixel_for_nn" else 19
    node = helper.make_node(
        "Resize", ["x", *constants], ["y"], **{k: int(v) if v is True else v for k, v in attributes.items()}
    )
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    tensors = [helper.make_tensor(name, kind, [len(values)], values) for name, (kind, values) in constants.items()]
    graph = helper.make_graph([node], "resize", infos[:1], infos[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return np.stack([session.run(None, {"x": unit})[0] for unit in units])


@pytest.mark.parametrize("coordinates", COORDINATES)
def test_derivative_of_onnxruntimes_own_resizing(coordinates, rng):
    """It is linear, so that its results for unit vectors are all of its derivative."""
    for form, (x, y, scaled) in itertools.product(FORMS, SIZES):
        if coordinates == "tf_half_pixel_for_nn" and form.get("antialias"):
            continue  # of other opsets
        attributes = {**form, "coordinate_transformation_mode": coordinates}
        attributes = {name: value for name, value in attributes.items() if value is not False}
        scales = tuple(float(np.float32((b + 0.4 * (b < a)) / a)) for a, b in zip(x, y, strict=True))
        scales, roi = (1.0, 1.0, *scales) if scaled else (), REGION if coordinates == CROP else ()
        units = np.eye(x[0] * x[1], dtype=np.float32).reshape(-1, 1, 1, *x)
        made = forward(units, y, roi, scales, attributes)
        dy = rng.normal(size=made.shape[1:])
        dx = OP.reference(dy, np.zeros((1, 1, *x)), roi=roi, scales=scales, **attributes)
        exact = (made * dy).reshape(len(made), -1).sum(1).reshape(dx.shape)
        # Weights of float32, of coordinates up to 10 and their third powers.
        np.testing.assert_allclose(dx, exact, rtol=0, atol=1e-4, err_msg=str((attributes, x, y)))


def test_larger_shapes_of_any_axes(threads, rng):
    """Rows that stay and are taken in pieces, planes of any number of axes, several passes."""
    cases = [
        ((3, 4, 7, 5000), (3, 8, 3, 5000), {"mode": "linear"}),
        ((2, 3, 2, 3, 2, 3), (3, 4, 3, 5, 3, 4), {}),
        ((5, 3, 4), (9, 3, 4), {}),
        ((300,), (700,), {"mode": "cubic"}),
        ((3, 1, 31, 29), (3, 1, 400, 3), {"mode": "linear", "antialias": True}),
    ]
    for x, y, attributes in cases:
        given = {"dy": rng.normal(size=y).astype("float32"), "x": np.zeros(x, "float32"), **attributes}
        check_close(threads(lambda given=given: call(OP, given)), expected(OP, given), 64)


def test_only_elements_with_a_weight_count(rng):
    """A number that is not finite reaches those that y was made of, and no others."""
    dy = rng.normal(size=(1, 1, 8, 8)).astype("float32")
    dy[0, 0, 3, 4] = np.nan
    dx = opgrad.resize_grad(dy, np.zeros((1, 1, 4, 4), "float32"), mode="linear")
    assert np.argwhere(np.isnan(dx[0, 0])).tolist() == [[1, 1], [1, 2], [2, 1], [2, 2]]


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("scales", [None, (2.0, 0.5, 1.5, 1.0), (1.4, 1.0, 1.0, 2.0)])
def test_resizing_of_images_and_channels_whose_sizes_the_graph_does_not_tell(scales, mode, rng):
    """Lowered; with a scale of 1.4 two images stay two, but not at their places."""
    sizes = (2, 4, 4, 3)
    new = [int(size * scale) for size, scale in zip(sizes, scales or (2.0, 0.5, 1.5, 1.0), strict=True)]
    x, dy = (rng.normal(size=shape).astype(np.float32) for shape in (sizes, new))
    inputs, given = {"dy": dy, "x": x}, {"mode": mode}
    if scales:
        inputs["scales"], given["scales"] = np.array(scales, np.float32), scales
    names = ["dy", "x", "", "scales"] if scales else ["dy", "x"]
    grad = helper.make_node("ResizeGrad", names, ["dx"], domain="com.microsoft", mode=mode)
    lowered = lower(graph_of([grad], inputs, [("dx", x, [None] * 4)]))
    onnx.checker.check_model(lowered, full_check=True)
    (dx,) = run(lowered, inputs)
    np.testing.assert_allclose(dx, OP.reference(dy, x, **given), atol=1e-5)


def resize_model(antialias):
    x, dy = np.ones((1, 1, 6, 6), np.float32), np.ones((1, 1, 3, 3), np.float32)
    grad = helper.make_node(
        "ResizeGrad", ["dy", "x"], ["dx"], domain="com.microsoft", mode="linear", antialias=antialias
    )
    return graph_of([grad], {"dy": dy, "x": x}, [("dx", x, [None] * 4)]), {"dy": dy, "x": x}


def test_antialias_where_the_opset_has_none():
    model, inputs = resize_model(0)
    lowered = lower(model)
    onnx.checker.check_model(lowered, full_check=True)
    np.testing.assert_allclose(run(lowered, inputs)[0].sum(), 9)
    model, _ = resize_model(1)
    with pytest.raises(NotImplementedError, match=r"ResizeGrad has no form .* antialias needs opset 18"):
        lower(model)
    lowered = lower(known_shapes(model, inputs))
    onnx.checker.check_model(lowered, full_check=True)
    exact = OP.reference(inputs["dy"], inputs["x"], mode="linear", antialias=True)
    np.testing.assert_allclose(run(lowered, inputs)[0], exact, atol=1e-6)


def test_resizing_in_float64_needs_sizes(rng):
    x, dy = rng.normal(size=(1, 1, 3, 4)), rng.normal(size=(1, 1, 7, 5))
    inputs = {"dy": dy, "x": x}
    for mode in ("linear", "nearest"):
        grad = helper.make_node("ResizeGrad", ["dy", "x"], ["dx"], domain="com.microsoft", mode=mode)
        model = graph_of([grad], inputs, [("dx", x, [None] * 4)])
        if mode == "linear":
            with pytest.raises(NotImplementedError, match=r"ResizeGrad has no form .* in float64 it needs sizes"):
                lower(model)
            model = known_shapes(model, inputs)
        np.testing.assert_allclose(run(lower(model), inputs)[0], OP.reference(dy, x, mode=mode), rtol=1e-12)
