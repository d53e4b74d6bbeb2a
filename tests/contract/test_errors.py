"""Bad input: the exact words, the right exception, nothing written; each attribute given what it does not expect."""

import numpy as np
import pytest
from hostile import Raising, arguments, attributes, values
from samples import accepted, bits, call, for_operators, is_float, sample

import opgrad
from opgrad import Dropout, post_ops
from opgrad.call import arrays
from opgrad.contract import FLOATS
from opgrad.ops import graph_operators, operators

pytestmark = pytest.mark.any_cpu

FLOAT_NAMES = ", ".join(FLOATS)


def fails(op, arguments, error, message, **changed):
    """The call raises exactly this message, and changes no argument; so it does with an attribute."""
    arguments = arguments | changed
    before = {name: bits(value) for name, value in arguments.items() if isinstance(value, np.ndarray)}
    for more in ({}, {"out_scale": 2.0}) if op.general else ({},):
        with pytest.raises(error) as caught:
            call(op, arguments, **more)
        assert str(caught.value) == f"{op.name}: {message}"
    assert {name: bits(arguments[name]) for name in before} == before


def arrays_of(op, arguments):
    return [name for name in op.inputs if isinstance(arguments.get(name), np.ndarray)]


def test_required_arrays(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    for name in set(op.inputs) - op.optional:
        fails(op, arguments | {name: None}, TypeError, f"{name} is None, expected an array")


def test_missing_and_unknown_arguments(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    required = next(name for name in op.parameters if name not in op.optional)
    rest = {name: value for name, value in arguments.items() if name != required}
    fails(op, rest, TypeError, f"missing a required argument: {required!r}")
    fails(op, arguments | {"axes": 1}, TypeError, "got an unexpected keyword argument 'axes'")
    function = getattr(opgrad, op.name)
    with pytest.raises(TypeError, match=f"^{op.name}: too many positional arguments"):
        function(*[None] * (len(op.parameters) + 1))
    with pytest.raises(TypeError, match=f"^{op.name}: multiple values for argument {required!r}"):
        function(None, **{required: None})


def test_dtypes(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    for name in arrays_of(op, arguments):
        expected = ", ".join(accepted(op, name))
        for wrong in {"complex64", "int16", "uint8", "bool", "longdouble"}.difference(accepted(op, name)):
            given = arguments | {name: arguments[name].astype(wrong)}
            fails(op, given, TypeError, f"{name} has dtype {np.dtype(wrong).name}, expected one of {expected}")
        objects = arguments[name].astype(object)
        fails(op, arguments | {name: objects}, TypeError, f"{name} has dtype object, expected one of {expected}")


def test_integers_and_floats_are_not_mixed_up(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    for name in arrays_of(op, arguments):
        wrong = "int64" if is_float(arguments[name]) else "float32"
        if wrong not in accepted(op, name):
            message = f"{name} has dtype {wrong}, expected one of {', '.join(accepted(op, name))}"
            fails(op, arguments | {name: arguments[name].astype(wrong)}, TypeError, message)


def test_dtypes_must_agree(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    for name, tensor in op.inputs.items():
        if tensor.dtype_of and not op.general:
            given = arguments | {name: arguments[name].astype("float64")}
            fails(op, given, TypeError, f"{name} has dtype float64, expected float32, the dtype of {tensor.dtype_of}")


def test_foreign_byte_order(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    for name in arrays_of(op, arguments):
        swapped = arguments[name].astype(arguments[name].dtype.newbyteorder("S"))
        message = f"{name} has dtype {swapped.dtype} in foreign byte order, expected native byte order"
        fails(op, arguments | {name: swapped}, TypeError, message)


def test_masked_arrays(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    for name in arrays_of(op, arguments):
        given = arguments | {name: np.ma.masked_array(arguments[name])}
        fails(op, given, TypeError, f"{name} is a masked array, expected an array without a mask")


def test_lists(op, rng):
    """Nested lists are what np.asarray makes of them; those that it refuses are refused."""
    arguments = sample(op, (4, 3), "float64", rng)
    expected = [bits(result) for result in call(op, arguments)]
    for name in arrays_of(op, arguments):
        given = arguments | {name: arguments[name].tolist()}
        assert [bits(result) for result in call(op, given)] == expected
        fails(op, arguments | {name: [[1.0], [1.0, 2.0]]}, TypeError, f"{name} is list, expected an array")


def test_shapes(op, rng):
    arguments = sample(op, (4, 3), "float32", rng, reduction="none")
    for name, tensor in op.inputs.items():
        if tensor.shape is not None and name in arguments:
            expected = arguments[name].shape
            wrong = np.zeros((*expected, 2), arguments[name].dtype)
            message = f"{name} has shape {wrong.shape}, expected {expected}, {tensor.as_in}"
            fails(op, arguments | {name: wrong}, ValueError, message)


def test_too_few_dimensions(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    for name, tensor in op.inputs.items():
        if tensor.ranks.start:
            wrong = np.zeros((2,) * (tensor.ranks.start - 1), arguments[name].dtype)
            with pytest.raises(ValueError, match=f"^{op.name}: {name} has .* dimensions?, expected at least"):
                call(op, arguments | {name: wrong})


@for_operators(lambda op: "axis" in op.attributes)
def test_axis(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    for axis in (2, -3, 99):
        message = f"axis is {axis}, expected -2 to 1 for an array of 2 dimensions"
        fails(op, arguments, ValueError, message, axis=axis)
    for axis in (1.0, "0", None, [0]):
        fails(op, arguments, TypeError, f"axis is {axis!r}, expected an int", axis=axis)


@for_operators(lambda op: op.kind == "rows")
def test_axes_must_be_adjacent(op, rng):
    arguments = sample(op, (4, 3, 2), "float32", rng)
    for axis in ((), (0, 2), (0, 0), (1, -2)):
        fails(op, arguments, ValueError, f"axis is {axis}, expected an int or a tuple of adjacent axes", axis=axis)


@for_operators(lambda op: op.kind == "slices")
def test_one_axis_only(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    fails(op, arguments, TypeError, "axis is (0, 1), expected an int", axis=(0, 1))


@for_operators(lambda op: "reduction" in op.attributes)
def test_reduction(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    for reduction in ("average", None, ["sum"], 1):
        message = f"reduction is {reduction!r}, expected one of none, mean, sum"
        fails(op, arguments, ValueError, message, reduction=reduction)


@for_operators(lambda op: "ignore_index" in op.attributes)
def test_ignore_index(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    for wrong in (1.5, "1", [1]):
        fails(op, arguments, TypeError, f"ignore_index is {wrong!r}, expected an int", ignore_index=wrong)
    for wrong in (2**63, -(2**63) - 1):
        fails(op, arguments, ValueError, f"ignore_index is {wrong}, expected a 64-bit integer", ignore_index=wrong)


@for_operators(lambda op: "out_dtype" in op.attributes)
def test_out_dtype(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    for wrong, name in (("int32", "int32"), ("complex64", "complex64"), ("nonsense", "'nonsense'"), ([1], "[1]")):
        fails(op, arguments, TypeError, f"out_dtype is {name}, expected one of {FLOAT_NAMES}", out_dtype=wrong)
    swapped = np.dtype("float32").newbyteorder("S")
    with pytest.raises(TypeError, match=f"^{op.name}: out_dtype .*, expected "):
        call(op, arguments, out_dtype=swapped)


@for_operators(lambda op: "out_dtype" in op.attributes and len(op.results) > 1)
def test_out_dtype_of_each_result(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    for wrong in ((), ("float32",), ("float32",) * 3):
        message = f"out_dtype is {wrong!r}, expected one dtype or a tuple of 2"
        fails(op, arguments, TypeError, message, out_dtype=wrong)
    first, second = op.results
    for wrong, name in (("int32", "int32"), ("nonsense", "'nonsense'")):
        for result, pair in ((first, (wrong, "float32")), (second, (None, wrong))):
            message = f"out_dtype for {result} is {name}, expected one of {FLOAT_NAMES}"
            fails(op, arguments, TypeError, message, out_dtype=pair)


@for_operators(lambda op: "out_dtype" in op.attributes and len(op.results) == 1)
def test_one_result_has_one_out_dtype(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    for wrong in (("float32",), ("float32", "float32")):
        fails(op, arguments, TypeError, f"out_dtype is {wrong}, expected one of {FLOAT_NAMES}", out_dtype=wrong)


def flags(op):
    return [name for name, default in op.attributes.items() if isinstance(default, bool)]


@for_operators(flags)
def test_flags(op, rng):
    """Only a bool is one: a number may be meant for another parameter."""
    arguments = sample(op, (4, 3), "float32", rng)
    for name in flags(op):
        for wrong in (1, 0, "yes", None, [True], np.float32(1)):
            fails(op, arguments, TypeError, f"{name} is {wrong!r}, expected a bool", **{name: wrong})
        for right in (True, False):
            expected = [bits(result) for result in call(op, arguments, **{name: right})]
            assert [bits(result) for result in call(op, arguments, **{name: np.bool_(right)})] == expected


@for_operators(lambda op: "check" in op.attributes)
def test_check_changes_nothing_on_the_cpu(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    expected = [bits(result) for result in call(op, arguments)]
    for check in (False, True):
        assert [bits(result) for result in call(op, arguments, check=check)] == expected
        name = "labels" if "labels" in op.inputs else "indices"
        wrong = arguments | {name: np.full_like(arguments[name], 99)}
        with pytest.raises(ValueError, match=f"^{op.name}: {name}\\[0\\] is 99, expected"):
            call(op, wrong, check=check)


@for_operators(lambda op: "alpha" in op.attributes)
def test_alpha(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    for wrong in ("large", None, [1.0, 2.0]):
        fails(op, arguments, TypeError, f"alpha is {wrong!r}, expected a number", alpha=wrong)


@for_operators(lambda op: "labels" in op.inputs)
@pytest.mark.parametrize("integer", ["int32", "int64"])
def test_labels_out_of_range(op, integer, rng):
    for optional in (False, True):
        for shape, place in (((6, 3), (4,)), ((2, 3, 5), (1, 2)), ((70000, 3), (69999,)), ((2, 3, 33000), (1, 7))):
            arguments = sample(op, shape, "float32", rng, integer=integer, optional=optional)
            for wrong in (-1, 3, np.iinfo(integer).min, np.iinfo(integer).max - 3, 2**30):
                arguments["labels"].flat[-1] = 99
                arguments["labels"][place] = wrong
                named = ", ".join(map(str, place))
                fails(op, arguments, ValueError, f"labels[{named}] is {wrong}, expected 0 to 2")


@for_operators(lambda op: "labels" in op.inputs)
def test_the_ignored_label_alone_is_ignored(op, rng):
    arguments = sample(op, (6, 3), "float32", rng)
    arguments["labels"][4] = -1
    fails(op, arguments, ValueError, "labels[4] is -1, expected 0 to 2 or ignore_index -2", ignore_index=-2)
    call(op, arguments, ignore_index=-1)


@for_operators(lambda op: "labels" in op.inputs)
def test_labels_that_are_out_of_order_in_memory(op, rng):
    arguments = sample(op, (4, 3, 5), "float32", rng)
    arguments["labels"][1, 4] = 7
    turned = {name: np.asfortranarray(value) for name, value in arguments.items()}
    fails(op, turned, ValueError, "labels[1, 4] is 7, expected 0 to 2")


@for_operators(lambda op: "indices" in op.inputs)
@pytest.mark.parametrize("integer", ["int32", "int64"])
def test_indices_out_of_range(op, integer, rng):
    for lengths, place in (((6,), (4,)), ((3, 5), (1, 2)), ((70000,), (69999,))):
        arguments = sample(op, (6, 3), "float32", rng, integer=integer, indices=lengths)
        for wrong in (-7, 6, np.iinfo(integer).min, np.iinfo(integer).max - 3, 2**30):
            arguments["indices"].flat[-1] = 99
            arguments["indices"][place] = wrong
            named = ", ".join(map(str, place))
            fails(op, arguments, ValueError, f"indices[{named}] is {wrong}, expected -6 to 5")


@for_operators(lambda op: "shape" in op.attributes)
def test_shape_argument(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    fails(op, arguments, ValueError, "shape is (-1, 3), expected sizes of at least 0", shape=(-1, 3))
    fails(op, arguments, TypeError, "shape is 4, expected a tuple of ints", shape=4)
    fails(op, arguments, TypeError, "shape is 1.5, expected an int", shape=(1.5, 3))


OPERATORS = [*operators().values(), *graph_operators().values()]


class Accepted(Exception):
    """The values were found to be right, and a kernel would be compiled next."""


@pytest.fixture
def checked_only(monkeypatch):
    """Calls end when all of their arguments have been checked."""

    def stop(prepared):
        raise Accepted

    monkeypatch.setattr(arrays, "plan_for", stop)


@pytest.mark.usefixtures("checked_only")
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_every_value_is_taken_or_refused_in_one_sentence(op, rng):
    known = arguments(op, lambda op: sample(op, (4, 3), "float32", rng, indices=(2,)))
    for name in attributes(op):
        for value in values():
            try:
                getattr(opgrad, op.name)(**known | {name: value})
            except Accepted:
                continue
            except (TypeError, ValueError, NotImplementedError) as error:
                text = str(error)
                assert text.startswith(f"{op.name}: "), (name, text)
                assert "\n" not in text
                assert len(text) < 1000


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: opgrad.softmax(x, np.array([True, False])), "softmax: axis is True, expected an int"),
        (lambda x: opgrad.softmax(x, True), "softmax: axis is True, expected an int"),
        (lambda x: opgrad.softmax(x, 2**70), f"softmax: axis is {2**70}, expected a 64-bit integer"),
        (lambda x: opgrad.split_training(x, 5), "split_training: split is 5, expected a tuple of ints"),
        (lambda x: opgrad.split_training(x, "ab"), "split_training: split is 'ab', expected a tuple of ints"),
        (
            lambda x: opgrad.mixed_precision_scale(np.ones((), "f4"), [x], np.array([True, False])),
            "mixed_precision_scale: fuse_outputs is array([ True, False]), expected a bool",
        ),
        (
            lambda x: opgrad.slice_grad(x, (9, 3), np.array([2**63 + 1], np.uint64), (9,)),
            f"slice_grad: starts is {2**63 + 1}, expected a 64-bit integer",
        ),
        (
            lambda x: opgrad.gather_grad((2**40, 2**40), np.zeros(1, int), x),
            f"gather_grad: shape is {(2**40, 2**40)}, expected fewer than {2**59} elements",
        ),
        (lambda x: opgrad.quick_gelu(x, 1j), "quick_gelu: alpha is 1j, expected a number"),
        (lambda x: opgrad.quick_gelu(x, np.complex64(1)), "quick_gelu: alpha is "),
        (lambda x: opgrad.softmax(x, where=10**400), "softmax: where is 1000"),
        (lambda x: opgrad.softmax(x, dropout=Raising()), "softmax: dropout is <hostile.Raising"),
        (lambda x: Dropout(Raising()), "Dropout: probability is <hostile.Raising"),
        (lambda x: Dropout(0.5, Raising()), "Dropout: seed is <hostile.Raising"),
        (lambda x: post_ops.linear(Raising(), 1), "post_ops.linear: alpha is <hostile.Raising"),
    ],
)
def test_the_words(call, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        call(np.ones((2, 3), np.float32))
    assert str(caught.value).startswith(message)
