"""ResizeGrad in stock onnxruntime: scales and sizes, regions, and what a node is refused for."""

import numpy as np
import pytest
from onnx_models import one_node, run

import opgrad


def test_scales_and_sizes(rng):
    """Scales from an input, sizes from the shapes; empty arrays stand for missing ones, as 1.19.2 takes them."""
    inputs = [("dy", "float32"), ("x", "float32"), ("roi", "float32"), ("scales", "float32")]
    attributes = {"mode": "linear", "nearest_mode": "floor", "extrapolation_value": 0.0, "cubic_coeff_a": -0.75}
    attributes["coordinate_transformation_mode"] = "pytorch_half_pixel"
    session = opgrad.onnxruntime.InferenceSession(one_node("ResizeGrad", inputs, [("dx", "float32")], **attributes))
    none = np.zeros(0, np.float32)
    for batch, scales in ((2, (1.0, 1.0, 2.0, 3.0)), (3, (1.0, 1.0, 2.0, 3.0)), (2, (1.0, 1.0, 2.2, 1.9)), (2, ())):
        x = rng.normal(size=(batch, 3, 4, 5)).astype(np.float32)
        sizes = (int(4 * scales[2]), int(5 * scales[3])) if scales else (7, 9)
        dy = rng.normal(size=(batch, 3, *sizes)).astype(np.float32)
        feeds = {"dy": dy, "x": x, "roi": none, "scales": np.array(scales, np.float32)}
        rounded = tuple(np.array(scales, np.float32).tolist())
        form = {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}
        (found,) = session.run(None, feeds)
        assert found.tobytes() == opgrad.resize_grad(dy, x, scales=rounded, **form).tobytes()


def test_regions_and_axes(rng):
    inputs = [("dy", "float16"), ("x", "float16"), ("roi", "float32")]
    form = {"mode": "cubic", "coordinate_transformation_mode": "tf_crop_and_resize", "exclude_outside": 1}
    model = one_node("ResizeGrad", inputs, [("dx", "float16")], axes=[2, 3], **form)
    x, dy = (rng.normal(size=shape).astype(np.float16) for shape in ((1, 2, 6, 5), (1, 2, 4, 9)))
    roi = np.array([0.1, 0.2, 0.9, 1.1], np.float32)
    (found,) = run(model, {"dy": dy, "x": x, "roi": roi})
    expected = opgrad.resize_grad(dy, x, roi=tuple(roi.tolist()), axes=(2, 3), **{**form, "exclude_outside": True})
    assert found.tobytes() == expected.tobytes()


def test_shapes_that_do_not_go_together(rng):
    model = one_node(
        "ResizeGrad", [("dy", "float32"), ("x", "float32"), None, ("scales", "float32")], [("dx", "float32")]
    )
    feeds = {"dy": np.zeros((1, 1, 9, 8), "f"), "x": np.zeros((1, 1, 4, 4), "f"), "scales": np.array([1, 1, 4, 2], "f")}
    with pytest.raises(Exception, match=r"resize_grad: dy has 9 elements along axis 2, expected 4 \* 4 elements"):
        run(model, feeds)
