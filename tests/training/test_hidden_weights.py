"""Weights that no product reads as they are stored: moved, in parts, in sequences, sparse, or inside of functions."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper, parser
from small_models import build, normal

from opgrad.onnx.graph.loading import load
from opgrad.training import ArtifactSet, Trainer, read_checkpoint
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts

X = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
ROWS, PLACES = np.array([[0], [2]]), np.array([[0, 1, 2, 3], [3, 2, 0, 1]])
KEPT, LENGTHS = np.array([True, False, True, True]), np.array([2, 3, 4, 1])
HIDDEN = np.arange(16).reshape(4, 4) % 3 == 0
OTHERS = {"rows": ROWS, "places": PLACES, "kept": KEPT, "lengths": LENGTHS, "hidden": HIDDEN}


CASES = {
    "Split": (
        "q, k, v = Split <axis = 1, num_outputs = 3> (w)  a = MatMul(x, q)  b = MatMul(x, k)"
        "  c = MatMul(x, v)  d = Mul(a, b)  y = Add(d, c)",
        {"w": (4, 12)},
    ),
    "SequenceConstruct": (
        "s = SequenceConstruct(m, u)  one = Constant <value = int64 {1}> ()  zero = Constant <value = int64 {0}> ()"
        "  t = SequenceAt(s, one)  r = SequenceAt(s, zero)  h = MatMul(x, r)  y = MatMul(h, t)",
        {"m": (4, 4), "u": (4, 4)},
    ),
    "ConcatFromSequence": (
        "s = SequenceConstruct(m, u)  z = ConcatFromSequence <axis = 1> (s)  y = MatMul(x, z)",
        {"m": (4, 4), "u": (4, 2)},
    ),
    "ScatterND": ("z = ScatterND(m, rows, u)  y = MatMul(x, z)", {"m": (4, 4), "u": (2, 4)}),
    "ScatterElements": ("z = ScatterElements <axis = 0> (m, places, u)  y = MatMul(x, z)", {"m": (4, 4), "u": (2, 4)}),
    "GatherND": ("z = GatherND(w, rows)  t = Transpose(z)  y = MatMul(x, t)", {"w": (4, 4)}),
    "GatherElements": ("z = GatherElements(w, places)  t = Transpose(z)  y = MatMul(x, t)", {"w": (4, 4)}),
    "Where": ("t = Transpose(u)  z = Where(hidden, w, t)  y = MatMul(x, z)", {"w": (4, 4), "u": (4, 4)}),
    "Pad": ("p = Constant <value_ints = [0, 1, 0, 2]> ()  z = Pad(w, p)  y = MatMul(x, z)", {"w": (4, 4)}),
    "CenterCropPad": (
        "s = Constant <value_ints = [4, 2]> ()  z = CenterCropPad(w, s)  y = MatMul(x, z)",
        {"w": (4, 4)},
    ),
    "Trilu": ("z = Trilu(w)  y = MatMul(x, z)", {"w": (4, 4)}),
    "Clip": (
        "a = Constant <value_float = -0.3> ()  b = Constant <value_float = 0.3> ()"
        "  z = Clip(w, a, b)  y = MatMul(x, z)",
        {"w": (4, 4)},
    ),
    "CastLike": ("z = CastLike(w, x)  y = MatMul(x, z)", {"w": (4, 4)}),
    "Compress": ("z = Compress <axis = 1> (w, kept)  y = MatMul(x, z)", {"w": (4, 4)}),
    "ReverseSequence": (
        "z = ReverseSequence <batch_axis = 1, time_axis = 0> (w, lengths)  y = MatMul(x, z)",
        {"w": (4, 4)},
    ),
    "DepthToSpace": (
        "z = DepthToSpace <blocksize = 2> (w)  s = Constant <value_ints = [4, 4]> ()"
        "  m = Reshape(z, s)  y = MatMul(x, m)",
        {"w": (1, 4, 2, 2)},
    ),
    "SpaceToDepth": (
        "z = SpaceToDepth <blocksize = 2> (w)  s = Constant <value_ints = [4, 4]> ()"
        "  m = Reshape(z, s)  y = MatMul(x, m)",
        {"w": (1, 1, 4, 4)},
    ),
    "Resize": ("s = Constant <value_floats = [1.0, 2.0]> ()  z = Resize(w, , s)  y = MatMul(x, z)", {"w": (4, 4)}),
}


def check(folder, model, values, compute):
    """Whether a step changes the weights along the gradient of the mean square of the results, in float64."""
    generate_artifacts(model, None, None, LossType.MSELoss, OptimType.SGD, folder)
    artifacts = ArtifactSet.load(folder)
    exact = {name: each.astype(np.float64) for name, each in values.items()}
    target = np.zeros_like(compute(**exact), np.float32)
    trainer, (label,) = Trainer(artifacts, 1.0), (each.name for each in artifacts.inputs if each.name != "x")
    before = {name: each.copy() for name, each in trainer.parameters.items()}
    assert before.keys() == values.keys()
    loss = trainer.step({"x": X, label: target})
    np.testing.assert_allclose(loss, (compute(**exact) ** 2).mean(), rtol=1e-5)
    for name, array in exact.items():
        direction = np.random.default_rng(1).standard_normal(array.shape)
        ends = [(compute(**exact | {name: array + step * direction}) ** 2).mean() for step in (1e-6, -1e-6)]
        found = ((before[name] - trainer.parameters[name]).astype(np.float64) * direction).sum()
        np.testing.assert_allclose(found, (ends[0] - ends[1]) / 2e-6, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_weights_that_are_moved_or_in_parts(name, tmp_path):
    body, shapes = CASES[name]
    values, others = normal(**shapes), {each: array for each, array in OTHERS.items() if each in body}
    model = build(f"g (float[n, 4] x) => (float[n, c] y) {{ {body} }}", values | others, 18)
    made = generate_artifacts(model, None, None, LossType.MSELoss, OptimType.SGD, tmp_path)
    assert made.trainable == tuple(shapes)


def test_what_inputs_are_scattered_into_is_no_weight(tmp_path):
    """Such as the zeros that become a mask or a cache."""
    model = build(
        "g (float[n, 4] x, float[2, 4] u) => (float[n, 4] y) { z = ScatterND(m, rows, u) h = MatMul(x, w)"
        " y = MatMul(h, z) }",
        normal(m=(4, 4), w=(4, 4)) | {"rows": ROWS},
    )
    made = generate_artifacts(model, None, None, LossType.MSELoss, OptimType.SGD, tmp_path)
    assert (made.trainable, made.constants) == (("w",), ("m",))


@pytest.mark.parametrize("zeros", [np.zeros(()), np.zeros((4, 4))])
@pytest.mark.parametrize(
    ("mixed", "others"),
    [("Where(hidden, w, zeros)", {"hidden": HIDDEN}), ("Where(hidden, zeros, w)", {"hidden": HIDDEN})],
)
def test_the_zeros_of_a_mask_are_no_weight(mixed, others, zeros, tmp_path):
    model = build(
        f"g (float[n, 4] x) => (float[n, 4] y) {{ z = {mixed} y = MatMul(x, z) }}",
        normal(w=(4, 4)) | others | {"zeros": zeros.astype(np.float32)},
    )
    made = generate_artifacts(model, None, None, LossType.MSELoss, OptimType.SGD, tmp_path)
    assert made.trainable == ("w",)


def test_what_a_mask_of_the_inputs_chooses_is_no_weight(tmp_path):
    model = build(
        "g (float[n, 4] x, bool[4, 4] c) => (float[n, 4] y) { h = MatMul(x, w) z = Where(c, m, w) y = MatMul(h, z) }",
        normal(m=(4, 4), w=(4, 4)),
    )
    made = generate_artifacts(model, None, None, LossType.MSELoss, OptimType.SGD, tmp_path)
    assert (made.trainable, made.constants) == (("w",), ("m",))


def sparse_model(indices, dims=(4, 4)):
    model = build("g (float[n, 4] x) => (float[n, 4] y) { h = MatMul(x, m) y = Tanh(h) }")
    values = helper.make_tensor("m", 1, [3], [1, 2, 3])
    places = numpy_helper.from_array(np.array(indices), "places")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, dims))
    return model


@pytest.mark.parametrize("indices", [[1, 6, 12], [[0, 1], [1, 2], [3, 0]]])
def test_sparse_initializers_are_dense(indices, tmp_path):
    model = sparse_model(indices)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": X})[0]
    onnx.save(model, tmp_path / "model.onnx")
    for loaded in (load(model, "test"), load(tmp_path / "model.onnx", "test")):
        assert not loaded.graph.sparse_initializer
        found = onnxruntime.InferenceSession(loaded.SerializeToString()).run(None, {"x": X})[0]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    check(tmp_path, model, {"m": numpy_helper.to_array(loaded.graph.initializer[0])}, lambda m: np.tanh(X @ m))


@pytest.mark.parametrize(
    ("indices", "dims", "message"),
    [
        ([1, 6, 16], (4, 4), "has an index outside of its shape"),
        ([-1, 6, 12], (4, 4), "has an index outside of its shape"),
        ([1, 6], (4, 4), "expected an int64 index, or one for each axis, of each value"),
        ([1.0, 6.0, 7.0], (4, 4), "expected an int64 index, or one for each axis, of each value"),
        ([1, 6, 12], (2**40, 4), "expected at most 2,147,483,648 bytes"),
    ],
)
def test_sparse_initializers_that_are_damaged(indices, dims, message):
    with pytest.raises(ValueError, match=f"test: the model: the sparse initializer 'm' .*{message}"):
        load(sparse_model(indices, dims), "test")


FUNCTIONS = """<ir_version: 9, opset_import: ["": 17, "own": 1]>
    g (float[n, 4] x) => (float[n, 4] y) { h = own.outer(x)  y = own.inner(h) }
    <domain: "own", opset_import: ["": 17]> inner (a, bias) => (c) {
        w = Constant <value = float[4, 4] {1, 2, 0, 0, 0, 1, 0, 3, 0, 0, 1, 0, -1, 0, 0, 1}> ()
        half = Constant <value = float {0.5}> ()
        b = MatMul(a, w)  d = Mul(b, half)  c = Tanh(d)
    }
    <domain: "own", opset_import: ["": 17, "own": 1]> outer (a) => (c) {
        v = Constant <value = float[4] {0.1, 0.2, 0.3, 0.4}> ()
        b = own.inner(a)  c = Add(b, v)
    }"""


def test_weights_inside_of_functions(tmp_path):
    """Calls of one function have one weight."""
    model = parser.parse_model(FUNCTIONS)
    made = generate_artifacts(model, None, None, LossType.MSELoss, OptimType.SGD, tmp_path)
    assert made.trainable == ("inner.w", "outer.v")
    values = read_checkpoint(tmp_path / "checkpoint").trainable
    check(tmp_path, model, values, lambda **given: computed(given["inner.w"], given["outer.v"]))
    eval_model = onnx.load(tmp_path / "eval_model.onnx")
    onnx.checker.check_model(eval_model)


def computed(w, v):
    return np.tanh((np.tanh(X @ w / 2) + v) @ w / 2)
