"""What `gradients` gives and refuses: names, shapes, sums, branches, functions, users' rules, messages."""

import numpy as np
import onnx
import pytest
from differences import build, run
from gradient_cases import numbers
from onnx import TensorProto, helper
from snippets import executed

from opgrad.gradients import NoGradient, gradients, register_gradient
from opgrad.onnx.rules.node import RULES

SQUARE = "g (float[N, 3] x) => (float[N, 3] y) { y = Mul(x, x) }"


def outputs(model):
    return [value.name for value in model.graph.output]


def test_gradients_stand_behind_the_outputs_under_their_names():
    model = build(SQUARE)
    before = model.SerializeToString()
    found = gradients(model, "y", "x", plain=True)
    assert model.SerializeToString() == before
    assert outputs(found) == ["y", "x_grad"]
    x = numbers(2, 3).astype(np.float32)
    np.testing.assert_allclose(run(found, {"x": x})[1], 2 * x, rtol=1e-6)
    declared = found.graph.output[1].type.tensor_type
    assert [dim.dim_param or dim.dim_value for dim in declared.shape.dim] == ["N", 3]


@pytest.mark.parametrize(("of", "wanted"), [("x", "x"), (["y", "x"], ["x", "y"]), ("y", "y"), (["y", "x"], "x")])
def test_what_is_asked_of_and_for_keeps_its_name(of, wanted):
    found = gradients(build(SQUARE), of, wanted, plain=True)
    wanted = [wanted] if isinstance(wanted, str) else wanted
    assert outputs(found) == ["y", *(f"{name}_grad" for name in wanted)]
    x = numbers(2, 3).astype(np.float32)
    by_name = dict(zip(outputs(found), run(found, {"x": x}), strict=True))
    if "x" in wanted:
        np.testing.assert_allclose(by_name["x_grad"], 2 * x * ("y" in of) + 1 * ("x" in of), rtol=1e-6)
    if "y" in wanted:
        np.testing.assert_array_equal(by_name["y_grad"], np.ones((2, 3)))


def test_files_are_read(tmp_path):
    onnx.save(build(SQUARE), tmp_path / "model.onnx")
    assert outputs(gradients(tmp_path / "model.onnx", "y", "x")) == ["y", "x_grad"]
    with pytest.raises(FileNotFoundError, match="there is no file"):
        gradients(tmp_path / "other.onnx", "y", "x")
    (tmp_path / "broken.onnx").write_bytes(b"\xff\xff")
    with pytest.raises(ValueError, match="no ONNX model, or damaged"):
        gradients(tmp_path / "broken.onnx", "y", "x")


def test_models_are_read_as_by_all_other_functions():
    """From a message, from its bytes and from a file: checked, and with the nodes in order."""
    model = build("g (float[3] x) => (float[3] y) { h = Neg(x)\n y = Mul(h, h) }")
    expected = gradients(model, "y", "x")
    assert gradients(model.SerializeToString(), "y", "x") == expected
    model.graph.node.reverse()
    assert gradients(model, "y", "x") == expected
    model.graph.input[0].type.tensor_type.elem_type = 99
    for damaged in (model, model.SerializeToString()):
        with pytest.raises(ValueError, match="gradients: the model is damaged, a tensor has the unknown element type"):
            gradients(damaged, "y", "x")
    with pytest.raises(TypeError, match=r"model is of type int, expected onnx.ModelProto, bytes"):
        gradients(3, "y", "x")


def test_a_name_that_is_taken_is_not_used_again():
    model = build("g (float[3] x) => (float[3] y) { x_grad = Neg(x)\n y = Mul(x_grad, x_grad) }")
    found = gradients(model, "y", "x", plain=True)
    assert len(set(outputs(found))) == 2
    x = np.array([1, 2, 3], np.float32)
    np.testing.assert_allclose(run(found, {"x": x})[1], 2 * x)


def test_several_values_are_differentiated_with_respect_to_several():
    model = build(
        "g (float[3] x, float[3] w) => (float[3] y, float[3] z) { y = Mul(x, w)\n h = Exp(w)\n z = Mul(h, h) }"
    )
    found = gradients(model, ["y", "z"], ["w", "x", "h"], plain=True)
    assert outputs(found) == ["y", "z", "w_grad", "x_grad", "h_grad"]
    x, w = np.array([1, 2, 3], np.float32), np.array([0.5, -1, 0.2], np.float32)
    dw, dx, dh = run(found, {"x": x, "w": w})[2:]
    np.testing.assert_allclose(dw, x + 2 * np.exp(2 * w), rtol=1e-5)
    np.testing.assert_allclose(dx, w)
    np.testing.assert_allclose(dh, 2 * np.exp(w), rtol=1e-6)


def test_a_value_of_which_one_gradient_is_that_of_another_keeps_both_names():
    model = build("g (float[3] x, float[3] w) => (float[3] y) { y = Add(x, w) }")
    _, *found = run(gradients(model, "y", ["w", "x"], plain=True), dict.fromkeys("xw", np.zeros(3, np.float32)))
    assert [each.tolist() for each in found] == [[1, 1, 1]] * 2


@pytest.mark.parametrize("opset", [11, 13, 17])
@pytest.mark.parametrize("shapes", [((2, 3), (2, 3)), ((1, 3), (2, 3)), ((2, 1), (1, 3)), ((2, 3), (1, 1))])
def test_sizes_without_names_are_broadcast_at_run_time(opset, shapes):
    model = build("g (float[?, ?] a, float[?, ?] b) => (float[?, ?] y) { y = Mul(a, b) }".replace("?", "N"), opset)
    for place, value in enumerate((*model.graph.input, *model.graph.output)):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"d{place}{axis}"
    a, b = (numbers(*shape).astype(np.float32) for shape in shapes)
    da, db = run(gradients(model, "y", ["a", "b"], plain=True), {"a": a, "b": b})[1:]
    whole = np.ones(np.broadcast_shapes(*shapes))
    for found, own, other in ((da, a, b), (db, b, a)):
        axes = tuple(axis for axis in range(2) if own.shape[axis] == 1 != whole.shape[axis])
        np.testing.assert_allclose(found, (whole * other).sum(axes, keepdims=True) + 0 * own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE])
def test_gradients_have_the_type_of_their_values(kind):
    model = build("g (float[3] x) => (float[3] y) { a = Tanh(x)\n y = Gelu(a) }", 20)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = kind
    assert gradients(model, "y", "x").graph.output[1].type.tensor_type.elem_type == kind
    plain = gradients(model, "y", "x", plain=True)
    onnx.checker.check_model(plain, full_check=True)


def test_no_node_is_written_that_no_gradient_needs():
    model = build("g (float[2, 3] x, float[3, 4] w) => (float[2, 4] y) { h = MatMul(x, w)\n y = Relu(h) }")
    operators = [node.op_type for node in gradients(model, "y", "w").graph.node]
    assert sorted(operators) == ["Gemm", "MatMul", "Relu", "ReluGrad"]


def test_results_of_kernels_that_nobody_needs_are_left_out():
    model = build("g (float[1, 2, 4, 4] x, float[3, 2, 3, 3] w) => (float[1, 3, 2, 2] y) { y = Conv(x, w) }")
    node = next(node for node in gradients(model, "y", "w").graph.node if node.op_type == "ConvGrad")
    assert list(node.output) == ["", "w_grad"]


def test_optional_outputs_that_a_gradient_needs_are_added():
    model = build("g (float[2, 3] x, float[3] s) => (float[2, 3] y) { y = LayerNormalization(x, s) }")
    forward = gradients(model, "y", "x").graph.node[0]
    assert list(forward.output) == ["y", "y_mean", "y_inv_std"]


def test_functions_of_the_model_are_expanded():
    model = build(
        """g (float[3] x) => (float[3] y) { y = my.cube(x) }
        <domain: "my", opset_import: ["": 17]> cube (a) => (b) { s = Mul(a, a)\n b = Mul(s, a) }"""
    )
    x = np.array([1, -2, 3], np.float32)
    np.testing.assert_allclose(run(gradients(model, "y", "x", plain=True), {"x": x})[1], 3 * x * x)


ANY_SIZE = {
    "GlobalAveragePool": "GlobalAveragePool(x)",
    "ReduceMean": "ReduceMean <axes = [2], keepdims = 0> (x)",
    "Resize": 'Resize <coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"> (x, , two)',
    "Concat": "Concat <axis = 2> (x, x)",
    "Pad": "Pad(x, pads)",
    "Pad, edge": 'Pad <mode = "edge"> (x, pads)',
    "Reshape": "Reshape(x, flat)",
    "Slice": "Slice(x, one, last, three)",
    "Tile": "Tile(x, copies)",
    "InstanceNormalization": "InstanceNormalization(x, ones, ones)",
    "DepthToSpace": 'DepthToSpace <blocksize = 1, mode = "CRD"> (x)',
    "TopK": "TopK <axis = 2> (x, one)",
}


@pytest.mark.parametrize("name", ANY_SIZE)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sizes_that_are_not_known_give_the_same_gradients(name):
    constants = {
        "two": np.array([1, 1, 2, 2], np.float32),
        "pads": np.array([0, 0, 1, 2, 0, 0, 1, 0]),
        "flat": np.array([0, -1]),
        "one": np.array([1]),
        "three": np.array([3]),
        "last": np.array([9]),
        "copies": np.array([1, 2, 1, 3]),
        "ones": np.ones(2, np.float32),
    }
    results = []
    for shape in ("2, 2, 5, 6", "N, 2, H, W"):
        call = ANY_SIZE[name]
        y = "y, i" if name == "TopK" else "y"
        text = f"g (float[{shape}] x) => (float z) {{ {y} = {call}\n e = Exp(y)\n z = ReduceSum(e) }}"
        graph = gradients(build(text, constants=constants), "z", "x", plain=True)
        results.append(run(graph, {"x": numbers(2, 2, 5, 6).astype(np.float32)})[1])
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("opset", [12, 13, 17])
def test_dropout_that_trains_passes_what_it_kept(opset):
    text = "g (float[8, 9] x) => (float[8, 9] y) { y = Dropout <seed = 3> (x, ratio, training) }"
    model = build(text, opset, {"ratio": np.float32(0.25), "training": True})
    graph = gradients(model, "y", "x", plain=True)
    assert list(graph.graph.node[0].output) == ["y", "y_mask"]
    x = numbers(8, 9, low=0.5).astype(np.float32)
    y, dx = run(graph, {"x": x})
    assert 0 < np.count_nonzero(y) < y.size
    np.testing.assert_allclose(dx, y / x, rtol=1e-6)


def test_users_add_rules():
    @register_gradient("Cube", "my")
    def cube(node):
        return node.dy * 3 * node.x * node.x

    try:
        found = gradients(build("g (float[3] x) => (float[3] y) { y = my.Cube(x) }"), "y", "x")
        assert sorted(node.op_type for node in found.graph.node) == ["Cube", "Mul", "Mul"]  # 3 * dy is a constant
    finally:
        del RULES["my", "Cube"]
    with pytest.raises(TypeError, match="expected text"):
        register_gradient(3)
    with pytest.raises(TypeError, match="no function"):
        register_gradient("Cube", "my")(3)


def test_users_refuse_with_a_reason():
    @register_gradient("Odd", "my")
    def odd(node):
        raise NoGradient("its mode is 'odd', expected 'even'")

    try:
        with pytest.raises(NotImplementedError, match=r"my\.Odd .*: its mode is 'odd', expected 'even'"):
            gradients(build("g (float[3] x) => (float[3] y) { y = my.Odd(x) }"), "y", "x")
    finally:
        del RULES["my", "Odd"]


@pytest.mark.parametrize(
    ("of", "wanted", "error", "message"),
    [
        ("loss", "x", ValueError, "the graph has no value 'loss'"),
        ("y", "weight0", ValueError, "no value 'weight0'; did you mean 'weight'"),
        ("y", "labels", ValueError, "'labels' has elements of type INT64, expected a float type"),
        ("y", "aside", ValueError, "'y' cannot be differentiated with respect to 'aside'"),
        (3, "x", TypeError, "of is 3, expected a name or several"),
        ("y", [], TypeError, "with_respect_to is"),
    ],
)
def test_wrong_names_are_explained(of, wanted, error, message):
    text = "g (float[3] x, float[3] weight, float[3] aside, int64[3] labels) => (float[3] y, float[3] z)"
    with pytest.raises(error, match=message):
        gradients(build(f"{text} {{ y = Mul(x, weight)  z = Exp(aside) }}"), of, wanted)


def test_no_gradient_goes_through_what_does_not_change():
    model = build("g (float[3] x) => (float[3] y) { a = Floor(x)\n b = Sign(x)\n c = Mul(a, b)\n y = Add(c, x) }")
    assert run(gradients(model, "y", "x", plain=True), {"x": np.ones(3, np.float32)})[1].tolist() == [1, 1, 1]


def test_the_examples_of_the_documentation_run():
    rules = dict(RULES)
    try:
        names, _ = executed("docs/reference/gradients.md")
        np.testing.assert_array_equal(names["positions_grad"], 2)
        node = helper.make_node("Scaled", ["x", "s"], ["y"], domain="my.domain", alpha=3.0)
        model = build("g (float[2, 3] x, float[3] s) => (float[2, 3] y) { y = Mul(x, s) }", domains='"my.domain": 1')
        model.graph.node[0].CopyFrom(node)
        assert outputs(gradients(model, "y", ["x", "s"])) == ["y", "x_grad", "s_grad"]
    finally:
        RULES.clear()
        RULES.update(rules)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_training_graphs_has_the_gradient_of_that_of_onnx(reduction):
    """Also where the second result, the logarithm of softmax, is used."""
    found = []
    for op in (f'SoftmaxCrossEntropyLoss <reduction = "{reduction}", ignore_index = 2>', None):
        inner = f'com.microsoft.SoftmaxCrossEntropyLossInternal <reduction = "{reduction}">'
        call = f"{op} (x, labels)" if op else f"{inner} (x, labels, , ignored)"
        text = f"""g (float[4, 3] x, int64[4] labels) => (float z) {{
            y, p = {call}  e = Exp(p)  t = ReduceSum <keepdims = 0> (e)  q = Mul(t, y)  z = Add(q, y) }}"""
        feeds = {"x": numbers(4, 3).astype(np.float32), "labels": np.array([0, 2, 1, 1])}
        found.append(run(gradients(build(text, constants={"ignored": 2}), "z", "x", plain=True), feeds))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
