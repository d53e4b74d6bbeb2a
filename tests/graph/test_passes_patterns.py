"""Recognition of layer normalization, Gelu, Swish and cross-entropy, and of what only looks like them."""

import math

import numpy as np
import pytest
from passes_cases import build, floats, operators, prepared, run, same_gradients

NUMBERS = {
    "half": 0.5, "one": 1.0, "two": 2.0, "three": 3.0, "four": 4.0, "minus_half": -0.5, "epsilon": 1e-3,
    "root": math.sqrt(2), "inverse_root": math.sqrt(0.5), "slope": math.sqrt(2 / math.pi), "cubic": 0.044715,
    "other": 0.05, "quick": 1.702,
}  # fmt: skip
LAYER = {
    "mean": "m = ReduceMean <axes = [-1]> (x)",
    "centred": "d = Sub(x, m)",
    "square": "q = Pow(d, two)",
    "variance": "v = ReduceMean <axes = [-1]> (q)",
    "epsilon": "a = Add(v, epsilon)",
    "root": "r = Sqrt(a)",
    "divided": "n = Div(d, r)",
    "scaled": "s = Mul(n, scale)",
    "moved": "z = Add(s, bias)",
}
RMS = {"mean": "", "centred": "d = Identity(x)"}


def graph(steps, x="float[batch, 3, 4] x", extra=""):
    """The text of a graph with these steps, and the sum of what they make as loss."""
    lines = "\n".join(filter(None, steps.values()))
    return f"g ({x}) => (float loss{extra}) {{ {lines}\n e = Sin(z)\n loss = ReduceSum <keepdims = 0> (e) }}"


def constants(**arrays):
    """The initializers of the graphs."""
    scale, bias = floats(4, seed=1) + 1, floats(4, seed=2)
    return {**{name: np.float32(value) for name, value in NUMBERS.items()}, "scale": scale, "bias": bias, **arrays}


def check(steps, expected, opset=17, wanted=("x",), x="float[batch, 3, 4] x", shape=(2, 3, 4), extra="", **arrays):
    """The operators that a graph is left with; results and gradients stay the same, for any batch."""
    model = build(graph(steps, x, extra), constants(**arrays), opset)
    feeds = {"x": floats(*shape)}
    simple = prepared(model, feeds, {"x": floats(5, *shape[1:], seed=3)})
    assert operators(simple) == sorted([*expected, "ReduceSum", "Sin"])
    same_gradients(model, list(wanted), feeds)
    return simple


LAYERS = {
    "torch": {},
    "a product as square": {"square": "q = Mul(d, d)"},
    "reciprocal": {"divided": "i = Reciprocal(r)\n n = Mul(i, d)"},
    "one by the root": {"divided": "i = Div(one, r)\n n = Mul(d, i)"},
    "a power": {"root": "i = Pow(a, minus_half)", "divided": "n = Mul(d, i)"},
    "a root as power": {"root": "r = Pow(a, half)"},
    "other order": {"epsilon": "a = Add(epsilon, v)", "scaled": "s = Mul(scale, n)", "moved": "z = Add(bias, s)"},
    "subtracted twice": {"square": "d2 = Sub(x, m)\n q = Pow(d2, two)"},
    "without scale": {"scaled": "", "moved": "z = Identity(n)"},
    "without bias": {"moved": "z = Identity(s)"},
    "named from the front": {"mean": "m = ReduceMean <axes = [2]> (x)"},
}


@pytest.mark.parametrize("form", LAYERS)
def test_layer_normalization_is_recognized(form):
    check({**LAYER, **LAYERS[form]}, ["LayerNormalization"])


@pytest.mark.parametrize("opset", [11, 13, 16, 18, 23])
def test_layer_normalization_of_all_opsets(opset):
    steps = dict(LAYER)
    if opset >= 18:
        steps |= {"mean": "m = ReduceMean(x, last)", "variance": "v = ReduceMean(q, last)"}
    old = ["ReduceMean", "Sub", "Pow", "ReduceMean", "Add", "Sqrt", "Div", "Mul", "Add"]
    expected = ["LayerNormalization"] if opset >= 13 else old
    check(steps, expected, opset, ("x", "scale", "bias"), last=np.array([-1]))


def test_layer_normalization_over_two_axes():
    axes = {name: LAYER[name].replace("[-1]", "[-2, -1]") for name in ("mean", "variance")}
    arrays = {"scale": floats(3, 4, seed=1) + 1, "bias": floats(3, 4, seed=2)}
    simple = check({**LAYER, **axes}, ["LayerNormalization"], **arrays)
    axis = next(each.i for node in simple.graph.node for each in node.attribute if each.name == "axis")
    assert axis == -2


KERAS = {
    **{name: LAYER[name] for name in ("mean", "centred", "square", "variance", "epsilon", "root")},
    "inverse": "i = Reciprocal(r)",
    "factor": "f = Mul(i, scale)",
    "product": "p = Mul(x, f)",
    "shift": "h = Mul(m, f)",
    "moved": "b = Sub(bias, h)",
    "sum": "z = Add(p, b)",
}


@pytest.mark.parametrize("changed", [{}, {"sum": "z = Add(b, p)", "product": "p = Mul(f, x)"}])
def test_layer_normalization_with_scale_and_bias_inside_is_recognized(changed):
    check({**KERAS, **changed}, ["LayerNormalization"], wanted=("x", "scale", "bias"))


@pytest.mark.parametrize(
    "changed",
    [
        {"moved": "b = Sub(h, bias)"},
        {"shift": "h = Mul(m, i)"},
        {"product": "y = Sin(x)\n p = Mul(y, f)"},
        {"variance": "v = ReduceMean <axes = [1]> (q)"},
        {"sum": "t = Add(p, b)\n z = Add(t, f)"},
    ],
)
def test_what_looks_like_layer_normalization_with_scale_and_bias_inside(changed):
    model = build(graph({**KERAS, **changed}), constants())
    assert "LayerNormalization" not in operators(prepared(model, {"x": floats(2, 3, 4)}))


UNLIKE_LAYERS = {
    "other axes": {"variance": "v = ReduceMean <axes = [1]> (q)"},
    "not the last axes": {name: LAYER[name].replace("[-1]", "[1]") for name in ("mean", "variance")},
    "axes that are lost": {"mean": "k = ReduceMean <axes = [-1], keepdims = 0> (x)\n m = Unsqueeze(k, last)"},
    "another power": {"square": "q = Pow(d, four)"},
    "a square of another": {"square": "q = Pow(x, two)"},
    "an epsilon for each": {"epsilon": "a = Add(v, scale)"},
    "not the mean": {"mean": "m = ReduceMax <axes = [-1]> (x)"},
    "the variance needed elsewhere": {"moved": "y = Add(s, bias)\n z = Add(y, v)"},
    "what is centred needed elsewhere": {"moved": "y = Add(s, bias)\n z = Add(y, d)"},
}


@pytest.mark.parametrize("form", UNLIKE_LAYERS)
def test_what_looks_like_layer_normalization(form):
    model = build(graph({**LAYER, **UNLIKE_LAYERS[form]}), constants(last=np.array([-1])))
    feeds = {"x": np.abs(floats(2, 3, 4)) + np.arange(4, dtype=np.float32)}
    simple = prepared(model, feeds)
    assert "LayerNormalization" not in operators(simple)


@pytest.mark.parametrize("shape", [(1,), (3, 1), (1, 3, 4)])
def test_a_scale_of_another_shape_stays_outside(shape):
    check(LAYER, ["LayerNormalization", "Mul", "Add"], scale=floats(*shape, seed=4))


def test_values_that_are_outputs_stay():
    for name in ("n", "s", "d"):
        model = build(graph(LAYER, extra=f", float[batch, 3, 4] {name}"), constants())
        simple = prepared(model, {"x": floats(2, 3, 4)})
        assert ("LayerNormalization" in operators(simple)) == (name != "d")
    kept = prepared(build(graph(LAYER), constants()), {"x": floats(2, 3, 4)}, keep=["v"])
    assert "v" in {name for node in kept.graph.node for name in node.output}


def test_layer_normalization_in_half_precision_that_is_computed_in_single():
    text = """g (float16[batch, 4] h) => (float16[batch, 4] z) {
        x = Cast <to = 1> (h)\n STEPS\n c = Cast <to = 10> (n)\n s = Mul(c, scale)\n z = Add(s, bias) }"""
    steps = "\n".join(LAYER[name] for name in list(LAYER)[:7])
    narrow = {name: constants()[name].astype(np.float16) for name in ("scale", "bias")}
    model = build(text.replace("STEPS", steps), constants(**narrow))
    assert operators(prepared(model, {"h": floats(3, 4).astype(np.float16)})) == ["LayerNormalization"]


@pytest.mark.parametrize("form", ["torch", "a product as square", "reciprocal", "a power", "without scale"])
@pytest.mark.parametrize("opset", [13, 23])
def test_rms_normalization_is_recognized(form, opset):
    steps = {**LAYER, **RMS, **LAYERS[form]}
    if opset >= 18:
        steps["variance"] = "v = ReduceMean(q, last)"
    if form != "without scale":
        steps["moved"] = "z = Identity(s)"
    check(steps, ["SimplifiedLayerNormalization"], opset, ("x",), last=np.array([-1]))


def test_rms_normalization_in_operators_of_onnx():
    steps = {**LAYER, **RMS, "variance": "v = ReduceMean(q, last)"}
    model = build(graph(steps), constants(last=np.array([-1])), 23)
    simple = prepared(model, {"x": floats(2, 3, 4)}, plain=True)
    assert operators(simple) == ["Add", "RMSNormalization", "ReduceSum", "Sin"]


# --- activations ---

ERF = {"inner": "i = Div(x, root)", "bent": "b = Erf(i)", "plus": "p = Add(b, one)", "times": "t = Mul(x, p)"}
ERF |= {"half": "z = Mul(t, half)"}
CUBE = {"power": "c = Pow(x, three)", "small": "k = Mul(cubic, c)", "sum": "i = Add(x, k)"}
TANH = {**CUBE, "sloped": "j = Mul(slope, i)", "bent": "b = Tanh(j)", **{each: ERF[each] for each in list(ERF)[2:]}}
GELUS = {
    "torch": ({}, ERF, "Gelu"),
    "a factor": ({"inner": "i = Mul(x, inverse_root)"}, ERF, "Gelu"),
    "a factor before": ({"inner": "i = Mul(inverse_root, x)"}, ERF, "Gelu"),
    "half of x": ({"times": "h = Mul(half, x)", "half": "z = Mul(h, p)"}, ERF, "Gelu"),
    "half of the bracket": ({"times": "h = Mul(p, half)", "half": "z = Mul(x, h)"}, ERF, "Gelu"),
    "one before": ({"plus": "p = Add(one, b)"}, ERF, "Gelu"),
    "tanh": ({}, TANH, "FastGelu"),
    "tanh, products": ({"power": "q = Mul(x, x)\n c = Mul(q, x)"}, TANH, "FastGelu"),
    "tanh, one product": ({"power": "q = Mul(cubic, x)\n w = Mul(x, x)", "small": "k = Mul(q, w)"}, TANH, "FastGelu"),
    "tanh, half of x": ({"times": "h = Mul(half, x)", "half": "z = Mul(h, p)"}, TANH, "FastGelu"),
    "tanh, x outside": ({"power": "c = Mul(x, x)", "sum": "f = Add(k, one)\n i = Mul(x, f)"}, TANH, "FastGelu"),
}


@pytest.mark.parametrize("form", GELUS)
def test_gelu_is_recognized(form):
    changed, steps, name = GELUS[form]
    check({**steps, **changed}, [name])


@pytest.mark.parametrize("opset", [9, 13, 20, 23])
def test_gelu_of_all_opsets(opset):
    x = f"float[batch, 3, 4] x) => (float loss) {{ {' '.join(f'{step}{chr(10)}' for step in ERF.values())}"
    text = f"g ({x} loss = ReduceMax <keepdims = 0> (z) }}"
    simple = prepared(build(text, constants(), opset), {"x": floats(2, 3, 4)})
    assert operators(simple) == ["Gelu", "ReduceMax"]
    plain = prepared(build(text, constants(), opset), {"x": floats(2, 3, 4)}, plain=True)
    assert operators(plain) == (["Gelu", "ReduceMax"] if opset >= 20 else operators(build(text, opset=opset)))


UNLIKE_GELUS = {
    "another root": ({"inner": "i = Div(x, two)"}, ERF),
    "another half": ({"half": "z = Mul(t, quick)"}, ERF),
    "another one": ({"plus": "p = Add(b, two)"}, ERF),
    "another x": ({"times": "y = Sin(x)\n t = Mul(y, p)"}, ERF),
    "another bend": ({"bent": "b = Sin(i)"}, ERF),
    "a bend needed elsewhere": ({"half": "t2 = Mul(t, half)\n z = Add(t2, b)"}, ERF),
    "a half that gives an axis": ({"half": "z = Mul(t, wide)"}, ERF),
    "another cubic": ({"small": "k = Mul(other, c)"}, TANH),
    "a square": ({"power": "c = Pow(x, two)"}, TANH),
    "another slope": ({"sloped": "j = Mul(half, i)"}, TANH),
}


@pytest.mark.parametrize("form", UNLIKE_GELUS)
def test_what_looks_like_gelu(form):
    changed, steps = UNLIKE_GELUS[form]
    wide = np.full((1, 1, 1, 1), 0.5, np.float32)
    model = build(graph({**steps, **changed}), constants(wide=wide))
    simple = prepared(model, {"x": floats(2, 3, 4)})
    assert not {"Gelu", "FastGelu"} & set(operators(simple))


def test_gelu_of_types_that_have_no_kernel_stays():
    text = graph(ERF).replace("float", "double")
    double = {name: np.asarray(value, np.float64) for name, value in constants().items()}
    assert "Gelu" not in operators(prepared(build(text, double)))


SWISHES = {
    "SiLU": ("s = Sigmoid(x)\n z = Mul(x, s)", 1.0),
    "SiLU, other order": ("s = Sigmoid(x)\n z = Mul(s, x)", 1.0),
    "QuickGelu": ("v = Mul(x, quick)\n s = Sigmoid(v)\n z = Mul(x, s)", 1.702),
    "QuickGelu, other order": ("v = Mul(quick, x)\n s = Sigmoid(v)\n z = Mul(s, x)", 1.702),
}


@pytest.mark.parametrize("form", SWISHES)
@pytest.mark.parametrize("opset", [7, 13, 24])
def test_swish_is_recognized(form, opset):
    text, alpha = SWISHES[form]
    model = build(f"g (float[N, 4] x) => (float[N, 4] z) {{ {text} }}", constants(), opset)
    feeds = {"x": floats(3, 4)}
    (node,) = prepared(model, feeds).graph.node
    assert node.op_type == "QuickGelu"
    assert node.attribute[0].f == pytest.approx(alpha)
    assert operators(prepared(model, *([feeds] if opset < 24 else []), plain=True)) == (
        ["Swish"] if opset >= 24 else operators(model)
    )


def test_what_looks_like_swish():
    for text in (
        "s = Sigmoid(x)\n w = Sin(x)\n z = Mul(w, s)",
        "s = Sigmoid(x)\n y = Mul(x, s)\n z = Add(y, s)",
        "v = Mul(x, scale)\n s = Sigmoid(v)\n z = Mul(x, s)",
        "v = Add(x, one)\n s = Sigmoid(v)\n z = Mul(x, s)",
    ):
        model = build(f"g (float[N, 4] x) => (float[N, 4] z) {{ {text} }}", constants())
        assert "QuickGelu" not in operators(prepared(model, {"x": floats(3, 4)}))


# --- losses ---


@pytest.mark.parametrize("opset", [12, 13])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_is_recognized(opset, weighted):
    weight = ", weight" if weighted else ""
    text = f"""g (float[batch, 4] x, int64[batch] labels) => (float loss, float[batch, 4] log_prob) {{
        log_prob = LogSoftmax <axis = 1> (x)
        loss = NegativeLogLikelihoodLoss <ignore_index = 2> (log_prob, labels{weight}) }}"""
    feeds = {"x": floats(5, 4), "labels": np.array([0, 1, 2, 3, 2])}
    model = build(text, {"weight": np.abs(floats(4, seed=1))} if weighted else {}, opset)
    assert operators(prepared(model, feeds)) == ["SoftmaxCrossEntropyLoss"]
    same_gradients(model, ["x"], feeds)


def test_what_looks_like_cross_entropy():
    for axis, opset in ((0, 13), (2, 13), (1, 12)):
        text = f"""g (float[4, 4, 4] x, int64[4, 4] labels) => (float loss) {{
            p = LogSoftmax <axis = {axis}> (x)\n loss = NegativeLogLikelihoodLoss(p, labels) }}"""
        feeds = {"x": floats(4, 4, 4), "labels": np.arange(16).reshape(4, 4) % 4}
        simple = prepared(build(text, opset=opset), feeds)
        assert operators(simple) == ["LogSoftmax", "NegativeLogLikelihoodLoss"]


def test_gradients_in_operators_of_onnx_have_no_others():
    model = build(graph({**LAYER, "moved": "y = Add(s, bias)\n u = Sigmoid(y)\n z = Mul(u, y)"}), constants(), 17)
    feeds = {"x": floats(2, 3, 4)}
    found = same_gradients(model, ["x"], feeds, plain=True)
    assert {node.domain for node in found.graph.node} <= {"", "opgrad"}
    assert "LayerNormalization" in operators(found)
    assert len(run(found, feeds)) == 2
