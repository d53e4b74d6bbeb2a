"""Bad input: the exact words, the right exception, nothing written; each attribute given what it does not expect."""

import numpy as np
import pytest
from hostile import Raising, arguments, attributes, values
from samples import accepted, bits, call, each_kind, for_operators, is_float, refused, sample

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


def test_missing_and_unknown_arguments(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    required = next(name for name in op.parameters if name not in op.optional)
    rest = {name: value for name, value in arguments.items() if name != required}
    fails(op, rest, TypeError, f"missing a required argument: {required!r}")
    fails(op, arguments | {"axes": 1}, TypeError, "got an unexpected keyword argument 'axes'")
    function = getattr(opgrad, op.name)
    refused(TypeError, f"^{op.name}: too many positional arguments", function, *[None] * (len(op.parameters) + 1))
    refused(TypeError, f"^{op.name}: multiple values for argument {required!r}", function, None, **{required: None})


def of_arrays(op, arguments):
    """What is wrong with each array: a change of a right call, the error and its message."""
    for name in set(op.inputs) - op.optional:
        yield {name: None}, TypeError, f"{name} is None, expected an array"
    for name in arrays_of(op, arguments):
        array, known = arguments[name], accepted(op, name)
        mixed = "int64" if is_float(array) else "float32"
        for wrong in {"complex64", "int16", "uint8", "bool", "longdouble", "object", mixed}.difference(known):
            message = f"{name} has dtype {np.dtype(wrong).name}, expected one of {', '.join(known)}"
            yield {name: array.astype(wrong)}, TypeError, message
        swapped = array.astype(array.dtype.newbyteorder("S"))
        message = f"{name} has dtype {swapped.dtype} in foreign byte order, expected native byte order"
        yield {name: swapped}, TypeError, message
        message = f"{name} is a masked array, expected an array without a mask"
        yield {name: np.ma.masked_array(array)}, TypeError, message
        yield {name: [[1.0], [1.0, 2.0]]}, TypeError, f"{name} is list, expected an array"
        tensor = op.inputs[name]
        if tensor.dtype_of and not op.general:
            message = f"{name} has dtype float64, expected float32, the dtype of {tensor.dtype_of}"
            yield {name: array.astype("float64")}, TypeError, message
        if tensor.shape is not None:
            wrong = np.zeros((*array.shape, 2), array.dtype)
            message = f"{name} has shape {wrong.shape}, expected {array.shape}, {tensor.as_in}"
            yield {name: wrong}, ValueError, message


def of_attributes(op, arguments):
    """The same of attributes."""
    known = op.attributes
    if "axis" in known:
        for axis in (2, -3, 99):
            yield {"axis": axis}, ValueError, f"axis is {axis}, expected -2 to 1 for an array of 2 dimensions"
        for axis in (1.0, "0", None, [0], *([(0, 1)] if op.kind == "slices" else [])):
            yield {"axis": axis}, TypeError, f"axis is {axis!r}, expected an int"
    if "reduction" in known:
        for wrong in ("average", None, ["sum"], 1):
            yield {"reduction": wrong}, ValueError, f"reduction is {wrong!r}, expected one of none, mean, sum"
    if "ignore_index" in known:
        for wrong in (1.5, "1", [1]):
            yield {"ignore_index": wrong}, TypeError, f"ignore_index is {wrong!r}, expected an int"
        for wrong in (2**63, -(2**63) - 1):
            yield {"ignore_index": wrong}, ValueError, f"ignore_index is {wrong}, expected a 64-bit integer"
    if "out_dtype" in known:
        yield from of_out_dtype(op)
    for name in flags(op):  # only a bool is one: a number may be meant for another parameter
        for wrong in (1, 0, "yes", None, [True], np.float32(1)):
            yield {name: wrong}, TypeError, f"{name} is {wrong!r}, expected a bool"
    if "alpha" in known:
        for wrong in ("large", None, [1.0, 2.0]):
            yield {"alpha": wrong}, TypeError, f"alpha is {wrong!r}, expected a number"
    if "shape" in known:
        yield {"shape": (-1, 3)}, ValueError, "shape is (-1, 3), expected sizes of at least 0"
        yield {"shape": 4}, TypeError, "shape is 4, expected a tuple of ints"
        yield {"shape": (1.5, 3)}, TypeError, "shape is 1.5, expected an int"


def of_out_dtype(op):
    swapped = np.dtype("float32").newbyteorder("S")
    wrong = {"int32": "int32", "complex64": "complex64", "nonsense": "'nonsense'", swapped: swapped}
    for each, name in wrong.items():
        yield {"out_dtype": each}, TypeError, f"out_dtype is {name}, expected one of {FLOAT_NAMES}"
    yield {"out_dtype": [1]}, TypeError, f"out_dtype is [1], expected one of {FLOAT_NAMES}"
    if len(op.results) == 1:
        for pair in (("float32",), ("float32", "float32")):
            yield {"out_dtype": pair}, TypeError, f"out_dtype is {pair}, expected one of {FLOAT_NAMES}"
        return
    for pair in ((), ("float32",), ("float32",) * 3):
        yield {"out_dtype": pair}, TypeError, f"out_dtype is {pair!r}, expected one dtype or a tuple of 2"
    first, second = op.results
    for each, name in (("int32", "int32"), ("nonsense", "'nonsense'")):
        for result, pair in ((first, (each, "float32")), (second, (None, each))):
            message = f"out_dtype for {result} is {name}, expected one of {FLOAT_NAMES}"
            yield {"out_dtype": pair}, TypeError, message


def flags(op):
    return [name for name, default in op.attributes.items() if isinstance(default, bool)]


@pytest.mark.parametrize("mistakes", [of_arrays, of_attributes], ids=lambda each: each.__name__)
def test_mistakes_are_named(op, mistakes, rng):
    arguments = sample(op, (4, 3), "float32", rng, reduction="none")
    for change, error, message in mistakes(op, arguments):
        fails(op, arguments | change, error, message)


@for_operators(lambda op: op.kind == "rows")
def test_axes_must_be_adjacent(op, rng):
    arguments = sample(op, (4, 3, 2), "float32", rng)
    for axis in ((), (0, 2), (0, 0), (1, -2)):
        fails(op, arguments, ValueError, f"axis is {axis}, expected an int or a tuple of adjacent axes", axis=axis)


@each_kind
def test_lists(op, rng):
    """Nested lists are what np.asarray makes of them."""
    arguments = sample(op, (4, 3), "float64", rng)
    expected = [bits(result) for result in call(op, arguments)]
    for name in arrays_of(op, arguments):
        assert [bits(result) for result in call(op, arguments | {name: arguments[name].tolist()})] == expected


def test_too_few_dimensions(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    for name, tensor in op.inputs.items():
        if tensor.ranks.start:
            wrong = np.zeros((2,) * (tensor.ranks.start - 1), arguments[name].dtype)
            with pytest.raises(ValueError, match=f"^{op.name}: {name} has .* dimensions?, expected at least"):
                call(op, arguments | {name: wrong})


@for_operators(flags)
def test_flags_of_numpy(op, rng):
    arguments = sample(op, (4, 3), "float32", rng)
    for name in flags(op):
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
        refused(ValueError, f"^{op.name}: {name}\\[0\\] is 99, expected", call, op, wrong, check=check)


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
