"""Attributes are read at each call: a number in an object that changes never finds the plan of its old value."""

import enum

import numpy as np
import pytest

import opgrad
from opgrad import post_ops
from opgrad.call import arrays
from opgrad.ops.reference.dropout import Dropout


class Number:
    """A number that changes, with the hash and the equality of an object."""

    def __init__(self, value):
        self.value = value

    def __float__(self):
        return float(self.value)

    def __index__(self):
        return int(self.value)


class Reduction(str, enum.Enum):  # noqa: UP042, whose own str() is not its value
    SUM = "sum"
    NONE = "none"


class Word(str):
    __slots__ = ()

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return True


X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
LABELS = np.array([0, 1, 3])


def changed(call, number, before, after):
    """That a call follows the value of `number`, given anew each time, whatever was asked before."""
    for value in (before, after, before):
        number.value = value
        found, expected = call(number), call(value)
        np.testing.assert_array_equal(found, expected)
        assert found.shape == expected.shape


def test_numbers_that_change():
    changed(lambda n: opgrad.leaky_relu(X, n), Number(0.5), 0.5, 0.25)
    changed(lambda n: opgrad.leaky_relu(X, alpha=n), Number(0.5), 0.5, 0.25)
    changed(lambda n: opgrad.quick_gelu_grad(X, X, n), Number(1.0), 1.0, 2.0)
    changed(lambda n: opgrad.softmax(X, logit_scale=n), Number(0.5), 0.5, 0.25)


def test_integers_that_change():
    changed(lambda n: opgrad.softmax(X, n), Number(0), 0, 1)
    changed(lambda n: opgrad.softmax(X, axis=(n,)), Number(0), 0, 1)
    changed(lambda n: opgrad.gather_grad((n, 4), LABELS, X), Number(4), 4, 6)
    changed(lambda n: opgrad.gather_grad([n, 4], LABELS, X), Number(4), 4, 6)
    loss = lambda n: opgrad.softmax_cross_entropy_loss(X, LABELS, ignore_index=n)[0]  # noqa: E731
    changed(loss, Number(0), 0, 3)


def test_arrays_of_one_number():
    alpha = np.array(0.5)
    before = opgrad.leaky_relu(X, alpha)
    alpha[...] = 0.25
    assert not np.array_equal(opgrad.leaky_relu(X, alpha), before)
    np.testing.assert_array_equal(opgrad.leaky_relu(X, alpha), opgrad.leaky_relu(X, 0.25))


def test_words():
    for word in (Reduction.SUM, Reduction.NONE, Word("sum"), Word("none"), np.str_("none")):
        found = opgrad.softmax_cross_entropy_loss(X, LABELS, reduction=word)[0]
        np.testing.assert_array_equal(
            found, opgrad.softmax_cross_entropy_loss(X, LABELS, reduction=str.__str__(word))[0]
        )
    with pytest.raises(ValueError, match="reduction is 'median', expected one of none, mean, sum"):
        opgrad.softmax_cross_entropy_loss(X, LABELS, reduction=Word("median"))


def test_attributes_objects_that_change():
    number, dropout = Number(0.5), Dropout(0.5, seed=1)
    for value in (0.5, 0.0, 0.5):
        number.value = value
        dropout.probability, dropout.seed = number, Number(7)
        assert (dropout.probability, dropout.seed) == (value, 7)
        np.testing.assert_array_equal(opgrad.softmax(X, dropout=dropout), opgrad.softmax(X, dropout=Dropout(value, 7)))
    clip = post_ops.clip(0.0, 0.5)
    for value in (0.5, 0.25, 0.5):
        number.value = value
        clip.beta = number
        expected = opgrad.softmax(X, post_ops=[post_ops.clip(0.0, value)])
        np.testing.assert_array_equal(opgrad.softmax(X, post_ops=[clip]), expected)
    with pytest.raises(ValueError, match=r"probability is 2\.0, expected 0 to 1"):
        dropout.probability = 2
    with pytest.raises(TypeError, match=r"post_ops\.clip: beta is 'x', expected a number"):
        clip.beta = "x"


def test_plans_of_calls_like_an_example_keep_its_numbers():
    number, out = Number(0.5), np.empty_like(X)
    planned = opgrad.plan(opgrad.leaky_relu, X, number, out=out)
    number.value = 0.25
    np.testing.assert_array_equal(planned(X, out=out), opgrad.leaky_relu(X, 0.5))


def test_what_is_no_number():
    with pytest.raises(TypeError, match="leaky_relu: alpha is 'x', expected a number"):
        opgrad.leaky_relu(X, Word("x"))
    with pytest.raises(TypeError, match=r"softmax: axis is 'x', expected an int"):
        opgrad.softmax(X, (0, "x"))


@pytest.mark.parametrize(
    "attributes", [{"logit_scale": 2.0}, {"where": True}, {"axis": 0, "result_scale": 3}], ids=repr
)
def test_the_same_call_again_is_found_by_its_own_arguments(attributes, monkeypatch, rng):
    """What reads arguments takes longer than the kernel for 1,000 numbers."""
    x = rng.standard_normal((4, 5)).astype("float32")
    attributes |= {"where": x > 0} if "where" in attributes else {}
    first = opgrad.softmax(x, **attributes)
    monkeypatch.delattr(arrays, "as_given")
    assert np.array_equal(opgrad.softmax(x, **attributes), first, equal_nan=True)
