"""Every operator of training graphs on its examples: accuracy, memory, threads, and what is refused."""

import numpy as np
import pytest
from graph_cases import OPERATORS, arrays_of, call, changed, check_close, each_dtype, each_operator
from guards import Placed, backwards, every_second, fortran, laid_out
from samples import in_place_pairs, packed, several

import opgrad
from opgrad.cli.examples import examples, expected, listed
from opgrad.contract import NEEDS


@each_dtype
@pytest.mark.one_in(3)
def test_against_the_reference(op, dtype):
    for example in examples(op, dtype):
        check_close(call(op, example.arguments), expected(op, example.arguments), example.terms)


@each_operator
def test_inputs_are_left_as_they_are(op):
    for example in examples(op, "float32"):
        before = [array.copy() for array in arrays_of(example.arguments)]
        given = changed(example.arguments, frozen)
        call(op, given)
        for array, was in zip(arrays_of(given), before, strict=True):
            np.testing.assert_array_equal(array, was)


def frozen(array):
    array.flags.writeable = False
    return array


@each_dtype
def test_any_strides(op, dtype):
    for example in examples(op, dtype):
        expected = call(op, example.arguments)
        for layout in (every_second, backwards, fortran):
            given = changed(example.arguments, lambda array, layout=layout: laid_out(array, layout))
            for got, wanted in zip(call(op, given), expected, strict=True):
                assert got.tobytes() == wanted.tobytes()


@each_dtype
def test_out_is_written_and_nothing_around_it(op, dtype):
    for place, example in enumerate(examples(op, dtype)):
        expected = call(op, example.arguments)
        guards = [Placed(array.shape, array.dtype, offset=place % 2) for array in expected]
        call(op, example.arguments, out=packed([guard.array for guard in guards]))
        for guard, wanted in zip(guards, expected, strict=True):
            assert guard.array.tobytes() == wanted.tobytes()
            assert guard.untouched()


@pytest.mark.parametrize("op", [op for op in OPERATORS if op.in_place], ids=lambda op: op.name)
def test_results_in_the_memory_of_arguments(op):
    for example in examples(op, "float32"):
        given = example.arguments
        expected = several(getattr(opgrad, op.name)(**given))
        names = [name for name in op.results if name in given.get("needs", op.results)]
        for result, name in in_place_pairs(op, given):
            own = {**given, **changed({name: given[name]}, np.copy)}
            new = changed(dict(zip(names, expected, strict=True)), np.empty_like)
            outs = [own[name] if each == result else new[each] for each in names]
            getattr(opgrad, op.name)(**own, out=packed(outs))
            for out, wanted in zip(listed(outs), listed(expected), strict=True):
                assert out.tobytes() == wanted.tobytes()


CHOOSING = [op for op in OPERATORS if op.general and NEEDS in op.general.keywords]


@pytest.mark.parametrize("op", CHOOSING, ids=lambda op: op.name)
def test_only_what_is_needed(op):
    """Each result alone, and some of them named in another order, have the bits that they have beside all others."""
    for example in examples(op, "float32"):
        names = [name for name in op.results if name in example.arguments.get(NEEDS, op.results)]
        every = dict(zip(names, call(op, example.arguments), strict=True))
        for needs in filter(None, (*((name,) for name in names), tuple(names[:0:-1]))):
            given = example.arguments | {NEEDS: needs}
            wanted = [every[name] for name in names if name in needs]
            outs = [np.empty_like(each) for each in wanted]
            for found in (call(op, given), call(op, given, out=packed(outs)), outs):
                assert [each.tobytes() for each in found] == [each.tobytes() for each in wanted], needs


@pytest.mark.parametrize("op", [op for op in OPERATORS if op.arrays], ids=lambda op: op.name)
def test_out_may_not_overlap_an_input_in_another_way(op):
    """A result that begins one element behind the start of the largest input."""
    for example in examples(op, "float32"):
        expected = call(op, example.arguments)
        largest = max(arrays_of(example.arguments), key=lambda array: array.nbytes)
        place, like = next(((i, each) for i, each in enumerate(expected) if each.size), (0, None))
        if like is None or largest.nbytes <= like.itemsize:
            continue
        memory = np.zeros(largest.nbytes + like.nbytes + 64, np.uint8)
        inside = memory[: largest.nbytes].view(largest.dtype).reshape(largest.shape)
        inside[...] = largest
        outs = [np.empty_like(each) for each in expected]
        outs[place] = memory[like.itemsize : like.itemsize + like.nbytes].view(like.dtype).reshape(like.shape)
        given = changed(example.arguments, lambda array, old=largest, new=inside: new if array is old else array)
        with pytest.raises(ValueError, match=f"^{op.name}: out for .* overlaps"):
            call(op, given, out=packed(outs))
        return
    pytest.fail("no example has an array with more than one element, and a result")


@each_operator
def test_the_number_of_threads_changes_no_bit(op, threads):
    for example in examples(op, "float32"):
        threads(lambda example=example: call(op, example.arguments))


@each_operator
def test_foreign_objects_are_refused(op):
    (example, *_) = examples(op, "float32")
    for name, value in example.arguments.items():
        if isinstance(value, np.ndarray):
            with pytest.raises(TypeError, match=f"^{op.name}: {name} "):
                call(op, {**example.arguments, name: value.astype("complex64")})
            with pytest.raises(TypeError, match=f"^{op.name}: {name} "):
                call(op, {**example.arguments, name: None if name not in op.optional else "text"})
