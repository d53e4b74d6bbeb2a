"""Any shape, axis, memory layout and attributes, found by hypothesis; the dtypes are those of an operator's tests."""

import os

import numpy as np
import pytest
from accuracy import check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import bits, call, for_operators, packed, sample

from opgrad.contract import FLOATS

each_dtype = pytest.mark.parametrize("dtype", FLOATS)
LARGEST = 40_000  # elements: enough for vectors, tails, tiles and several parts
SETTINGS = settings(
    max_examples=20 if os.environ.get("OPGRAD_CASES") == "levels" else 40,
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def shapes(draw, least):
    """Mostly small axes, sometimes a long one."""
    lengths = draw(st.lists(st.integers(0, 9) | st.sampled_from([16, 17, 31, 33, 64, 65]), min_size=least, max_size=6))
    if lengths and draw(st.booleans()):
        lengths[draw(st.integers(0, len(lengths) - 1))] = draw(st.integers(1, 3000))
    while np.prod([max(length, 1) for length in lengths], dtype=object) > LARGEST:
        lengths[lengths.index(max(lengths))] //= 2
    return tuple(lengths)


@st.composite
def attributes(draw, op, rank):
    chosen = {}
    if op.kind == "rows":
        first = draw(st.integers(0, rank - 1))
        last = draw(st.integers(first, rank - 1))
        chosen["axis"] = draw(st.sampled_from([first, first - rank, tuple(range(first, last + 1))]))
    if op.kind == "slices":
        chosen["axis"] = draw(st.integers(-rank, rank - 1))
        chosen["indices"] = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    if op.kind == "classes":
        chosen |= {"reduction": draw(st.sampled_from(["none", "mean", "sum"]))}
        chosen |= {"ignore_index": draw(st.sampled_from([None, 0, 1, -1])), "optional": draw(st.booleans())}
    if "alpha" in op.attributes:
        chosen["alpha"] = draw(st.floats(-4, 4, width=32))
    return chosen | {"integer": draw(st.sampled_from(["int32", "int64"]))}


@st.composite
def relaid(draw, array):
    """The same values in other memory: axes permuted, reversed, spread out, off their alignment."""
    order = draw(st.permutations(range(array.ndim)))
    steps = [draw(st.sampled_from([1, 1, 1, 2, 3, -1])) for _ in order]
    lead = draw(st.sampled_from([0, 0, 1, array.itemsize]))
    lengths = [array.shape[axis] * abs(step) for axis, step in zip(order, steps, strict=True)]
    memory = np.zeros(int(np.prod(lengths)) * array.itemsize + lead, np.uint8)
    wide = np.ndarray(lengths, array.dtype, memory, lead)
    view = wide[(..., *(slice(None, None, step) for step in steps))].transpose(np.argsort(order))
    view[...] = array
    view.flags.writeable = draw(st.booleans())
    return view


@for_operators(lambda op: True)
@each_dtype
@SETTINGS
@given(data=st.data())
@pytest.mark.one_in(2)
def test_matches_the_reference_also_in_place(op, dtype, data):
    shape = data.draw(shapes({"elements": 0, "classes": 2}.get(op.kind, 1)), "shape")
    if op.kind == "classes" and not shape[1]:
        shape = (shape[0], 1, *shape[2:])
    options = data.draw(attributes(op, len(shape)), "attributes")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    arguments = sample(op, shape, dtype, rng, size=data.draw(st.sampled_from([0.1, 1.0, 30.0]), "size"), **options)
    for name, value in arguments.items():
        if isinstance(value, np.ndarray) and data.draw(st.booleans(), f"relay {name}"):
            arguments[name] = data.draw(relaid(value), name)
    expected = check(op, arguments)
    if op.in_place:
        result, names = data.draw(st.sampled_from(sorted(op.in_place.items())), "result")
        name = data.draw(st.sampled_from([each for each in names if each in arguments]), "argument")
        arguments[name].flags.writeable = True
        pairs = zip(op.results, expected, strict=True)
        outputs = [arguments[name] if each == result else np.empty_like(array) for each, array in pairs]
        call(op, arguments, out=packed(outputs))
        assert [bits(output) for output in outputs] == [bits(array) for array in expected]
