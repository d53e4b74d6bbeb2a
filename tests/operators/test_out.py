"""out=: what it may be, what is refused before anything is written, and what is never written."""

import numpy as np
import pytest
from guards import Placed
from samples import bits, call, cast, elements, for_operators, in_place_calls, packed, reference, sample

from opgrad.contract import DTYPES

SHAPES = [(1, 1), (3, 7), (5, 33), (2, 129), (2, 5, 3), (2, 6, 35), (3, 1000), (1, 70001)]


def like(results, make=np.empty_like):
    return [make(result) for result in results]


@pytest.mark.parametrize("offset", [0, 1, 64 - 8], ids=["aligned", "odd", "end of line"])
def test_nothing_around_the_result_is_written(op, dtype, offset, rng):
    for shape in SHAPES:
        arguments = sample(op, shape, dtype, rng)
        expected = call(op, arguments)
        guards = [Placed(result.shape, result.dtype, offset=offset) for result in expected]
        call(op, arguments, out=packed([guard.array for guard in guards]))
        for guard, plain in zip(guards, expected, strict=True):
            assert guard.untouched(), shape
            assert bits(guard.array) == bits(plain), shape


def test_empty_results_write_nothing(op, dtype, rng):
    shapes = [(0, 3), (2, 3, 0), (5, 9, 0), (2, 0, 0), (3, 0, 5), (0, 3, 2), (2, 5, 0, 3)]
    for shape in shapes:
        for reduction in ("none", "mean"):
            arguments = sample(op, shape, dtype, rng, axis=1, reduction=reduction)
            if op.kind == "classes" and not shape[1] and arguments["labels"].size:
                continue
            results = reference(op, arguments)
            guards = [Placed(np.shape(result), dtype) for result in results]
            call(op, arguments, out=packed([guard.array for guard in guards]))
            assert all(guard.untouched() for guard in guards), f"{shape}, {reduction}"


def test_empty_results_may_have_any_strides(op, rng):
    """NumPy gives empty arrays strides of 0 here and there; they repeat nothing."""
    arguments = sample(op, (0, 3, 2), "float32", rng, axis=1, reduction="none", indices=(0,))
    memory = np.empty(1, np.float32)
    outputs = [np.lib.stride_tricks.as_strided(memory, r.shape, (0,) * r.ndim) for r in call(op, arguments)]
    assert all(output.size == 0 for output in outputs)
    call(op, arguments, out=packed(outputs))


def test_nothing_between_spaced_rows_is_written(op, dtype, rng):
    arguments = sample(op, (5, 33), dtype, rng, reduction="none")
    expected = call(op, arguments)
    wide = [Placed((2 * result.shape[0], *result.shape[1:]), result.dtype) for result in expected]
    gaps = [guard.array[1::2] for guard in wide]
    for gap in gaps:
        gap[...] = 7
    results = call(op, arguments, out=packed([guard.array[::2] for guard in wide]))
    assert all((gap == 7).all() for gap in gaps)
    assert all(guard.untouched() for guard in wide)
    assert [bits(result) for result in results] == [bits(result) for result in expected]


def test_in_place(op, dtype, rng):
    for shape in [(5, 33), (2, 5, 3), (2, 6, 35), (3, 5000), (1, 140000)]:
        arguments = sample(op, shape, dtype, rng)
        expected = call(op, arguments)
        for name, own, outputs in in_place_calls(op, arguments, expected):
            results = call(op, own, out=packed(outputs))
            assert [bits(array) for array in results] == [bits(array) for array in expected], f"{shape}, {name}"


@for_operators(lambda op: op.kind in ("elements", "rows") and len(op.inputs) > 1 and "factor" not in op.inputs)
def test_both_arguments_may_be_one_array(op, dtype, rng):
    arguments = sample(op, (5, 33), dtype, rng)
    names = elements(op, arguments)
    shared = arguments[names[0]]
    arguments |= dict.fromkeys(names, shared)
    expected = [bits(array) for array in call(op, arguments | {name: shared.copy() for name in names})]
    assert [bits(array) for array in call(op, arguments)] == expected


def refused(op, arguments, outputs, error, message):
    """The call fails with this message, and no array changed; so it does with an attribute."""
    arrays = [*outputs, *(value for value in arguments.values() if isinstance(value, np.ndarray))]
    before = [bits(array) for array in arrays]
    for more in ({}, {"out_scale": 2.0}) if op.general else ({},):
        with pytest.raises(error, match=message):
            call(op, arguments, **more, out=packed(outputs))
    assert [bits(array) for array in arrays] == before


def test_other_overlaps_are_refused(op, dtype, rng):
    arguments = sample(op, (5, 33), dtype, rng, reduction="none")
    expected = call(op, arguments)
    for place, result in enumerate(expected):
        for name in [n for n in elements(op, arguments) if arguments[n].size == result.size]:
            memory = np.empty(result.size + 1, result.dtype)
            shifted, moved = memory[:-1].reshape(result.shape), memory[1:].reshape(result.shape)
            shifted[...] = arguments[name].reshape(result.shape)
            outputs = like(expected)
            outputs[place] = moved
            given = arguments | {name: shifted.reshape(arguments[name].shape)}
            message = f"^{op.name}: out for .* overlaps {name}, expected .*separate memory"
            refused(op, given, outputs, ValueError, message)


def test_arguments_that_must_stay_are_refused(op, dtype, rng):
    arguments = sample(op, (5, 33), dtype, rng, reduction="none")
    expected = call(op, arguments)
    for place, (result, array) in enumerate(zip(op.results, expected, strict=True)):
        for name in elements(op, arguments):
            if name not in op.in_place.get(result, ()) and arguments[name].shape == array.shape:
                outputs = like(expected)
                outputs[place] = arguments[name]
                refused(op, arguments, outputs, ValueError, f"overlaps {name}, expected separate memory")


def test_integers_are_never_overwritten(op, rng):
    arguments = sample(op, (5, 33), "float64", rng, reduction="none", indices=(5, 33))
    expected = call(op, arguments)
    for place, result in enumerate(expected):
        for name in set(arguments) & {"labels", "indices"}:
            if arguments[name].size >= result.size > 0:
                outputs = like(expected)
                outputs[place] = arguments[name].ravel()[: result.size].view(np.float64).reshape(result.shape)
                refused(op, arguments, outputs, ValueError, f"overlaps {name}, expected separate memory")


@for_operators(lambda op: len(op.results) > 1)
def test_results_that_overlap_are_refused(op, rng):
    arguments = sample(op, (5, 33), "float32", rng, reduction="none")
    memory = np.empty((5, 33), np.float32)
    message = f"^{op.name}: out for .* overlaps loss, expected separate memory"
    refused(op, arguments, [memory[:, 0], memory], ValueError, message)


def wrong_outputs(op, result):
    """Arrays that cannot take this result: (array, error, words of the message)."""
    if op.general:
        yield np.zeros(result.shape, np.int32), TypeError, "has dtype int32, expected one of float32, float64"
    else:
        other = DTYPES["float64" if result.dtype != np.float64 else "float32"]
        yield np.zeros(result.shape, other), TypeError, f"has dtype {other.name}, expected {result.dtype.name}"
    yield np.zeros((*result.shape, 1), result.dtype), ValueError, "has shape .*, expected "
    yield np.zeros((*result.shape, 0), result.dtype), ValueError, "has shape .*, expected "
    locked = np.zeros_like(result)
    locked.flags.writeable = False
    yield locked, ValueError, "read-only, expected a writable array"
    if result.size > 1:
        repeated = np.lib.stride_tricks.as_strided(np.zeros(1, result.dtype), result.shape, (0,) * result.ndim)
        yield repeated, ValueError, "repeats elements .*, expected distinct"
    swapped = result.dtype.newbyteorder("S")
    if swapped != result.dtype:
        yield np.zeros(result.shape, swapped), TypeError, "expected"


def test_wrong_out_is_refused(op, dtype, rng):
    arguments = sample(op, (5, 33), dtype, rng, reduction="none")
    expected = call(op, arguments)
    for place, (name, result) in enumerate(zip(op.results, expected, strict=True)):
        for wrong, error, words in wrong_outputs(op, result):
            outputs = like(expected, np.zeros_like)
            outputs[place] = wrong
            refused(op, arguments, outputs, error, f"^{op.name}: out for {name} .*{words}")


@pytest.mark.parametrize("wrong", [[], "text", 3, [1.0]], ids=str)
def test_out_must_be_an_array(op, wrong, rng):
    arguments = sample(op, (5, 33), "float32", rng)
    given = wrong if len(op.results) == 1 else (wrong,) * len(op.results)
    with pytest.raises(TypeError, match=f"^{op.name}: out .*, expected a NumPy array"):
        call(op, arguments, out=given)


@for_operators(lambda op: len(op.results) > 1)
def test_out_must_be_a_tuple_for_two_results(op, rng):
    arguments = sample(op, (5, 33), "float32", rng)
    outputs = call(op, arguments)
    for wrong in (outputs[0], list(outputs), outputs[:1], (*outputs, outputs[0])):
        with pytest.raises(TypeError, match=f"^{op.name}: out is .*, expected a tuple of 2 arrays"):
            call(op, arguments, out=wrong)


@for_operators(lambda op: {"labels", "indices"} & set(op.inputs))
def test_a_failed_call_leaves_out_alone(op, dtype, rng):
    arguments = sample(op, (5, 33), dtype, rng, reduction="none")
    name = "labels" if "labels" in arguments else "indices"
    guards = [Placed(result.shape, result.dtype) for result in call(op, arguments)]
    arguments[name] = arguments[name].copy()
    arguments[name][-1] = 99
    with pytest.raises(ValueError, match=f"^{op.name}: {name}"):
        call(op, arguments, out=packed([guard.array for guard in guards]))
    assert all(guard.unwritten() for guard in guards)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@for_operators(lambda op: op.kind == "elements")
def test_half_precision_is_rounded_once(op, dtype, rng):
    """A half-precision result is the float32 one rounded, where the inputs are the same numbers."""
    arguments = sample(op, (7, 131), dtype, rng)
    wide = {n: cast(v, "float32") if isinstance(v, np.ndarray) else v for n, v in arguments.items()}
    exact = call(op, wide)[0]
    assert bits(call(op, arguments)[0]) == bits(cast(exact, dtype))
