"""Gradients of models with loops and branches, against central differences, all in onnxruntime in float64."""

import numpy as np
import onnx
import onnxruntime
from differences import LOSS, STEP, TOLERANCE, build, float_results, with_loss

from opgrad.gradients import gradients
from opgrad.onnxruntime import InferenceSession

DIRECTIONS = 4


def session(model, kind=onnxruntime.InferenceSession):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return kind(model.SerializeToString(), options)


def check(model, feeds, wanted=None, outputs=None, directions=DIRECTIONS):
    """Compare the gradients of a model, in both forms, with central differences of the model in onnxruntime.

    wanted: the inputs to differentiate with respect to, None for all of float64. outputs: the results that are
    differentiated, None for all of float type. Returns the model with gradients in plain operators.
    """
    model = build(model) if isinstance(model, str) else model
    wanted = list(wanted or [name for name, each in feeds.items() if each.dtype == np.float64])
    results = session(model).run(None, feeds)
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    whole = with_loss(whole, float_results(model, results, outputs))
    place = len(whole.graph.output) - 1
    forward = session(whole)
    plain = gradients(whole, LOSS, wanted, plain=True)
    onnx.checker.check_model(plain)
    found = session(plain).run(None, feeds)[-len(wanted) :]
    assert all(node.domain in ("", "opgrad") for node in plain.graph.node)
    other = session(gradients(whole, LOSS, wanted), InferenceSession).run(None, feeds)[-len(wanted) :]
    random = np.random.default_rng(2)
    for name, gradient, again in zip(wanted, found, other, strict=True):
        assert gradient.shape == feeds[name].shape, (name, gradient.shape)
        np.testing.assert_allclose(again, gradient, rtol=1e-12, atol=1e-12)
        for direction in random.normal(size=(directions, *feeds[name].shape)):
            ends = [forward.run(None, {**feeds, name: feeds[name] + s * STEP * direction})[place] for s in (1, -1)]
            expected, actual = (ends[0] - ends[1]) / (2 * STEP), (gradient * direction).sum()
            scale = np.abs(gradient * direction).sum() + np.abs(ends[0]) + 1
            assert np.abs(expected - actual) <= TOLERANCE * scale, (name, float(expected), float(actual))
    return plain
