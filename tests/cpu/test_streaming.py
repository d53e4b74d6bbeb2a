"""Writing past the cache, which small arrays never do by themselves: every dtype, from every place in a cache line."""

import itertools

import numpy as np
import pytest
from accuracy import check
from guards import Placed
from primitive_attributes import typed_call
from samples import bits, call, dispatcher, sample

import opgrad
from opgrad.cli.examples import examples, listed
from opgrad.contract import DTYPES, FLOATS
from opgrad.cpu.programs import layout
from opgrad.cpu.runtime import plan
from opgrad.ops import graph_operators, loss_operators, operators
from opgrad.ops.reference.dropout import keep_mask
from opgrad.ops.reference.primitive import TYPES

LINE = 64
FORWARD = ["softmax", "log_softmax"]
ROWS = ["softmax", "log_softmax", "softmax_grad", "log_softmax_grad"]
# Lengths of rows around what is transposed, grouped, and written row by row; their numbers around groups of 8 to 32.
LENGTHS = (1, 2, 3, 7, 12, 16, 17, 31, 32, 33, 56, 57, 96, 97, 112, 113, 161, 225, 390, 800)
COUNTS = (1, 9, 31, 32, 33, 64, 65, 101)


@pytest.fixture
def streaming(monkeypatch):
    monkeypatch.setattr(plan, "last_level_cache", lambda: -1)


def hold(expected, offset, note, function, *arguments, **named):
    """A function writes these bits to `out` so many elements into a cache line, and nothing around it."""
    placed = Placed(expected.shape, expected.dtype, offset=offset * expected.itemsize)
    function(*arguments, **named, out=placed.array)
    assert bits(placed.array) == bits(expected), note
    assert placed.untouched(), note


@pytest.mark.parametrize("shape", [(9, 131), (2, 33, 130)], ids=["rows", "columns"])
@pytest.mark.parametrize("number", range(len(TYPES)))
@pytest.mark.one_in(2)
def test_attributes(number, shape, rng, streaming):
    """In the forms of `typed_call`, whose kernels are compiled anyway."""
    x, given = typed_call(number, rng, shape)
    expected = opgrad.softmax(x, 1, **given)
    for offset in range(LINE // expected.itemsize):
        hold(expected, offset, offset, opgrad.softmax, x, 1, out_scale=given["out_scale"])


def test_mask(rng, streaming):
    x = rng.normal(size=(7, 300)).astype(np.float32)
    kept, dropout = keep_mask(x.shape, 0.5, 3, 4), opgrad.Dropout(0.5, 3, 4, mask=True)
    for offset in range(LINE):
        hold(kept, offset, offset, lambda out: opgrad.softmax(x, dropout=dropout, out=(np.empty_like(x), out)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["relu", "softmax", "log_softmax"])
def test_plain_kernels(name, dtype, rng, streaming):
    function, dtype = getattr(opgrad, name), DTYPES[dtype]
    for shape in ((5, 131), (9, 700)):
        x = rng.normal(size=shape).astype(dtype)
        expected = function(x)
        for offset in range(LINE // dtype.itemsize):
            hold(expected, offset, offset, function, x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.one_in(2)
def test_rows_of_every_layout(name, dtype, rng, streaming):
    """Groups of rows wait in a buffer, whose lines begin where those of the result do. Every length, and every number
    of rows, is written from each place."""
    op, dtype = operators()[name], DTYPES[dtype]
    offsets = [0, 1, 4, LINE // dtype.itemsize - 1]
    for (first, n), (second, count) in itertools.product(enumerate(LENGTHS), enumerate(COUNTS)):
        arguments = sample(op, (count, n), dtype.name, rng)
        (expected,) = check(op, arguments)
        offset = offsets[(first + second) % len(offsets)]
        hold(expected, offset, (n, count, offset), call, op, arguments)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.one_in(2)
def test_interleaved_columns(name, dtype, rng, streaming):
    """Few columns side by side, short and long, written anywhere, and with gaps between their lines."""
    op, dtype = operators()[name], DTYPES[dtype]
    for shape in ((8, 5, 2), (33, 24, 3), (50, 7, 4), (17, 31, 8), (300, 1, 2), (3, 131, 17), (9, 1400, 3)):
        arguments = sample(op, shape, dtype.name, rng, axis=1)
        (expected,) = check(op, arguments)
        for offset in {0, 1, 4, LINE // dtype.itemsize - 1}:
            hold(expected, offset, (shape, offset), call, op, arguments)
        apart = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
        apart = {name: np.pad(value, ((0, 0), (0, 0), (0, 1)))[..., :-1] for name, value in apart.items()}
        check(op, {**arguments, **apart})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_in_parts_strided_and_in_place(name, dtype, rng, streaming):
    """Parts that several threads write, rows with something between them, and results that replace an input."""
    op = operators()[name]
    for count, n in ((9001, 15), (4099, 33), (1501, 131)):
        arguments = sample(op, (count, n), dtype, rng)
        (expected,) = check(op, arguments)
        apart = np.full((count, n + 3), 7, expected.dtype)
        call(op, arguments, out=apart[:, :n])
        assert bits(apart[:, :n]) == bits(expected), n
        assert (apart[:, n:] == 7).all()
        first = next(iter(arguments))
        call(op, arguments, out=arguments[first])
        assert bits(arguments[first]) == bits(expected), n


# --- the size of the cache -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ROWS)
def test_strips_of_whole_lines_give_the_same_bits(name, dtype, rng, streaming, monkeypatch):
    """Large columns are computed by vectors as wide as a line of the result, small ones by two registers."""
    op, dtype = operators()[name], DTYPES[dtype]
    for shape in ((2, 5, 3), (2, 33, 65), (1, 7, 130), (3, 2, 32)):
        arguments = sample(op, shape, dtype.name, rng, axis=1)
        (expected,) = check(op, arguments)
        with monkeypatch.context() as context:
            context.setattr(layout, "LARGE", 0)
            run = dispatcher(op)
            for offset in range(LINE // dtype.itemsize):
                hold(expected, offset, (shape, offset), run, **arguments)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", ROWS)
def test_columns_that_nearly_fill_the_cache_are_written_to_the_last_one(name, dtype, rng, monkeypatch):
    """They are written past the cache, too, by strips that may begin before the first column."""
    op, dtype, shape = operators()[name], DTYPES[dtype], (2, 9, 192)
    arguments = sample(op, shape, dtype.name, rng, axis=1)
    (expected,) = check(op, arguments)
    arrays = sum(each.nbytes for each in (*arguments.values(), expected) if isinstance(each, np.ndarray))
    monkeypatch.setattr(plan, "last_level_cache", lambda: 3 * arrays // 2)
    run = dispatcher(op)
    for offset in range(LINE // dtype.itemsize):
        hold(expected, offset, offset, run, **arguments)


REDUCING = [op for op in (*operators().values(), *loss_operators().values()) if op.kind in ("rows", "classes")]
# Rows of every layout, few long ones among them, and columns, alone and behind others.
ROW_SHAPES = [(count, n) for n in (1, 7, 24, 33, 50, 79, 97, 130, 150, 200, 300, 700, 1100) for count in (3, 40)]
COLUMN_SHAPES = [(2, n, inner) for n in (5, 150) for inner in (3, 37, 64)] + [(40, 5, 2), (9, 24, 3), (17, 31, 8)]
SHAPES = [*ROW_SHAPES, *COLUMN_SHAPES, (2, 70000)]


def with_caches(monkeypatch, op, arguments):
    """The results of a call that is planned anew, for a machine without a cache and for one of a huge cache."""
    for size in (1, 1 << 50):
        monkeypatch.setattr(plan, "last_level_cache", lambda size=size: size)
        yield [bits(each) for each in listed(dispatcher(op)(**arguments))]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", REDUCING, ids=lambda op: op.name)
@pytest.mark.one_in(2)
def test_the_size_of_the_cache_changes_no_bit(op, dtype, rng, monkeypatch):
    for large in (0, layout.LARGE) if op.name in FORWARD else (layout.LARGE,):
        monkeypatch.setattr(layout, "LARGE", large)  # all shapes as if they were large, or small
        for shape in SHAPES:
            without, with_much = with_caches(monkeypatch, op, of_shape(op, shape, dtype, rng))
            assert without == with_much, shape


def of_shape(op, shape, dtype, rng):
    if op.forward in operators() or op.forward is None:
        return sample(op, shape, dtype, rng, size=4.0, **({"axis": 1} if op.kind == "rows" else {}))
    arguments = sample(loss_operators()[op.forward], shape, dtype, rng, size=4.0)
    return arguments | {"dloss": np.ones_like(arguments["labels"], np.float32)}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.one_in(2)
def test_the_size_of_the_cache_changes_no_bit_of_calls_with_attributes(name, rng, monkeypatch):
    """In the form of operators/test_attributes, whose kernels are compiled anyway."""
    for shape in SHAPES:
        x, where = rng.normal(size=shape).astype("float32"), rng.random(shape) < 0.7
        given = {"x": x, "axis": 1, "where": where, "logit_scale": 0.5, "stats": True}
        without, with_much = with_caches(monkeypatch, operators()[name], given)
        assert without == with_much, shape


@pytest.mark.parametrize("op", graph_operators().values(), ids=lambda op: op.name)
@pytest.mark.one_in(3)
def test_the_size_of_the_cache_changes_no_bit_of_training_graphs(op, monkeypatch):
    for example in examples(op, "float32"):
        without, with_much = with_caches(monkeypatch, op, example.arguments)
        assert without == with_much
