"""Native calls of softmax with attributes: post-ops and dropout in objects that change, operands that broadcast."""

import copy
import gc
import pickle
import sys

import numpy as np
import pytest
from callers import functions_met
from samples import bits

import opgrad
from opgrad import Dropout, post_ops
from opgrad.call import entries
from opgrad.post_ops import PostOp

pytestmark = pytest.mark.skipif(not entries.SUPPORTED, reason="this Python has no native calls")
X = np.linspace(-1, 1, 480).astype("float32").reshape(2, 4, 60)
ROW, COLUMN, FULL = X[0, 0] + 2, X[:, :1, :1] + 2, X * X + 1
HALF = np.float32(0.5)
CALLS = {
    "relu": lambda: {"post_ops": [post_ops.relu()]},
    "in a tuple": lambda: {"post_ops": (post_ops.relu(0.25),)},
    "row": lambda: {"post_ops": [post_ops.add(ROW)]},
    "column": lambda: {"post_ops": [post_ops.mul(COLUMN), post_ops.add(FULL)]},
    "one array twice": lambda: {"post_ops": [post_ops.mul(ROW), post_ops.add(ROW)]},
    "x": lambda: {"post_ops": [post_ops.mul(X)]},
    "numbers": lambda: {"post_ops": [post_ops.add(2.0), post_ops.max(1), post_ops.mul(HALF)]},
    "select": lambda: {"post_ops": [post_ops.select(ROW > 2, -1.0)]},
    "where by row": lambda: {"where": ROW > 1.5, "logit_scale": 0.5},
    "where by column": lambda: {"where": COLUMN < 9, "logit_scale": 0.5},
    "dropout": lambda: {"dropout": Dropout(0.3, seed=5, offset=2**40)},
    "every one": lambda: {
        "where": ROW > 1.5, "dropout": Dropout(0.3, seed=-5), "post_ops": [post_ops.add(ROW)], "out_dtype": "float16",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_without_python(name):
    arguments = CALLS[name]()
    expected = bits(opgrad.softmax(X, **arguments))
    y = np.empty_like(X, dtype=arguments.get("out_dtype", "float32"))
    for _ in range(3):
        assert bits(opgrad.softmax(X, **CALLS[name]())) == expected
        y.fill(7)
        assert opgrad.softmax(X, **CALLS[name](), out=y) is y
        assert bits(y) == expected
    arguments = CALLS[name]()
    assert functions_met(opgrad.softmax, X, **arguments) == functions_met(opgrad.softmax, X, **arguments, out=y) == []


def test_gradients():
    y = opgrad.softmax(X, result_scale=2.0, save=True)[1]

    def arguments():
        return {"post_ops": [post_ops.mul(ROW), post_ops.relu()], "dropout": Dropout(0.25, seed=3)}

    expected = bits(opgrad.softmax_grad(X, y, **arguments()))
    for _ in range(3):
        assert bits(opgrad.softmax_grad(X, y, **arguments())) == expected
    assert functions_met(opgrad.softmax_grad, X, y, **arguments()) == []


def test_objects_that_change():
    """A changed field, an operand that is written to or replaced, another list: each call reads what stands there."""
    several, bias = [post_ops.linear(2.0, 1.0), post_ops.add(ROW.copy())], ROW.copy()
    y = opgrad.softmax(X)
    for _ in range(4):
        np.testing.assert_allclose(opgrad.softmax(X, post_ops=several), 2 * y + 1 + ROW, rtol=1e-6)
    several[0].alpha = 3
    np.testing.assert_allclose(opgrad.softmax(X, post_ops=several), 3 * y + 1 + ROW, rtol=1e-6)
    several[1].operands = (bias,)
    bias += 1
    for _ in range(3):
        np.testing.assert_allclose(opgrad.softmax(X, post_ops=several), 3 * y + 1 + ROW + 1, rtol=1e-6)
    several[1].name = "mul"
    np.testing.assert_allclose(opgrad.softmax(X, post_ops=several), (3 * y + 1) * bias, rtol=1e-6)
    several[1].operands = (bias[None, None, :].repeat(2, 0),)
    np.testing.assert_allclose(opgrad.softmax(X, post_ops=several), (3 * y + 1) * bias, rtol=1e-6)
    several[1].operands = (bias[:-1],)
    with pytest.raises(ValueError, match=r"post_ops\[1\]'s operand has shape \(59,\), expected one that broadcasts"):
        opgrad.softmax(X, post_ops=several)
    several.pop()
    np.testing.assert_allclose(opgrad.softmax(X, post_ops=several), 3 * y + 1, rtol=1e-6)
    del several[0].beta
    with pytest.raises(AttributeError, match="beta"):
        opgrad.softmax(X, post_ops=several)


def test_shapes_that_repeat_to_the_same_strides():
    """Each is native by itself."""
    for shape in ((60,), (1, 60), (1, 1, 60)):
        for _ in range(3):
            y = opgrad.softmax(X, post_ops=[post_ops.add(ROW.reshape(shape))])
        np.testing.assert_array_max_ulp(y, opgrad.softmax(X) + ROW, 2)  # sums may go in another order
        assert functions_met(opgrad.softmax, X, post_ops=[post_ops.add(ROW.reshape(shape))]) == []


def test_seeds_need_no_plan():
    dropout = Dropout(0.5, seed=1)
    drawn = {}
    for seed in (1, 2, -1, 2**64 - 1, 2**63, -(2**63), 10**12, True + 1):
        for offset in (0, 9, 2**40):
            dropout.seed, dropout.offset = seed, offset
            drawn.setdefault((dropout.seed, dropout.offset), bits(opgrad.softmax(X, dropout=dropout)))
            assert functions_met(opgrad.softmax, X, dropout=dropout) == [] or len(drawn) < 3
            assert bits(opgrad.softmax(X.copy(), dropout=copy.copy(dropout))) == drawn[dropout.seed, dropout.offset]
    assert len(set(drawn.values())) == len(drawn) == 5 * 3
    object.__setattr__(dropout, "seed", 2**70)  # around the check
    for _ in range(2):
        with pytest.raises(OverflowError):
            opgrad.softmax(X, dropout=dropout)
    del dropout.seed
    with pytest.raises(AttributeError):
        opgrad.softmax(X, dropout=dropout)


class Odd(PostOp):
    pass


def test_what_stays_pythons():
    """Lists in place of arrays, arrays and post-ops of other classes: right, whatever was native before."""
    y = opgrad.softmax(X)
    for _ in range(3):
        opgrad.softmax(X, post_ops=[post_ops.add(ROW)])
    for operand in (ROW.tolist(), ROW.view(np.recarray), memoryview(ROW), ROW[::-1], ROW.astype("float64")):
        found = opgrad.softmax(X, post_ops=[post_ops.add(operand)])
        np.testing.assert_allclose(found, y + np.asarray(operand), rtol=1e-6)
    mask = [True] * 30 + [False] * 30
    for _ in range(3):
        assert not opgrad.softmax(X, where=mask)[..., 30:].any()
    mask[:] = mask[::-1]
    assert not opgrad.softmax(X, where=mask)[..., :30].any()
    np.testing.assert_array_max_ulp(opgrad.softmax(X, post_ops=[Odd("add", operands=(ROW,))]), y + ROW, 2)


def test_they_are_copied_and_pickled():
    for each in (post_ops.linear(2.0, 1.0), post_ops.add(1.5), Dropout(0.5, seed=2**64 - 1, mask=True)):
        for other in (copy.copy(each), copy.deepcopy(each), pickle.loads(pickle.dumps(each))):
            assert repr(other) == repr(each)
        with pytest.raises(TypeError, match="unhashable"):
            hash(each)


def test_nothing_is_lost_or_kept():
    several, dropout, out = [post_ops.add(ROW), post_ops.linear(0.1, 0.2)], Dropout(0.5, seed=10**15), np.empty_like(X)
    watched = [X, ROW, several, *several, dropout, dropout.seed, several[0].operands, several[1].alpha]
    for _ in range(3):
        opgrad.softmax(X, post_ops=several, dropout=dropout, out=out)
    gc.collect()
    before = [sys.getrefcount(each) for each in watched]
    for _ in range(10_000):
        opgrad.softmax(X, post_ops=several, dropout=dropout, out=out)
    assert [sys.getrefcount(each) for each in watched] == before
