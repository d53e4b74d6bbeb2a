"""Forms of plain ONNX: each operator's, whole graphs, `lower` as a function, and what it refuses."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from accuracy import relative_tolerance
from lowered_sets import NAMES, batches
from lowering_cases import SINGLE, cases
from lowering_models import feedback, graph_of, known_shapes, run, value_info
from onnx import TensorProto, helper, numpy_helper
from portable_steps import stepped

from opgrad.contract import reference
from opgrad.onnxruntime import LOWERED, NOT_LOWERED, lower, register
from opgrad.training import AdamWRule, read_checkpoint

# Operators on sequences and MaxPoolGrad, which needs its forward node, have tests of their own.
ELSEWHERE = {"AdamWOptimizer", "InplaceClipGradNorm", "MaxPoolGrad", "SGDOptimizerV2"}
ELSEWHERE |= {"LSTMTraining", "LSTMGrad", "GRUTraining", "GRUGrad"}  # test_recurrent.py
ELSEWHERE |= {"LinearCrossEntropyLoss", "LinearCrossEntropyLossAndGrad"}  # operators/test_linear_loss.py
ELSEWHERE |= {"QuantizedMatMulGrad"}  # gradients/test_quantized_products.py


def typed(array, dtype):
    """Numbers in the dtype of the test; integers and truth values as they are."""
    return array.astype(dtype) if array.dtype.kind == "f" else array


def assert_close(result, exact, dtype, terms, name):
    assert result.dtype == typed(exact, dtype).dtype, name
    assert result.shape == exact.shape, name
    if exact.dtype.kind != "f":
        np.testing.assert_array_equal(result, exact, name)
    else:
        allowed = relative_tolerance(dtype, terms) * (1 + np.abs(exact[np.isfinite(exact)]).max(initial=0))
        np.testing.assert_allclose(result, exact, rtol=0, atol=allowed, err_msg=name)


def built(name, case, dtype, opset):
    """The model of one node, its inputs, and what the references say of each output."""
    inputs = {f"in{place}": np.asarray(each) for place, each in enumerate(case.inputs) if each is not None}
    inputs = {key: each.astype(dtype) if each.dtype.kind == "f" else each for key, each in inputs.items()}
    exact = {f"out{place}": np.asarray(each) for place, each in enumerate(case.exact) if each is not None}
    names_in, names_out = (
        [f"{word}{place}" if each is not None else "" for place, each in enumerate(arrays)]
        for word, arrays in (("in", case.inputs), ("out", case.exact))
    )
    node = helper.make_node(name, names_in, names_out, domain=case.domain, **case.attributes)
    wanted = [(key, typed(each, dtype), case.shape or [None] * each.ndim) for key, each in exact.items()]
    return graph_of([node], inputs, wanted, opset), inputs, exact


NAMES_LOWERED = [name for name in LOWERED if name not in ELSEWHERE]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in NAMES_LOWERED
        for dtype in ("float32", "float64")
        if dtype == "float32" or name not in SINGLE
    ],
)
@pytest.mark.one_in(2)
def test_form_computes_the_reference(name, dtype, rng):
    for case, opset in itertools.product(cases(name, dtype, rng), (15, 21)):
        if opset == 15 and case.attributes.get("antialias"):
            continue  # of later opsets
        model, inputs, exact = built(name, case, dtype, opset)
        lowered = lower(model, operators=[name])
        onnx.checker.check_model(lowered)
        assert {node.domain for node in lowered.graph.node} == {"opgrad"}
        assert {node.domain for function in lowered.functions for node in function.node} == {""}
        for (key, each), result in zip(exact.items(), run(lowered, inputs, [*exact]), strict=True):
            assert_close(result, each, dtype, case.terms, f"{key}, {case.attributes}")


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


def optimizer_model(op, sequences, outputs, **attributes):
    """An optimizer model as the generator writes it: only the flag is an output."""
    node = helper.make_node(op, ["learning_rate", *sequences], outputs, domain="com.microsoft", **attributes)
    numbers = [value_info("learning_rate", np.zeros(1, np.float32), [1])]
    if "step" in sequences:
        numbers.append(value_info("step", np.zeros(1, np.int64), [1]))
    lists = [name for name in sequences if name != "step"]
    inputs = [*numbers, *(helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None) for name in lists)]
    graph = helper.make_graph([node], "optimizer", inputs, [value_info(outputs[0], np.zeros(1, bool), [1])])
    imports = [helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("", 15)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def results(session, given):
    """What a session gives, by name, for those of the given arrays that it takes."""
    feeds = {value.name: given[value.name] for value in session.get_inputs()}
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds), strict=True))


def five_steps(model, inputs, gradients):
    """The inputs after five steps, every output fed back into its input."""
    lowered = lower(model)
    onnx.checker.check_model(lowered)
    back = feedback(lowered)
    session = onnxruntime.InferenceSession(lowered.SerializeToString(), providers=["CPUExecutionProvider"])
    for step, each in enumerate(gradients, 1):
        found = results(session, inputs | {"step": np.array([step]), "gradients": each})
        assert next(iter(found.values())).tolist() == [True]
        inputs |= {source: found[name] for name, source in back.items()}
    return inputs


def random_sequences(rng, count):
    return [[rng.standard_normal(shape).astype(np.float32) for shape in SHAPES] for _ in range(count)]


@pytest.mark.parametrize(("mode", "correct"), [(0, 1), (1, 1), (1, 0)])
def test_adamw(mode, correct, rng):
    parameters, *gradients = random_sequences(rng, 6)
    zeros = [np.zeros(shape, np.float32) for shape in SHAPES]
    sequences = ["step", "params", "gradients", "first", "second"]
    settings = {"alpha": 0.75, "beta": 0.875, "epsilon": 2.0**-20, "weight_decay": 0.125}
    settings |= {"adam_mode": mode, "correct_bias": correct}
    model = optimizer_model("AdamWOptimizer", sequences, ["done"], **settings)
    rate = np.array([0.0625], np.float32)
    after = five_steps(model, {"learning_rate": rate, "params": parameters, "first": zeros, "second": zeros}, gradients)
    for place, p in enumerate(parameters):
        p, moments = p.astype(np.float64), ()
        for t, each in enumerate(gradients, 1):
            p, moments = stepped(AdamWRule(**settings), p, moments, each[place].astype(np.float64), 0.0625, t)
        for name, exact in zip(("params", "first", "second"), (p, *moments), strict=True):
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


def test_squares_of_large_gradients_do_not_overflow():
    gradients = [np.array([3e25, 0], np.float32), np.array(4e25, np.float32)]
    model = optimizer_model("SGDOptimizerV2", ["params", "gradients"], ["done"])
    clip = node("InplaceClipGradNorm", "gradients", "clipped", max_norm=5.0)
    model.graph.node.insert(0, clip)
    model.graph.node[1].input[2] = "clipped"
    inputs = {"learning_rate": np.ones(1, np.float32), "params": [np.zeros_like(each) for each in gradients]}
    after = five_steps(model, inputs, [gradients])["params"]
    np.testing.assert_allclose(after[0], [-3, 0], rtol=1e-6)
    np.testing.assert_allclose(after[1], -4, rtol=1e-6)
    arrays = dict(zip("ab", gradients, strict=True))
    (norm,) = run(lower(one("ReduceAllL2", arrays, "norm", gradients[1])), arrays)
    np.testing.assert_allclose(norm, 5e25, rtol=1e-6)


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


X = np.array([[-1.0, 2, 0], [3, -4, 5]], np.float32)
DY = np.arange(6, dtype=np.float32).reshape(2, 3)
FLAG, FEEDS, RELU_GRAD = np.array([True]), {"dy": DY, "x": X}, np.where(X > 0, DY, 0)


def node(op, inputs, outputs, domain="com.microsoft", **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), domain=domain, **attributes)


def one(op, inputs, outputs, like, **attributes):
    """A model of one node, whose outputs are of the type of an array."""
    wanted = [(name, like, None) for name in outputs.split()]
    return graph_of([node(op, " ".join(inputs), outputs, **attributes)], inputs, wanted)


def relu_grad_model(opset=15, *more):
    nodes = [node("ReluGrad", "dy x", "dx", name="relu"), *more]
    return graph_of(nodes, FEEDS, [("dx", X, [None, None])], opset)


def opset_of(model):
    return next(each.version for each in model.opset_import if each.domain == "")


# --- what it takes ---------------------------------------------------------------------------------------------------


def test_model_bytes_and_path_give_the_same(tmp_path):
    model = relu_grad_model()
    before = model.SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(before)
    results = [lower(each).SerializeToString(deterministic=True) for each in (model, before, path, str(path))]
    assert len(set(results)) == 1
    assert model.SerializeToString() == before


@pytest.mark.parametrize("model", [None, 3, ["model.onnx"]])
def test_no_model(model):
    with pytest.raises(TypeError, match=r"lower: model is of type .* expected onnx\.ModelProto, bytes or a path"):
        lower(model)


def test_missing_and_damaged_models(tmp_path):
    with pytest.raises(FileNotFoundError):
        lower(tmp_path / "none.onnx")
    path = tmp_path / "damaged.onnx"
    path.write_bytes(b"\xff" * 100)
    for damaged in (path, path.read_bytes()):
        with pytest.raises(ValueError, match="no ONNX model, or damaged"):
            lower(damaged)
    with pytest.raises(ValueError, match="lower: the model is no ONNX model, or empty"):
        lower(b"")


def test_data_outside_the_file_stay_there(tmp_path):
    model = relu_grad_model()
    del model.graph.input[1]
    model.graph.initializer.append(numpy_helper.from_array(X, "x"))
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    lowered = lower(tmp_path / "model.onnx")
    assert lowered.graph.initializer[0].data_location == TensorProto.EXTERNAL
    onnx.save(lowered, tmp_path / "plain.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "plain.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"dy": DY})[0], RELU_GRAD)


# --- which operators -------------------------------------------------------------------------------------------------


def test_only_the_named_operators():
    second = node("TanhGrad", "dx x", "other")
    lowered = lower(relu_grad_model(15, second), operators={"TanhGrad"})
    assert [each.domain for each in lowered.graph.node] == ["com.microsoft", "opgrad"]
    with pytest.raises(ValueError, match="operators has 'Relu', expected names of opgrad"):
        lower(relu_grad_model(), operators=["Relu"])
    with pytest.raises(TypeError, match=r"operators is of type str, expected a collection of names such as \['Relu"):
        lower(relu_grad_model(), operators="ReluGrad")
    with pytest.raises(NotImplementedError, match="lower: PythonOp has no form of plain operators: it calls back"):
        lower(relu_grad_model(), operators=["PythonOp"])


def test_operator_without_a_form_is_named():
    model = relu_grad_model(15, node("BitmaskDropoutGrad", "x", "y", name="cell"))
    with pytest.raises(NotImplementedError, match=r"lower: BitmaskDropoutGrad \(node 'cell'\) has no form .*: it unp"):
        lower(model)
    assert [each.op_type for each in lower(model, operators=LOWERED).graph.node] == ["ReluGrad", "BitmaskDropoutGrad"]


def test_others_are_left_alone():
    nodes = [node(op, *names) for op, *names in (("Gelu", "x", "g"), ("QuickGelu", "g", "q"), ("Unheard", "q", "u"))]
    nodes.append(node("ReluGrad", "q", "r", "mine"))
    model = graph_of(nodes, {"x": X}, [("g", X, [None, None])])
    assert lower(model).SerializeToString() == model.SerializeToString()
    assert "QuickGelu" in LOWERED


def test_missing_input_is_named():
    with pytest.raises(NotImplementedError, match="ReluGrad has no form of plain operators: it has 1 of its 2 inputs"):
        lower(one("ReluGrad", {"x": X}, "dx", X))


def test_nodes_share_functions():
    nodes = [node("LeakyReluGrad", "dy x", f"out{index}", alpha=alpha) for index, alpha in enumerate((0.5, 0.25, 0.5))]
    lowered = lower(graph_of(nodes, FEEDS, [(f"out{index}", X, [None, None]) for index in range(3)]))
    assert [each.op_type for each in lowered.graph.node] == ["LeakyReluGrad", "LeakyReluGrad_2", "LeakyReluGrad"]
    for result, alpha in zip(run(lowered, FEEDS), (0.5, 0.25, 0.5), strict=True):
        np.testing.assert_array_equal(result, np.where(X > 0, DY, alpha * DY))


def test_lowering_in_two_steps_gives_each_body_its_own_name():
    nodes = [node("LeakyReluGrad", "dy x", "a", alpha=0.5), node("ReluGrad", "a x", "b")]
    model = graph_of(nodes, FEEDS, [("b", X, [None, None])])
    first = lower(model, operators=["LeakyReluGrad"])
    first.graph.node.append(node("LeakyReluGrad", "b x", "c", alpha=0.125))
    names = [each.name for each in lower(first).functions]
    assert names == ["LeakyReluGrad", "ReluGrad", "LeakyReluGrad_2"]


# --- opsets and imports ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("opset", "after"), [(12, 16), (13, 16), (15, 16), (16, 16), (18, 18), (21, 21)])
def test_opset_is_raised_to_what_the_bodies_need(opset, after):
    lowered = lower(relu_grad_model(opset))
    assert opset_of(lowered) == after
    onnx.checker.check_model(lowered)
    np.testing.assert_array_equal(run(lowered, FEEDS)[0], RELU_GRAD)


def test_old_operators_are_converted():
    squeeze = helper.make_node("Unsqueeze", ["dx"], ["y"], axes=[0])  # an attribute up to opset 12
    model = relu_grad_model(12, squeeze)
    model.graph.output.append(value_info("y", X, [1, None, None]))
    assert run(lower(model), FEEDS)[1].shape == (1, 2, 3)


def test_layer_normalization_of_an_old_opset():
    normal = helper.make_node("LayerNormalization", ["x", "scale"], ["y", "mean", "inv_std"], axis=-1)
    grad = node("LayerNormalizationGrad", "dy x scale mean inv_std", "dx dscale dbias", axis=-1)
    inputs = FEEDS | {"scale": np.ones(3, np.float32)}
    wanted = [("dx", X, [None, None]), ("dscale", X, [None])]
    lowered = lower(graph_of([normal, grad], inputs, wanted))
    assert opset_of(lowered) == 17
    onnx.checker.check_model(lowered)
    dx, _ = run(lowered, inputs)
    np.testing.assert_allclose(dx.sum(1), 0, atol=1e-5)


def test_imports_of_unused_domains_go():
    model = relu_grad_model()
    model.opset_import.extend([helper.make_opsetid("org.pytorch.aten", 1), helper.make_opsetid("ai.onnx.ml", 3)])
    assert {each.domain for each in lower(model).opset_import} == {"", "com.microsoft", "opgrad"}


def test_session_that_knows_opgrads_operators():
    options = onnxruntime.SessionOptions()
    register(options)
    session = onnxruntime.InferenceSession(lower(relu_grad_model()).SerializeToString(), options)
    np.testing.assert_array_equal(session.run(None, FEEDS)[0], RELU_GRAD)


# --- nodes inside nodes ----------------------------------------------------------------------------------------------


def test_nodes_of_subgraphs():
    branches = [
        helper.make_graph([node("ReluGrad", source, name[:4])], name, [], [value_info(name[:4], X, [None, None])])
        for name, source in (("then_branch", "dy x"), ("else_branch", "x dy"))
    ]
    choice = helper.make_node("If", ["flag"], ["dx"], **{each.name: each for each in branches})
    inputs = FEEDS | {"flag": FLAG}
    lowered = lower(graph_of([choice], inputs, [("dx", X, [None, None])]))
    np.testing.assert_array_equal(run(lowered, inputs)[0], RELU_GRAD)
    np.testing.assert_array_equal(run(lowered, inputs | {"flag": ~FLAG})[0], np.where(DY > 0, X, 0))


def test_nodes_of_functions():
    imports = [helper.make_opsetid("", 16), helper.make_opsetid("com.microsoft", 1)]
    inner = node("ReluGrad", "a b", "c")
    model = graph_of([node("Outer", "dy x", "dx", "mine")], FEEDS, [("dx", X, [None, None])], 16)
    model.functions.append(helper.make_function("mine", "Outer", ["a", "b"], ["c"], [inner], imports))
    model.opset_import.append(helper.make_opsetid("mine", 1))
    np.testing.assert_array_equal(run(lower(model), FEEDS)[0], RELU_GRAD)
    inner = model.functions[0].node[0]
    inner.op_type = "LeakyReluGrad"
    inner.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    with pytest.raises(NotImplementedError, match="its attribute alpha is that of the function around it"):
        lower(model)


# --- what was written in place ---------------------------------------------------------------------------------------


def accumulator_model(outputs="done", *more):
    nodes = [node("InPlaceAccumulatorV2", "buffer dy reset", outputs), *more]
    return graph_of(nodes, {"buffer": X, "dy": DY, "reset": FLAG}, [("done", FLAG, [1])])


def test_sum_is_an_output_to_feed_back():
    lowered = lower(accumulator_model())
    assert feedback(lowered) == {"buffer.next": "buffer"}
    assert [each.name for each in lowered.graph.output] == ["done", "buffer.next"]
    inputs = {"buffer": X.copy(), "dy": DY, "reset": ~FLAG}
    done, total = run(lowered, inputs)
    assert done.tolist() == [True]
    np.testing.assert_array_equal(total, X + DY)
    np.testing.assert_array_equal(inputs["buffer"], X)


def test_sum_that_is_an_output_already_keeps_its_name():
    model = accumulator_model("done total")
    model.graph.output.append(value_info("total", X, [None, None]))
    lowered = lower(model)
    assert feedback(lowered) == {"total": "buffer"}
    assert len(lowered.graph.output) == 2


def test_two_writers_of_one_input_are_refused():
    model = accumulator_model("done", node("InPlaceAccumulatorV2", "buffer x", "again"))
    with pytest.raises(NotImplementedError, match="InPlaceAccumulatorV2 writes into buffer, as another node does"):
        lower(model)


def test_sum_of_an_inner_tensor_is_no_output():
    nodes = [helper.make_node("Neg", ["x"], ["buffer"]), node("InPlaceAccumulatorV2", "buffer dy", "done total")]
    lowered = lower(graph_of(nodes, FEEDS, [("total", X, [None, None])]))
    assert not lowered.metadata_props
    np.testing.assert_array_equal(run(lowered, FEEDS)[0], DY - X)


def test_feedback_of_an_earlier_run_is_kept():
    first = lower(accumulator_model())
    first.graph.node.append(node("InPlaceAccumulator", "reset_sum dy", "second"))
    first.graph.input.append(value_info("reset_sum", X, [None, None]))
    again = lower(first)
    assert json.loads(again.metadata_props[0].value) == {"buffer.next": "buffer", "second": "reset_sum"}


# --- empty axes, rows that repeat, older opsets, statistics ----------------------------------------------------------


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("op", "x", "y", "w", "attributes"),
    [
        ("ConvGrad", (0, 4, 5, 5), (0, 6, 3, 3), (6, 2, 3, 3), {"group": 2}),
        ("ConvGrad", (1, 2, 2, 5), (1, 3, 0, 3), (3, 2, 3, 3), {}),
        ("ConvGrad", (1, 2, 0, 5), (1, 3, 0, 2), (3, 2, 1, 3), {"strides": [2, 2]}),
        ("ConvGrad", (1, 2, 0, 5), (1, 3, 1, 3), (3, 2, 2, 3), {"pads": [1, 0, 1, 0]}),
        ("ConvGrad", (1, 4, 0, 5), (1, 4, 1, 3), (4, 2, 2, 3), {"pads": [1, 0, 1, 0], "strides": [2, 1], "group": 2}),
        ("ConvTransposeGrad", (0, 4, 5, 5), (0, 6, 7, 7), (4, 3, 3, 3), {"group": 2}),
        ("ConvTransposeGrad", (1, 2, 1, 5), (1, 3, 0, 7), (2, 3, 1, 3), {"pads": [1, 0, 0, 0]}),
        ("ConvTransposeGrad", (1, 2, 0, 5), (1, 3, 2, 7), (2, 3, 3, 3), {}),
    ],
)
def test_convolutions_of_empty_axes(op, x, y, w, attributes, known, rng):
    inputs = {name: rng.normal(size=size).astype("f4") for name, size in (("dy", y), ("x", x), ("w", w))}
    model = one(op, inputs, "dx dw db", inputs["x"], kernel_shape=w[2:], **attributes)
    found = run(lower(known_shapes(model, inputs) if known else model), inputs)
    name = {"ConvGrad": "conv_grad", "ConvTransposeGrad": "conv_transpose_grad"}[op]
    exact = reference(name)(*inputs.values(), **attributes)
    for result, each in zip(found, exact, strict=True):
        assert result.shape == each.shape
        np.testing.assert_allclose(result, each, atol=1e-5)


@pytest.mark.parametrize("inner", [0, 1])
@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (1, 3), (2, 3), (1, 2)])
def test_rows_of_a_bias_repeat_where_the_graph_tells_sizes(rows, inner, rng):
    x, bias = rng.normal(size=(2, 3, 4)).astype("f4"), rng.normal(size=(*rows, 4)).astype("f4")
    attributes = {"axis": 2, "is_inner_broadcast": inner}
    inputs = {"x": x, "bias": bias}
    exact = reference("bias_softmax")(x, bias, axis=2, is_inner_broadcast=bool(inner))
    model = one("BiasSoftmax", inputs, "y", x, **attributes)
    np.testing.assert_allclose(run(lower(known_shapes(model, inputs)), inputs)[0], exact, atol=1e-6)
    dropped = node("BiasSoftmaxDropout", "x bias", "dropped mask y", **attributes)
    model = graph_of([dropped], inputs, [("y", x, [None] * 3)])
    np.testing.assert_allclose(run(lower(model), inputs)[0], exact, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_batch_normalization_that_does_not_train_gives_its_statistics_back(dtype, rng):
    arrays = [rng.normal(size=size).astype(dtype) for size in ((2, 3, 4), 3, 3, 3)] + [rng.random(3).astype(dtype)]
    inputs = dict(zip(("x", "scale", "bias", "mean", "var"), arrays, strict=True))
    lowered = lower(one("BatchNormInternal", inputs, "y", arrays[0], training_mode=0, epsilon=0.5))
    assert feedback(lowered) == {"mean.next": "mean", "var.next": "var"}
    y, mean, var = run(lowered, inputs)
    wide = [each.astype(np.float64) for each in arrays]
    exact = reference("batch_norm_internal")(*wide, epsilon=0.5, training_mode=False)[0]
    np.testing.assert_allclose(y, exact, rtol=float(np.finfo(dtype).eps), atol=1e-6)
    assert (mean.tobytes(), var.tobytes()) == (arrays[3].tobytes(), arrays[4].tobytes())


# --- mixed types -----------------------------------------------------------------------------------------------------


def test_factors_of_another_type_round_once(rng):
    x, factor = rng.normal(size=5), np.float32(1.7)
    half = np.array([2.0**-20, -(2.0**-18), 0], np.float16)
    inputs = {"scale": np.array(factor), "x": x, "half": half, "large": np.array(2.0**17, np.float32)}
    scaled = node("MixedPrecisionScale", "scale x", "y", to=TensorProto.DOUBLE)
    model = graph_of([scaled, node("Scale", "half large", "z")], inputs, [("y", x, [None]), ("z", half, [None])])
    y, z = run(lower(model), inputs)
    np.testing.assert_array_equal(y, x * float(factor))
    assert z.tolist() == [2.0**-3, -0.5, 0]


@pytest.mark.parametrize(("dtype", "atol"), [("float16", 2e-3), ("float64", 1e-12)])
def test_layer_normalization_with_statistics_in_float32(dtype, atol, rng):
    dy, x, scale = (rng.normal(size=size).astype(dtype) for size in ((4, 8), (4, 8), 8))
    wide = x.astype(np.float64)
    mean, inv_std = (each.astype(np.float32) for each in (wide.mean(1, keepdims=True), 1 / wide.std(1, keepdims=True)))
    inputs = {"dy": dy, "x": x, "scale": scale, "mean": mean, "inv_std": inv_std}
    found = run(lower(one("LayerNormalizationGrad", inputs, "dx dscale dbias", x)), inputs)
    wide = (each.astype(np.float64) for each in inputs.values())
    for result, exact in zip(found, reference("layer_normalization_grad")(*wide), strict=True):
        assert result.dtype == dtype
        np.testing.assert_allclose(result, exact, rtol=0, atol=atol)


def test_loss_of_halves_in_float32_and_its_gradient(rng):
    scores = rng.standard_normal((3, 4)).astype(np.float16)
    labels = np.array([1, 3, 0])
    forward = node("SoftmaxCrossEntropyLossInternal", "scores labels", "loss log_prob", output_type=TensorProto.FLOAT)
    backward = node("SoftmaxCrossEntropyLossInternalGrad", "dy log_prob labels", "dx", output_type=TensorProto.FLOAT16)
    one = np.ones((), np.float32)
    inputs = {"scores": scores, "labels": labels, "dy": one}
    model = graph_of([forward, backward], inputs, [("loss", one, []), ("dx", scores, [None, None])])
    loss, dx = run(lower(model), inputs)
    wide = scores.astype(np.float64)
    log_prob = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    np.testing.assert_allclose(loss, -log_prob[range(3), labels].mean(), rtol=1e-5)
    np.testing.assert_allclose(dx, (np.exp(log_prob) - np.eye(4)[labels]) / 3, atol=2e-4)
    assert (loss.dtype, dx.dtype) == (np.float32, np.float16)


def test_halves_are_gathered_in_float32():
    """Added to 2048 one by one, ones would be lost: the distance of neighbours there is 2."""
    dy = np.ones((3000, 1), np.float16)
    inputs = {"shape": np.array([2, 1]), "indices": np.zeros(3000, np.int64), "dy": dy}
    assert run(lower(one("GatherGrad", inputs, "dx", dy)), inputs)[0].tolist() == [[3000], [0]]


def test_accumulator_of_float32_takes_halves():
    inputs = {"buffer": X, "dy": DY.astype(np.float16)}
    assert run(lower(one("InPlaceAccumulatorV2", inputs, "done", FLAG)), inputs)[1].dtype == np.float32


def test_what_is_not_lowered_has_a_reason():
    assert not set(LOWERED) & NOT_LOWERED.keys()
    assert all(reason and reason[0].islower() and not reason.endswith(".") for reason in NOT_LOWERED.values())


def test_every_operator_is_in_the_document():
    text = (Path(__file__).parents[2] / "docs" / "guides" / "lowering.md").read_text(encoding="utf-8")
    for name in (*LOWERED, *NOT_LOWERED):
        assert re.search(rf"\b{name}\b", text), name


ARTIFACTS = Path(__file__).parents[1] / "artifacts"
BUFFER = "_grad.accumulation.buffer"


def session_of(path):
    lowered = lower(path)
    onnx.checker.check_model(lowered)
    again = lower(lowered)
    assert again.SerializeToString(deterministic=True) == lowered.SerializeToString(deterministic=True)
    back = feedback(lowered) if lowered.metadata_props else {}
    return onnxruntime.InferenceSession(lowered.SerializeToString(), providers=["CPUExecutionProvider"]), back


class Lowered:
    """Training with the lowered graphs of a set: whatever they give back goes into their inputs."""

    def __init__(self, folder, learning_rate):
        self.training, self.back = session_of(folder / "training_model.onnx")
        self.optimizer, self.optimizer_back = session_of(folder / "optimizer_model.onnx")
        self.evaluation, _ = session_of(folder / "eval_model.onnx")
        checkpoint = read_checkpoint(folder / "checkpoint")
        self.trainable = list(checkpoint.trainable)
        self.state = {name: np.array(each) for name, each in checkpoint.parameters.items()}
        self.state["lazy_reset_grad"] = np.array([True])
        for name in self.trainable:  # reset gradients may hold anything
            self.state[name + BUFFER] = np.full_like(self.state[name], np.nan)
        moments = [np.zeros_like(self.state[name]) for name in self.trainable]
        self.sequences = {"first_order_moments": moments, "second_order_moments": moments}
        self.learning_rate, self.steps = np.array([learning_rate], np.float32), 0

    def loss(self, session, batch):
        """The first output; what it is to be fed back with is kept."""
        found = results(session, self.state | batch)
        self.state |= {source: found[name] for name, source in self.back.items() if name in found}
        return next(iter(found.values()))

    def step(self, batch):
        loss = self.loss(self.training, batch)
        self.steps += 1
        feeds = self.sequences | {
            "params": [self.state[name] for name in self.trainable],
            "gradients": [self.state[name + BUFFER] for name in self.trainable],
            "learning_rate": self.learning_rate,
            "step": np.array([self.steps]),
        }
        found = results(self.optimizer, feeds)
        self.sequences |= {source: found[name] for name, source in self.optimizer_back.items()}
        self.state |= dict(zip(self.trainable, self.sequences.pop("params"), strict=True))
        return loss


@pytest.mark.parametrize("name", NAMES)
def test_artifact_sets_give_the_losses_and_gradients_of_the_old_runtime(name):
    reference = json.loads((ARTIFACTS / name / "reference.json").read_text())
    trained, (steps, evaluations) = Lowered(ARTIFACTS / name, reference["learning_rate"]), batches(name, reference)
    losses = [trained.step(steps[0])]
    gradients = np.load(ARTIFACTS / name / "gradients.npz")
    assert set(gradients.files) == set(trained.trainable)
    # Some gradients are 0 but for what rounding leaves.
    largest = max(np.abs(each).max() for each in gradients.values())
    for key, exact in gradients.items():
        np.testing.assert_allclose(trained.state[key + BUFFER], exact, rtol=0, atol=1e-5 * largest)
    losses += [trained.step(each) for each in steps[1:]]
    np.testing.assert_allclose(losses, reference["loss_per_step"], rtol=1e-4)
    for key, exact in reference["frozen_after"].items():
        np.testing.assert_allclose(trained.state[key], exact, rtol=1e-3, atol=1e-4)
    evaluated = [trained.loss(trained.evaluation, each) for each in evaluations]
    np.testing.assert_allclose(evaluated, reference["eval_loss_per_batch"], rtol=1e-3)
