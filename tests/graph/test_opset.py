"""Models as they are read: opsets, functions, recurrent layers, batch normalization, weights inside of branches."""

import numpy as np
import onnx
import pytest
from differences import build, computed
from differences import run as run_model
from gradient_cases import numbers
from onnx import TensorProto, helper, numpy_helper, parser
from small_models import LABELS, normal
from small_models import build as build_small

from opgrad.gradients import gradients, register_gradient
from opgrad.onnx.graph.conversion import evaluating, raise_opset
from opgrad.onnx.graph.loading import load, read_model
from opgrad.onnx.rules.node import RULES
from opgrad.onnxruntime import lower
from opgrad.training import ArtifactSet, Dataset, Trainer
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts


def floats(*shape, seed=0):
    return numbers(*shape, seed=seed).astype(np.float32)


X = np.linspace(-3, 3, 48, dtype=np.float32).reshape(1, 2, 4, 6)
MEANINGS = {
    "Upsample, linear": (7, 'y = Upsample <mode = "linear", scales = [1.0, 1.0, 2.0, 1.5]> (x)'),
    "Upsample, nearest": (9, "y = Upsample(x, scales)"),
    "Resize, linear": (10, 'y = Resize <mode = "linear"> (x, scales)'),
    "Resize, nearest": (10, "y = Resize(x, scales)"),
    "Resize, smaller": (10, "y = Resize(x, less)"),
    "Clip": (7, "y = Clip <min = -1.5, max = 2.0> (x)"),
    "Pad": (7, "y = Pad <pads = [0, 0, 1, 1, 0, 0, 0, 2], value = 0.5> (x)"),
    "Softmax": (7, "y = Softmax <axis = 2> (x)"),
    "Dropout": (7, "y = Dropout(x)"),
}


@pytest.mark.parametrize("least", [11, 16])
@pytest.mark.parametrize("name", MEANINGS)
def test_results_stay(name, least):
    opset, text = MEANINGS[name]
    constants = {"scales": [1, 1, 1.5, 2], "less": [1, 1, 0.5, 0.4]}
    arrays = {key: np.array(each, np.float32) for key, each in constants.items()}
    model = build(f"g (float[1, 2, 4, 6] x) => (float[n, c, h, w] y) {{ {text} }}", opset, arrays)
    expected = computed(model, {"x": X})[0]
    raise_opset(model, least)
    np.testing.assert_allclose(computed(model, {"x": X})[0], expected, rtol=1e-4, atol=1e-5)


def test_batch_normalization_goes_on_training():
    text = "y, m, v, sm, sv = BatchNormalization(x, two, two, two, two)"
    constants = {"two": np.ones(2, np.float32)}
    model = build(f"g (float[1, 2, 4, 6] x) => (float[1, 2, 4, 6] y) {{ {text} }}", 12, constants)
    raise_opset(model, 16)
    (node,) = model.graph.node
    assert list(node.output) == ["y", "m", "v"]
    assert {each.name: each.i for each in node.attribute}["training_mode"] == 1


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.DOUBLE])
@pytest.mark.parametrize("text", ["y = Clip <max = 2.0> (x)", "y = Pad <pads = [0, 1], value = 0.5> (x)"])
def test_bounds_and_fillers_have_the_type_of_the_data(kind, text):
    model = build(f"g (float[3] x) => (float[n] y) {{ {text} }}", 7)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = kind
    raise_opset(model, 11)
    onnx.checker.check_model(model, full_check=True)


def test_what_the_converter_does_not_know_stays():
    text = """g (float[2000] x) => (float[2000] y) { a = my.Double(x) b = Unknown <alpha = 2.0> (a) y = Add(b, large) }
        <domain: "my", opset_import: ["": 13]> Double (a) => (b) { b = Add(a, a) }"""
    model = build(text, 13, {"large": np.arange(2000, dtype=np.float32)}, '"my": 1')
    model.metadata_props.add(key="who", value="me")
    raise_opset(model, 16)
    assert [f"{node.domain}.{node.op_type}" for node in model.graph.node] == ["my.Double", ".Unknown", ".Add"]
    assert [each.name for each in model.functions] == ["Double"]
    assert model.functions[0].opset_import[0].version == 16
    assert [(each.key, each.value) for each in model.metadata_props] == [("who", "me")]
    assert [each.name for each in model.graph.input] == ["x"]
    np.testing.assert_array_equal(numpy_helper.to_array(model.graph.initializer[0]), np.arange(2000))
    assert {each.domain: each.version for each in model.opset_import} == {"": 16, "my": 1}


@pytest.mark.parametrize("opset", [11, 12])
def test_gradients_of_pooling_are_lowered_from_any_opset(opset):
    text = """g (float[1, 2, 4, 6] x) => (float[1, 2, 1, 2] y) {
        a = MaxPool <kernel_shape = [2, 2], strides = [2, 1]> (x)
        y = AveragePool <kernel_shape = [2, 3], strides = [1, 2]> (a)
    }"""
    found = [computed(lower(gradients(build(text, each), "y", "x")), {"x": X}) for each in (opset, 17)]
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


ROWS = np.linspace(-2, 3, 24, dtype=np.float32).reshape(6, 4)
# As onnxscript writes them: values that calls leave out stand in the functions, here also in bodies and nested calls.
MODEL = """<ir_version: 9, opset_import: ["": {opset}, "own": 1]>
    g (float[6, 4] x, float[4, 3] w) => (float[6, 3] y) {{
        h = own.outer(x)
        yes = Constant<value = bool {{1}}>()
        k = If (yes) <then_branch = a () => (float[6, 4] p) {{ p = own.inner(h) }},
                      else_branch = b () => (float[6, 4] q) {{ q = Identity(h) }}>
        m = own.inner<slope = 0.7>(k)
        y = MatMul(m, w)
    }}
    <domain: "own", opset_import: ["": {inner}]> inner <slope: float = 0.4, axis: int = 0> (a) => (c) {{
        b = LeakyRelu<alpha: float = @slope>(a)
        s = Softmax<axis: int = @axis>(b)
        c = Add(b, s)
    }}
    <domain: "own", opset_import: ["": {opset}, "own": 1]> outer <turned: float = -0.3> (a) => (c) {{
        b = own.inner(a)
        c = own.inner<slope: float = @turned>(b)
    }}"""


def model(opset=17, inner=17):
    return parser.parse_model(MODEL.format(opset=opset, inner=inner))


def inner(a, slope=0.4):
    b = np.where(a > 0, a, slope * a)
    e = np.exp(b - b.max(0))
    return b + e / e.sum(0)


def expected(x, w):
    return inner(inner(inner(inner(x), -0.3)), 0.7) @ w


def check(given):
    feeds = {"x": ROWS, "w": normal(w=(4, 3))["w"]}
    found = run_model(gradients(given, "y", list(feeds), plain=True), feeds)
    exact = {name: array.astype(np.float64) for name, array in feeds.items()}
    np.testing.assert_allclose(found[0], expected(**exact), rtol=1e-5, atol=1e-5)
    for gradient, name in zip(found[1:], feeds, strict=True):
        direction, step = np.random.default_rng(0).standard_normal(feeds[name].shape), 1e-5
        ends = [expected(**exact | {name: exact[name] + sign * step * direction}).sum() for sign in (1, -1)]
        np.testing.assert_allclose((gradient * direction).sum(), (ends[0] - ends[1]) / (2 * step), rtol=1e-3)


def test_calls_have_the_defaults_of_a_function():
    check(model())


@pytest.mark.parametrize(("opset", "inner"), [(17, 13), (15, 17), (18, 17), (21, 16), (17, 18)])
def test_functions_of_other_opsets_whose_operators_mean_the_same(opset, inner):
    check(model(opset, inner))


def test_functions_mean_what_they_say():
    """The softmax of opset 12 is one of all axes from its axis on, and onnxruntime's of the model's opset is not."""
    given = parser.parse_model("""<ir_version: 9, opset_import: ["": 17, "own": 1]>
        g (float[2, 3] x) => (float[2, 3] y) { y = own.all(x) }
        <domain: "own", opset_import: ["": 12]> all <axis: int = 0> (a) => (c) { c = Softmax<axis: int = @axis>(a) }""")
    x = normal(x=(2, 3))["x"]
    found = run_model(gradients(given, "y", "x", plain=True), {"x": x})[0]
    np.testing.assert_allclose(found, np.exp(x) / np.exp(x).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("version", "body", "message"),
    [
        (20, "c = Gelu(a)", "function own.f imports opset 20 of ai.onnx and the model opset 17"),
        (10, "c = Dropout<ratio = 0.5>(a)", "function own.f imports opset 10 of ai.onnx .* opset 11 at least"),
    ],
)
def test_functions_that_cannot_be_converted_are_refused_by_name(version, body, message):
    given = parser.parse_model(f"""<ir_version: 9, opset_import: ["": 17, "own": 1]>
        g (float[2, 3] x) => (float[2, 3] y) {{ y = own.f(x) }}
        <domain: "own", opset_import: ["": {version}]> f (a) => (c) {{ {body} }}""")
    with pytest.raises(ValueError, match=message):
        gradients(given, "y", "x")
    given.graph.node[0].CopyFrom(onnx.helper.make_node("Relu", ["x"], ["y"]))  # it is not called
    gradients(given, "y", "x")


def test_functions_follow_a_model_to_a_newer_opset():
    given = model(11, 11)
    given.functions[0].node[1].CopyFrom(onnx.helper.make_node("Identity", ["b"], ["s"]))  # without softmax
    given = load(given)
    raise_opset(given, 17)
    assert not given.functions
    lowered = lower(gradients(given, "y", "x"))
    doubled = [np.where(ROWS > 0, 2 * ROWS, 0.8 * ROWS)]
    for slope in (-0.3, 0.4, 0.7):
        doubled.append(2 * np.where(doubled[-1] > 0, doubled[-1], slope * doubled[-1]))
    w = normal(w=(4, 3))["w"]
    np.testing.assert_allclose(run_model(lowered, {"x": ROWS, "w": w})[0], doubled[-1] @ w, rtol=1e-5)


def test_a_rule_for_a_function_reads_its_defaults():
    @register_gradient("inner", "own")
    def rule(node):
        return node.dy * node.get("slope", 9.0)

    try:
        given = parser.parse_model("""<ir_version: 9, opset_import: ["": 17, "own": 1]>
            g (float[2, 3] x) => (float[2, 3] y) { y = own.inner(x) }
            <domain: "own", opset_import: ["": 17]> inner <slope: float = 0.5> (a) => (c) {
                c = LeakyRelu<alpha: float = @slope>(a)
            }""")
        found = run_model(gradients(given, "y", "x", plain=True), {"x": -np.ones((2, 3), np.float32)})
        np.testing.assert_array_equal(found[1], np.full((2, 3), 0.5))
    finally:
        del RULES["own", "inner"]


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_training_and_evaluation_have_one_loss(kind, tmp_path):
    given, dtype = model(), np.float16 if kind == TensorProto.FLOAT16 else np.float32
    w = given.graph.input.pop()
    given.graph.initializer.append(numpy_helper.from_array(normal(w=(4, 3))["w"].astype(dtype), w.name))
    values = [*given.graph.input, *given.graph.output]
    for value in [*values, *(each.g.output[0] for each in given.graph.node[2].attribute)]:
        value.type.tensor_type.elem_type = kind
    generate_artifacts(given, None, None, LossType.CrossEntropyLoss, OptimType.SGD, tmp_path)
    artifacts, batch = ArtifactSet.load(tmp_path), {"x": ROWS.astype(dtype), "labels": LABELS}
    trainer = Trainer(artifacts, 0.0)
    loss = trainer.step(batch)
    scores = expected(ROWS.astype(np.float64), normal(w=(4, 3))["w"])
    exact = np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(6), LABELS])
    evaluated = trainer.evaluate(Dataset(batch, artifacts.axes)).loss
    np.testing.assert_allclose([loss, evaluated], exact, rtol=1e-2 if dtype == np.float16 else 1e-5)


LAYERS = {"RNN": 1, "GRU": 3, "LSTM": 4}  # and their gates
BODY = '{results} = {op} <hidden_size = 2, direction = "bidirectional", layout = 1> (x, w, r, b, {states})'


def model_of(op, inside=False):
    """A layer that makes all of its results; inside of the branch of an If, too."""
    names = ["h", "c"][: 1 + (op == "LSTM")]
    body = BODY.format(op=op, results=", ".join(["y", *(f"y{each}" for each in names)]), states=f", {', '.join(names)}")
    inputs = ", ".join(["float[N, T, 3] x", *(f"float[N, 2, 2] {each}" for each in names)])
    text = f"{body}\n s = ReduceSum <keepdims = 0> (yh)\n z = Add(y, s)"
    if inside:
        branch = f"{{ {text} }}".replace("z = ", "inner = ")
        text = (
            f"z = If (yes) <then_branch = a () => (float[N, T, 2, 2] inner) {branch}, "
            f"else_branch = e () => (float[N, T, 2, 2] inner) {branch}>"
        )
    gates = LAYERS[op]
    shapes = {"w": (2, 2 * gates, 3), "r": (2, 2 * gates, 2), "b": (2, 4 * gates)}
    constants = {name: floats(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    model = build(f"g ({inputs}) => (float[N, T, 2, 2] z) {{ {text} }}", 14, constants | {"yes": True})
    return model, {"x": floats(4, 5, 3), **{each: floats(4, 2, 2, seed=3) for each in names}}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("op", LAYERS)
def test_results_are_those_of_the_layer(op, inside):
    """The reference takes batches in front; onnxruntime takes what becomes of the layer, in branches, too."""
    model, feeds = model_of(op, inside)
    expected = run_model(model_of(op)[0], feeds)[0]
    for written in (load(model), lower(model)):
        assert computed(written, feeds)[0] == pytest.approx(expected, 1e-5)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("op", LAYERS)
def test_gradients_run_in_onnxruntime(op, plain):
    """They are those of the reference, which tests/gradients/test_rules.py compares with differences."""
    model, feeds = model_of(op)
    wanted = [*feeds, "w", "r", "b"]
    expected = run_model(gradients(model, "z", wanted, plain=True), feeds)
    found = computed(gradients(model, "z", wanted, plain=plain), feeds, plain)
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


ARRAYS = normal(scale=(2,), bias=(2,), mean=(2,)) | {"var": np.array([0.5, 2], np.float32)}


def normalizing(mode, outputs, opset=15, result="y"):
    """One normalization; mode: its attribute, None without."""
    attribute = "" if mode is None else f"<training_mode = {mode}>"
    text = f"""g (float[n, 2, 3] x) => (float{"[2]" if result == "m" else "[n, 2, 3]"} {result}) {{
        {outputs} = BatchNormalization{attribute}(x, scale, bias, mean, var)
    }}"""
    return build_small(text, ARRAYS, opset)


def eval_model(content):
    """A model as the front ends for training read it to evaluate."""
    found = read_model(content)
    evaluating(found)
    return found


def run_small(found):
    x = np.random.default_rng(0).standard_normal((4, 2, 3)).astype(np.float32)
    return x, computed(found, {"x": x})[0]


@pytest.mark.parametrize(
    ("mode", "outputs", "opset"),
    [(0, "y, m, v", 15), (None, "y, m, v", 14), (1, "y, m, v", 15), (1, "y", 15), (None, "y, m, v, s, i", 13)],
)
def test_an_eval_model_takes_given_statistics(mode, outputs, opset):
    """Also one that says that it trains: by the attribute or, in older opsets, by its outputs."""
    found = eval_model(normalizing(mode, outputs, opset).SerializeToString())
    assert list(found.graph.node[0].output) == ["y"]
    x, y = run_small(found)
    scale, bias, mean, var = (ARRAYS[name].reshape(2, 1).astype(np.float64) for name in ARRAYS)
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(var + 1e-5) * scale + bias, rtol=1e-5, atol=1e-6)


def test_any_model_is_read_with_what_onnx_allows():
    for source in (normalizing(0, "y, m, v"), normalizing(None, "y, m, v", 14)):
        assert list(read_model(source.SerializeToString()).graph.node[0].output) == ["y"]
        assert list(lower(source).graph.node[0].output) == ["y"]
    for trains in (normalizing(1, "y, m, v"), normalizing(None, "y, m, v, s, i", 13)):
        assert read_model(trains.SerializeToString()).graph == trains.graph


def test_statistics_that_somebody_reads_are_those_that_were_given():
    y = run_small(eval_model(normalizing(0, "y, m, v", result="m").SerializeToString()))[1]
    np.testing.assert_array_equal(y, ARRAYS["mean"])


TEXT = """g (float[N, 3] x, bool positive) => (float[N, 2] y) {
    y = If (positive) <
        then_branch = a () => (float[N, 2] y1) {
            inner = If (positive) <
                then_branch = b () => (float[N, 2] y2) { y2 = MatMul(x, deep) },
                else_branch = c () => (float[N, 2] y3) { y3 = MatMul(x, deep) }
            >
            shifted = Add(inner, bias)
            y1 = Tanh(shifted)
        },
        else_branch = d () => (float[N, 2] y4) { p = MatMul(x, w)
            y4 = Add(p, bias) }
    >
}"""
# The branches with a weight, its name there, and whether it is a node; two names stand in two branches each.
PLACES = {"a": ("bias", False), "b": ("deep", True), "c": ("deep", False), "d": ("bias", True)}
SHAPES = {"bias": (2,), "deep": (3, 2)}


def branches(graph):
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g
                yield from branches(attribute.g)


def branching():
    model = build(TEXT, constants={"w": floats(3, 2, seed=9)})
    for seed, branch in enumerate(branches(model.graph)):
        name, is_node = PLACES[branch.name]
        tensor = numpy_helper.from_array(floats(*SHAPES[name], seed=seed), name)
        if is_node:
            branch.node.insert(0, helper.make_node("Constant", [], [name], value=tensor))
        else:
            branch.initializer.append(tensor)
    onnx.checker.check_model(model, full_check=True)
    return model


def both(model):
    x = floats(4, 3)
    return [computed(model, {"x": x, "positive": np.array(positive)})[0] for positive in (True, False)]


def test_results_stay_and_every_weight_is_an_initializer():
    written = load(branching())
    assert all(not each.initializer for each in branches(written.graph))
    assert not any(node.op_type == "Constant" for each in branches(written.graph) for node in each.node)
    assert sorted(list(each.dims) for each in written.graph.initializer) == [[2], [2], [3, 2], [3, 2], [3, 2]]
    for mine, other in zip(both(written), both(branching()), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_a_constant_that_is_a_result_stays():
    """onnxruntime takes no result of a branch that the branch does not make."""
    text = """g (bool c) => (float[2] y) { y = If (c) <
        then_branch = a () => (float[2] p) { p = Constant <value = float[2] {1, 2}> () },
        else_branch = b () => (float[2] q) { q = Constant <value = float[2] {3, 4}> () }> }"""
    written = load(build(text))
    assert [computed(written, {"c": np.array(c)})[0].tolist() for c in (True, False)] == [[1, 2], [3, 4]]


def test_gradients_are_asked_for_by_their_names():
    text = """g (float[N, 3] x, bool c) => (float[N, 2] y) { y = If (c) <
        then_branch = a () => (float[N, 2] p) { w = Constant <value = float[3, 2] {1, 2, 3, 4, 5, 6}> ()
            p = MatMul(x, w) },
        else_branch = b () => (float[N, 2] q) { q = MatMul(x, v) }> }"""
    graph = gradients(build(text, constants={"v": np.zeros((3, 2), np.float32)}), "y", ["w", "v"], plain=True)
    x = floats(4, 3)
    _, dw, dv = computed(graph, {"x": x, "c": np.array(True)})
    np.testing.assert_allclose(dw, np.repeat(x.sum(0)[:, None], 2, 1), rtol=1e-5)
    assert not dv.any()
