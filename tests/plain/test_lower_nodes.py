"""Lowered nodes that need more than themselves: pooling with its forward node, optimizers with their sequences."""

import numpy as np
import onnx
import onnxruntime
import pytest
from accuracy import relative_tolerance
from lowering_models import feedback, graph_of, run, value_info
from onnx import TensorProto, helper

from opgrad.onnxruntime import lower

# --- pooling, whose shape comes from the forward node ----------------------------------------------------------------


def max_pool_model(x, grad_attributes, forward=True):
    """MaxPool and its gradient, the sizes unknown; or the gradient alone, with the shape of its output in the graph."""
    window = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}
    pool = helper.make_node("MaxPool", ["x"], ["y", "indices"], **window)
    grad = helper.make_node("MaxPoolGrad", ["dy", "indices"], ["dx"], **window, **grad_attributes)
    if forward:
        return graph_of([pool, grad], {"x": x, "dy": x}, [("dx", x, [None] * 4), ("y", x, [None] * 4)])
    indices = np.zeros((1, 1, 1, 1), np.int64)
    return graph_of([grad], {"dy": x, "indices": indices}, [("dx", x, x.shape)])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_max_pool_grad_takes_the_shape_from_the_forward_node(dtype, rng):
    x = rng.standard_normal((2, 3, 5, 4)).astype(dtype)
    dy = rng.standard_normal((2, 3, 3, 4)).astype(dtype)
    dx, y = run(lower(max_pool_model(x, {})), {"x": x, "dy": dy})
    exact = np.zeros(x.shape)
    for n, c, i, j in np.ndindex(*y.shape):  # random numbers are all different, so each maximum names its place
        place = np.argwhere(x[n, c] == y[n, c, i, j])[0]
        exact[n, c, *place] += dy[n, c, i, j]
    np.testing.assert_allclose(dx, exact, rtol=relative_tolerance(dtype, 6))


def test_max_pool_grad_takes_the_shape_from_the_graph(rng):
    x = rng.standard_normal((2, 1, 4, 3)).astype(np.float32)
    indices = np.array([[[[0, 5]]], [[[23, 23]]]])
    dy = np.arange(4, dtype=np.float32).reshape(indices.shape)
    (dx,) = run(lower(max_pool_model(x, {}, forward=False)), {"dy": dy, "indices": indices})
    assert dx.shape == x.shape
    assert {place: dx.flat[place] for place in np.flatnonzero(dx)} == {5: 1, 23: 5}


def test_pooling_of_unknown_shape_has_no_form(rng):
    x = rng.standard_normal((1, 1, 4, 3)).astype(np.float32)
    model = max_pool_model(x, {}, forward=False)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(NotImplementedError, match=r"MaxPoolGrad has no form .* neither the shape of its output nor"):
        lower(model)
    with pytest.raises(NotImplementedError, match="storage_order is 1"):
        lower(max_pool_model(x, {"storage_order": 1}))
    node = helper.make_node("AveragePoolGrad", ["dy"], ["dx"], kernel_shape=[2, 2])
    with pytest.raises(NotImplementedError, match=r"AveragePoolGrad has no form .* spatial sizes"):
        lower(graph_of([node], {"dy": x}, [("dx", x, [None] * 4)]))


# --- sequences: optimizers and clipping ------------------------------------------------------------------------------

SHAPES = ((3, 2), (), (4,))


def sequence(name):
    return helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None)


def optimizer_model(op, sequences, outputs, **attributes):
    """An optimizer model as the generator writes it: only the flag is an output."""
    node = helper.make_node(op, ["learning_rate", *sequences], outputs, domain="com.microsoft", **attributes)
    numbers = [value_info("learning_rate", np.zeros(1, np.float32), [1])]
    if "step" in sequences:
        numbers.append(value_info("step", np.zeros(1, np.int64), [1]))
    inputs = [*numbers, *(sequence(name) for name in sequences if name != "step")]
    graph = helper.make_graph([node], "optimizer", inputs, [value_info(outputs[0], np.zeros(1, bool), [1])])
    imports = [helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("", 15)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def five_steps(model, inputs, gradients):
    """The inputs after five steps, every output fed back into its input."""
    lowered = lower(model)
    onnx.checker.check_model(lowered)
    back = feedback(lowered)
    session = onnxruntime.InferenceSession(lowered.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    for step, each in enumerate(gradients, 1):
        more = {"step": np.array([step])} if "step" in {value.name for value in session.get_inputs()} else {}
        results = dict(zip(names, session.run(None, inputs | more | {"gradients": each}), strict=True))
        assert results[names[0]].tolist() == [True]
        inputs |= {source: results[name] for name, source in back.items()}
    return inputs


def random_sequences(rng, count):
    return [[rng.standard_normal(shape).astype(np.float32) for shape in SHAPES] for _ in range(count)]


@pytest.mark.parametrize(("mode", "correct"), [(0, 1), (1, 1), (1, 0)])
def test_adamw(mode, correct, rng):
    parameters, *gradients = random_sequences(rng, 6)
    zeros = [np.zeros(shape, np.float32) for shape in SHAPES]
    sequences = ["step", "params", "gradients", "first", "second"]
    settings = {"alpha": 0.75, "beta": 0.875, "epsilon": 2.0**-20, "weight_decay": 0.125}
    model = optimizer_model("AdamWOptimizer", sequences, ["done"], adam_mode=mode, correct_bias=correct, **settings)
    rate = np.array([0.0625], np.float32)
    after = five_steps(model, {"learning_rate": rate, "params": parameters, "first": zeros, "second": zeros}, gradients)
    for place, p in enumerate(parameters):
        p, m, v = p.astype(np.float64), np.zeros(p.shape), np.zeros(p.shape)
        for t, each in enumerate(gradients, 1):
            g = each[place].astype(np.float64)
            m, v = 0.75 * m + 0.25 * g, 0.875 * v + 0.125 * g * g
            c1, c2 = (1 - 0.75**t, 1 - 0.875**t) if correct else (1, 1)
            if mode == 0:
                p = p * (1 - 0.0625 * 0.125)
                p = p - 0.0625 / c1 * m / (np.sqrt(v / c2) + 2.0**-20)
            else:
                p = p - 0.0625 * np.sqrt(c2) / c1 * m / (np.sqrt(v) + 2.0**-20)
                p = p * (1 - 0.0625 * 0.125)
        for name, exact in (("params", p), ("first", m), ("second", v)):
            assert after[name][place].shape == exact.shape
            np.testing.assert_allclose(after[name][place], exact, rtol=1e-5, atol=1e-6)


def test_sgd_with_clipping_and_without(rng):
    parameters, *gradients = random_sequences(rng, 6)
    model = optimizer_model("SGDOptimizerV2", ["params", "gradients"], ["done"])
    rate = {"learning_rate": np.array([0.5], np.float32)}
    after = five_steps(model, rate | {"params": parameters}, gradients)
    for place, p in enumerate(parameters):
        np.testing.assert_allclose(
            after["params"][place], p - 0.5 * np.sum([each[place] for each in gradients], axis=0), atol=1e-5
        )
    clip = helper.make_node("InplaceClipGradNorm", ["gradients"], ["clipped"], domain="com.microsoft", max_norm=0.75)
    model.graph.node.insert(0, clip)
    model.graph.node[1].input[2] = "clipped"
    after = five_steps(model, rate | {"params": parameters}, gradients[:1])
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients[0]))
    for p, g, result in zip(parameters, gradients[0], after["params"], strict=True):
        assert result.shape == p.shape
        np.testing.assert_allclose(result, p - 0.5 * g * 0.75 / (norm + 1e-6), atol=1e-6)
    small = [np.asarray(g / 100) for g in gradients[0]]  # a norm below the limit changes nothing
    after = five_steps(model, rate | {"params": parameters}, [small])
    for p, g, result in zip(parameters, small, after["params"], strict=True):
        np.testing.assert_allclose(result, p - 0.5 * g, atol=1e-6)


def test_skipped_update_changes_nothing(rng):
    parameters, gradients = random_sequences(rng, 2)
    model = optimizer_model("SGDOptimizerV2", ["params", "gradients"], ["done"])
    model.graph.input.append(value_info("signal", np.zeros(1, bool), [1]))
    model.graph.node[0].input.append("signal")
    inputs = {"learning_rate": np.ones(1, np.float32), "params": parameters, "gradients": gradients}
    done, after = run(lower(model), inputs | {"signal": np.array([False])})
    assert done.tolist() == [False]
    for p, result in zip(parameters, after, strict=True):
        assert result.shape == p.shape
        np.testing.assert_array_equal(result, p)
