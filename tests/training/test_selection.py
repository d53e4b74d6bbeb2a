"""What is trained, what stays, and what is said of names that stand for nothing."""

import re

import numpy as np
import onnx
import pytest
from command import cli
from onnx import TensorProto, helper, numpy_helper
from small_models import LABELS, build, images, normal, perceptron, run

from opgrad.cli.inspection import inspect
from opgrad.training import ArtifactSet, Trainer, onnxblock, read_checkpoint
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts
from opgrad.training.make.checks import quantity
from opgrad.training.make.selection import is_of_sines

CE = LossType.CrossEntropyLoss
NUMBERS = {"alpha": (1,), "val_7": (), "temperature": (), "low": ()}


@pytest.mark.parametrize(
    ("requires_grad", "frozen_params", "trainable", "frozen"),
    [
        (None, None, "w0 b0 w1 b1", ""),
        (None, ["*0"], "w1 b1", "w0 b0"),
        (["w?"], ["b1"], "w0 w1", "b1"),
        ("w1", None, "w1", ""),
        (["*"], ["w*"], "b0 b1", "w0 w1"),
        (["w1", "b1"], ["*"], "w1 b1", "w0 b0"),
        (["x", "w1"], None, "x w1", ""),
    ],
)
def test_names_and_patterns(requires_grad, frozen_params, trainable, frozen, tmp_path):
    made = generate_artifacts(perceptron(), requires_grad, frozen_params, CE, artifact_directory=tmp_path)
    assert (made.trainable, made.frozen) == (tuple(trainable.split()), tuple(frozen.split()))
    checkpoint = read_checkpoint(tmp_path / "checkpoint")
    assert list(checkpoint.trainable) == [name for name in made.trainable if name != "x"]
    assert list(checkpoint.frozen) == list(made.frozen)
    assert f"trainable: {quantity(len(made.trainable), 'tensor')}" in str(made)


def test_weights_are_told_from_numbers(tmp_path):
    text = """g (int64[n, 6] tokens, float[n, 6, 8] mask) => (float[n, 3] scores) {
        e = Gather(table, tokens)  p = Add(e, positions)  masked = Mul(p, mask)  m = Add(masked, minus)
        n = LayerNormalization(m, scale, shift)  t = Transpose<perm = [1, 0]>(turned)  h = MatMul(n, t)
        g = Mul(h, half)  q = Pow(g, two)  pool = ReduceMean<axes = [1], keepdims = 0>(q)
        c = Constant<value = float[8, 3] {1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3}>()
        k = Clip(pool, low)  scores = MatMul(k, c)
    }"""
    numbers = {"half": np.float32(0.5), "two": np.float32(2), "low": np.float32(-9)}
    shapes = {"table": (9, 8), "positions": (6, 8), "scale": (8,), "shift": (8,), "turned": (8, 8), "unused": (2, 2)}
    hiding = {"minus": np.array([[0] * 7 + [-1e9]], np.float32)}
    weights = {**normal(**shapes), **{name: np.array(each) for name, each in numbers.items()}, **hiding}
    made = generate_artifacts(build(text, weights), loss=CE, optimizer=OptimType.SGD, artifact_directory=tmp_path)
    assert made.trainable == ("table", "positions", "scale", "shift", "turned", "c")
    assert (made.frozen, made.constants) == ((), ("unused", "minus"))
    assert made.sizes["c"] == 24
    np.testing.assert_array_equal(read_checkpoint(tmp_path / "checkpoint").trainable["c"][0], [1, 2, 3])


def test_what_torch_export_tells_of_parameters_and_buffers(tmp_path):
    """A number or a scale of the input that is a parameter is trained, a matrix that is a buffer is not."""
    text = """g (float[n, 3] x) => (float[n, 3] y) {
        a = Mul(x, scale)  b = MatMul(a, w)  c = MatMul(b, projection)  d = Mul(c, gain)  y = Add(d, offset)
    }"""
    shapes = {"scale": (3,), "w": (3, 3), "projection": (3, 3), "gain": (), "offset": (1,)}
    model = build(text, normal(**shapes))
    for name, shape in shapes.items():
        value = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        kind = "BUFFER" if name in ("projection", "offset") else "PARAMETER"
        value.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value=kind)
        model.graph.value_info.append(value)
    made = generate_artifacts(model, loss=LossType.MSELoss, artifact_directory=tmp_path)
    assert (made.trainable, made.constants, made.notes) == (("scale", "w", "gain"), ("projection",), ())
    named = ["projection"]
    assert generate_artifacts(model, named, loss=LossType.MSELoss, artifact_directory=tmp_path).trainable == (*named,)
    onnx.save(model, tmp_path / "model.onnx")
    assert "projection (a buffer of the module)" in cli("inspect", tmp_path / "model.onnx", columns=300)[1]
    call = model.graph.node[0].metadata_props.add(key="pkg.torch.onnx.fx_node")
    for call.value, said in (
        ("mul.Tensor](args = (%x, %detach))", "left detach() out"),
        (
            "cross_entropy_loss.default](args = (%x, %y, None, 1, -100, 0.1), kwargs = {})",
            "left label_smoothing=0.1 out",
        ),
    ):
        assert said in str(generate_artifacts(model, loss=LossType.MSELoss, artifact_directory=tmp_path))


@pytest.mark.parametrize(
    ("body", "w", "bias", "weights"),
    [
        ("h = MatMul(x, w)  y = Add(h, b)", (8, 1), (1,), ("w", "b")),
        ("h = MatMul(x, w)  c = Cast<to = 1>(h)  y = Add(b, c)", (8, 1), (1, 1), ("w", "b")),
        ("t = Transpose<perm = [1, 0]>(w)  h = MatMul(x, t)  y = Add(h, b)", (1, 8), (1,), ("w", "b")),
        ("h = MatMul(x, w)  y = Add(h, b)", (8, 1), (), ("w",)),
        ("h = MatMul(x, w)  y = Mul(h, b)", (8, 1), (1,), ("w",)),
        ("h = MatMul(x, w)  s = Sigmoid(h)  y = Add(s, b)", (8, 1), (1,), ("w",)),
    ],
)
def test_one_number_is_a_weight_as_the_bias_of_one_result(body, w, bias, weights, tmp_path):
    """Other single numbers are constants of a formula."""
    values = {**normal(w=w), "b": np.zeros(bias, np.float32)}
    model = build(f"g (float[n, 8] x) => (float[n, 1] y) {{ {body} }}", values)
    assert generate_artifacts(model, loss=LossType.MSELoss, artifact_directory=tmp_path).trainable == weights


def test_single_numbers_with_names_of_parameters_are_told(tmp_path):
    """ReZero's gates are learned; epsilons and what exporters number are not."""
    text = """g (float[n, 8] x) => (float[n, 3] scores) {
        h = MatMul(x, v)  r = Relu(h)  g = Mul(r, alpha)  s = Add(x, g)  e = Add(s, val_7)
        l = Exp(temperature)  t = Mul(e, l)  c = Clip(t, low)  scores = MatMul(c, w)
    }"""
    numbers = {name: np.full(dims, 0.5, np.float32) for name, dims in NUMBERS.items()}
    model = build(text, {**normal(v=(8, 8), w=(8, 3)), **numbers})
    made = generate_artifacts(model, loss=CE, artifact_directory=tmp_path)
    told = "not trained unless named: 'alpha', 'temperature'; nothing tells whether constants like these were learned"
    assert (made.trainable, made.notes) == (("v", "w"), (told,))
    onnx.save(model, tmp_path / "model.onnx")
    assert "alpha (one number), temperature (one number)" in cli("inspect", tmp_path / "model.onnx", columns=300)[1]
    made = generate_artifacts(model, ["*", "alpha"], loss=CE, artifact_directory=tmp_path)
    assert (made.trainable, made.notes) == (("v", "w", "alpha"), ())


def test_scales_by_roots_of_sizes_and_epsilons_are_not_told(tmp_path):
    """Attention divides its scores by sqrt(d), or queries and keys by its root; another number may be a temperature."""
    text = """g (float[n, 5, 16] x) => (float[n, 5, 3] scores) {
        e = Mul(x, embedding)  q = MatMul(e, v)  k = MatMul(e, w)
        h = Reshape(q, heads)  i = Reshape(k, heads)  j = Transpose<perm = [0, 2, 1, 3]>(h)  r = Mul(j, both)
        t = Transpose<perm = [0, 2, 3, 1]>(i)  s = MatMul(r, t)  z = Cast<to = 1>(s)  d = Div(z, scale)
        c = Mul(d, temperature)  p = Softmax(c)  o = Sub(unity, p)  b = ReduceMean<axes = [1], keepdims = 0>(o)
        a = MatMul(b, e)
        m = ReduceMean<axes = [-1]>(a)  g = Add(m, epsilon)  f = Sqrt(g)  y = Div(a, f)  scores = MatMul(y, u)
    }"""
    numbers = {"embedding": 4, "both": 6**-0.25, "scale": 6**0.5, "epsilon": 1e-5, "temperature": 0.9, "unity": 1}
    arrays = {name: np.array(value, np.float32) for name, value in numbers.items()}
    arrays |= {**normal(v=(16, 12), w=(16, 12), u=(16, 3)), "heads": np.array([0, 0, 2, 6])}
    made = generate_artifacts(build(text, arrays), loss=CE, artifact_directory=tmp_path)
    told = "not trained unless named: 'temperature'; nothing tells whether constants like these were learned"
    assert (made.trainable, made.notes) == (("v", "w", "u"), (told,))


COMPUTED = {  # what is computed of v, [8, 8], and g, [8], in a graph, and the names of its weights
    "n = ReduceL2 <axes = [1], keepdims = 1> (v)  u = Div(v, n)  k = Mul(u, g)  y = MatMul(x, k)": ("v", "g"),
    "u = LpNormalization <axis = 1, p = 2> (v)  t = Transpose <perm = [1, 0]> (u)  y = MatMul(x, t)": ("v",),
    "s = Sigmoid(g)  r = Sub(val_1, s)  h = MatMul(x, v)  a = Mul(h, s)  b = Mul(x, r)  y = Add(a, b)": ("v", "g"),
    "e = Exp(g)  m = Neg(e)  h = MatMul(x, v)  y = Mul(h, m)": ("v", "g"),
    "c = Sub(val_1, mask)  m = Mul(c, val_2)  h = MatMul(x, v)  y = Add(h, m)": ("v",),
    "h = MatMul(x, v)  d = Sub(h, g)  y = Mul(d, d)": ("v",),
    "h = MatMul(x, v)  s = Sigmoid(h)  y = Pow(s, g)": ("v",),
}


@pytest.mark.parametrize("body", COMPUTED)
def test_weights_of_formulas(body, tmp_path):
    """Weights are found behind formulas of constants; other constants that may have been learned are told."""
    arrays = normal(v=(8, 8), g=(8,)) | {"mask": np.array([0, 1] * 4, np.float32)}
    arrays = {name: each for name, each in arrays.items() if re.search(rf"\b{name}\b", body)}
    numbers = {"val_1": np.array(1, np.float32), "val_2": np.array(-1e4, np.float32)}
    model = build(f"g (float[n, 8] x) => (float[n, 8] y) {{ {body} }}", {**arrays, **numbers})
    made = generate_artifacts(model, loss=LossType.MSELoss, artifact_directory=tmp_path)
    assert set(made.trainable) == set(COMPUTED[body])
    told = [each for each in arrays if each not in COMPUTED[body] and each != "mask"]
    assert [note for note in made.notes if "unless named" in note] == [
        f"not trained unless named: {each!r}; nothing tells whether constants like these were learned" for each in told
    ]


# --- what nobody trained ---


def angles(rows, columns):
    return np.arange(rows)[:, None] / 10000 ** (np.arange(0, columns, 2) / columns)


def interleaved(rows=32, columns=8):
    table = np.empty((rows, columns), np.float32)
    table[:, 0::2], table[:, 1::2] = np.sin(angles(rows, columns)), np.cos(angles(rows, columns))
    return table


def halves(rows=32, columns=8):
    return np.concatenate([np.sin(angles(rows, columns)), np.cos(angles(rows, columns))], 1).astype(np.float32)


def of_an_image(side=6, columns=8):
    """Half of the columns tell the row, half the column; before them a row of zeros, of a class."""
    each = halves(side, columns // 2)
    rows = np.concatenate([np.repeat(each, side, 0), np.tile(each, (side, 1))], 1)
    return np.concatenate([np.zeros((1, columns), np.float32), rows])


def rotary(wave, rows=64, columns=16):
    return wave(np.concatenate([angles(rows, columns)] * 2, 1)).astype(np.float32)


TABLES = {
    "interleaved": interleaved(), "halves": halves(512, 64), "batched": halves()[None], "half precision": halves(),
    "image": of_an_image(), "later positions": interleaved(64)[2:], "columns": interleaved().T,
    "rotary cosines": rotary(np.cos), "rotary sines": rotary(np.sin, 2048, 64)[None, None],
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_sines_are_not_trained(name):
    table = TABLES[name].astype(np.float16 if name == "half precision" else np.float32)
    assert is_of_sines(lambda _: table, "t", table.shape)


@pytest.mark.parametrize(
    "table",
    [
        np.zeros((32, 8)), np.ones((32, 8)), np.eye(16), np.linspace(-1, 1, 256).reshape(32, 8),
        normal(t=(64, 16))["t"], np.tanh(3 * normal(t=(64, 16))["t"]), 0.02 * interleaved(), interleaved()[:6],
        interleaved() + 0.05 * normal(t=(32, 8))["t"], np.sign(normal(t=(64, 16))["t"]), normal(t=(4, 3, 3, 3))["t"],
    ],
)  # fmt: skip
def test_other_tables_are_weights(table):
    table = table.astype(np.float32)
    assert not is_of_sines(lambda _: table, "t", table.shape)


def test_a_model_with_positions_that_nobody_trained(tmp_path):
    text = """g (int64[n, 32] tokens) => (float[n, 3] scores) {
        e = Gather(table, tokens)  p = Add(e, sines)  q = Add(p, learned)  r = Mul(q, cosines)
        pool = ReduceMean<axes = [1], keepdims = 0>(r)  scores = MatMul(pool, w)
    }"""
    arrays = {
        **normal(table=(9, 8), learned=(32, 8), w=(8, 3)), "sines": interleaved()[None],
        "cosines": rotary(np.cos, 32, 8),
    }  # fmt: skip
    model = build(text, arrays)
    made = generate_artifacts(model, loss=CE, artifact_directory=tmp_path)
    assert made.trainable == ("table", "learned", "w")
    assert set(made.constants) == {"sines", "cosines"}
    named = generate_artifacts(model, ["*", "sines"], loss=CE, artifact_directory=tmp_path)
    assert set(named.trainable) == {"table", "learned", "w", "sines"}
    onnx.save(model, tmp_path / "model.onnx")
    found = inspect(tmp_path / "model.onnx").training
    assert found.trainable == ["table", "learned", "w"]
    assert found.constants == {"sines": "positions, as sines", "cosines": "positions, as sines"}
    told = cli("inspect", tmp_path / "model.onnx")[1]
    assert "table, learned, w" in told
    assert "sines (positions, as sines), cosines (positions, as sines)" in told


def test_frequencies_of_positions_and_constants_of_the_input_are_not_trained(tmp_path):
    text = """g (float[n, 16, 6] x, int64[n, 16] places) => (float[n, 3] scores) {
        shifted = Add(x, mean)  scaled = Mul(shifted, scale)  h = MatMul(scaled, v)
        f = Cast<to = 1>(places)  column = Unsqueeze(f, last)  angles = MatMul(column, frequencies)
        c = Cos(angles)  s = Sin(angles)  turns = Concat<axis = 2>(c, s)
        t = Mul(h, turns)  biased = Add(t, bias)
        pool = ReduceMean<axes = [1], keepdims = 0>(biased)  scores = MatMul(pool, w)
    }"""
    arrays = {
        **normal(v=(6, 8), w=(8, 3), bias=(8,), mean=(6,), scale=(1, 1, 6)), "last": np.array([2]),
        "frequencies": np.array([[1, 0.3, 0.1, 0.03]], np.float32),
    }  # fmt: skip
    made = generate_artifacts(build(text, arrays), loss=CE, artifact_directory=tmp_path)
    assert made.trainable == ("v", "w", "bias")
    assert set(made.constants) == {"mean", "scale", "frequencies"}


class Scaled(onnxblock.Block):
    """A loss of one's own with a table and a layer in it."""

    def build(self, scores, labels="labels"):
        model = self.base
        model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2, 0.5], np.float32), "own"))
        model.graph.initializer.append(numpy_helper.from_array(np.eye(3, dtype=np.float32), "layer"))
        model.graph.node.append(helper.make_node("Mul", [scores, "own"], ["scaled"]))
        model.graph.node.append(helper.make_node("MatMul", ["scaled", "layer"], ["turned"]))
        return onnxblock.loss.MSELoss()("turned", labels)


CLASS_WEIGHTS = np.array([1, 2, 0.5], np.float32)
WEIGHTED = {
    "bce": onnxblock.loss.BCEWithLogitsLoss(weight=CLASS_WEIGHTS, pos_weight=CLASS_WEIGHTS),
    "cross-entropy": onnxblock.loss.CrossEntropyLoss(weight=CLASS_WEIGHTS),
    "smoothed": onnxblock.loss.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1),
    "own": Scaled(),
}


@pytest.mark.parametrize("requires_grad", [None, ["*"]])
@pytest.mark.parametrize("loss", WEIGHTED)
def test_weights_of_a_loss_are_constants(loss, requires_grad, tmp_path):
    """They belong to what is minimized; trained, they would make any loss small."""
    block = WEIGHTED[loss]
    made = generate_artifacts(perceptron(), requires_grad, ["w1"], block, OptimType.SGD, tmp_path)
    assert (made.trainable, made.frozen) == (("w0", "b0", "b1"), ("w1",))
    trainer, random = Trainer(ArtifactSet.load(tmp_path), 0.05), np.random.default_rng(0)
    labels = LABELS if "entropy" in loss or loss == "smoothed" else random.random((6, 3), np.float32)
    batch = {"x": random.standard_normal((6, 4)).astype(np.float32), made.inputs[1]: labels}
    losses = [trainer.step(batch) for _ in range(40)]
    assert 0 < losses[-1] < losses[0]


def test_weights_of_a_loss_are_trained_if_they_are_named(tmp_path):
    made = generate_artifacts(perceptron(), ["w0", "own"], loss=Scaled(), artifact_directory=tmp_path)
    assert made.trainable == ("w0", "own")


def test_weights_inside_of_functions_and_branches(tmp_path):
    text = """g (float[n, 4] x) => (float[n, 3] y) {
            yes = Constant<value = bool {1}>()
            h = own.layer(x, w)
            y = If (yes) <then_branch = a () => (float[n, 3] p) { p = MatMul(h, v) },
                          else_branch = b () => (float[n, 3] q) { q = Identity(h) }>
        }
        <domain: "own", opset_import: ["": 17]> layer (a, b) => (c) {
            yes = Constant<value = bool {1}>()  ratio = Constant<value_float = 0.5>()
            m = MatMul(a, b)  c, mask = Dropout(m, ratio, yes)
        }"""
    model = build(text, normal(w=(4, 3), v=(3, 3)), domains=', "own": 1')
    made = generate_artifacts(model, loss=CE, artifact_directory=tmp_path)
    assert (made.trainable, [note[:26] for note in made.notes]) == (("w", "v"), ["Dropout with training_mode"])
    feeds = {"x": np.ones((6, 4), np.float32), "labels": LABELS, **read_checkpoint(tmp_path / "checkpoint").trainable}
    first, second = (run(tmp_path / "eval_model.onnx", feeds) for _ in range(2))
    assert first == second  # nothing is dropped


def test_initializers_that_are_inputs_too_are_constants(tmp_path):
    model = perceptron()
    for name in ("w0", "b1"):
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    made = generate_artifacts(model, ["w0"], loss=CE, artifact_directory=tmp_path)
    assert made.inputs == ("x", "labels")
    assert [each.name for each in onnx.load(tmp_path / "eval_model.onnx").graph.input] == ["x", "labels", "w0"]


@pytest.mark.parametrize(
    ("requires_grad", "frozen_params", "message"),
    [
        (["w"], None, "requires_grad has 'w', which is no initializer of the model; did you mean 'w1' or 'w0'?"),
        (["w0"], ["bias0"], "frozen_params has 'bias0', which is no initializer of the model"),
        (["w0", "b0"], ["b0"], "frozen_params has 'b0', expected none that is to be trained"),
        (["layer*"], None, "requires_grad has 'layer*', which matches no weight of the model"),
        (["unu*"], None, "which matches no weight, but 'unused': name those in full"),
        ([], None, "nothing is trainable, expected at least one parameter or input"),
        (["unused"], None, "cannot be differentiated with respect to 'unused': no differentiable way"),
        (["steps"], None, "requires_grad has 'steps' with elements of type INT64, expected a float type"),
    ],
)
def test_names_that_stand_for_nothing(requires_grad, frozen_params, message, tmp_path):
    model = perceptron()
    more = {"unused": np.ones((2, 2), np.float32), "steps": np.arange(3)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in more.items())
    with pytest.raises(ValueError, match=r"^generate_artifacts: ") as caught:
        generate_artifacts(model, requires_grad, frozen_params, CE, artifact_directory=tmp_path)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_models_without_weights(tmp_path):
    numbers = build("g (int64[n, 3] x) => (float[n, 3] y) { y = Cast<to = 1>(x) }")
    with pytest.raises(ValueError, match="the model has no weights, expected float tensors"):
        generate_artifacts(numbers, loss=CE, artifact_directory=tmp_path)
    linear = helper.make_node("LinearRegressor", ["x"], ["y"], domain="ai.onnx.ml", coefficients=[1.0] * 3, targets=1)
    numbers.graph.node[0].CopyFrom(linear)
    numbers.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT
    numbers.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    with pytest.raises(ValueError, match="adds or looks up: those of LinearRegressor are attributes, which are not"):
        generate_artifacts(numbers, loss=LossType.MSELoss, artifact_directory=tmp_path)
    apart = build(
        "g (float[n, 3] x) => (float[n, 3] y, float[n, 2] z) { y = Relu(x) z = MatMul(x, w) }", normal(w=(3, 2))
    )
    with pytest.raises(ValueError, match="depends on no weight of the model, of which it has 'w'"):
        generate_artifacts(apart, loss=CE, loss_input_names=["y"], artifact_directory=tmp_path)


def test_all_that_is_not_trained_may_be_frozen(tmp_path):
    text = """g (float[n, 2, 6] x) => (float[n, 3] scores) {
        part = Slice(x, starts, ends, axes)  rows = Reshape(part, shape)  s = Unsqueeze(rows, axes)
        t = Squeeze(s, axes)  h = MatMul(t, w)  k = Clip(h, low)  scores = Add(k, b)
    }"""
    numbers = {"starts": [1], "ends": [6], "axes": [2], "shape": [0, -1]}
    arrays = {**{name: np.array(each) for name, each in numbers.items()}, "low": np.float32(-1)}
    model = build(text, {**arrays, **normal(w=(10, 3), b=(3,))})
    others = [each.name for each in model.graph.initializer if each.name != "w"]
    made = generate_artifacts(model, ["w"], others, CE, OptimType.SGD, tmp_path)
    assert set(made.frozen) == set(others)
    training = onnx.load(tmp_path / "training_model.onnx").graph
    assert [each.name for each in training.input][1:-2] == ["labels", *(each.name for each in model.graph.initializer)]
    trainer = Trainer(ArtifactSet.load(tmp_path), 0.1)
    feeds = {"x": np.random.default_rng(0).standard_normal((6, 2, 6)).astype(np.float32), "labels": LABELS}
    found = [trainer.step(feeds) for _ in range(3)]
    assert found[-1] < found[0]


# --- batch normalization ---


def modes(folder):
    """What batch normalization became in the training model, and whether the eval model loads and trains not."""
    training, evaluation = (onnx.load(folder / f"{kind}_model.onnx").graph for kind in ("training", "eval"))
    (own,) = (node for node in evaluation.node if node.op_type == "BatchNormalization")
    assert len(own.output) == 1
    assert [each.i for each in own.attribute if each.name == "training_mode"] == [0]
    (name,) = (
        node.op_type for node in training.node if node.op_type.startswith("BatchNorm") and "Grad" not in node.op_type
    )
    return name


@pytest.mark.parametrize(
    ("training", "frozen_params", "batch_norm", "expected"),
    [
        (False, None, "model", "BatchNormalization"),
        (True, None, "model", "BatchNormInternal"),
        (True, ["mean", "var"], "model", "BatchNormalization"),
        (True, None, "freeze", "BatchNormalization"),
        (False, ["mean", "var"], "train", "BatchNormInternal"),
    ],
)
def test_whose_statistics_batch_normalization_takes(training, frozen_params, batch_norm, expected, tmp_path):
    generate_artifacts(images(training), None, frozen_params, CE, OptimType.SGD, tmp_path, batch_norm=batch_norm)
    assert modes(tmp_path) == expected
    checkpoint = read_checkpoint(tmp_path / "checkpoint")
    assert set(checkpoint.frozen) == {"mean", "var"}
    x = np.random.default_rng(0).standard_normal((4, 2, 6, 6)).astype(np.float32)
    assert np.isfinite(
        run(tmp_path / "eval_model.onnx", {"x": x, "labels": np.arange(4) % 3, **checkpoint.parameters})[0]
    )


def test_gradients_of_normalization_have_what_the_old_package_demands(tmp_path):
    generate_artifacts(images(), loss=CE, artifact_directory=tmp_path, batch_norm="train")
    nodes = {node.op_type: node for node in onnx.load(tmp_path / "training_model.onnx").graph.node}
    assert [each.name for each in nodes["BatchNormalizationGrad"].attribute] == ["epsilon"]
    text = "g (float[n, 4] x) => (float[n, 4] y) { h = MatMul(x, w) y = LayerNormalization(h, scale) }"
    generate_artifacts(build(text, normal(w=(4, 4), scale=(4,))), ["w"], loss=CE, artifact_directory=tmp_path)
    nodes = {node.op_type: node for node in onnx.load(tmp_path / "training_model.onnx").graph.node}
    assert all(nodes["LayerNormalizationGrad"].output[:3])
    assert len(nodes["LayerNormalizationGrad"].output) == 3
