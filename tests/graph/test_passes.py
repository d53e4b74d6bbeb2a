"""What passes over graphs leave out, compute, join and compute again, and what they leave as it is."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, external_data_helper, helper, numpy_helper
from passes_cases import build, close, finish, floats, operators, prepared, run, same_gradients, without_passes

from bench.steps.generated import peak_bytes
from opgrad.gradients import gradients
from opgrad.onnx.graph.nodes import read_by
from opgrad.onnx.passes import prepare

X = floats(2, 3, 4)


def left(body, opset=17, x=X, given="float[N, 3, 4] x", batches=(), constants=None, **options):
    """The operators that are left of a graph that computes y from x."""
    model = build(f"g ({given}) => (float[] y) {{ {body} }}", constants or {}, opset)
    return operators(prepared(model, {"x": x}, *({"x": each} for each in batches), **options))


# --- constants ---


def test_what_depends_on_no_input_is_computed_once():
    body = """a = Constant <value_float = 2.0> ()\n b = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()
        c = Mul(a, b)\n d = Sqrt(c)\n y = Add(x, d)"""
    assert left(body) == ["Add"]


def test_parameters_are_no_constants():
    model = build("g (float[N, 4] x) => (float[N, 3] y) { t = Transpose(w)\n y = MatMul(x, t) }", {"w": floats(3, 4)})
    feeds = {"x": floats(2, 4)}
    assert operators(prepared(model, feeds)) == ["MatMul"]
    assert operators(prepared(model, feeds, variable=["w"])) == ["MatMul", "Transpose"]
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 4]))  # a default, for ONNX
    assert operators(prepared(model, {**feeds, "w": floats(3, 4, seed=1)})) == ["MatMul", "Transpose"]


def test_constants_that_would_make_the_file_large_are_computed_at_run_time():
    for size, expected in ((16, ["Add"]), (4096, ["Add", "Expand"])):
        shape = {"shape": np.array([size]), "one": np.float32(1)}
        body = "e = Expand(one, shape)\n y = Add(x, e)"
        assert left(body, x=floats(size), given=f"float[{size}] x", constants=shape) == expected


def test_integers_that_runtimes_round_in_another_way_are_left():
    constants = {"a": np.array([-7]), "b": np.array([2]), "c": np.array([7])}
    expected = ["Add", "Cast", "Div"]
    assert left("d = Div(a, b)\n f = Cast <to = 1> (d)\n y = Add(x, f)", constants=constants) == expected
    assert left("d = Div(c, b)\n f = Cast <to = 1> (d)\n y = Add(x, f)", constants=constants) == ["Add"]


def test_all_results_of_a_constant_split():
    constants = {"w": floats(2, 4), "sizes": np.array([1, 1])}
    assert left("a, b = Split <axis = 0> (w, sizes)\n c = Mul(x, b)\n y = Add(c, a)", constants=constants) == [
        "Add",
        "Mul",
    ]


def test_equal_constants_are_one():
    constants = {"a": floats(4), "b": floats(4), "p": floats(4)}
    model = build("g (float[4] x) => (float[4] y) { s = Add(x, a)\n t = Add(s, b)\n y = Add(t, p) }", constants)
    simple = prepared(model, {"x": floats(4, seed=1)}, variable=["p"])
    assert [each.name for each in simple.graph.initializer] == ["a", "p"]


# --- what changes nothing ---

NOTHING = {
    "Identity": "i = Identity(x)",
    "Cast": "i = Cast <to = 1> (x)",
    "casts there and back": "d = Cast <to = 11> (x)\n i = Cast <to = 1> (d)",
    "Transpose": "i = Transpose <perm = [0, 1, 2]> (x)",
    "two of them": "t = Transpose <perm = [2, 0, 1]> (x)\n i = Transpose <perm = [1, 2, 0]> (t)",
    "Reshape": "i = Reshape(x, same)",
    "Reshape there and back": "r = Reshape(x, flat)\n i = Reshape(r, same)",
    "Expand": "i = Expand(x, ones)",
    "Slice": "i = Slice(x, zero, last, zero)",
    "Pad": "i = Pad(x, pads)",
    "Concat": "i = Concat <axis = 0> (x)",
    "Sum": "i = Sum(x)",
    "Add": "i = Add(x, none)",
    "Add, other order": "i = Add(none, x)",
    "Mul": "i = Mul(x, single)",
    "Mul, other order": "i = Mul(single, x)",
    "Div": "i = Div(x, single)",
    "Pow": "i = Pow(x, single)",
    "Dropout": "i = Dropout(x)",
    "Dropout that does not train": "i, mask = Dropout(x, half, never)",
    "Tile": "i = Tile(x, ones)",
    "two that are equal": "a = Exp(x)\n b = Exp(x)\n c = Sub(a, b)\n i = Add(x, c)",
}
CONSTANTS = {
    "same": np.array([-1, 3, 4]), "flat": np.array([-1, 12]), "ones": np.array([1, 1, 1]), "zero": np.array([0]),
    "last": np.array([2**40]), "pads": np.zeros(6, np.int64), "none": np.float32(0), "single": np.float32(1),
    "half": np.float32(0.5), "never": np.array(False), "always": np.array(True), "wide": np.ones((1, 1, 1, 1), "f"),
    "many": np.array([2, 1, 1]), "part": np.array([1]), "order": np.array([4, 3, -1]), "six": np.array([6]),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING)
def test_what_changes_nothing_is_left_out(name):
    found = left(f"{NOTHING[name]}\n y = Sin(i)", batches=[floats(5, 3, 4)], constants=CONSTANTS)
    assert found == (["Add", "Exp", "Sin", "Sub"] if name == "two that are equal" else ["Sin"])


def test_a_number_has_no_axis_to_be_copied_along():
    body = "n = ReduceSum <keepdims = 0> (x)\n i = Tile(n, never)\n y = Sin(i)"
    assert left(body, constants={"never": np.zeros(0, np.int64)}) == ["ReduceSum", "Sin"]


@pytest.mark.parametrize("opset", [7, 10, 11])
def test_dropout_of_old_opsets_does_not_train(opset):
    assert left("i, mask = Dropout <ratio = 0.5> (x)\n y = Sin(i)", opset) == ["Sin"]


SOMETHING = {
    "a number": "i = Cast <to = 10> (x)\n j = Cast <to = 1> (i)",
    "an order": "j = Transpose <perm = [0, 2, 1]> (x)",
    "axes": "j = Add(x, wide)",
    "an axis": "j = Mul(x, wide)",
    "a number at the front": "j = Div(single, x)",
    "copies": "j = Tile(x, many)",
    "a part": "j = Slice(x, zero, part, zero)",
    "another shape": "j = Reshape(x, order)",
    "a mask": "i, m = Dropout(x)\n w = Not(m)\n v = Cast <to = 1> (w)\n j = Add(i, v)",
}


@pytest.mark.parametrize("name", SOMETHING)
def test_what_changes_something_stays(name):
    body = f"{SOMETHING[name]}\n y = Sin(j)"
    model = build(f"g (float[N, 3, 4] x) => (float y) {{ {body} }}", CONSTANTS)
    assert left(body, constants=CONSTANTS) == operators(model)


def test_dropout_that_trains_stays_and_is_not_shared():
    body = "a, k = Dropout(x, half, always)\n b, l = Dropout(x, half, always)\n y = Add(a, b)"
    model = build(f"g (float[N, 4] x) => (float[N, 4] y) {{ {body} }}", CONSTANTS)
    assert operators(prepare(model)) == ["Add", "Dropout", "Dropout"]
    random = build("g () => (float[4] y) { a = RandomNormal <shape = [4]> ()\n b = RandomNormal <shape = [4]> ()\n"
                   " y = Sub(a, b) }")  # fmt: skip
    assert operators(prepare(random)).count("RandomNormal") == 2


def test_a_mask_without_what_it_masked():
    model = build("g (float[N, 4] x) => (bool[N, 4] k) { y, k = Dropout(x) }", opset=13)
    model.graph.node[0].output[0] = ""
    assert list(prepare(model).graph.node[0].output) == ["", "k"]


def test_permutations_are_joined_where_nothing_else_reads_the_first():
    pair = "a = Transpose <perm = [0, 2, 1]> (x)\n b = Transpose <perm = [1, 0, 2]> (a)\n"
    assert left(f"{pair} y = Sin(b)") == ["Sin", "Transpose"]
    assert left(f"{pair} c = ReduceMax(a)\n d = Add(b, c)\n y = Sin(d)").count("Transpose") == 2


# --- names ---


def test_inputs_outputs_and_what_is_kept_stay_under_their_names():
    model = build(
        """g (float[N, 4] x, float[N, 4] unused) => (float[N, 4] a, float[N, 4] b, float[N, 4] c) {
        a = Identity(x)\n h = Exp(x)\n b = Identity(h)\n k = Identity(h)\n l = Exp(x)\n c = Sin(k) }""",
        {"p": floats(4)},
    )
    feeds = {"x": floats(2, 4), "unused": floats(2, 4)}
    simple = prepared(model, feeds, keep=["k", "l"], variable=["p"])
    assert [each.name for each in simple.graph.input] == ["x", "unused"]
    assert [each.name for each in simple.graph.output] == ["a", "b", "c"]
    assert {"a", "b", "c", "k", "l"} <= {name for node in simple.graph.node for name in node.output}
    assert [each.name for each in simple.graph.initializer] == ["p"]
    assert operators(prepared(model, feeds)) == ["Exp", "Identity", "Sin"]


def test_subgraphs_read_what_stands_for_a_value():
    model = build(
        """g (float[N, 4] x, bool c) => (float[N, 4] y) { i = Identity(x)\n e = Exp(i)\n f = Exp(i)
        y = If (c) <then_branch = t () => (float[N, 4] r) { r = Add(i, f) },
                    else_branch = o () => (float[N, 4] s) { s = Mul(f, e) }> }"""
    )
    for choice in (True, False):
        simple = prepared(model, {"x": floats(2, 4), "c": np.array(choice)})
    assert operators(simple) == ["Exp", "If"]


def test_graphs_of_onnxruntimes_operators_read_values():
    node = helper.make_node("Exp", ["outside"], ["e"])
    decoder = helper.make_graph([node], "decoder", [], [helper.make_empty_tensor_value_info("e")])
    search = helper.make_node("BeamSearch", ["x"], ["y"], domain="com.microsoft", decoder=decoder)
    assert read_by([search]) == {"x", "outside"}


def test_dead_nodes_go_with_their_constants():
    model = build("g (float[N, 4] x) => (float[N, 4] y) { a = Add(x, w)\n b = Exp(a)\n y = Sin(x) }", {"w": floats(4)})
    simple = prepared(model, {"x": floats(2, 4)})
    assert operators(simple) == ["Sin"]
    assert not simple.graph.initializer
    assert not simple.graph.value_info


def test_weights_in_other_files_are_left_there():
    model = build("g (float[N, 4] x) => (float[N, 3] y) { t = Transpose <perm = [1, 0]> (w)\n y = MatMul(x, t) }")
    tensor = numpy_helper.from_array(floats(3, 4), "w")
    external_data_helper.set_external_data(tensor, "weights.bin")
    tensor.ClearField("raw_data")
    model.graph.initializer.append(tensor)
    simple = prepare(model)
    assert operators(simple) == ["MatMul", "Transpose"]
    assert simple.graph.initializer[0].data_location == TensorProto.EXTERNAL


# --- shapes ---

VIEW = """s = Shape(x)\n b = Gather(s, i0)\n u = Unsqueeze(b, zero)\n t = Gather(s, i1)\n w = Unsqueeze(t, zero)\n
    p = Concat <axis = 0> (u, w, two, two)\n r = Reshape(x, p)\n y = Sin(r)"""
SHAPES = {"i0": np.array(0), "i1": np.array(1), "zero": np.array([0]), "two": np.array([2]), "minus": np.array([-1])}


@pytest.mark.parametrize("opset", [13, 15, 21])
def test_shape_arithmetic_becomes_constants_for_any_batch(opset):
    for given in ("float[N, 3, 4] x", "float[N, M, 4] x"):
        assert left(VIEW, opset, given=given, batches=[floats(7, 3, 4)], constants=SHAPES) == ["Reshape", "Sin"]


def test_names_that_stand_for_any_size_are_no_sizes():
    model = build(f"g (float[N, M, 4] x) => (float[A, B, C, D] y) {{ {VIEW} }}", SHAPES)
    for dim in list(model.graph.input[0].type.tensor_type.shape.dim)[:2]:
        dim.dim_param = "?"
    assert "Shape" in operators(prepared(model, {"x": X}))
    assert "Shape" not in left(VIEW, given="float[N, M, 4] x", constants=SHAPES)


@pytest.mark.parametrize("opset", [7, 10, 12])
def test_shape_arithmetic_of_old_opsets(opset):
    body = VIEW.replace("Unsqueeze(b, zero)", "Unsqueeze <axes = [0]> (b)")
    body = body.replace("Unsqueeze(t, zero)", "Unsqueeze <axes = [0]> (t)")
    assert left(body, opset, batches=[floats(7, 3, 4)], constants=SHAPES) == ["Reshape", "Sin"]


def test_products_of_sizes():
    body = """s = Shape(x)\n a = Slice(s, zero, two)\n m = ReduceProd <keepdims = 1> (a)\n k = Mul(m, two)
        d = Div(k, two)\n p = Concat <axis = 0> (d, minus)\n r = Reshape(x, p)\n y = Sin(r)"""
    assert left(body, given="float[2, 3, 4] x", constants=SHAPES) == ["Reshape", "Sin"]
    constants = {**SHAPES, "minus": np.array([4])}
    assert left(body, batches=[floats(5, 3, 4)], constants=constants) == ["Reshape", "Sin"]


def test_a_broadcast_to_the_own_shape_is_nothing():
    body = """s = Shape(x)\n e = Equal(s, minus)\n o = ConstantOfShape <value = int64[1] {1}> (three)
        t = Where(e, o, s)\n r = Expand(x, t)\n y = Sin(r)"""
    assert left(body, constants={**SHAPES, "three": np.array([3])}, batches=[floats(5, 3, 4)]) == ["Sin"]


def test_sizes_that_are_never_negative_are_chosen_at_once():
    body = """s = Shape(x)\n b = Gather(s, zero)\n p = Concat <axis = 0> (b, three, four)\n e = Equal(p, minus)
        t = Where(e, ones, p)\n r = Expand(w, t)\n y = Add(x, r)"""
    constants = {**SHAPES, "ones": np.array([1, 1, 1]), "w": floats(1, 1, 4), "three": np.array([3])}
    constants["four"] = np.array([4])
    found = left(body, constants=constants, batches=[floats(5, 3, 4)])
    assert found == ["Add", "Concat", "Expand", "Gather", "Shape"]


def test_sizes_that_runs_decide_stay():
    body = "n = NonZero(x)\n s = Shape(n)\n c = Gather(s, i1)\n f = Cast <to = 1> (c)\n y = Add(x, f)"
    assert left(body, constants=SHAPES) == ["Add", "Cast", "Gather", "NonZero", "Shape"]


# --- parts ---


def test_slices_of_everything_become_a_split():
    body = """a = Slice(x, zero, two, axis)\n b = Slice(x, two, three, axis)\n c = Slice(x, three, end, axis)
        s = Sub(a, b)\n y = Add(s, c)"""
    constants = {**SHAPES, "axis": np.array([-1]), "three": np.array([3]), "end": np.array([2**62])}
    constants["two"] = np.array([2])
    assert left(body, constants=constants, given="float[N, 3, 4] x") == ["Add", "Split", "Sub"]
    assert left(body.replace("(x, three, end", "(x, two, end"), constants=constants).count("Slice") == 3


@pytest.mark.parametrize("opset", [11, 13, 18])
def test_elements_of_everything_become_a_split(opset):
    body = "a = Gather <axis = 1> (x, i0)\n b = Gather <axis = 1> (x, i1)\n c = Gather <axis = 1> (x, i2)\n"
    body += "s = Sub(a, b)\n y = Add(s, c)"
    found = left(body, opset, constants={**SHAPES, "i2": np.array(-1)})
    assert found == ["Add", "Split", *["Squeeze"] * 3, "Sub"]
    assert left(body, opset, constants={**SHAPES, "i2": np.array(1)}).count("Gather") == 2


# --- after ---


def test_gradients_are_added_one_by_one():
    model = build(
        """g (float[N, 4] x, float[4] w) => (float loss) {
        a = Sin(x)\n b = Exp(x)\n c = Mul(x, w)\n d = Mul(a, b)\n e = Mul(d, c)\n f = Mul(e, e)
        loss = ReduceSum <keepdims = 0> (f) }"""
    )
    found = same_gradients(model, ["x", "w"], {"x": floats(3, 4), "w": floats(4, seed=1)})
    assert "Sum" not in operators(found)
    assert [each.name for each in found.graph.output] == ["loss", "x_grad", "w_grad"]


def test_a_gradient_that_is_transposed_is_computed_so():
    model = build(
        """g (float[N, 3, 4] x, float[5, 4] w) => (float loss) { t = Transpose <perm = [1, 0]> (w)\n y = MatMul(x, t)
        e = Sin(y)\n loss = ReduceSum <keepdims = 0> (e) }"""
    )
    found = same_gradients(model, ["w"], {"x": floats(2, 3, 4), "w": floats(5, 4)})
    assert operators(found).count("Transpose") == 1


def test_models_are_not_changed():
    model = build("g (float[4] x) => (float[4] y) { i = Identity(x)\n y = Exp(i) }")
    before = model.SerializeToString()
    prepare(model)
    finish(model, ["y"])
    assert model.SerializeToString() == before
    onnx.checker.check_model(prepare(model), full_check=True)


WIDTH, LAYERS, ROWS = 16, 12, 256
IN_USE = 4  # gradients and intermediate results of the layer at work


def layered(layer, layers=LAYERS, inputs=""):
    """A chain of layers whose text has {i} and {o} for what it reads and makes, {n} for its number."""
    text = "\n".join(layer.format(i=f"h{n}", o=f"h{n + 1}", n=n) for n in range(layers))
    weights = {f"w{n}": floats(WIDTH, WIDTH, seed=n) / 2 for n in range(layers)}
    body = f"h0 = Identity(x)\n {text}\n q = Mul(h{layers}, h{layers})\n loss = ReduceSum <keepdims = 0> (q)"
    return build(f"g (float[N, {WIDTH}] x{inputs}) => (float loss) {{ {body} }}", weights), list(weights)


DENSE = "m{n} = MatMul({i}, w{n})\n t{n} = Tanh(m{n})\n s{n} = Sin(t{n})\n {o} = Add(s{n}, {i})"


def test_activations_that_are_computed_again_halve_the_memory():
    model, weights = layered(DENSE)
    feeds = {"x": floats(ROWS, WIDTH)}
    everything = gradients(model, "loss", weights)
    expected, before = run(everything, feeds), peak_bytes(everything, feeds)
    for segments in (2, 4, ["h3", "h6", "h9"]):
        found = gradients(model, "loss", weights, checkpoint_segments=segments)
        for one, other in zip(run(found, feeds), expected, strict=True):
            np.testing.assert_array_equal(one, other)
        # All but one of k segments are forgotten; one tensor between each two stays, and some that are in use.
        count = segments if isinstance(segments, int) else len(segments) + 1
        most = before / count + (count - 1 + IN_USE) * ROWS * WIDTH * 4
        assert peak_bytes(found, feeds) <= most < 0.75 * before
    assert operators(gradients(model, "loss", weights, checkpoint_segments=1)) == operators(everything)


def test_gradients_of_weights_are_computed_as_soon_as_they_can_be():
    """In the order of the file alone, the one of the first layer would wait for none of the others."""
    model, weights = layered("m{n} = MatMul({i}, w{n})\n {o} = Tanh(m{n})")
    feeds = {"x": floats(ROWS, WIDTH)}
    with without_passes():
        before = peak_bytes(gradients(model, "loss", weights), feeds)
    assert peak_bytes(gradients(model, "loss", weights), feeds) < 0.8 * before


def test_dropout_is_computed_again_with_its_mask():
    layer = "m{n} = MatMul({i}, w{n})\n d{n}, k{n} = Dropout <seed = {n}> (m{n}, ratio, train)\n {o} = Tanh(d{n})"
    model, weights = layered(layer, 4, ", bool train")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.25), "ratio"))
    feeds = {"x": floats(32, WIDTH), "train": np.array(True)}
    found = gradients(model, "loss", ["x", *weights], checkpoint_segments=2)
    assert operators(found).count("Dropout") == 4
    for train in (True, False):
        feeds["train"] = np.array(train)
        # onnxruntime draws from a seed what it drew in another session from this seed.
        close(run(found, feeds), run(gradients(model, "loss", ["x", *weights]), feeds))


def test_batch_normalization_is_computed_again_and_moves_its_statistics_once():
    text = """g (float[N, 2, 8, 8] x) => (float loss, float[2] mean1, float[2] var1) {
        a = Sin(x)\n y, mean1, var1 = BatchNormalization <training_mode = 1, momentum = 0.5> (a, scale, bias, mean, var)
        c = Mul(y, y)\n b = Tanh(c)\n d = Sin(b)\n e = Mul(d, d)\n loss = ReduceSum <keepdims = 0> (e) }"""
    constants = {name: floats(2, seed=place) + 2 for place, name in enumerate(("scale", "bias", "mean", "var"))}
    model = build(text, constants)
    feeds = {"x": floats(3, 2, 8, 8)}
    found = same_gradients(model, ["x", "scale", "bias"], feeds, checkpoint_segments=["b"])
    assert operators(found).count("BatchNormTraining") == 1
    assert operators(found).count("BatchNormalization") == 1


def test_segments_of_a_graph_with_branches_and_several_outputs():
    text = """g (float[N, 16] x, int64[N] ids) => (float loss, float[N, 16] c, float metric) {
        e = Gather(table, ids)\n a = Add(x, e)\n b = Tanh(a)\n c = Sin(b)\n d = Exp(a)\n f = Mul(c, d)\n g = Add(f, a)
        h = Tanh(g)\n i = Mul(h, h)\n metric = ReduceMax <keepdims = 0> (h)
        loss = ReduceSum <keepdims = 0> (i) }"""
    model = build(text, {"table": floats(5, 16)})
    feeds = {"x": floats(3, 16), "ids": np.array([0, 4, 0])}
    for segments in (2, 3, 5, ["a"], ["f", "g"]):
        for plain in (False, True):
            same_gradients(model, ["x", "table"], feeds, checkpoint_segments=segments, plain=plain)


def test_more_segments_than_nodes():
    model = build("g (float[N, 4] x) => (float loss) { y = Tanh(x)\n loss = ReduceSum <keepdims = 0> (y) }")
    same_gradients(model, ["x"], {"x": floats(2, 4)}, checkpoint_segments=100)


def test_equal_calls_give_equal_bytes():
    model, weights = layered(DENSE, 3)
    found = [gradients(model, "loss", weights, checkpoint_segments=2) for _ in range(2)]
    assert len({each.SerializeToString(deterministic=True) for each in found}) == 1


@pytest.mark.parametrize(
    ("segments", "error", "message"),
    [
        (0, ValueError, "checkpoint_segments is 0, expected at least 1"),
        ("h1", TypeError, "checkpoint_segments is 'h1', expected a number of segments or names"),
        (1.5, TypeError, "checkpoint_segments is 1.5"),
        ([], TypeError, "expected a number of segments or names"),
        (["h1", "no"], ValueError, "checkpoint_segments has 'no', which no node between inputs and loss makes"),
    ],
)
def test_other_segments_are_refused(segments, error, message):
    model, weights = layered(DENSE, 2)
    with pytest.raises(error, match=message):
        gradients(model, "loss", weights, checkpoint_segments=segments)
