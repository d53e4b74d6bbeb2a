"""`lower` as a function: what it takes, what it leaves alone, what it refuses."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from lowering_models import feedback, graph_of, run, value_info
from onnx import TensorProto, helper, numpy_helper

from opgrad.onnxruntime import LOWERED, NOT_LOWERED, lower, register

X = np.array([[-1.0, 2, 0], [3, -4, 5]], np.float32)
DY = np.arange(6, dtype=np.float32).reshape(2, 3)
FLAG = np.array([True])


def node(op, inputs, outputs, domain="com.microsoft", **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), domain=domain, **attributes)


def relu_grad_model(opset=15, *more):
    nodes = [node("ReluGrad", "dy x", "dx", name="relu"), *more]
    return graph_of(nodes, {"dy": DY, "x": X}, [("dx", X, [None, None])], opset)


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
    np.testing.assert_array_equal(session.run(None, {"dy": DY})[0], np.where(X > 0, DY, 0))


# --- which operators -------------------------------------------------------------------------------------------------


def test_only_the_named_operators():
    second = node("TanhGrad", "dx x", "other")
    lowered = lower(relu_grad_model(15, second), operators={"TanhGrad"})
    assert [each.domain for each in lowered.graph.node] == ["com.microsoft", "opgrad"]
    with pytest.raises(ValueError, match="operators has 'Relu', expected names of opgrad"):
        lower(relu_grad_model(), operators=["Relu"])
    with pytest.raises(
        TypeError, match=r"operators is of type str, expected a collection of names such as \['ReluGrad'\]"
    ):
        lower(relu_grad_model(), operators="ReluGrad")
    with pytest.raises(NotImplementedError, match="lower: PythonOp has no form of plain operators: it calls back"):
        lower(relu_grad_model(), operators=["PythonOp"])


def test_operator_without_a_form_is_named():
    model = relu_grad_model(15, node("BitmaskDropoutGrad", "x", "y", name="cell"))
    with pytest.raises(
        NotImplementedError,
        match=r"lower: BitmaskDropoutGrad \(node 'cell'\) has no form of plain operators: it unpacks",
    ):
        lower(model)
    assert [each.op_type for each in lower(model, operators=LOWERED).graph.node] == ["ReluGrad", "BitmaskDropoutGrad"]


def test_others_are_left_alone():
    nodes = [
        node("Gelu", "x", "g"),
        node("QuickGelu", "g", "q"),
        node("Unheard", "q", "u"),
        node("ReluGrad", "q", "r", "mine"),
    ]
    model = graph_of(nodes, {"x": X}, [("g", X, [None, None])])
    assert lower(model).SerializeToString() == model.SerializeToString()
    assert "QuickGelu" in LOWERED


def test_missing_input_is_named():
    with pytest.raises(NotImplementedError, match="ReluGrad has no form of plain operators: it has 1 of its 2 inputs"):
        lower(graph_of([node("ReluGrad", "x", "dx")], {"x": X}, [("dx", X, [None, None])]))


def test_nodes_share_functions():
    nodes = [node("LeakyReluGrad", "dy x", f"out{index}", alpha=alpha) for index, alpha in enumerate((0.5, 0.25, 0.5))]
    lowered = lower(graph_of(nodes, {"dy": DY, "x": X}, [(f"out{index}", X, [None, None]) for index in range(3)]))
    assert [each.op_type for each in lowered.graph.node] == ["LeakyReluGrad", "LeakyReluGrad_2", "LeakyReluGrad"]
    for result, alpha in zip(run(lowered, {"dy": DY, "x": X}), (0.5, 0.25, 0.5), strict=True):
        np.testing.assert_array_equal(result, np.where(X > 0, DY, alpha * DY))


def test_lowering_in_two_steps_gives_each_body_its_own_name():
    nodes = [node("LeakyReluGrad", "dy x", "a", alpha=0.5), node("ReluGrad", "a x", "b")]
    model = graph_of(nodes, {"dy": DY, "x": X}, [("b", X, [None, None])])
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
    np.testing.assert_array_equal(run(lowered, {"dy": DY, "x": X})[0], np.where(X > 0, DY, 0))


def test_old_operators_are_converted():
    squeeze = helper.make_node("Unsqueeze", ["dx"], ["y"], axes=[0])  # an attribute up to opset 12
    model = relu_grad_model(12, squeeze)
    model.graph.output.append(value_info("y", X, [1, None, None]))
    assert run(lower(model), {"dy": DY, "x": X})[1].shape == (1, 2, 3)


def test_layer_normalization_of_an_old_opset():
    normal = helper.make_node("LayerNormalization", ["x", "scale"], ["y", "mean", "inv_std"], axis=-1)
    grad = node("LayerNormalizationGrad", "dy x scale mean inv_std", "dx dscale dbias", axis=-1)
    scale = np.ones(3, np.float32)
    wanted = [("dx", X, [None, None]), ("dscale", scale, [None])]
    lowered = lower(graph_of([normal, grad], {"x": X, "dy": DY, "scale": scale}, wanted))
    assert opset_of(lowered) == 17
    onnx.checker.check_model(lowered)
    dx, _ = run(lowered, {"x": X, "dy": DY, "scale": scale})
    np.testing.assert_allclose(dx.sum(1), 0, atol=1e-5)


def test_imports_of_unused_domains_go():
    model = relu_grad_model()
    model.opset_import.extend([helper.make_opsetid("org.pytorch.aten", 1), helper.make_opsetid("ai.onnx.ml", 3)])
    assert {each.domain for each in lower(model).opset_import} == {"", "com.microsoft", "opgrad"}


def test_session_that_knows_opgrads_operators():
    options = onnxruntime.SessionOptions()
    register(options)
    session = onnxruntime.InferenceSession(lower(relu_grad_model()).SerializeToString(), options)
    np.testing.assert_array_equal(session.run(None, {"dy": DY, "x": X})[0], np.where(X > 0, DY, 0))


# --- nodes inside nodes ----------------------------------------------------------------------------------------------


def test_nodes_of_subgraphs():
    branches = [
        helper.make_graph([node("ReluGrad", source, name[:4])], name, [], [value_info(name[:4], X, [None, None])])
        for name, source in (("then_branch", "dy x"), ("else_branch", "x dy"))
    ]
    choice = helper.make_node("If", ["flag"], ["dx"], **{each.name: each for each in branches})
    inputs = {"flag": FLAG, "dy": DY, "x": X}
    lowered = lower(graph_of([choice], inputs, [("dx", X, [None, None])]))
    np.testing.assert_array_equal(run(lowered, inputs)[0], np.where(X > 0, DY, 0))
    np.testing.assert_array_equal(run(lowered, inputs | {"flag": ~FLAG})[0], np.where(DY > 0, X, 0))


def test_nodes_of_functions():
    imports = [helper.make_opsetid("", 16), helper.make_opsetid("com.microsoft", 1)]
    inner = node("ReluGrad", "a b", "c")
    model = graph_of([node("Outer", "dy x", "dx", "mine")], {"dy": DY, "x": X}, [("dx", X, [None, None])], 16)
    model.functions.append(helper.make_function("mine", "Outer", ["a", "b"], ["c"], [inner], imports))
    model.opset_import.append(helper.make_opsetid("mine", 1))
    np.testing.assert_array_equal(run(lower(model), {"dy": DY, "x": X})[0], np.where(X > 0, DY, 0))
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
    model = graph_of(nodes, {"x": X, "dy": DY}, [("total", X, [None, None])])
    lowered = lower(model)
    assert not lowered.metadata_props
    np.testing.assert_array_equal(run(lowered, {"x": X, "dy": DY})[0], DY - X)


def test_feedback_of_an_earlier_run_is_kept():
    first = lower(accumulator_model())
    first.graph.node.append(node("InPlaceAccumulator", "reset_sum dy", "second"))
    first.graph.input.append(value_info("reset_sum", X, [None, None]))
    again = lower(first)
    assert json.loads(again.metadata_props[0].value) == {"buffer.next": "buffer", "second": "reset_sum"}


# --- mixed types -----------------------------------------------------------------------------------------------------


def test_layer_normalization_of_halves_with_statistics_in_float32(rng):
    x, dy = rng.standard_normal((2, 4, 8)).astype(np.float16)
    wide, slope = x.astype(np.float64), dy.astype(np.float64)
    mean, inv_std = wide.mean(1, keepdims=True), 1 / wide.std(1, keepdims=True)
    inputs = {"dy": dy, "x": x, "scale": np.ones(8, np.float16)}
    inputs |= {"mean": mean.astype(np.float32), "inv_std": inv_std.astype(np.float32)}
    grad = node("LayerNormalizationGrad", "dy x scale mean inv_std", "dx dscale dbias")
    (dx,) = run(lower(graph_of([grad], inputs, [("dx", x, [None, None])])), inputs)
    normalized = (wide - mean) * inv_std
    exact = inv_std * (slope - slope.mean(1, keepdims=True) - normalized * (slope * normalized).mean(1, keepdims=True))
    assert dx.dtype == np.float16
    np.testing.assert_allclose(dx, exact, atol=2e-3)


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
    model = graph_of([node("GatherGrad", "shape indices dy", "dx")], inputs, [("dx", dy, [None, None])])
    assert run(lower(model), inputs)[0].tolist() == [[3000], [0]]


def test_accumulator_of_float32_takes_halves():
    inputs = {"buffer": X, "dy": DY.astype(np.float16)}
    model = graph_of([node("InPlaceAccumulatorV2", "buffer dy", "done")], inputs, [("done", FLAG, [1])])
    assert run(lower(model), inputs)[1].dtype == np.float32


def test_reasons_are_sentences():
    assert all(reason and reason[0].islower() and not reason.endswith(".") for reason in NOT_LOWERED.values())


def test_every_operator_is_in_the_document():
    text = (Path(__file__).parents[2] / "docs" / "guides" / "lowering.md").read_text(encoding="utf-8")
    for name in (*LOWERED, *NOT_LOWERED):
        assert re.search(rf"\b{name}\b", text), name
