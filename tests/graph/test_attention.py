"""Attention in graphs: the forms that exporters write are found, and give the results and gradients that they had."""

import re
from functools import partial

import numpy as np
import onnx
import pytest
from differences import build, computed
from onnx import TensorProto, helper
from small_models import normal

import opgrad
from opgrad.gradients import gradients
from opgrad.onnx.gradients.differentiation import with_attention
from opgrad.onnx.graph.graph import Graph
from opgrad.onnxruntime import InferenceSession, lower

results = partial(computed, plain=False)
B, H, L, D = 2, 4, 7, 8
LOW = "-3.4028235e38"
CONSTANTS = f"""
    scale = Constant <value_float: float = 0.35355338> ()
    root = Constant <value_float: float = 2.8284271> ()
    zero = Constant <value_float: float = 0.0> ()
    one = Constant <value_float: float = 1.0> ()
    low = Constant <value_float: float = {LOW}> ()
    inf = Constant <value = float {{-inf}}> ()
    cap = Constant <value_float: float = 3.0> ()
    first = Constant <value_ints: ints = [0]> ()
    second = Constant <value_ints: ints = [1]> ()
    both = Constant <value_ints: ints = [2, 3]> ()
    two = Constant <value_ints: ints = [2]> ()
    three = Constant <value_ints: ints = [3]> ()
    second_third = Constant <value_ints: ints = [1, 2]> ()
    shape = Shape (q)
    rows_of = Slice (shape, first, second)
    length = Slice (shape, two, three)
    n = Squeeze (length)
    nil = Constant <value_int: int = 0> ()
    step = Constant <value_int: int = 1> ()
"""
RANGE = """
    places = Range (nil, n, step)
    rows = Unsqueeze (places, second)
    columns = Unsqueeze (places, first)
    causal = GreaterOrEqual (rows, columns)
"""
TRIL = """
    square = Concat <axis = 0> (length, length)
    ones = ConstantOfShape <value: tensor = float[1] {1.0}> (square)
    lower = Trilu <upper = 0> (ones)
    hidden = Equal (lower, zero)
    causal_mask = Where (hidden, inf, zero)
"""
KEYS = "kt = Transpose <perm = [0, 1, 3, 2]> (k)"
END = "p = Softmax <axis = -1> (s)\n y = MatMul (p, v)"
# What stands between the constants and the result, and the attributes of the node; None: it is no attention.
FORMS = {
    "scaled scores": (f"{KEYS} a = MatMul (q, kt) s = Div (a, root) {END}", {}),
    "scaled operands": (f"{KEYS} qs = Mul (q, scale) ks = Mul (scale, kt) s = MatMul (qs, ks) {END}", {"scale": 0.125}),
    "scaled key before its transposition": (
        f"ks = Mul (k, scale) kt = Transpose <perm = [0, 1, 3, 2]> (ks) s = MatMul (q, kt) {END}",
        {},
    ),
    "no scale": (f"{KEYS} s = MatMul (q, kt) {END}", {"scale": 1.0}),
    "fused product": ("s = com.microsoft.FusedMatMul <alpha = 0.35355338, transB = 1> (q, k) " + END, {}),
    "causal by Range": (
        f"{RANGE} {KEYS} a = MatMul (q, kt) b = Mul (a, scale) s = Where (causal, b, low) {END}",
        {"causal": "top_left"},
    ),
    "causal, hidden where later": (
        f"{RANGE} later = Less (rows, columns) {KEYS} a = MatMul (q, kt) b = Mul (a, scale) "
        f"s = Where (later, inf, b) {END}",
        {"causal": "top_left"},
    ),
    "causal by Trilu": (
        f"{TRIL} {KEYS} a = MatMul (q, kt) b = Mul (a, scale) s = Add (b, causal_mask) {END}",
        {"causal": "top_left"},
    ),
    "causal by a buffer": (
        "stop = Concat <axis = 0> (length, length) start = Constant <value_ints: ints = [0, 0]> () "
        f"seen = Slice (buffer, start, stop, both) {KEYS} a = MatMul (q, kt) b = Div (a, root) "
        f"s = Where (seen, b, low) {END}",
        {"causal": "top_left"},
    ),
    "causal and padding in one condition": (
        f"{RANGE} seen = And (causal, keys) {KEYS} a = MatMul (q, kt) b = Mul (a, scale) "
        f"s = Where (seen, b, low) {END}",
        {"causal": "top_left", "mask": True},
    ),
    "causal and padding in an added mask": (
        f"{RANGE} seen = And (keys, causal) m = Where (seen, zero, low) {KEYS} a = MatMul (q, kt) "
        f"b = Mul (a, scale) s = Add (b, m) {END}",
        {"causal": "top_left", "mask": True},
    ),
    "causal and padding before they have an axis of heads": (
        f"{RANGE} rank2 = Squeeze (keys, second_third) rank3 = Unsqueeze (rank2, second) both3 = And (causal, rank3) "
        f"sizes = Concat <axis = 0> (rows_of, second, length, length) seen = Reshape (both3, sizes) "
        f"m = Where (seen, zero, low) {KEYS} a = MatMul (q, kt) b = Mul (a, scale) s = Add (b, m) {END}",
        {"causal": "top_left", "mask": (B, 1, 1, L)},
    ),
    "causal and padding, of which the keys that there are are taken": (
        f"{RANGE} yes = Constant <value: tensor = bool {{1}}> () c = And (yes, causal) seen = And (keys, c) "
        f"whole = Where (seen, zero, low) m = Slice (whole, first, length, three) {KEYS} a = MatMul (q, kt) "
        f"b = Mul (a, scale) s = Add (b, m) {END}",
        {"causal": "top_left", "mask": (B, 1, 1, L)},
    ),
    "an added mask inside of the scale": (
        f"{KEYS} a = MatMul (q, kt) b = Add (bias, a) s = Mul (b, scale) {END}",
        {"mask": True},
    ),
    "two masks": (
        f"{KEYS} a = MatMul (q, kt) b = Mul (a, scale) c = Add (b, bias) s = Where (keys, c, inf) {END}",
        {"mask": True},
    ),
    "softcap": (
        f"{KEYS} a = MatMul (q, kt) b = Mul (a, scale) c = Div (b, cap) d = Tanh (c) s = Mul (d, cap) {END}",
        {"softcap": 3.0},
    ),
    "rows without a key": (
        f"{KEYS} a = MatMul (q, kt) b = Mul (a, scale) s = Where (keys, b, inf) p0 = Softmax <axis = -1> (s) "
        "none = IsNaN (p0) p = Where (none, zero, p0) y = MatMul (p, v)",
        {"mask": True},
    ),
    "two transpositions of keys in one": (
        f"kl = Transpose <perm = [0, 2, 1, 3]> (k) kt = Transpose <perm = [0, 2, 3, 1]> (kl) a = MatMul (q, kt) "
        f"s = Mul (a, scale) {END}",
        {},
    ),
    "keys transposed as a batch of matrices": (
        "f = Constant <value_ints: ints = [-1, 7, 8]> () u = Constant <value_ints: ints = [2, 4, 8, 7]> () "
        "kf = Reshape (k, f) kg = Transpose <perm = [0, 2, 1]> (kf) kt = Reshape (kg, u) a = MatMul (q, kt) "
        f"s = Mul (a, scale) {END}",
        {},
    ),
    "heads as one axis": (
        "f = Constant <value_ints: ints = [8, 7, 8]> () qf = Reshape (q, f) kf = Reshape (k, f) vf = Reshape (v, f) "
        "kt = Transpose <perm = [0, 2, 1]> (kf) a = MatMul (qf, kt) s = Mul (a, scale) p = Softmax <axis = -1> (s) "
        "y = MatMul (p, vf)",
        {},
    ),
    "softmax over queries": (
        f"{KEYS} a = MatMul (q, kt) s = Mul (a, scale) p = Softmax <axis = 2> (s) y = MatMul (p, v)",
        "its axis is 2, expected the last one",
    ),
    "scores that something else reads": (
        f"{KEYS} a = MatMul (q, kt) s = Mul (a, scale) r = Relu (s) p = Softmax <axis = -1> (s) w = MatMul (p, v) "
        "rv = MatMul (r, v) y = Add (w, rv)",
        "its input is no product of queries and keys that is only scaled, masked or capped",
    ),
    "scores divided by learned temperatures": (
        f"{KEYS} a = MatMul (q, kt) s = Mul (a, temperature) {END}",
        "its input is no product of queries and keys that is only scaled, masked or capped",
    ),
}


def model_of(body, sizes=f"{B}, {H}, {L}, {D}"):
    text = f"""g (float[{sizes}] q, float[{sizes}] k, float[{sizes}] v, bool[{B}, 1, 1, {L}] keys,
        float[1, {H}, {L}, {L}] bias, float[{H}, 1, 1] temperature) => (float z) {{
        {CONSTANTS} {body}
        t = Sin (y) z = ReduceSum <keepdims = 0> (t) }}"""
    return build(text, constants={"buffer": np.tri(12, dtype=bool).reshape(1, 1, 12, 12)})


def feeds_of(model, rng):
    given = {"q": (B, H, L, D), "k": (B, H, L, D), "v": (B, H, L, D), "bias": (1, H, L, L), "temperature": (H, 1, 1)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in given.items()}
    arrays["keys"] = np.arange(L) < np.array([[[[5]]], [[[L]]]])
    return {each.name: arrays[each.name] for each in model.graph.input}


def found_in(model, wanted=("q", "k", "v")):
    graph, found = with_attention(Graph(model, wanted), ["z"], wanted)
    return [node for node in graph.nodes() if node.op_type == "AttentionTraining"], found


def expect_alike(model, feeds, wanted=("q", "k", "v")):
    """Results and gradients are those of plain operators, in which nothing is recognized."""
    fused, plain = gradients(model, "z", wanted), gradients(model, "z", wanted, plain=True)
    assert any(node.op_type == "AttentionGrad" for node in fused.graph.node)
    expected = results(plain, feeds)
    for each in (fused, lower(fused)):
        for mine, other in zip(results(each, feeds), expected, strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=2e-5 * max(1, np.abs(other).max()))
    return fused


@pytest.mark.parametrize("sizes", [f"{B}, {H}, {L}, {D}", f"batch, {H}, length, {D}"], ids=["numbers", "names"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, sizes, rng):
    body, expected = FORMS[form]
    if any(each in form for each in ("as one axis", "as a batch", "before they have")) or "bias" in body:
        sizes = f"{B}, {H}, {L}, {D}"
    model = model_of(body, sizes)
    feeds = feeds_of(model, rng)
    if isinstance(expected, str):
        _, (found,) = found_in(model)
        assert found.reason == expected
        return
    fused = expect_alike(model, feeds)
    node = next(each for each in fused.graph.node if each.op_type == "AttentionTraining")
    given = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    assert given["scale"] == pytest.approx(expected.get("scale", D**-0.5), rel=1e-5)
    assert given["causal"].decode() == expected.get("causal", "")
    assert given["softcap"] == pytest.approx(expected.get("softcap", 0.0))
    assert (len(node.input) > 3) == ("mask" in expected)
    if isinstance(expected.get("mask"), tuple) and "batch" not in sizes:
        (mask,) = (each for each in fused.graph.value_info if each.name == node.input[3])
        assert tuple(each.dim_value for each in mask.type.tensor_type.shape.dim) == expected["mask"]


GAP = f"{RANGE} gap = Sub (rows, columns) near = Less (gap, far)"
WINDOWS = {
    "a condition": f"{GAP} seen = And (causal, near)",
    "one mask": f"{GAP} a = Where (near, one, zero) b = Where (causal, a, zero) seen = Equal (b, one)",
    "a table": "from = Sub (both, both) to = Concat <axis = 0> (length, length) seen = Slice (buffer, from, to, both)",
}


@pytest.mark.parametrize("seen", WINDOWS.values(), ids=WINDOWS)
def test_a_window_that_is_wider_than_the_trials_is_kept(seen, rng):
    """A query sees 20 keys of 40, which no mask for a few of them tells."""
    body = f"far = Constant <value_int: int = 20> () {seen} {KEYS} c = MatMul (q, kt) s = Where (seen, c, inf) {END}"
    model = model_of(body, f"batch, {H}, length, {D}")
    (table,) = (each for each in model.graph.initializer if each.name == "buffer")
    band = (np.tri(40, dtype=bool) & ~np.tri(40, k=-20, dtype=bool)).reshape(1, 1, 40, 40)
    table.CopyFrom(onnx.numpy_helper.from_array(band, "buffer"))
    expect_alike(model, feeds_of(model, rng) | normal(q=(B, H, 40, D), k=(B, H, 40, D), v=(B, H, 40, D)))


def crossing(model, length):
    """The values of at least length x length that the forward part makes and the backward part reads."""
    shapes = model.graph.value_info
    sizes = {each.name: [dim.dim_value for dim in each.type.tensor_type.shape.dim] for each in shapes}
    nodes = list(model.graph.node)
    middle = next(i for i, node in enumerate(nodes) if any(name.endswith("_grad") for name in node.output))
    made = {name for node in nodes[:middle] for name in node.output}
    read = {name for node in nodes[middle:] for name in node.input}
    return [name for name in made & read if sizes.get(name, []).count(length) >= 2]


@pytest.mark.parametrize("low", [LOW, -1e4, -65504.0])
@pytest.mark.parametrize(
    "hidden",
    [
        "s = Where (keys, b, low)",
        "no = Not (keys) s = Where (no, low, b)",
        f"{RANGE} seen = And (causal, keys) s = Where (seen, b, low)",
        f"{RANGE} c = Where (causal, b, low) s = Where (keys, c, low)",
        "c = Add (b, bias) s = Where (keys, c, low)",
    ],
)
@pytest.mark.parametrize("opset", [17, 18])
def test_queries_whose_scores_are_all_replaced_by_a_number_see_all(hidden, low, opset, rng):
    body = f"lowest = Constant <value_float: float = {low}> () {KEYS} a = MatMul (q, kt) b = Mul (a, scale) {hidden}"
    model = model_of(f"{re.sub(r'low(?=[,)])', 'lowest', body)} {END}")
    model.opset_import[0].version = opset
    feeds = feeds_of(model, rng)
    feeds["keys"] = np.isin(np.arange(L), [4, 5]) & np.array([[[[False]]], [[[True]]]])
    expect_alike(model, feeds)
    y, dv = results(gradients(model, "z", ["v"]), feeds)
    assert np.isfinite(y)
    assert dv[0].all()


def test_a_causal_mask_alone_needs_no_look_for_queries_without_keys(rng):
    model = model_of(FORMS["causal by Range"][0])
    assert "ReduceMax" not in [node.op_type for node in gradients(model, "z", ["q"]).graph.node]


@pytest.mark.parametrize(
    "hidden",
    [
        f"m = Where (keys, zero, low) s = Add (b, m) {END}",
        f"yes = Cast <to = 1> (keys) no = Sub (one, yes) m = Mul (no, low) s = Add (m, b) {END}",
    ],
)
def test_queries_whose_keys_are_all_hidden_by_the_least_number_see_all(hidden, rng):
    """Softmax of scores that are all the least number is the mean, and so are the gradients."""
    model = model_of(f"{KEYS} a = MatMul (q, kt) b = Mul (a, scale) {hidden}")
    feeds = feeds_of(model, rng)
    feeds["keys"] = np.arange(L) < np.array([[[[0]]], [[[5]]]])
    expect_alike(model, feeds)
    (dv,) = results(gradients(model, "z", ["v"]), feeds)[1:]
    assert dv[0].all()


@pytest.mark.parametrize("form", ["causal by Range", "causal and padding in one condition", "softcap"])
def test_no_matrix_of_scores_passes_from_the_forward_part_to_the_backward_part(form):
    model = model_of(FORMS[form][0])
    assert crossing(gradients(model, "z", ["q", "k", "v"]), L) == []
    assert crossing(gradients(model, "z", ["q", "k", "v"], plain=True), L) != []


def test_the_gradient_of_a_learned_bias(rng):
    model = model_of(f"{KEYS} a = MatMul (q, kt) b = Mul (a, scale) s = Add (b, bias) {END}")
    expect_alike(model, feeds_of(model, rng), ("q", "bias"))


def test_heads_that_queries_share(rng):
    body = """wide = Constant <value_ints: ints = [2, 2, 2, 7, 8]> ()
        every = Constant <value_ints: ints = [2, 4, 7, 8]> ()
        k5 = Unsqueeze (k, two) ke = Expand (k5, wide) kr = Reshape (ke, every)
        v5 = Unsqueeze (v, two) ve = Expand (v5, wide) vr = Reshape (ve, every)
        kt = Transpose <perm = [0, 1, 3, 2]> (kr) a = MatMul (q, kt) s = Mul (a, scale)
        p = Softmax <axis = -1> (s) y = MatMul (p, vr)"""
    model = model_of(body)
    for value in model.graph.input[1:3]:
        value.type.tensor_type.shape.dim[1].dim_value = 2
    feeds = feeds_of(model, rng)
    feeds |= {name: np.ascontiguousarray(feeds[name][:, :2]) for name in ("k", "v")}
    fused = expect_alike(model, feeds)
    node = next(each for each in fused.graph.node if each.op_type == "AttentionTraining")
    assert list(node.input[:3]) == ["q", "k", "v"]


@pytest.mark.parametrize(
    "head", ["y = Softmax (n)", "p = Softmax (n) y = MatMul (p, w)", "p = Softmax (n) y = MatMul (w, p)"]
)
def test_a_softmax_that_is_no_attention_leaves_the_rules_before_it_their_results(head, rng):
    """The rule of the normalization adds its mean to the node's results, and the graph must still have that node."""
    text = f"""g (float[4, 4] x, float[4] s, float[4, 4] w) => (float[4, 4] z) {{
        n = LayerNormalization (x, s) {head} z = Mul (y, y) }}"""
    feeds = {name: rng.normal(size=(4, 4)[: 1 + (name != "s")]).astype(np.float32) for name in "xsw"}
    made = (gradients(build(text), "z", ["x", "s"], plain=each) for each in (False, True))
    for one, other in zip(*(results(each, feeds) for each in made), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_dropout_draws_anew_in_each_run_and_the_gradient_has_the_same_decisions(rng):
    """With v as the identity, y are the probabilities; the gradient of their sum by v is their transposed sum."""
    body = f"""half = Constant <value_float: float = 0.5> () train = Constant <value: tensor = bool {{1}}> ()
        {KEYS} a = MatMul (q, kt) s = Mul (a, scale) p = Softmax <axis = -1> (s)
        d = Dropout (p, half, train) y0 = MatMul (d, v) y = Identity (y0)"""
    model = model_of(body)
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    feeds = feeds_of(model, rng)
    feeds["v"] = np.broadcast_to(np.eye(L, D, dtype=np.float32), (B, H, L, D)).copy()
    for fused in (gradients(model, "z", ["v"]), lower(gradients(model, "z", ["v"]))):
        session, runs = InferenceSession(fused.SerializeToString()), []
        for _ in range(2):
            _, y, dv = session.run(None, feeds)
            dropped = (y[..., :L] == 0).mean()
            assert 0.3 < dropped < 0.7
            expected = np.einsum("bhij,bhid->bhjd", y[..., :L], np.cos(y))
            np.testing.assert_allclose(dv, expected, atol=1e-5)
            runs.append(y)
        assert (runs[0] != runs[1]).any()


def test_the_gradient_of_a_node_with_sequences_behind_each_other_and_of_its_logarithms(rng):
    model = build("""g (float[9, 4, 8] q, float[8, 2, 8] k, float[8, 2, 8] v, int64[3] starts, int64[3] others)
        => (float z) {
        y, lse = com.microsoft.AttentionTraining <causal = "top_left"> (q, k, v, , , , , , starts, others)
        t = Sin (y) a = ReduceSum <keepdims = 0> (t) u = Cos (lse) b = ReduceSum <keepdims = 0> (u) z = Add (a, b) }""")
    q, k, v = (rng.normal(size=(n, h, D)).astype(np.float32) for n, h in ((9, 4), (8, 2), (8, 2)))
    starts, others = np.array([0, 4, 9]), np.array([0, 5, 8])
    options = {"causal": "top_left", "cu_seqlens_q": starts, "cu_seqlens_k": others}
    y, lse = opgrad.attention(q, k, v, **options, needs=("y", "lse"))
    expected = opgrad.attention_grad(np.cos(y), q, k, v, y, lse, dlse=-np.sin(lse), **options)
    feeds = {"q": q, "k": k, "v": v, "starts": starts, "others": others}
    made = gradients(model, "z", ["q", "k", "v"])
    for each in (made, lower(made)):
        for got, wanted in zip(results(each, feeds)[1:], expected, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)
