"""Every attribute of every operator, given what it does not expect: one sentence with the operator's name."""

import numpy as np
import pytest
from hostile import Raising, arguments, attributes, values
from samples import sample

import opgrad
from opgrad import Dropout, post_ops
from opgrad.call import runners
from opgrad.ops import graph_operators, operators

pytestmark = pytest.mark.any_cpu

OPERATORS = [*operators().values(), *graph_operators().values()]


class Accepted(Exception):
    """The values were found to be right, and a kernel would be compiled next."""


@pytest.fixture
def checked_only(monkeypatch):
    """Calls end when all of their arguments have been checked."""

    def stop(prepared):
        raise Accepted

    monkeypatch.setattr(runners, "plan_for", stop)


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
