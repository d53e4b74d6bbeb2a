"""Functions of a model: defaults of their attributes, and opsets other than the model's."""

import numpy as np
import onnx
import pytest
from differences import run
from onnx import TensorProto, numpy_helper, parser
from small_models import LABELS, normal

from opgrad.gradients import gradients, register_gradient
from opgrad.onnx.graph.conversion import raise_opset
from opgrad.onnx.graph.loading import load
from opgrad.onnx.rules.node import RULES
from opgrad.onnxruntime import lower
from opgrad.training import ArtifactSet, Dataset, Trainer
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts

X = np.linspace(-2, 3, 24, dtype=np.float32).reshape(6, 4)
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
    feeds = {"x": X, "w": normal(w=(4, 3))["w"]}
    found = run(gradients(given, "y", list(feeds), plain=True), feeds)
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
    found = run(gradients(given, "y", "x", plain=True), {"x": x})[0]
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
    given = load(given, "test")
    raise_opset(given, 17)
    assert not given.functions
    lowered = lower(gradients(given, "y", "x"))
    doubled = [np.where(X > 0, 2 * X, 0.8 * X)]
    for slope in (-0.3, 0.4, 0.7):
        doubled.append(2 * np.where(doubled[-1] > 0, doubled[-1], slope * doubled[-1]))
    w = normal(w=(4, 3))["w"]
    np.testing.assert_allclose(run(lowered, {"x": X, "w": w})[0], doubled[-1] @ w, rtol=1e-5)


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
        found = run(gradients(given, "y", "x", plain=True), {"x": -np.ones((2, 3), np.float32)})
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
    artifacts, batch = ArtifactSet.load(tmp_path), {"x": X.astype(dtype), "labels": LABELS}
    trainer = Trainer(artifacts, 0.0)
    loss = trainer.step(batch)
    scores = expected(X.astype(np.float64), normal(w=(4, 3))["w"])
    exact = np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(6), LABELS])
    evaluated = trainer.evaluate(Dataset(batch, artifacts.axes)).loss
    np.testing.assert_allclose([loss, evaluated], exact, rtol=1e-2 if dtype == np.float16 else 1e-5)
