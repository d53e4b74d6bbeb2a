"""Wrong calls of softmax's general form: the exact words, and nothing written."""

import numpy as np
import pytest
from primitive_cases import Placed, numbers
from samples import bits

import opgrad
from opgrad import post_ops
from opgrad.contract import shown
from opgrad.ops.reference.dropout import Dropout
from opgrad.ops.reference.primitive import GRADIENT_TYPES, OPERAND_TYPES, TYPES

pytestmark = pytest.mark.any_cpu

FORWARD, GRADIENT = ("softmax", "log_softmax"), ("softmax_grad", "log_softmax_grad")
NAMES = FORWARD + GRADIENT
every = pytest.mark.parametrize("name", NAMES)
forward = pytest.mark.parametrize("name", FORWARD)
gradient = pytest.mark.parametrize("name", GRADIENT)
SHAPE = (4, 3)
LISTED, GRADIENT_LISTED, OPERANDS_LISTED = (", ".join(each) for each in (TYPES, GRADIENT_TYPES, OPERAND_TYPES))


def listed(name):
    return LISTED if name in FORWARD else GRADIENT_LISTED


def arguments(name, rng, dtype="float32"):
    return {each: numbers(rng, SHAPE, dtype) for each in (("x",) if name in FORWARD else ("dy", "y"))}


def arrays_in(value):
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, tuple | list):
        return [array for each in value for array in arrays_in(each)]
    return [array for each in value.operands for array in arrays_in(each)] if hasattr(value, "operands") else []


def fails(name, given, error, message):
    """The call raises exactly this message, and changes none of its arrays; neither does a second one."""
    arrays = arrays_in(tuple(given.values()))
    before = [bits(array) for array in arrays]
    for _ in range(2):
        with pytest.raises(error) as caught:
            getattr(opgrad, name)(**given)
        assert str(caught.value) == f"{name}: {message}"
    assert [bits(array) for array in arrays] == before


@every
def test_unknown_keywords(name, rng):
    keywords = ["axes", "post_op", "temperature", "scale"]
    keywords += ["stats", "save", "inf_as_zero", "accumulation"] if name in GRADIENT else ["post_op_grads"]
    keywords += ["inf_as_zero"] if name == "log_softmax" else []
    for keyword in keywords:
        given = arguments(name, rng) | {keyword: True}
        fails(name, given, TypeError, f"got an unexpected keyword argument {keyword!r}")


@every
def test_masked_arrays(name, rng):
    masked = np.ma.masked_array(np.ones(SHAPE, bool))
    message = "where is a masked array, expected an array without a mask"
    fails(name, arguments(name, rng) | {"where": masked}, TypeError, message)
    operand = np.ma.masked_array(np.ones(SHAPE))
    for place, op in enumerate([post_ops.add(operand), post_ops.select(operand, 1.0), post_ops.select(True, operand)]):
        what = ("operand", "condition", "other")[place]
        message = f"post_ops[1]'s {what} is a masked array, expected an array without a mask"
        fails(name, arguments(name, rng) | {"post_ops": [post_ops.abs(), op]}, TypeError, message)


@every
def test_out_dtype(name, rng):
    wrong = ["int16", "int32", "int64", "bool", "complex64", "longdouble", "float8_e4m3", "float8_e4m3b11fnuz"]
    wrong += ["int8", "uint8"] if name in GRADIENT else []
    for dtype in wrong:
        given = arguments(name, rng) | {"out_dtype": dtype}
        try:
            shown = str(np.dtype(dtype))
        except TypeError:
            shown = repr(dtype)
        fails(name, given, TypeError, f"out_dtype is {shown}, expected one of {listed(name)}")
    swapped = np.dtype("float32").newbyteorder("S")
    for value in ("nonsense", [1], ("float32",), ("float32", None)):
        given = arguments(name, rng) | {"out_dtype": value}
        fails(name, given, TypeError, f"out_dtype is {value!r}, expected one of {listed(name)}")
    fails(name, arguments(name, rng) | {"out_dtype": swapped}, TypeError,
          f"out_dtype is {swapped}, expected one of {listed(name)}")  # fmt: skip


# --- where, scales, flags, dropout -----------------------------------------------------------------------------------


@every
def test_where(name, rng):
    given = arguments(name, rng)
    for dtype in ("int64", "uint8", "float32", "int32", "object"):
        message = f"where has dtype {dtype}, expected one of bool"
        fails(name, given | {"where": np.ones(SHAPE, dtype)}, TypeError, message)
    for shape in ((4, 2), (3, 4), (2, 4, 3), (1, 4, 3), (0,), (4, 0)):
        message = f"where has shape {shape}, expected one that broadcasts to {SHAPE}"
        fails(name, given | {"where": np.ones(shape, bool)}, ValueError, message)
    fails(name, given | {"where": [[True], [True, False]]}, TypeError, "where is list, expected an array")
    fails(name, given | {"where": 1}, TypeError, "where has dtype float64, expected one of bool")


@every
def test_scales(name, rng):
    given = arguments(name, rng)
    for scale in ("logit_scale", "result_scale", "out_scale"):
        expected = "a finite number other than 0" if scale == "out_scale" else "a finite number"
        for wrong in (float("nan"), float("inf"), -float("inf"), np.float32("nan")):
            fails(name, given | {scale: wrong}, ValueError, f"{scale} is {float(wrong)}, expected {expected}")
        for wrong in ("2", b"2", None, [2.0], 1j, np.ones(2), np.ones((1, 1)), given):
            fails(name, given | {scale: wrong}, TypeError, f"{scale} is {shown(wrong)}, expected a number")
    for zero in (0, 0.0, -0.0):
        message = "out_scale is 0.0, expected a finite number other than 0"
        fails(name, given | {"out_scale": zero}, ValueError, message)


@every
def test_flags(name, rng):
    flags = ["stats", "save"] if name in FORWARD else ["post_op_grads"]
    for key in flags + ["inf_as_zero"] * (name == "softmax"):
        for wrong in (0, 1, None, "yes", [], [True], np.float32(1)):
            for more in ({}, {"out_scale": 2.0}):
                given = arguments(name, rng) | {key: wrong} | more
                fails(name, given, TypeError, f"{key} is {wrong!r}, expected a bool")


@forward
def test_accumulation(name, rng):
    for wrong in ("f32", "STRICT", None, 1, [], ["any"]):
        for more in ({}, {"out_scale": 2.0}):
            given = arguments(name, rng) | {"accumulation": wrong} | more
            fails(name, given, ValueError, f"accumulation is {wrong!r}, expected one of strict, relaxed, any")


@every
def test_dropout(name, rng):
    for wrong in (0.5, 0, True, False, (0.5, 1), {"probability": 0.5}, "0.5", Dropout):
        for more in ({}, {"out_scale": 2.0}):
            given = arguments(name, rng) | {"dropout": wrong} | more
            fails(name, given, TypeError, f"dropout is {wrong!r}, expected an opgrad.Dropout")


def test_dropout_s_own_values():
    for wrong in (-0.1, 1.0001, 2, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"^Dropout: probability is {float(wrong)}, expected 0 to 1$"):
            Dropout(wrong)
    for wrong in ("0.5", b"1", None, [0.5], 1j):
        with pytest.raises(TypeError, match=r"^Dropout: probability is .*, expected a number$"):
            Dropout(wrong)
    for name in ("seed", "offset"):
        for wrong in (1.0, "1", None, [1], np.float32(1), True):
            with pytest.raises(TypeError, match=f"^Dropout: {name} is .*, expected an int$"):
                Dropout(0.5, **{name: wrong})
        for wrong in (2**64, -(2**63) - 1, 10**30):
            with pytest.raises(ValueError, match=f"^Dropout: {name} is {wrong}, expected a 64-bit integer$"):
                Dropout(0.5, **{name: wrong})
    for wrong in (1, 0, None, "yes"):
        with pytest.raises(TypeError, match=r"^Dropout: mask is .*, expected a bool$"):
            Dropout(0.5, mask=wrong)


# --- post-ops --------------------------------------------------------------------------------------------------------


@every
def test_post_ops_are_a_list_of_them(name, rng):
    given = arguments(name, rng)
    for wrong in (None, post_ops.abs(), "abs", 3, {}, iter([]), post_ops.abs):
        for more in ({}, {"out_scale": 2.0}):
            message = f"post_ops is {type(wrong).__name__}, expected a list of opgrad.post_ops"
            fails(name, given | {"post_ops": wrong} | more, TypeError, message)
    for wrong in (None, "abs", 3, post_ops.abs, np.abs, [post_ops.abs()]):
        message = f"post_ops[1] is {wrong!r}, expected one of opgrad.post_ops"
        fails(name, given | {"post_ops": (post_ops.abs(), wrong)}, TypeError, message)


@every
def test_too_many_post_ops(name, rng):
    given = arguments(name, rng) | {"post_ops": [post_ops.linear(1.0, 1.0)] * 33}
    fails(name, given, ValueError, "post_ops has 33 operations, expected at most 32")


@every
def test_operands_shapes(name, rng):
    given = arguments(name, rng)
    for shape in ((4, 2), (3, 4), (2, 4, 3), (1, 4, 3), (4,), (0,), (1, 1, 1), (4, 0)):
        array = np.ones(shape, "float32")
        expected = f"has shape {shape}, expected one that broadcasts to {SHAPE}"
        fails(name, given | {"post_ops": [post_ops.mul(array)]}, ValueError, f"post_ops[0]'s operand {expected}")
        chain = [post_ops.abs(), post_ops.select(array, 0.0)]
        fails(name, given | {"post_ops": chain}, ValueError, f"post_ops[1]'s condition {expected}")
        chain = [post_ops.abs(), post_ops.select(True, array)]
        fails(name, given | {"post_ops": chain}, ValueError, f"post_ops[1]'s other {expected}")


@every
def test_operands_dtypes(name, rng):
    given = arguments(name, rng)
    for dtype in ("int64", "int16", "uint32", "complex64", "object", "bool", "longdouble"):
        array = np.ones(SHAPE, dtype)
        shown = np.dtype(dtype).name
        message = f"post_ops[0]'s operand has dtype {shown}, expected one of {OPERANDS_LISTED}"
        fails(name, given | {"post_ops": [post_ops.sub(array)]}, TypeError, message)
        message = f"post_ops[0]'s other has dtype {shown}, expected one of {OPERANDS_LISTED}"
        fails(name, given | {"post_ops": [post_ops.select(1, array)]}, TypeError, message)
        if dtype != "bool":
            message = f"post_ops[0]'s condition has dtype {shown}, expected one of {OPERANDS_LISTED}, bool"
            fails(name, given | {"post_ops": [post_ops.select(array, 1.0)]}, TypeError, message)
    for wrong in (None, "text", [[1.0], [1.0, 2.0]]):
        with pytest.raises(TypeError, match=rf"^{name}: post_ops\[0\]'s operand .*, expected "):
            getattr(opgrad, name)(**given, post_ops=[post_ops.add(wrong)])


@gradient
def test_post_ops_without_a_gradient(name, rng):
    for op in (post_ops.round(), *(getattr(post_ops, each)(0.5) for each in ("ge", "gt", "le", "lt", "eq", "ne"))):
        given = arguments(name, rng) | {"post_ops": [post_ops.abs(), op]}
        fails(name, given, ValueError, f"post_ops[1] is {op.name}, which has no gradient")


# --- out -------------------------------------------------------------------------------------------------------------


def results_of(name, rng, given):
    found = getattr(opgrad, name)(**given)
    return found if isinstance(found, tuple) else (found,)


WITH_ALL = {"stats": True, "save": True, "dropout": Dropout(0.5, 1, 2, mask=True)}


@every
def test_out_must_be_an_array(name, rng):
    first = "y" if name in FORWARD else "dx"
    for wrong in ([], "text", 3, [1.0], (1.0,), {}):
        for more in ({}, {"out_scale": 2.0}):
            given = arguments(name, rng) | {"out": wrong} | more
            message = f"out for {first} is {type(wrong).__name__}, expected a NumPy array"
            fails(name, given, TypeError, message)
    masked = np.ma.masked_array(np.zeros(SHAPE, "float32"))
    given = arguments(name, rng) | {"out": masked, "out_scale": 2.0}
    fails(name, given, TypeError, f"out for {first} is MaskedArray, expected a NumPy array")


@forward
def test_out_must_be_as_many(name, rng):
    given = arguments(name, rng) | WITH_ALL
    outputs = tuple(np.zeros_like(each) for each in results_of(name, rng, given))
    for wrong in (outputs[0], list(outputs), outputs[:1], outputs[:3], (*outputs, outputs[0]), ()):
        message = f"out is {type(wrong).__name__}, expected a tuple of 4 arrays"
        fails(name, given | {"out": wrong}, TypeError, message)
    for place, result in enumerate(("y", "stats", "saved", "mask")):
        wrong = (*outputs[:place], None, *outputs[place + 1 :])
        fails(name, given | {"out": wrong}, TypeError, f"out for {result} is NoneType, expected a NumPy array")


@forward
def test_out_s_shapes_and_dtypes(name, rng):
    given = arguments(name, rng) | WITH_ALL
    outputs = tuple(np.zeros_like(each) for each in results_of(name, rng, given))
    own = dict(zip(("y", "stats", "saved", "mask"), outputs, strict=True))
    for place, (result, array) in enumerate(own.items()):
        shape = (*array.shape, 1)
        wrong = (*outputs[:place], np.zeros(shape, array.dtype), *outputs[place + 1 :])
        words = "the shape of x with 1 for axis" if result == "stats" else "the shape of x"
        message = f"out for {result} has shape {shape}, expected {array.shape}, {words}"
        fails(name, given | {"out": wrong}, ValueError, message)
        if result != "y":
            wrong = (*outputs[:place], array.astype("float16"), *outputs[place + 1 :])
            message = f"out for {result} has dtype float16, expected {array.dtype.name}"
            fails(name, given | {"out": wrong}, TypeError, message)


@every
def test_out_s_dtype(name, rng):
    first = "y" if name in FORWARD else "dx"
    for dtype in ("int32", "complex64", "bool", ">f4", *(("int8",) if name in GRADIENT else ())):
        for more in ({}, {"out_scale": 2.0}):
            given = arguments(name, rng) | {"out": np.zeros(SHAPE, dtype)} | more
            message = f"out for {first} has dtype {np.dtype(dtype)}, expected one of {listed(name)}"
            fails(name, given, TypeError, message)
    for more in ({"out_dtype": "float16"}, {"out_dtype": "float16", "out_scale": 2.0}):
        given = arguments(name, rng) | {"out": np.zeros(SHAPE, "float64")} | more
        fails(name, given, TypeError, f"out for {first} has dtype float64, expected float16")
    given = arguments(name, rng) | {"out": np.zeros(SHAPE, "float64"), "out_dtype": "float32"}
    fails(name, given, TypeError, f"out for {first} has dtype float64, expected float32")


@pytest.mark.parametrize("name", ["softmax", "log_softmax_grad"])
def test_out_that_overlaps(name, rng):
    first = "y" if name in FORWARD else "dx"
    memory = np.zeros(16, "float32")
    shifted, moved = memory[:12].reshape(SHAPE), memory[1:13].reshape(SHAPE)
    given = arguments(name, rng) | {next(iter(arguments(name, rng))): shifted}
    message = f"expected {next(iter(given))} itself or separate memory"
    for wrong in (memory.view("float16")[:12].reshape(SHAPE), shifted[:, ::-1]):
        fails(name, given | {"out": wrong}, ValueError, f"out for {first} overlaps {next(iter(given))}, {message}")
    given = arguments(name, rng)
    apart = np.ones(SHAPE, "float32")
    for place, operands in enumerate(((moved, apart), (apart, shifted))):
        chain = [post_ops.add(operands[0]), post_ops.mul(operands[1][:, :1])]
        message = f"out for {first} overlaps post_ops[{place}]'s operand, expected separate memory"
        fails(name, given | {"post_ops": chain, "out": shifted}, ValueError, message)
    where = memory.view(bool)[:12].reshape(SHAPE)
    message = f"out for {first} overlaps where, expected separate memory"
    fails(name, given | {"where": where, "out": shifted}, ValueError, message)


@forward
def test_results_that_overlap_each_other(name, rng):
    y, stats, saved, mask = (np.zeros_like(each) for each in results_of(name, rng, arguments(name, rng) | WITH_ALL))
    given = arguments(name, rng) | WITH_ALL
    other = "expected separate memory"
    for outputs, words in [
        ((y, stats, y, mask), "saved overlaps y"), ((y, y[:, :1], saved, mask), "stats overlaps y"),
        ((y, stats, saved, saved.view(bool)[:, ::4]), "mask overlaps saved"),
        ((y, stats, given["x"], mask), "saved overlaps x"), ((y, given["x"][:, :1], saved, mask), "stats overlaps x"),
    ]:  # fmt: skip
        fails(name, given | {"out": outputs}, ValueError, f"out for {words}, {other}")


@gradient
def test_shapes_of_gradients(name, rng):
    given = arguments(name, rng) | {"out_scale": 2.0}
    fails(name, given | {"y": given["y"][:3]}, ValueError, "y has shape (3, 3), expected (4, 3), the shape of dy")


@gradient
def test_out_and_post_op_grads(name, rng):
    given = arguments(name, rng) | {"post_ops": [post_ops.mul(np.ones(3, "float32"))], "post_op_grads": True}
    fails(
        name, given | {"out": np.zeros(SHAPE, "float32")}, TypeError, "out is given, expected None with post_op_grads"
    )


@every
def test_a_failed_call_writes_nothing(name, rng):
    """Whatever is wrong is found before the first element is written."""
    good = arguments(name, rng) | {"out_dtype": "float16"}
    for wrong in (
        {"where": np.ones((2, 2), bool)}, {"logit_scale": float("nan")}, {"dropout": 0.5}, {"axis": 7},
        {"post_ops": [post_ops.add(np.ones(7))]}, {"post_ops": [None]}, {"out_dtype": "int64"},
    ):  # fmt: skip
        placed = Placed(SHAPE, "float16")
        with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
            getattr(opgrad, name)(**good | wrong, out=placed.array)
        assert placed.unwritten(), wrong


def test_values_of_post_ops():
    for make, count in ((post_ops.linear, 2), (post_ops.pow, 2), (post_ops.clip, 2), (post_ops.elu, 1)):
        for wrong in ("1", None, [1.0], 1j):
            with pytest.raises(TypeError, match=rf"^post_ops\.{make.__name__}: alpha is .*, expected a number$"):
                make(*(wrong, 1.0)[:count])
    for make in (post_ops.clip, post_ops.clip_v2):
        for low, high in ((1.0, 0.5), (0.0, float("nan")), (float("nan"), 0.0)):
            with pytest.raises(ValueError, match=rf"^post_ops\.{make.__name__}: beta is .*, expected at least alpha"):
                make(low, high)
    with pytest.raises(ValueError, match=r"^post_ops\.soft_relu: alpha is 0, expected another number$"):
        post_ops.soft_relu(0)
