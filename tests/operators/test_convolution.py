"""The gradients of convolution and of transposed convolution: references, what is computed, errors, large sizes."""

import itertools

import numpy as np
import pytest
import torch
from graph_cases import call, check_close
from samples import dispatcher
from torch.nn import functional

import opgrad
from opgrad.cli.examples import examples, listed
from opgrad.cli.examples import expected as expected_of
from opgrad.cli.examples.arrays import convolved, transposed
from opgrad.cpu.programs import convolution
from opgrad.ops import graph_operators

CONV, TRANSPOSED = (graph_operators()[name] for name in ("conv_grad", "conv_transpose_grad"))
RNG = np.random.default_rng(0)
# Examples, and what is cut off in front of a transposed convolution's whole result, which pads do not always say.
CASES = {
    "one axis": (convolved(RNG, (2, 4, 9), 6, (3,), strides=(2,), pads=(2, 1), dilations=(2,), group=2), None),
    "two axes": (convolved(RNG, (2, 3, 6, 7), 4, (3, 2), strides=(2, 1), pads=(1, 0, 2, 1), dilations=(1, 2)), None),
    "three axes": (
        convolved(RNG, (1, 2, 4, 5, 4), 2, (2, 3, 2), strides=(1, 2, 3), pads=(1,) * 6, dilations=(2, 1, 1), group=2),
        None,
    ),
    "transposed, one axis": (
        transposed(RNG, (2, 4, 5), 3, (3,), strides=(2,), pads=(1, 0), output_padding=(1,), group=2),
        (1,),
    ),
    "transposed, same": (transposed(RNG, (1, 2, 3, 4), 2, (3, 4), strides=(2, 3), auto_pad="SAME_LOWER"), (1, 1)),
    "transposed to a shape": (transposed(RNG, (1, 2, 3, 3), 2, (3, 2), strides=(2, 2), output_shape=(4, 8)), (2, 0)),
    "transposed, three axes": (transposed(RNG, (1, 2, 2, 3, 2), 1, (2, 1, 3), dilations=(2, 1, 1), group=2), (0, 0, 0)),
}


def of_case(case):
    return TRANSPOSED if case.startswith("transposed") else CONV


def padded(x, around):
    """With so many zeros in front of each axis and behind it; where a number is negative, so many are cut off."""
    return functional.pad(x, [each for pair in [*around][::-1] for each in pair])


@pytest.mark.parametrize("case", CASES)
def test_references_are_the_derivatives_of_pytorchs_forward(case):
    (example, begin), op = CASES[case], of_case(case)
    given = example.arguments
    dy, x, w = (torch.tensor(given[name], requires_grad=name != "dy") for name in ("dy", "x", "w"))
    rank, names = x.dim() - 2, {"strides": "stride", "dilations": "dilation", "group": "groups"}
    options = {mine: given[name] for name, mine in names.items() if given.get(name)}
    if op is CONV:
        y = padded(x, zip(given["pads"][:rank], given["pads"][rank:], strict=True))
        y = getattr(functional, f"conv{rank}d")(y, w, **options)
    else:
        y = getattr(functional, f"conv_transpose{rank}d")(x, w, **options)
        sizes = zip(begin, y.shape[2:], dy.shape[2:], strict=True)
        y = padded(y, [(-cut, size + cut - whole) for cut, whole, size in sizes])
    expected = [*torch.autograd.grad(y, (x, w), dy), dy.sum((0, *range(2, dy.dim())))]
    for found, exact in zip(op.reference(**given), expected, strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-12, atol=1e-12)


def of_dtype(example, dtype="float32"):
    dtype = opgrad.contract.DTYPES[dtype]
    return {k: v.astype(dtype) if isinstance(v, np.ndarray) else v for k, v in example.arguments.items()}


LARGER = {
    "several chunks": convolved(RNG, (70, 12, 20, 20), 10, (3, 3), pads=(1, 1, 1, 1)),
    "channels beyond a tile": convolved(RNG, (3, 37, 14, 14), 33, (3, 3), pads=(1, 1, 1, 1)),
    "depthwise": convolved(RNG, (4, 24, 20, 20), 24, (5, 5), group=24, pads=(2, 2, 2, 2)),
    "two filters a channel": convolved(RNG, (4, 6, 20, 20), 12, (3, 3), group=6, strides=(2, 2)),
    "points": convolved(RNG, (5, 40, 9, 9), 48, (1, 1)),
    "points with strides": convolved(RNG, (5, 16, 9, 9), 24, (1, 1), strides=(2, 2)),
    "wide strides": convolved(RNG, (3, 5, 50, 50), 8, (3, 3), strides=(5, 4), pads=(2, 0, 0, 2)),
    "large windows": convolved(RNG, (2, 3, 40, 40), 4, (11, 11), strides=(4, 4), pads=(5, 5, 5, 5)),
    "a window as large as x": convolved(RNG, (6, 20, 5, 5), 30, (5, 5)),
    "windows across images": convolved(RNG, (3, 6, 30, 40), 20, (30, 3), pads=(2, 1, 1, 0), group=2),
    "windows with dilation": convolved(RNG, (2, 3, 5, 20, 21), 40, (3, 7, 6), dilations=(2, 2, 3), strides=(1, 2, 1)),
    "a window beyond x": convolved(RNG, (70, 3, 6, 7), 30, (9, 8), pads=(2, 1, 1, 0)),
    "a long axis": convolved(RNG, (2, 2, 30_000), 3, (25,), dilations=(7,)),
    "three axes": convolved(RNG, (2, 6, 7, 9, 11), 7, (3, 3, 3), pads=(1,) * 6, strides=(1, 2, 1)),
    "transposed, several chunks": transposed(RNG, (40, 12, 20, 20), 5, (3, 3), strides=(2, 2), pads=(1,) * 4),
    "transposed, channels beyond a tile": transposed(RNG, (3, 33, 9, 9), 37, (2, 2), strides=(2, 2)),
    "transposed, depthwise": transposed(RNG, (2, 24, 10, 10), 1, (5, 5), group=24, pads=(2,) * 4),
    "transposed, wide strides": transposed(RNG, (2, 5, 12, 12), 3, (2, 3), strides=(5, 4), pads=(1, 0, 0, 1)),
    "transposed, a long axis": transposed(RNG, (2, 2, 30_000), 3, (25,), dilations=(7,)),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("case", LARGER)
@pytest.mark.one_in(2)
def test_larger(case, dtype, threads):
    op, example = of_case(case), LARGER[case]
    given = of_dtype(example, dtype)
    check_close(threads(lambda: call(op, given)), expected_of(op, given), example.terms)


def test_matrices_of_windows_take_every_attribute(monkeypatch, threads):
    """What is chosen for windows that are large beside the images holds for all."""
    monkeypatch.setattr(convolution, "by_windows", lambda *_: True)
    for example in (*examples(CONV, "float32"), *examples(CONV, "bfloat16")):
        found = threads(lambda example=example: listed(dispatcher(CONV)(**example.arguments)))
        check_close(found, expected_of(CONV, example.arguments), example.terms)


CHUNKED = {
    "several chunks": (28_000, (1, 100_000, 1 << 30)),
    "transposed, several chunks": (40 * 39 * 39, (1, 100_000, 1 << 30)),
    "windows across images": (LARGER["windows across images"].terms, (1, 1 << 13)),
}


@pytest.mark.parametrize("case", CHUNKED)
def test_chunks_of_any_size_give_the_same_sums(case, monkeypatch):
    (terms, sizes), op, given = CHUNKED[case], of_case(case), of_dtype(LARGER[case])
    expected = expected_of(op, given)
    for size in sizes:
        monkeypatch.setattr(convolution, "CHUNK_BYTES", size)
        check_close(listed(dispatcher(op)(**given)), expected, terms)


def test_numbers_that_are_not_finite_reach_the_gradients():
    x, w, dy = np.ones((1, 2, 5, 5), "float32"), np.ones((3, 2, 3, 3), "float32"), np.ones((1, 3, 3, 3), "float32")
    dy[0, 1, 1, 1] = np.inf
    dx, dw, db = opgrad.conv_grad(dy, x, w)
    assert np.isposinf(dx[:, :, 1:4, 1:4]).all()
    assert np.isfinite(dx[:, :, 0]).all()
    assert np.isposinf(dw[1]).all()
    assert np.isfinite(dw[[0, 2]]).all()
    assert np.isposinf(db[1])
    assert np.isfinite(db[[0, 2]]).all()


def test_elements_that_no_window_reaches_get_zero():
    x, w, dy = np.ones((1, 1, 7, 8), "float32"), np.ones((1, 1, 2, 2), "float32"), np.ones((1, 1, 2, 2), "float32")
    dx, _, _ = opgrad.conv_grad(dy, x, w, strides=(4, 4))
    expected = np.zeros((7, 8))
    for i, j in itertools.product((0, 1, 4, 5), (0, 1, 4, 5)):
        expected[i, j] = 1
    np.testing.assert_array_equal(dx[0, 0], expected)


def test_empty():
    for shape, filters, window, group in (
        ((2, 0, 4, 4), 0, (3, 3), 1),
        ((0, 2, 4, 4), 3, (3, 3), 1),
        ((2, 2, 2, 2), 3, (3, 3), 1),
    ):
        example = convolved(np.random.default_rng(0), shape, filters, window, group=group)
        assert not any(each.any() for each in opgrad.conv_grad(**example.arguments))


def test_the_bias_of_no_channels_has_a_gradient():
    dy, x, w = np.ones((2, 3, 4, 4)), np.zeros((2, 0, 4, 4)), np.zeros((0, 3, 1, 1))
    assert opgrad.conv_transpose_grad(dy, x, w)[2].tolist() == [32] * 3
    assert opgrad.conv_grad(dy, x, w.reshape(3, 0, 1, 1))[2].tolist() == [32] * 3
