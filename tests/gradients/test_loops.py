"""Gradients of branches, loops, scans and sequences, and what is refused by name."""

import numpy as np
import onnxruntime
import pytest
from control_flow import check, session
from differences import build, run
from differences import check as check_in_numpy
from gradient_case import numbers
from onnx import helper

from opgrad.gradients import gradients
from opgrad.onnx.graph.nodes import all_nodes
from opgrad.onnxruntime import InferenceSession

VECTOR, WEIGHT, MATRIX = numbers(3), numbers(3, seed=1), numbers(3, 3, seed=1)
ALWAYS = "t = Constant<value = bool {1}>()"


def branches(then, otherwise, more=""):
    """A model in which x decides which branch is taken: the sum of its elements is compared with a limit."""
    return f"""g (double[3] x, double[3] w, double limit) => (double[3] y) {{
        s = ReduceSum<keepdims = 0>(x)  c = Greater(s, limit)  {more}
        y = If (c) <then_branch = a () => (double[3] p) {{ {then} }},
                    else_branch = b () => (double[3] q) {{ {otherwise} }}>
    }}"""


@pytest.mark.parametrize("limit", [-100.0, 100.0])
@pytest.mark.parametrize(
    ("then", "otherwise"),
    [
        ("z = Mul(x, w)  p = Exp(z)", "u = Tanh(x)  v = Mul(u, w)  q = Mul(v, u)"),  # keeps values of other branches
        ("z = Mul(x, w)  p = Exp(z)", "u = Tanh(x)  q = Mul(u, u)"),  # w has no gradient in one of them
        ("p = Identity(x)", "u = Mul(w, x)  q = Identity(u)"),
        (
            "o = Constant<value = double[3] {1, 2, 3}>()  p = Mul(x, o)",
            "k = Constant<value = double[3] {4, 4, 4}>() q = Mul(k, w)",
        ),
    ],
)
def test_the_branch_that_was_taken_has_the_gradient(limit, then, otherwise):
    check(branches(then, otherwise), {"x": VECTOR, "w": WEIGHT, "limit": np.array(limit)}, ["x", "w"])


@pytest.mark.parametrize("limit", [-100.0, 100.0])
def test_a_branch_inside_of_a_branch(limit):
    inner = """zero = Constant<value = double {0}>()  r = ReduceSum<keepdims = 0>(w)  d = Greater(r, zero)
        e = Exp(x)  p = If (d) <then_branch = c () => (double[3] f) { f = Mul(e, w) },
                                else_branch = d () => (double[3] h) { i = Mul(w, w) h = Mul(i, e) }>"""
    for weight in (WEIGHT, -np.abs(WEIGHT), np.abs(WEIGHT)):
        check(branches(inner, "q = Sin(w)"), {"x": VECTOR, "w": weight, "limit": np.array(limit)}, ["x", "w"])


@pytest.mark.parametrize("turns", [0, 1, 4])
def test_states_rows_and_values_from_outside(turns):
    text = f"""g (double[3] x, double[3, 3] w, double[3] v, int64 n) => (double[3] y, double[k, 3] rows) {{ {ALWAYS}
        y, rows = Loop (n, t, x) <body = b (int64 i, bool c, double[3] h)
            => (bool d, double[3] k, double[3] e) {{
            d = Identity(c)  z = Transpose<perm = [1, 0]>(w)  a = MatMul(h, z)  k = Tanh(a)  e = Mul(k, v) }}>
    }}"""
    feeds = {"x": VECTOR, "w": MATRIX, "v": WEIGHT, "n": np.array(turns)}
    for outputs in (None, ["y"], *([["rows"]] if turns else [])):
        check(text, feeds, ["x", "w"] if outputs == ["y"] else ["x", "w", "v"], outputs)


def test_a_loop_that_ends_by_its_condition():
    text = f"""g (double[3] x, double[3, 3] w) => (double[3] y, int64 n) {{ {ALWAYS}
        zero = Constant<value = int64 {{0}}>()  one = Constant<value = int64 {{1}}>()
        most = Constant<value = double {{30}}>()
        n, y = Loop (, t, zero, x) <body = b (int64 i, bool c, int64 k, double[3] h)
            => (bool d, int64 l, double[3] m) {{
            l = Add(k, one)  a = MatMul(h, w)  m = Add(a, h)  b = Abs(m)
            s = ReduceSum<keepdims = 0>(b)  d = Less(s, most)
        }}>
    }}"""
    check(text, {"x": VECTOR, "w": MATRIX})


@pytest.mark.parametrize(("counter", "condition"), [("[1]", ""), ("", "[1]"), ("[1]", "[1]")])
def test_an_iteration_and_a_condition_of_one_element(counter, condition):
    """torch's older exporter declares them so."""
    text = f"""g (double[3] x, double[4, 3] w, int64{counter} n, bool{condition} t) => (double[3] y) {{
        y = Loop (n, t, x) <body = b (int64{counter} i, bool{condition} c, double[3] h)
            => (bool{condition} d, double[3] k) {{
            d = Identity(c)  r = Gather(w, i)  f = CastLike(i, h)  p = Mul(f, h)  q = Mul(p, r)  k3 = Tanh(q)
            size = Shape(h)  k = Reshape(k3, size)
        }}>
    }}"""
    feeds = {"n": np.full(counter and (1,), 4), "t": np.full(condition and (1,), True)}
    check(text, {"x": VECTOR, "w": numbers(4, 3), **feeds}, ["x", "w"])


def test_states_that_change_places_and_states_that_stay():
    text = f"""g (double[3] x, double[3] w, int64 n) => (double[3] y, double[3] z, double[k, 3] rows) {{ {ALWAYS}
        y, z, rows = Loop (n, t, x, w) <body = b (int64 i, bool c, double[3] p, double[3] q)
            => (bool c, double[3] q, double[3] p, double[3] q) {{ unused = Sin(p) }}>
    }}"""
    check(text, {"x": VECTOR, "w": WEIGHT, "n": np.array(3)})
    same = f"""g (double[3] x, int64 n) => (double[3] y, double[3] z) {{ {ALWAYS}
        y, z = Loop (n, t, x, x) <body = b (int64 i, bool c, double[3] p, double[3] q)
            => (bool d, double[3] r, double[3] s) {{
            d = Identity(c)  r = Mul(q, x)  s = Sin(p) }}>
    }}"""
    check(same, {"x": VECTOR, "n": np.array(3)})


@pytest.mark.parametrize("turns", [0, 3])
def test_shapes_that_differ_from_turn_to_turn(turns):
    text = f"""g (double[2] x, double[2] w, int64 n) => (double[k] y) {{ {ALWAYS}
        y = Loop (n, t, x) <body = b (int64 i, bool c, double[h] p) => (bool d, double[j] q) {{
            d = Identity(c)  a = Concat<axis = 0>(p, w)  e = Tanh(a)  q = Mul(e, a) }}>
    }}"""
    check(text, {"x": numbers(2), "w": numbers(2, seed=1), "n": np.array(turns)})
    prefixes = f"""g (double[7] x, int64 n) => (double y) {{ {ALWAYS}
        start = Constant<value = double {{0.5}}>()  zero = Constant<value = int64[1] {{0}}>()
        y = Loop (n, t, start) <body = b (int64 i, bool c, double h) => (bool d, double k) {{
            d = Identity(c)  i1 = Unsqueeze(i, zero)  s = Slice(x, zero, i1)  e = Exp(s)
            r = ReduceSum<keepdims = 0>(e)  m = Mul(h, r)  k = Tanh(m) }}>
    }}"""
    check(prefixes, {"x": numbers(7), "n": np.array(turns + 1)})


INNER = {
    "a state of one shape": """double[3] g) => (bool f, double[3] o) {
        f = Identity(e) m = MatMul(g, w) a = Tanh(m) o = Mul(a, h) }""",
    "a state that grows": """double[l] g) => (bool f, double[m] o) {
        f = Identity(e) a = Concat<axis = 0>(g, v) b = Tanh(a) o = Mul(b, a) }""",
}


@pytest.mark.parametrize("inner", INNER)
def test_loops_and_branches_inside_of_loops(inner):
    text = f"""g (double[3] x, double[3, 3] w, double[3] v, int64 n) => (double[k] y) {{ {ALWAYS}
        two = Constant<value = int64 {{2}}>()  zero = Constant<value = double {{0}}>()
        y = Loop (n, t, x) <body = b (int64 i, bool c, double[j] h) => (bool d, double[k] r) {{ d = Identity(c)
            u = Loop (two, t, h) <body = c (int64 i2, bool e, {INNER[inner]}>
            s = ReduceSum<keepdims = 0>(u)  q = Greater(s, zero)
            r = If (q) <then_branch = d () => (double[k] p) {{ ex = Exp(u) p = Sin(ex) }},
                        else_branch = e () => (double[k] z) {{ z = Sin(u) }}>
        }}>
    }}"""
    wanted = ["x", "w"] if "one" in inner else ["x", "v"]
    check(text, {"x": VECTOR, "w": MATRIX, "v": WEIGHT, "n": np.array(3)}, wanted)


@pytest.mark.parametrize("turns", [0, 3, 5])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("sizes", ["5, 5, 5", "a, b, c"])
def test_rows_that_a_loop_gathers(turns, axis, sizes):
    """Also where it does not reach all of them."""
    text = f"""g (double[{sizes}] x, double[5, 5] w, int64 n) => (double[5, 5] y, double[5, 5] z) {{ {ALWAYS}
        y, z = Loop (n, t, w, w) <body = b (int64 i, bool c, double[5, 5] p, double[5, 5] q)
            => (bool d, double[5, 5] r, double[5, 5] s) {{
            d = Identity(c)  e = Gather<axis = {axis}>(x, i)  f = Mul(e, p)  r = Tanh(f)  s = Add(q, e) }}>
    }}"""
    check(text, {"x": numbers(5, 5, 5), "w": numbers(5, 5, seed=1), "n": np.array(turns)})
    twice = text.replace("s = Add(q, e)", "g = Gather<axis = 0>(x, i)  s = Add(q, g)")
    check(twice, {"x": numbers(5, 5, 5), "w": numbers(5, 5, seed=1), "n": np.array(turns)})


def test_dropout_inside_of_a_loop_that_is_not_trained():
    text = f"""g (double[3] x, int64 n) => (double[3] y) {{ {ALWAYS} r = Constant<value = float {{0.5}}>()
        y = Loop (n, t, x) <body = b (int64 i, bool c, double[3] p) => (bool d, double[3] q) {{
            d = Identity(c)  e = Dropout(p, r)  q = Sin(e) }}>
    }}"""
    check(text, {"x": VECTOR, "n": np.array(3)})


@pytest.mark.parametrize("kind", [onnxruntime.InferenceSession, InferenceSession])
def test_dropout_inside_of_a_loop_that_is_trained(kind):
    """The masks of all turns are kept."""
    text = f"""g (float[50] x, int64 n) => (float[50] y) {{ {ALWAYS} r = Constant<value = float {{0.3}}>()
        y = Loop (n, t, x) <body = b (int64 i, bool c, float[50] p) => (bool d, float[50] q) {{
            d = Identity(c)  q = Dropout(p, r, t) }}>
    }}"""
    x = np.linspace(1, 2, 50, dtype=np.float32)
    graph = gradients(build(text), "y", "x", plain=kind is onnxruntime.InferenceSession)
    y, dx = session(graph, kind).run(None, {"x": x, "n": np.array(3)})
    assert 0 < (y == 0).sum() < 50
    np.testing.assert_allclose(dx, y / x, rtol=1e-6)


# --- scans ---

STEPS = numbers(5, 3, seed=2)


@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scans_along_all_axes_in_both_directions(axis, backward):
    ways = f"scan_input_axes = [{axis}], scan_output_axes = [{axis}], "
    ways += f"scan_input_directions = [{backward}], scan_output_directions = [{backward}], num_scan_inputs = 1"
    text = f"""g (double[3] x, double[3, 3] w, double[a, b, c] s) => (double[3] y, double[d, e, f] z) {{
        first = Constant<value = int64[1] {{0}}>()
        y, z = Scan <{ways}, body = b (double[3] h, double[j, k] e) => (double[3] o, double[j, k] r) {{
            f = Flatten<axis = 0>(e)  u = Slice(f, first, three, one)  v = Reshape(u, three)
            m = MatMul(h, w)  a = Add(m, v)  o = Tanh(a)  n = ReduceSum<keepdims = 0>(o)  r = Mul(e, n) }}> (x, s)
    }}""".replace(
        "first =", "three = Constant<value = int64[1] {3}>()  one = Constant<value = int64[1] {1}>()  first ="
    )
    check(text, {"x": VECTOR, "w": MATRIX, "s": numbers(2, 3, 4, seed=3)})


@pytest.mark.parametrize("sizes", [("3", "3, 3", "5, 3"), ("n", "n, n", "t, n"), ("?", "?, ?", "?, ?")])
def test_scans_of_any_size(sizes):
    x, w, s = sizes
    text = f"""g (double[{x}] x, double[{w}] w, double[{s}] s) => (double[{x}] y) {{
        y = Scan <num_scan_inputs = 1, body = b (h, e) => (o) {{ a = MatMul(h, w) b = Add(a, e) o = Tanh(b) }}> (x, s)
    }}"""
    check(text, {"x": VECTOR, "w": MATRIX, "s": STEPS})


def test_integer_states_and_rows():
    text = """g (double[3] x, double[5, 3] s) => (double[3] y, int64 n, int64[5] k, double[5, 3] z) {
        zero = Constant<value = int64 {0}>()  one = Constant<value = int64 {1}>()
        n, y, k, z = Scan <num_scan_inputs = 1, body = b (int64 c, double[3] h, double[3] e)
            => (int64 d, double[3] o, int64 l, double[3] p) {
            d = Add(c, one)  f = Cast<to = 11>(d)  l = Identity(d)  a = Mul(h, e)  o = Div(a, f)  p = Mul(o, o)
        }> (zero, x, s)
    }"""
    check(text, {"x": VECTOR, "s": STEPS})


# --- sequences ---


@pytest.mark.parametrize("turns", [1, 4])
def test_a_list_that_a_loop_makes(turns):
    text = f"""g (double[3] x, double[3] w, int64 n) => (double[k, 3] y, double[l] z) {{ {ALWAYS}
        s = SequenceEmpty<dtype = 11>()
        l, h = Loop (n, t, s, x) <body = b (int64 i, bool c, seq(double[3]) p, double[3] h)
            => (bool d, seq(double[3]) q, double[3] o) {{
            d = Identity(c)  m = Mul(h, w)  o = Tanh(m)  q = SequenceInsert(p, o) }}>
        y = ConcatFromSequence<axis = 0, new_axis = 1>(l)  z = ConcatFromSequence<axis = -1>(l)
    }}"""
    check(text, {"x": VECTOR, "w": WEIGHT, "n": np.array(turns)})


@pytest.mark.parametrize("keepdims", [0, 1])
def test_a_list_that_a_loop_reads(keepdims):
    text = f"""g (double[4, 3] x, double[3] w, int64 n) => (double[a] y) {{ {ALWAYS}
        flat = Constant<value = int64[1] {{-1}}>()
        l = SplitToSequence<axis = 0, keepdims = {keepdims}>(x)
        y = Loop (n, t, w) <body = b (int64 i, bool c, double[j] h) => (bool d, double[k] o) {{
            d = Identity(c)  e = SequenceAt(l, i)  r = Reshape(e, flat)  m = Mul(h, r)  o = Tanh(m) }}>
    }}"""
    check(text, {"x": numbers(4, 3), "w": WEIGHT, "n": np.array(4)})


def test_a_list_that_a_loop_changes_and_reads():
    text = f"""g (double[3] x, double[3] w, int64 n) => (double[k] y) {{ {ALWAYS} s = SequenceConstruct(x, w)
        l = Loop (n, t, s) <body = b (int64 i, bool c, seq(double[3]) p) => (bool d, seq(double[3]) q) {{
            last = Constant<value = int64 {{-1}}>()  before = Constant<value = int64 {{-2}}>()
            d = Identity(c)  u = SequenceAt(p, last)  v = SequenceAt(p, before)  m = Mul(u, v)  e = Tanh(m)
            q = SequenceInsert(p, e, last) }}>
        y = ConcatFromSequence<axis = 0>(l)
    }}"""
    check(text, {"x": VECTOR, "w": WEIGHT, "n": np.array(3)})


@pytest.mark.parametrize("place", [0, 1, -1, -3])
def test_places_in_a_list(place):
    text = f"""g (double[3] x, double[2] w, double[1] v) => (double[k] y, double[l] z, double[m] u) {{
        p = Constant<value = int64 {{{place}}}>()  s = SequenceConstruct(x, w, v, x)
        a = SequenceErase(s, p)  b = Mul(x, x)  c = SequenceInsert(s, b, p)  last = SequenceErase(c)
        y = ConcatFromSequence<axis = 0>(a)  z = ConcatFromSequence<axis = 0>(last)  u = SequenceAt(c, p)
    }}"""
    check(text, {"x": VECTOR, "w": numbers(2), "v": numbers(1)})


@pytest.mark.parametrize("limit", [-100.0, 100.0])
def test_a_list_of_a_branch(limit):
    text = """g (double[3] x, double limit) => (double[3] y) {
        s = ReduceSum<keepdims = 0>(x)  c = Greater(s, limit)
        zero = Constant<value = int64 {0}>()  one = Constant<value = int64 {1}>()
        l = If (c)
            <then_branch = a () => (seq(double[3]) p) { e = Exp(x)  f = Sin(x)  p = SequenceConstruct(e, f) },
             else_branch = b () => (seq(double[3]) q) { d = Cos(x)  m = Mul(d, x)  q = SequenceConstruct(m, d, x) }>
        u = SequenceAt(l, one)  v = SequenceAt(l, zero)  y = Mul(u, v)
    }"""
    check(text, {"x": VECTOR, "limit": np.array(limit)}, ["x"])


def test_a_split_into_unequal_parts():
    text = """g (double[5, 2] x) => (double[k, 2] y) {
        lengths = Constant<value = int64[2] {2, 3}>()
        zero = Constant<value = int64 {0}>()  one = Constant<value = int64 {1}>()
        l = SplitToSequence<axis = 0>(x, lengths)  a = SequenceAt(l, zero)  b = SequenceAt(l, one)  c = Exp(a)
        y = Concat<axis = 0>(b, c)
    }"""
    check(text, {"x": numbers(5, 2)})


def test_a_map_of_lists():
    text = """g (double[4, 3] x, double[3] w) => (double[k, 3] y) {
        l = SplitToSequence<axis = 0>(x)
        s = SequenceMap (l, w) <body = b (double[1, 3] e, double[3] f) => (double[1, 3] o) {
            m = Mul(e, f)  o = Tanh(m) }>
        y = ConcatFromSequence<axis = 0>(s)
    }"""
    check(text, {"x": numbers(4, 3), "w": WEIGHT})


def test_a_map_whose_body_declares_no_types():
    """So torch writes vstack and its kin."""
    text = """g (float[2, 3] x, float[4, 3] w) => (float loss) {
        zero = Constant<value = int64 {0}>()  one = Constant<value = int64 {1}>()
        all = Constant<value = int64[1] {-1}>()
        l = SequenceConstruct(x, w)
        s = SequenceMap (l) <body = b (e) => (o) {
            n = Size(e)  c = LessOrEqual(n, one)
            o = If (c) <then_branch = t () => (p) { p = Reshape(e, all) }, else_branch = f () => (q) { q = Sin(e) }>
        }>
        p = SequenceAt(s, zero)  q = SequenceAt(s, one)  r = Concat<axis = 0>(p, q)
        loss = ReduceSum<keepdims = 0>(r)
    }"""
    feeds = {"x": numbers(2, 3).astype(np.float32), "w": numbers(4, 3).astype(np.float32)}
    for plain, kind in ((True, onnxruntime.InferenceSession), (False, InferenceSession)):
        found = session(gradients(build(text), "loss", list(feeds), plain=plain), kind).run(None, feeds)[-2:]
        for value, gradient in zip(feeds.values(), found, strict=True):
            np.testing.assert_allclose(gradient, np.cos(value), rtol=1e-6)


# --- what onnxruntime and ONNX leave open ---


@pytest.mark.parametrize(("axis", "backward"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_scan_that_cannot_keep_the_values_of_its_branches(axis, backward):
    """It becomes a Loop, which keeps them in sequences."""
    ways = f"scan_input_axes = [{axis}], scan_output_axes = [{axis}], "
    ways += f"scan_input_directions = [{backward}], scan_output_directions = [{backward}], num_scan_inputs = 1"
    text = f"""g (double[3] x, double[{"5, 3" if axis == 0 else "3, 5"}] s) => (double[3] y, double[d, e] z) {{
        zero = Constant<value = double {{0}}>()
        y, z = Scan <{ways}, body = b (double[3] h, double[3] e) => (double[3] o, double[3] r) {{
            t = ReduceSum<keepdims = 0>(h)  c = Greater(t, zero)
            i = If (c) <then_branch = a () => (double[3] p) {{ k = Exp(e)  p = Mul(k, h) }},
                        else_branch = b () => (double[3] q) {{ l = Sin(e)  m = Mul(l, l)  q = Mul(m, h) }}>
            o = Tanh(i)  r = Mul(o, e) }}> (x, s)
    }}"""
    check(text, {"x": VECTOR, "s": STEPS if axis == 0 else STEPS.T.copy()})


@pytest.mark.parametrize("opset", [11, 12])
def test_bodies_of_old_opsets(opset):
    text = f"""g (double[1, 3] x, double[1, 3] w, int64 n) => (double[1, 3] y) {{ {ALWAYS}
        y = Loop (n, t, x) <body = b (int64 i, bool c, double[1, 3] h) => (bool d, double[1, 3] o) {{
            d = Identity(c)  s = Squeeze<axes = [0]>(h)  m = Unsqueeze<axes = [0]>(s)
            r = ReduceSum<axes = [1], keepdims = 1>(m)  a = Mul(r, w)  o = Tanh(a) }}>
    }}"""
    check(build(text, opset), {"x": numbers(1, 3), "w": numbers(1, 3, seed=1), "n": np.array(3)})


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_sums_over_turns_of_half_precision(kind):
    """float16 counts to 2048 in ones, bfloat16 to 256."""
    number = {"float16": 10, "bfloat16": 16}[kind]
    text = f"""g ({kind}[2] x, {kind}[2] w, int64 n) => ({kind}[2] y) {{ {ALWAYS}
        y = Loop (n, t, x) <body = b (int64 i, bool c, {kind}[2] h) => (bool d, {kind}[2] o) {{
            d = Identity(c)  o = Add(h, w) }}>
    }}"""
    turns = {"float16": 4000, "bfloat16": 1024}[kind]
    model = build(text)
    found = run(gradients(model, "y", "w", plain=True), {
        **{name: np.zeros(2, helper.tensor_dtype_to_np_dtype(number)) for name in ("x", "w")}, "n": np.array(turns),
    })  # fmt: skip
    np.testing.assert_array_equal(found[-1].astype(np.float32), turns)


def test_gradients_of_what_a_body_reads_keep_their_names():
    """The body's gradient of x is made first, and must not take the name of the gradient that is asked for."""
    model = build(
        """g (float[3] x, float[3] s, int64 n, bool c) => (float[3] y) { y = Loop (n, c, s) <
        body = b (int64 i, bool k, float[3] a) => (bool k2, float[3] r) { k2 = Identity(k)
            r = Mul(a, x) }> }"""
    )
    for plain in (True, False):
        found = gradients(model, "y", ["x", "s"], plain=plain)
        assert [each.name for each in found.graph.output] == ["y", "x_grad", "s_grad"]


def test_layers_inside_of_a_loop():
    """Layer normalization as exporters write it, which becomes one operator in bodies, too, and an LSTM."""
    text = f"""g (float[2, 4] x, float[4, 4] w, float[4] s, float[4] b, int64 n) => (float[2, 4] y) {{ {ALWAYS}
        two = Constant<value = float {{2}}>()  eps = Constant<value = float {{1e-5}}>()
        y = Loop (n, t, x) <body = step (int64 i, bool c, float[2, 4] h) => (bool d, float[2, 4] o) {{ d = Identity(c)
            mean = ReduceMean<axes = [-1]>(h)  centred = Sub(h, mean)  square = Pow(centred, two)
            variance = ReduceMean<axes = [-1]>(square)  wide = Add(variance, eps)  deviation = Sqrt(wide)
            normal = Div(centred, deviation)  scaled = Mul(normal, s)  moved = Add(scaled, b)
            a = MatMul(moved, w)  u = Softmax<axis = -1>(a)  o = Add(u, h) }}>
    }}"""
    operators = {node.op_type for node in all_nodes(gradients(build(text), "y", ["x", "s"]).graph.node)}
    assert operators >= {"LayerNormalization", "LayerNormalizationGrad"}
    feeds = {"x": numbers(2, 4), "w": numbers(4, 4, seed=1), "s": numbers(4, seed=2), "b": numbers(4, seed=3)}
    check(text.replace("float", "double"), {**feeds, "n": np.array(3)})
    text = f"""g (double[3, 2, 4] x, double[1, 12, 4] w, double[1, 12, 3] r, double[1, 2, 3] h0, double[1, 2, 3] c0,
        int64 n) => (double[1, 2, 3] y) {{ {ALWAYS}
        y, z = Loop (n, t, h0, c0) <body = step (int64 i, bool c, double[1, 2, 3] h, double[1, 2, 3] k)
            => (bool d, double[1, 2, 3] o, double[1, 2, 3] p) {{
            d = Identity(c)  all, o, p = LSTM<hidden_size = 3>(x, w, r, "", "", h, k) }}>
    }}"""
    shapes = {"x": (3, 2, 4), "w": (1, 12, 4), "r": (1, 12, 3), "h0": (1, 2, 3), "c0": (1, 2, 3)}
    arrays = {name: numbers(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    check_in_numpy(build(text), {**arrays, "n": np.array(2)})


def test_optional_values():
    """Each has the gradient of what it holds."""
    text = """g (double[3] x, double[3] w) => (double[3] y) {
        o = Optional(x)  has = OptionalHasElement(o)  a = OptionalGetElement(o)  b = Mul(a, w)  d = Mul(x, b)
        y = If (has) <then_branch = t () => (double[3] r) { r = Mul(d, d) },
                      else_branch = f () => (double[3] s) { s = Identity(d) }>
    }"""
    check(text, {"x": VECTOR, "w": WEIGHT}, ["x", "w"])


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("condition", "expected"), [(True, np.exp), (False, lambda x: -np.ones_like(x))])
def test_a_branch_that_a_constant_or_an_input_chooses(condition, expected, is_known):
    x, choice = np.array([0.5, -1, 2], np.float32), {"condition": np.array(condition)}
    text = f"""g (float[3] x{", bool condition" * (not is_known)}) => (float[3] y) {{
        y = If (condition) <then_branch = a () => (float[3] p) {{ p = Exp(x) }},
                            else_branch = b () => (float[3] q) {{ q = Neg(x) }}> }}"""
    model = gradients(build(text, constants=choice if is_known else ()), "y", "x", plain=True)
    found = run(model, {"x": x} | ({} if is_known else choice))[1]
    np.testing.assert_allclose(found, expected(x), rtol=1e-6)


def test_what_is_trained_is_no_constant():
    model = build("g (float[3] x) => (float[3] y) { y = Pow(x, exponent) }", constants={"exponent": np.float32(2)})
    x = np.array([1, 2, 3], np.float32)
    _, dx, exponent = run(gradients(model, "y", ["x", "exponent"], plain=True), {"x": x})
    np.testing.assert_allclose(dx, 2 * x)
    np.testing.assert_allclose(exponent, (x**2 * np.log(x)).sum(), rtol=1e-6)


REFUSED = {  # the opset, a graph, and what is said of it
    "values that cannot be kept": (12, f"""g (float[2] x, int64 n) => (float[k] y) {{ {ALWAYS}
        [again] y = Loop (n, t, x) <body = b (int64 i, bool c, float[h] p) => (bool d, float[j] q) {{
            d = Identity(c)  a = Concat<axis = 0>(p, x)  q = Tanh(a) }}>
    }}""", r"Loop \(node 'again'\): the graph does not tell .* of opset 13"),
    "a scan with an axis for batches": (8, """g (float[1, 3] x, float[1, 5, 3] s) => (float[1, 3] y) {
        [again] y = Scan <num_scan_inputs = 1, body = b (float[3] h, float[3] e) => (float[3] o) {
            o = Add(h, e) }> ("", x, s)
    }""", "'again' is a Scan of opset 8, which has an axis for batches"),
    "an optional list": (17, """g (double[3] x) => (double[3] y) {
        nil = Constant<value = int64 {0}>()  l = SequenceConstruct(x)  p = Optional(l)
        m = OptionalGetElement(p)  y = SequenceAt(m, nil)
    }""", r"Optional .*: it holds a sequence"),
    "nodes of a body": (17, """g (float[3, 3] x, int64 n, bool t) => (float[3, 3] y) {
        [again] y = Loop (n, t, x) <body = b (int64 i, bool c, float[3, 3] s) => (bool d, float[3, 3] r) {
            d = Identity(c) [one] o = my.One(s) two = Exp(o) [three] r = my.Two(two) }>
    }""", r"one node has no gradient: Loop \(node 'again'\): in its body, my.One \(node 'one'\): there is no rule for "
     r"it; [^;]*; my.Two \(node 'three'\): there is no rule"),
    "all nodes without a rule": (
        17, "g (float[3, 3] x) => (float y) { a = my.One(x)  b = Det(a)  c = Exp(b)  y = my.Two(c) }",
        r"3 nodes have no gradient: my\.One.*; Det.*; my\.Two.*register_grad"),
    # also those that stand before a node without a rule, or before one with a graph of its own
    "nodes whose rule refuses them, beside those without one": (17, """g (float[3, 3] x, bool c) => (float y) {
        a = Einsum <equation = "ij,jk->ik"> (x)  b = my.One(a)
        d = If (c) <then_branch = t () => (float[3, 3] p) { p = Exp(b) },
                    else_branch = e () => (float[3, 3] q) { q = my.Two(b) }>
        y = my.Three(d)
    }""", r"4 nodes have no gradient: Einsum .*; my\.One .*there is no rule.*; If .*in its body, my.Two.*; my\.Three "),
    "all reasons of rules": (17, """g (float[3, 3] x, float[1, 12, 3] w, float[1, 12, 3] r) => (float[1] y) {
        a = Einsum <equation = "ij,jk->ik"> (x)  b = LSTM <hidden_size = 3, clip = -1.0> (a, w, r)  y = ReduceSum(b)
    }""", r"2 nodes .*has 2 operands, the node 1.*attribute clip is -1\.0"),
    "a composition": (
        17, 'g (float[3, 3] x) => (float[3, 3] y) { y = com.microsoft.FusedGemm <activation = "Sin"> (x, x) }',
        "its activation is 'Sin', expected none or one of Relu, .*, HardSigmoid"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_gradient_is_told_by_name(name):
    opset, text, reason = REFUSED[name]
    with pytest.raises(NotImplementedError, match=reason):
        gradients(build(text, opset), "y", "x")
