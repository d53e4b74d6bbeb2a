"""What tests of passes share: models from text, their results in onnxruntime, what passes make of them."""

from contextlib import contextmanager
from unittest import mock

import differences
import numpy as np
import onnxruntime

from opgrad.gradients import gradients
from opgrad.onnx import passes
from opgrad.onnx.gradients import differentiation
from opgrad.onnx.gradients.differentiation import Differentiated
from opgrad.onnx.graph.graph import Graph, overridable
from opgrad.onnx.graph.messages import copied
from opgrad.onnxruntime import InferenceSession


def build(text, initializers=(), opset=17):
    """A model from the text of its graph, with initializers."""
    return differences.build(text, opset, initializers, '"com.microsoft": 1')


def floats(*shape, seed=0):
    """Float32 numbers between -1 and 1."""
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def run(found, feeds, as_it_is=False):
    """The results of a model in onnxruntime with opgrad.

    as_it_is: without onnxruntime's own fusions, of which that of layer normalization takes fourth powers for squares,
        and epsilon for 1e-5 where it is the first operand.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if as_it_is:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return InferenceSession(found.SerializeToString(), options).run(None, feeds)


def operators(found):
    """The operators of a model, sorted."""
    return sorted(node.op_type for node in found.graph.node)


def close(actual, expected, terms=64):
    """Equal but for roundings of sums of so many terms."""
    for one, other in zip(actual, expected, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        if one.dtype.kind == "f" and one.size:
            scale = max(float(np.abs(other.astype(np.float64)).max()), 1)
            np.testing.assert_allclose(one, other, rtol=0, atol=terms * np.finfo(one.dtype).eps * scale)
        else:
            np.testing.assert_array_equal(one, other)


def prepared(found, *batches, **options):
    """What `prepare` makes of a model; it gives the same for each of these feeds."""
    simple = passes.prepare(found, **options)
    again = passes.prepare(found, **options)
    assert simple.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True)
    for feeds in batches:
        close(run(simple, feeds, as_it_is=True), run(found, feeds, as_it_is=True))
    return simple


@contextmanager
def without_passes():
    """As long as it is entered, `gradients` differentiates graphs as they are."""
    skipped = mock.patch.multiple(passes, simplify=mock.DEFAULT, tidy=mock.DEFAULT)
    with skipped, mock.patch.object(differentiation, "order_ends"):
        yield


def finish(found, forward, keep=(), segments=None):
    """The model that training makes of one with gradients among its outputs. forward: what it computed before."""
    graph = Graph(copied(found), overridable(found), {*keep, *forward})
    passes.tidy(graph)
    return Differentiated(graph, tuple(forward), {}).model(segments)


def same_gradients(found, wanted, feeds, **options):
    """The model with gradients, which are the same as those of the graph as it is."""
    with_passes = gradients(found, "loss", wanted, **options)
    with without_passes():
        expected = gradients(found, "loss", wanted)
    close(run(with_passes, feeds), run(expected, feeds, as_it_is=True))
    return with_passes
