"""Wrong calls of softmax's general form: the exact words, and nothing written."""

import itertools

import numpy as np
import pytest
from guards import Placed
from primitive_cases import numbers
from samples import bits, refused

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


def of_arrays(name):
    """What is wrong with arrays and dtypes: a change of a right call, the error and its message."""
    masked = np.ma.masked_array(np.ones(SHAPE, bool))
    yield {"where": masked}, TypeError, "where is a masked array, expected an array without a mask"
    for op, what in ((post_ops.add(masked), "operand"), (post_ops.select(masked, 1.0), "condition"),
                     (post_ops.select(True, masked), "other")):  # fmt: skip
        message = f"post_ops[1]'s {what} is a masked array, expected an array without a mask"
        yield {"post_ops": [post_ops.abs(), op]}, TypeError, message
    wrong = ["int16", "int32", "int64", "bool", "complex64", "longdouble", np.dtype("float32").newbyteorder("S")]
    wrong += ["float8_e4m3", "float8_e4m3b11fnuz", "nonsense", [1], ("float32",), ("float32", None)]
    for dtype in wrong + (["int8", "uint8"] if name in GRADIENT else []):
        try:
            text = str(np.dtype(dtype))
        except (TypeError, ValueError):
            text = repr(dtype)
        yield {"out_dtype": dtype}, TypeError, f"out_dtype is {text}, expected one of {listed(name)}"
    for dtype in ("int64", "uint8", "float32", "int32", "object"):
        yield {"where": np.ones(SHAPE, dtype)}, TypeError, f"where has dtype {dtype}, expected one of bool"
    for shape in ((4, 2), (3, 4), (2, 4, 3), (1, 4, 3), (0,), (4, 0)):
        message = f"where has shape {shape}, expected one that broadcasts to {SHAPE}"
        yield {"where": np.ones(shape, bool)}, ValueError, message
    yield {"where": [[True], [True, False]]}, TypeError, "where is list, expected an array"
    yield {"where": 1}, TypeError, "where has dtype float64, expected one of bool"


def of_values(name):
    """The same of numbers, flags and words."""
    keywords = ["axes", "post_op", "temperature", "scale"]
    keywords += ["stats", "save", "inf_as_zero", "accumulation"] if name in GRADIENT else ["post_op_grads"]
    for keyword in keywords + ["inf_as_zero"] * (name == "log_softmax"):
        yield {keyword: True}, TypeError, f"got an unexpected keyword argument {keyword!r}"
    for scale in ("logit_scale", "result_scale", "out_scale"):
        expected = "a finite number other than 0" if scale == "out_scale" else "a finite number"
        for wrong in (float("nan"), float("inf"), -float("inf"), np.float32("nan")):
            yield {scale: wrong}, ValueError, f"{scale} is {float(wrong)}, expected {expected}"
        for wrong in ("2", b"2", None, [2.0], 1j, np.ones(2), np.ones((1, 1)), {"x": 1}):
            yield {scale: wrong}, TypeError, f"{scale} is {shown(wrong)}, expected a number"
    for zero in (0, 0.0, -0.0):
        yield {"out_scale": zero}, ValueError, "out_scale is 0.0, expected a finite number other than 0"
    flags = ["stats", "save"] if name in FORWARD else ["post_op_grads"]
    for key, wrong in itertools.product(
        flags + ["inf_as_zero"] * (name == "softmax"), (0, 1, None, "yes", [], [True], np.float32(1))
    ):
        yield {key: wrong}, TypeError, f"{key} is {wrong!r}, expected a bool"
    for wrong in ("f32", "STRICT", None, 1, [], ["any"]) if name in FORWARD else ():
        yield {"accumulation": wrong}, ValueError, f"accumulation is {wrong!r}, expected one of strict, relaxed, any"
    for wrong in (0.5, 0, True, False, (0.5, 1), {"probability": 0.5}, "0.5", Dropout):
        yield {"dropout": wrong}, TypeError, f"dropout is {wrong!r}, expected an opgrad.Dropout"


def of_post_ops(name):
    for wrong in (None, post_ops.abs(), "abs", 3, {}, iter([]), post_ops.abs):
        message = f"post_ops is {type(wrong).__name__}, expected a list of opgrad.post_ops"
        yield {"post_ops": wrong}, TypeError, message
    for wrong in (None, "abs", 3, post_ops.abs, np.abs, [post_ops.abs()]):
        message = f"post_ops[1] is {wrong!r}, expected one of opgrad.post_ops"
        yield {"post_ops": (post_ops.abs(), wrong)}, TypeError, message
    many = [post_ops.linear(1.0, 1.0)] * 33
    yield {"post_ops": many}, ValueError, "post_ops has 33 operations, expected at most 32"

    def places(array):
        yield post_ops.mul(array), "operand"
        yield post_ops.select(True, array), "other"
        if array.dtype != bool:
            yield post_ops.select(array, 0.0), "condition"

    for shape in ((4, 2), (3, 4), (2, 4, 3), (1, 4, 3), (4,), (0,), (1, 1, 1), (4, 0)):
        for op, what in places(np.ones(shape, "float32")):
            message = f"post_ops[1]'s {what} has shape {shape}, expected one that broadcasts to {SHAPE}"
            yield {"post_ops": [post_ops.abs(), op]}, ValueError, message
    for dtype in ("int64", "int16", "uint32", "complex64", "object", "bool", "longdouble"):
        for op, what in places(np.ones(SHAPE, dtype)):
            more = ", bool" if what == "condition" else ""
            message = f"post_ops[0]'s {what} has dtype {np.dtype(dtype).name}, expected one of {OPERANDS_LISTED}{more}"
            yield {"post_ops": [op]}, TypeError, message
    whole = (post_ops.round(), *(getattr(post_ops, each)(0.5) for each in ("ge", "gt", "le", "lt", "eq", "ne")))
    for op in whole if name in GRADIENT else ():
        yield {"post_ops": [post_ops.abs(), op]}, ValueError, f"post_ops[1] is {op.name}, which has no gradient"


def of_out(name):
    first = "y" if name in FORWARD else "dx"
    masked = np.ma.masked_array(np.zeros(SHAPE, "float32"))
    for wrong in ([], "text", 3, [1.0], (1.0,), {}, masked):
        message = f"out for {first} is {type(wrong).__name__}, expected a NumPy array"
        yield {"out": wrong, **({"out_scale": 2.0} if wrong is masked else {})}, TypeError, message
    for dtype in ("int32", "complex64", "bool", ">f4", *(("int8",) if name in GRADIENT else ())):
        message = f"out for {first} has dtype {np.dtype(dtype)}, expected one of {listed(name)}"
        yield {"out": np.zeros(SHAPE, dtype)}, TypeError, message
    for dtype in ("float16", "float32"):
        message = f"out for {first} has dtype float64, expected {dtype}"
        yield {"out": np.zeros(SHAPE, "float64"), "out_dtype": dtype}, TypeError, message


@pytest.mark.parametrize("mistakes", [of_arrays, of_values, of_post_ops, of_out], ids=lambda each: each.__name__)
@every
def test_mistakes_are_named(name, mistakes, rng):
    """Also where another attribute makes the call one that is not plain."""
    given = arguments(name, rng)
    for change, error, message in mistakes(name):
        for more in ({}, {"out_scale": 2.0}):
            fails(name, given | more | change, error, message)


@every
def test_operands_that_are_no_arrays(name, rng):
    for wrong in (None, "text", [[1.0], [1.0, 2.0]]):
        with pytest.raises(TypeError, match=rf"^{name}: post_ops\[0\]'s operand .*, expected "):
            getattr(opgrad, name)(**arguments(name, rng), post_ops=[post_ops.add(wrong)])


def test_dropout_s_own_values():
    for wrong in (-0.1, 1.0001, 2, float("nan"), float("inf")):
        refused(ValueError, f"^Dropout: probability is {float(wrong)}, expected 0 to 1$", Dropout, wrong)
    for wrong in ("0.5", b"1", None, [0.5], 1j):
        refused(TypeError, r"^Dropout: probability is .*, expected a number$", Dropout, wrong)
    for name in ("seed", "offset"):
        for wrong in (1.0, "1", None, [1], np.float32(1), True):
            refused(TypeError, f"^Dropout: {name} is .*, expected an int$", Dropout, 0.5, **{name: wrong})
        for wrong in (2**64, -(2**63) - 1, 10**30):
            with pytest.raises(ValueError, match=f"^Dropout: {name} is {wrong}, expected a 64-bit integer$"):
                Dropout(0.5, **{name: wrong})
    for wrong in (1, 0, None, "yes"):
        refused(TypeError, r"^Dropout: mask is .*, expected a bool$", Dropout, 0.5, mask=wrong)


def results():
    """Arrays for y, stats, saved and mask."""
    return tuple(np.zeros((4, size), dtype) for size, dtype in ((3, "f4"), (1, "f4"), (3, "f4"), (3, bool)))


WITH_ALL = {"stats": True, "save": True, "dropout": Dropout(0.5, 1, 2, mask=True)}


@forward
def test_out_must_be_as_many(name, rng):
    given = arguments(name, rng) | WITH_ALL
    outputs = results()
    for wrong in (outputs[0], list(outputs), outputs[:1], outputs[:3], (*outputs, outputs[0]), ()):
        message = f"out is {type(wrong).__name__}, expected a tuple of 4 arrays"
        fails(name, given | {"out": wrong}, TypeError, message)
    for place, result in enumerate(("y", "stats", "saved", "mask")):
        wrong = (*outputs[:place], None, *outputs[place + 1 :])
        fails(name, given | {"out": wrong}, TypeError, f"out for {result} is NoneType, expected a NumPy array")


@forward
def test_out_s_shapes_and_dtypes(name, rng):
    given = arguments(name, rng) | WITH_ALL
    outputs = results()
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


@pytest.mark.parametrize("name", ["softmax", "log_softmax_grad"])
def test_out_that_overlaps(name, rng):
    first = "y" if name in FORWARD else "dx"
    memory = np.zeros(16, "float32")
    shifted, moved = memory[:12].reshape(SHAPE), memory[1:13].reshape(SHAPE)
    given = arguments(name, rng) | {next(iter(arguments(name, rng))): shifted}
    message = f"expected {next(iter(given))} itself or separate memory"
    for wrong in (moved, shifted[:, ::-1]):
        fails(name, given | {"out": wrong}, ValueError, f"out for {first} overlaps {next(iter(given))}, {message}")
    given = arguments(name, rng)
    apart, kept, where = np.ones(SHAPE, "float32"), np.ones(SHAPE, bool), memory.view(bool)[:12].reshape(SHAPE)
    for what, *arrays in (
        ("post_ops[0]'s operand", moved, apart, kept), ("post_ops[1]'s operand", apart, shifted, kept),
        ("where", apart, apart, where),
    ):  # fmt: skip
        chain = [post_ops.add(arrays[0]), post_ops.mul(arrays[1][:, :1])]
        message = f"out for {first} overlaps {what}, expected separate memory"
        fails(name, given | {"post_ops": chain, "where": arrays[2], "out": shifted}, ValueError, message)


@forward
def test_results_that_overlap_each_other(name, rng):
    y, stats, saved, mask = results()
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
            refused(ValueError, rf"^post_ops\.{make.__name__}: beta is .*, expected at least alpha", make, low, high)
    refused(ValueError, r"^post_ops\.soft_relu: alpha is 0, expected another number$", post_ops.soft_relu, 0)
