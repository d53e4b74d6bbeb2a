"""Weights that are hidden, shared, or renamed by an exporter: found, moved, copied."""

import fnmatch
import math
import re

import numpy as np
import onnx
import onnxruntime
import pytest
from command import cli
from onnx import helper, numpy_helper, parser
from small_models import LABELS, build, normal, run, set_of

from opgrad.onnx.graph.loading import load
from opgrad.onnx.graph.nodes import SCOPES, module_path
from opgrad.training import ArtifactSet, Trainer, read_checkpoint
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts
from opgrad.training.make.selection import Candidates
from opgrad.training.make.tensors import untie
from opgrad.training.onnxblock.loss import CrossEntropyLoss
from opgrad.training.quantization import KINDS, keep_paths, paths_of, prepare

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
    "Expand": (  # of a formula of constants, as relative positions are repeated for each row of a batch
        "n = Shape <end = 1> (x)  c = Constant <value_ints = [4, 4]> ()  s = Concat <axis = 0> (n, c)  t = Tanh(w)"
        "  z = Expand(t, s)  a = Constant <value_ints = [1]> ()  r = Unsqueeze(x, a)  m = MatMul(r, z)"
        "  y = Squeeze(m, a)",
        {"w": (4, 4)},
    ),
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
    artifacts = set_of(model, folder, LossType.MSELoss)
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


LOOPS = {  # as tf2onnx writes a recurrent layer, and layers whose weights are stacked, as of flax
    "Loop": (
        "m = Constant <value = int64 {3}> ()  t, y, o = Loop (m, , w, x, v) <body = b (int64 i, bool go,"
        " float[4, 4] a, float[n, 4] h, float[4] c) => (bool on, float[4, 4] e, float[n, 4] k, float[4] c)"
        " { on = Identity(go)  e = Identity(a)  p = MatMul(h, a)  q = Add(p, c)  k = Tanh(q) }>",
        {"w": (4, 4), "v": (4,)},
    ),
    "Scan": (
        "y = Scan <num_scan_inputs = 2, body = b (float[n, 4] h, float[4, 4] a, float[4] c) => (float[n, 4] k)"
        " { p = MatMul(h, a)  q = Add(p, c)  k = Tanh(q) }> (x, w, v)",
        {"w": (3, 4, 4), "v": (3, 4)},
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_weights_that_a_loop_hands_on(name, tmp_path):
    body, shapes = LOOPS[name]
    values = normal(**shapes)

    def compute(w, v):
        h = X.astype(np.float64)
        for number in range(3):
            h = np.tanh(h @ (w if w.ndim == 2 else w[number]) + (v if v.ndim == 1 else v[number]))
        return h

    check(tmp_path, build(f"g (float[n, 4] x) => (float[n, 4] y) {{ {body} }}", values, 18), values, compute)


def test_a_first_state_is_doubtful(tmp_path):
    """Whether it was learned is not known, but zeros are a filling."""
    body = LOOPS["Loop"][0].replace("w, x, v", "w, z, v")
    text = f"g (float[5, 4] x) => (float[5, 4] y) {{ {body.replace('k = Tanh(q)', 'r = Add(q, x)  k = Tanh(r)')} }}"
    for factor, count in ((1, 1), (0, 0)):
        values = normal(w=(4, 4), v=(4,)) | {"z": factor * normal(z=(5, 4))["z"]}
        made = generate_artifacts(build(text, values, 18), None, None, LossType.MSELoss, OptimType.SGD, tmp_path)
        assert made.trainable == ("w", "v")
        assert [each.startswith("not trained unless named: 'z'") for each in made.notes] == [True] * count


@pytest.mark.parametrize(("product", "scale", "trainable"), [
    ("h = MatMul(x, w)", 1, ["w"]),
    ("h = MatMul(x, w)", 2, ["w", "s"]),
    ("h = Identity(x)", 1, ["s", "b"]),
])  # fmt: skip
def test_scales_that_an_exporter_made_up_are_no_weights(product, scale, trainable, tmp_path):
    """All weights of some exporters are Constant nodes, and those of fresh normalizations are 1 and 0, too."""
    made_up = f"s = Constant <value_floats = {[float(scale)] * 4}> ()  b = Constant <value_floats = {[0.0] * 4}> ()"
    body = f"g (float[n, 4] x) => (float[n, c] y) {{ {product}  {made_up}  y = LayerNormalization(h, s, b) }}"
    made = generate_artifacts(build(body, normal(w=(4, 4)) if "w" in trainable else {}, 18), None, None,
                              LossType.MSELoss, OptimType.SGD, tmp_path)  # fmt: skip
    assert made.trainable == tuple(trainable)


@pytest.mark.parametrize(("name", "count"), [("val_{}", 1), ("helper.constant.{}", 1), ("norm.{}", 3)])
def test_instances_that_groups_are_normalized_as_have_no_weights(name, count, tmp_path):
    text = "g (float[n, 1, 4] x) => (float[n, 1, 4] y) { h = InstanceNormalization(x, s, b)  y = MatMul(h, w) }"
    model = build(text, normal(w=(4, 4)) | {"s": np.ones(1, np.float32), "b": np.zeros(1, np.float32)}, 18)
    for place, tensor in ((1, "s"), (2, "b")):
        made_up = model.graph.node[0].input[place] = name.format(place)
        next(each for each in model.graph.initializer if each.name == tensor).name = made_up
    made = generate_artifacts(model, None, None, LossType.MSELoss, OptimType.SGD, tmp_path)
    assert len(made.trainable) == count


@pytest.mark.parametrize(
    ("more", "z"),
    [("float[2, 4] u", "ScatterND(m, rows, u)"), ("bool[4, 4] c", "Where(c, m, w)")],
    ids=["scattered into", "chosen by a mask"],
)
def test_what_inputs_change_is_no_weight(more, z, tmp_path):
    """Such as the zeros that become a mask or a cache."""
    text = f"g (float[n, 4] x, {more}) => (float[n, 4] y) {{ z = {z} h = MatMul(x, w) y = MatMul(h, z) }}"
    model = build(text, normal(m=(4, 4), w=(4, 4)) | ({"rows": ROWS} if "rows" in z else {}))
    made = generate_artifacts(model, None, None, LossType.MSELoss, OptimType.SGD, tmp_path)
    assert (made.trainable, made.constants) == (("w",), ("m",))


@pytest.mark.parametrize("zeros", [np.zeros(()), np.zeros((4, 4))])
@pytest.mark.parametrize("mixed", ["w, zeros", "zeros, w"])
def test_the_zeros_of_a_mask_are_no_weight(mixed, zeros, tmp_path):
    text = f"g (float[n, 4] x) => (float[n, 4] y) {{ z = Where(hidden, {mixed}) y = MatMul(x, z) }}"
    model = build(text, normal(w=(4, 4)) | {"hidden": HIDDEN, "zeros": zeros.astype(np.float32)})
    made = generate_artifacts(model, None, None, LossType.MSELoss, OptimType.SGD, tmp_path)
    assert made.trainable == ("w",)


def test_erfc_of_tensorflow(tmp_path):
    model = build("g (float[n, 4] x) => (float[n, 4] y) { h = MatMul(x, m) y = Erfc(h) }", values := normal(m=(4, 4)))
    check(tmp_path, model, values, lambda m: np.vectorize(math.erfc)(X @ m))


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
    for loaded in (load(model), load(tmp_path / "model.onnx")):
        assert not loaded.graph.sparse_initializer
        found = onnxruntime.InferenceSession(loaded.SerializeToString()).run(None, {"x": X})[0]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    (sparse,) = model.graph.sparse_initializer
    other = build("g (float[n, 4] x) => (float[n, 4] y) { h = MatMul(x, m) y = Tanh(h) }")
    other.graph.node.insert(0, helper.make_node("Constant", [], ["m"], sparse_value=sparse))
    assert generate_artifacts(other, loss=LossType.MSELoss, artifact_directory=tmp_path).trainable == ("m",)
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
    with pytest.raises(ValueError, match=f"^the model: the sparse initializer 'm' .*{message}"):
        load(sparse_model(indices, dims))


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

    def computed(**given):
        w, v = given["inner.w"], given["outer.v"]
        return np.tanh((np.tanh(X @ w / 2) + v) @ w / 2)

    check(tmp_path, model, values, computed)
    eval_model = onnx.load(tmp_path / "eval_model.onnx")
    onnx.checker.check_model(eval_model)


CE, SGD = LossType.CrossEntropyLoss, OptimType.SGD
ONES, ZEROS = np.ones(8, np.float32), np.zeros(8, np.float32)
SHARED_X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)


def norms(names=("/a/Norm", "/b/Norm")):
    """Two fresh normalizations that share scale and bias."""
    text = """g (float[n, 8] x) => (float[n, 3] scores) {
        n = LayerNormalization(x, a.weight, a.bias)  h = MatMul(n, v)  m = LayerNormalization(h, a.weight, a.bias)
        scores = MatMul(m, w)
    }"""
    weights = {"scale": ONES, "bias": ZEROS, **normal(v=(8, 8), w=(8, 3))}
    model = build(text.replace("a.weight", "scale").replace("a.bias", "bias"), weights)
    for node, name in zip((model.graph.node[0], model.graph.node[2]), names, strict=True):
        node.name = name
        node.input[1:] = ["a.weight", "a.bias"]
    model.graph.initializer[0].name, model.graph.initializer[1].name = "a.weight", "a.bias"
    return model


def trained(model, folder, **options):
    made = generate_artifacts(model, None, None, CE, SGD, folder, **options)
    trainer = Trainer(ArtifactSet.load(folder), 0.5)
    for _ in range(3):
        loss = trainer.step({"x": SHARED_X, "labels": LABELS})
    return made, trainer, loss


def test_layers_that_read_one_tensor_are_told(tmp_path):
    made, _, _ = trained(norms(), tmp_path)
    assert made.trainable == ("a.weight", "a.bias", "v", "w")
    assert made.notes == (
        "2 tensors read by several layers, trained or frozen as one: 'a.weight' by 'a', 'b'; 'a.bias' by 'a', 'b'; "
        "untie them if only their first values are the same",
    )
    onnx.save(norms(("", "")), tmp_path / "model.onnx")
    told = cli("inspect", tmp_path / "model.onnx", columns=300)[1]
    assert "a.weight by \"LayerNormalization (the node that makes 'n')\"" in told.replace("\n", " ")
    assert "with --untie each its own" in told
    frozen = generate_artifacts(norms(), None, ["b.*"], CE, artifact_directory=tmp_path)
    assert frozen.frozen == ("a.weight", "a.bias")
    assert len(frozen.notes) == 1


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_transposes_of_a_weight_are_told(tmp_path, scale):
    """Zeros are not: they are where adapters begin."""
    w = scale * normal(w=(4, 6))["w"]
    model = build("g (float[n, 4] x) => (float[n, 4] y) { h = MatMul(x, w)  y = MatMul(h, v) }", {"w": w, "v": w.T})
    made = generate_artifacts(model, None, None, LossType.MSELoss, SGD, tmp_path)
    assert [each.split(",")[0] for each in made.notes] == ["'v' is the transpose of 'w'"][: scale > 0]
    onnx.save(model, tmp_path / "model.onnx")
    told = " ".join(cli("inspect", tmp_path / "model.onnx", columns=300)[1].split())
    assert told.count("note") == len(made.notes)
    assert all(note in told for note in made.notes)


def test_nodes_outside_all_modules_are_layers(tmp_path):
    """Keras writes the whole model as one module, with a cast behind each layer; equal tensors are stored once."""
    text = """g (float[n, 8] x) => (float[n, 3] scores) {
        h = MatMul(x, v)  c = Cast<to = 1>(h)  a = Add(c, zeros)  slope = Identity(zeros)
        up = Relu(a)  m = Neg(a)  down = Relu(m)  leak = Mul(slope, down)  y = Add(up, leak)  scores = MatMul(y, w)
    }"""
    model = build(text, {"zeros": np.zeros(8, np.float32), **normal(v=(8, 8), w=(8, 3))})
    for node in model.graph.node:
        node.name = f"/{node.op_type}_{node.output[0]}"
    made, _, _ = trained(model, tmp_path)
    assert "'zeros' by \"Add (node '/Add_a')\", \"Mul (node '/Mul_leak')\"" in made.notes[0]
    made, _, _ = trained(model, tmp_path, untie=True)
    assert (made.notes, len(made.trainable)) == ((), 4)


@pytest.mark.parametrize("untie", [False, True])
def test_a_node_that_asks_for_a_shape_is_no_layer(untie, tmp_path):
    text = """g (float[n, 8] x) => (float[n, 3] scores) {
        count = Size(w)  sizes = Shape(w)  rows = Gather <axis = 0> (sizes, zero)  a = Cast <to = 1> (count)
        b = Cast <to = 1> (rows)  h = MatMul(x, w)  d = Div(h, a)  scores = Mul(d, b)
    }"""
    model = build(text, {**normal(w=(8, 3)), "zero": np.array(0)})
    made = generate_artifacts(model, None, None, CE, SGD, tmp_path, untie=untie)
    assert (made.trainable, made.notes) == (("w",), ())
    assert "shared" not in cli("inspect", tmp_path)[1]
    onnx.save(model, tmp_path / "model.onnx")
    assert "shared" not in cli("inspect", tmp_path / "model.onnx")[1]


def test_untied_layers_are_trained_apart(tmp_path):
    made, trainer, _ = trained(norms(), tmp_path, untie=True)
    assert made.trainable == ("a.weight", "a.bias", "v", "w", "b.weight", "b.bias")
    assert made.notes == ()
    assert (trainer.parameters["a.weight"] != trainer.parameters["b.weight"]).any()
    plain = generate_artifacts(norms(("", "")), None, None, CE, SGD, tmp_path, untie=True)
    assert set(plain.trainable) == {"a.weight", "a.bias", "v", "w", "a.weight.copy", "a.bias.copy"}


def test_copies_compute_the_same(tmp_path):
    """Through nodes that several layers share, and through the Identity that the older exporter writes."""
    text = """g (float[n, 8] x) => (float[n, 3] scores) {
        turned = Transpose<perm = [1, 0]>(v)  wide = Cast<to = 1>(turned)
        other = Identity(scale)  h = MatMul(x, wide)  k = MatMul(h, wide)  n = Mul(k, scale)  m = Mul(n, other)
        scores = MatMul(m, w)
    }"""
    model = build(text, {"scale": ONES * 2, **normal(v=(8, 8), w=(8, 3))})
    parted = onnx.ModelProto()
    parted.CopyFrom(model)
    untie(parted, {})
    onnx.checker.check_model(parted, full_check=True)
    assert [each.name for each in parted.graph.initializer] == ["scale", "v", "w", "other", "v.copy"]
    np.testing.assert_array_equal(run(model, {"x": SHARED_X}), run(parted, {"x": SHARED_X}))
    made, trainer, _ = trained(model, tmp_path, untie=True)
    assert made.trainable == ("scale", "v", "w", "other", "v.copy")
    assert (trainer.parameters["v"] != trainer.parameters["v.copy"]).any()


def test_a_module_that_is_called_twice_is_one_layer(tmp_path):
    model = norms(("", ""))
    for node in model.graph.node:
        if node.op_type == "LayerNormalization":
            node.metadata_props.add(key=SCOPES, value="['', 'a', 'layer_norm']")
    made = generate_artifacts(model, None, None, CE, SGD, tmp_path, untie=True)
    assert made.trainable == ("a.weight", "a.bias", "v", "w")
    assert generate_artifacts(model, None, None, CE, SGD, tmp_path).notes == ()


@pytest.mark.parametrize("names", [("", ""), ("/a/Norm", "/b/Norm")])
@pytest.mark.parametrize("mode", [0, 1])
def test_statistics_come_apart(mode, names, tmp_path):
    """Scale and variance of a fresh batch normalization are equal, and so are bias and mean."""
    outputs = [", m1, v1", ", m2, v2"] if mode else ["", ""]
    text = f"""g (float[6, 8] x) => (float[6, 3] scores) {{
        n{outputs[0]} = BatchNormalization<training_mode = {mode}>(x, one, zero, zero, one)  h = MatMul(n, v)
        k{outputs[1]} = BatchNormalization<training_mode = {mode}>(h, one, zero, zero, one)  scores = MatMul(k, w)
    }}"""
    model = build(text, {"one": ONES, "zero": ZEROS, **normal(v=(8, 8), w=(8, 3))})
    model.graph.node[0].name, model.graph.node[2].name = names
    made, trainer, loss = trained(model, tmp_path)
    assert {"one", "zero", "v", "w"} <= set(made.trainable)
    assert len(made.frozen) == 4
    if all(names):
        own = {f"{layer}.{name}" for layer in "ab" for name in ("running_mean", "running_var")}
        assert set(made.frozen) == own
    values = read_checkpoint(tmp_path / "checkpoint").parameters
    assert (trainer.parameters["one"] != values["one"]).any()
    onnx.save(model, tmp_path / "model.onnx")
    told = cli("inspect", tmp_path / "model.onnx", columns=300)[1]
    assert "4 statistics of normalization" in told
    assert loss < 2


LOSS = CrossEntropyLoss(class_axis=-1)


def exported(path, dynamo):
    """A model of layers with three axes, whose weights both exporters turn and rename."""
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2))

        def forward(self, tokens):
            x = self.table(tokens)
            for layer in self.layers:
                x = torch.relu(layer(x))
            return self.head(x)

    torch.manual_seed(0)
    model, tokens = Model(), torch.zeros(2, 5, dtype=torch.long)
    names = {"input_names": ["tokens"], "output_names": ["scores"]}
    if dynamo:
        pytest.importorskip("onnxscript")
        torch.onnx.export(model.eval(), (tokens,), path, dynamo=True, opset_version=18, verbose=False, **names)
    else:
        torch.onnx.export(model.eval(), (tokens,), path, dynamo=False, opset_version=17, **names)
    return {name: each.detach().numpy() for name, each in model.named_parameters()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [False, True])
def test_patterns_take_weights_by_their_modules(dynamo, tmp_path):
    path = tmp_path / "model.onnx"
    parameters = exported(path, dynamo)
    own = {each.name for each in onnx.load(path).graph.initializer}
    assert "layers.0.0.bias" in own
    assert "layers.0.0.weight" not in own
    for pattern in ("layers.0.*", "*.weight", "head.weight"):
        made = generate_artifacts(path, None, [pattern], LOSS, OptimType.SGD, tmp_path)
        # Both exporters store equal tensors once, such as the scales of fresh norms.
        expected = {parameters[name].tobytes() for name in fnmatch.filter(parameters, pattern)}
        frozen = read_checkpoint(tmp_path / "checkpoint").frozen
        turned = {array.T.tobytes() for array in frozen.values()} | {array.tobytes() for array in frozen.values()}
        assert expected <= turned
        assert not any("a pattern takes" in note for note in made.notes)
    trained = generate_artifacts(path, ["head.weight"], None, LOSS, OptimType.SGD, tmp_path).trainable
    assert len(trained) == 1
    told = cli("inspect", path)[1]
    assert f"{trained[0]} (head.weight)" in told


def linear(node="", scopes=None):
    text = "g (float[n, 5, 8] x) => (float[n, 5, 3] y) { h = MatMul(x, val_3) y = Add(h, l.bias) }"
    model = build(text.replace("l.bias", "bias"), normal(val_3=(8, 3), bias=(3,)))
    model.graph.initializer[1].name = model.graph.node[1].input[1] = "l.bias"
    model.graph.node[0].name = node
    if scopes is not None:
        model.graph.node[0].metadata_props.add(key=SCOPES, value=scopes)
    return model


def test_a_bias_without_the_weight_of_its_layer_is_told(tmp_path):
    made = generate_artifacts(linear(), None, ["l.*"], LOSS, artifact_directory=tmp_path)
    assert (made.trainable, made.frozen) == (("val_3",), ("l.bias",))
    assert len(made.notes) == 1
    assert "a pattern takes 'l.bias' and not 'val_3', the weight of the same layer" in made.notes[0]
    assert generate_artifacts(linear("/l/MatMul"), None, ["l.b*"], LOSS, artifact_directory=tmp_path).notes == ()
    assert generate_artifacts(linear(), None, ["l.bias"], LOSS, artifact_directory=tmp_path).notes == ()
    assert generate_artifacts(linear(), ["val*", "l.*"], None, LOSS, artifact_directory=tmp_path).notes == ()


@pytest.mark.parametrize(
    ("node", "scopes", "path"),
    [
        ("/model/layers.0/q/MatMul_1", None, "model.layers.0.q"),
        ("/model/layers.0/layers.0.1/MatMul", None, "model.layers.0.1"),
        ("/MatMul", None, ""),
        ("model/q/MatMul", None, None),
        ("", None, None),
        ("node_MatMul_3", "['', 'model', 'model.q', 'linear_1']", "model.q"),
        ("/other/MatMul", "['', 'linear']", ""),
        ("node_MatMul_3", "['linear']", None),
        ("node_MatMul_3", "[[[", None),
        ("node_MatMul_3", "[1, 2]", None),
        ("node_MatMul_3", "print()", None),
    ],
)
def test_paths_of_modules(node, scopes, path):
    assert module_path(linear(node, scopes).graph.node[0]) == path


def test_names_that_match_nothing_are_told_with_those_of_modules(tmp_path):
    with pytest.raises(ValueError, match=r"'l.weigth', which is no initializer of the model; did you mean 'l.weight'"):
        generate_artifacts(linear("/l/MatMul"), None, ["l.weigth"], LOSS, artifact_directory=tmp_path)


def test_the_weight_of_a_quantized_layer_has_its_module(tmp_path):
    text = """g (float[n, 8] x) => (float[n, 3] y) {
        q = QuantizeLinear(val_3, scale)  d = DequantizeLinear(q, scale)  y = MatMul(x, d)
    }"""
    model = build(text, {**normal(val_3=(8, 3)), "scale": np.float32(0.1)})
    model.graph.node[2].name = "/head/MatMul"
    made = generate_artifacts(model, None, ["scale"], CrossEntropyLoss(), artifact_directory=tmp_path)
    assert made.trainable == ("val_3",)
    assert generate_artifacts(model, ["head.*"], None, CrossEntropyLoss(), artifact_directory=tmp_path).trainable


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_patterns_choose_what_is_quantized(kind, dynamo, tmp_path):
    exported(tmp_path / "model.onnx", dynamo)
    batches = [{"tokens": np.zeros((2, 5), np.int64)}] if kind == "int8" else ()
    names = Candidates(onnx.load(tmp_path / "model.onnx")).modules
    renamed = {named: name for name, several in names.items() for named in several}
    found = []
    for patterns in (None, ["layers.1.*", "head.weight"]):
        graph = prepare(tmp_path / "model.onnx", kind, batches, weights=patterns).graph
        scales = {each.name.removesuffix("_scale.log") for each in graph.initializer if each.name.endswith(".log")}
        found.append(scales & {each.name for each in graph.initializer})
    assert found[1] == {name for name in found[0] if name in (renamed["layers.1.0.weight"], renamed["head.weight"])}
    assert len(found[0]) > len(found[1]) == 2
    for wrong in ("layer.1.*", "layers.1.0.bias"):
        with pytest.raises(ValueError, match=rf"quantization.prepare: weights has '{re.escape(wrong)}', which "):
            prepare(tmp_path / "model.onnx", kind, batches, weights=["head.*", wrong])


def test_a_module_is_told_of_each_reader_of_a_weight():
    text = "g (float[n, 8] x) => (float[n, 8] y) { h = MatMul(x, w) y = MatMul(h, w) }"
    model = build(text, normal(w=(8, 8)))
    for node, path in zip(model.graph.node, ("a", "b"), strict=True):
        node.metadata_props.add(key=SCOPES, value=f"['', '{path}', '']")
    paths = paths_of(model)
    assert paths == {"w": ["a", "b"]}
    fewer = build(text.replace("h = MatMul(x, w) y = MatMul(h, w)", "y = MatMul(x, w)"), normal(w=(8, 8)))
    keep_paths(fewer, paths)
    assert module_path(fewer.graph.node[0]) is None
    keep_paths(model, {"w": ["c", "d"]})
    assert list(map(module_path, model.graph.node)) == ["c", "d"]
