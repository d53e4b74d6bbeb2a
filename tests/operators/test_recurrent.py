"""Recurrent layers: the references against finite differences, larger sizes, what is wanted, errors."""

import numpy as np
import pytest
from accuracy import check_slopes
from graph_cases import call, check_close

import opgrad
from opgrad.cli.examples import examples, expected
from opgrad.ops import graph_operators

OPERATORS = {name: graph_operators()[name] for name in ("lstm_training", "lstm_grad", "gru_training", "gru_grad")}
LAYERS = {"lstm": ("y", "y_h", "y_c", "cells", "gates"), "gru": ("y", "y_h", "gates")}


def results_of(name, given):
    return dict(zip(LAYERS[name], OPERATORS[f"{name}_training"].reference(**given), strict=True))


def gradients_of(name, given, results, upstream):
    op = OPERATORS[f"{name}_grad"]
    every = given | results | upstream
    names = {*op.inputs, *op.attributes}
    return dict(zip(op.results, op.reference(**{k: v for k, v in every.items() if k in names}), strict=True))


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("name", LAYERS)
def test_reference_is_the_forwards_derivative(name, direction, linear, rng):
    if name == "lstm" and linear:
        return
    gates, directions = (4 if name == "lstm" else 3), 1 + (direction == "bidirectional")
    shapes = {"x": (3, 2, 4), "w": (directions, gates * 3, 4), "r": (directions, gates * 3, 3)}
    shapes |= {"bias": (directions, 2 * gates * 3), "initial_h": (directions, 2, 3)}
    if name == "lstm":
        shapes |= {"initial_c": (directions, 2, 3), "peepholes": (directions, 9)}
    arrays = {each: 0.5 * rng.normal(size=shape) for each, shape in shapes.items()}
    attributes = {"direction": direction} | ({"linear_before_reset": linear} if name == "gru" else {})
    results = results_of(name, arrays | attributes)
    upstream = {f"d{each}": rng.normal(size=results[each].shape) for each in ("y", "y_h", "y_c") if each in results}
    found = gradients_of(name, arrays | attributes, results, upstream)

    def total(**arrays):
        there = results_of(name, arrays | attributes)
        return sum((there[key[1:]] * dy).sum() for key, dy in upstream.items())

    check_slopes(total, arrays, {each[1:]: gradient for each, gradient in found.items()}, rng)


# Sizes beyond a tile, a panel, a chunk of products and a unit of sequences, and such as end a little behind one.
LARGER = [((5, 37, 150, 70), "forward", ("bias", "initial_h")), ((3, 19, 33, 131), "bidirectional", ("bias",))]


@pytest.mark.parametrize("op", OPERATORS.values(), ids=OPERATORS)
def test_larger(op, threads):
    for example in examples(op, "float32", cases=LARGER):
        found = threads(lambda example=example: call(op, example.arguments))
        check_close(found, expected(op, example.arguments), example.terms)


def test_the_originals_gradient_through_peepholes():
    """The original gets no peepholes: what goes through them to the cells is left out."""
    (given,) = [
        each.arguments for each in examples(OPERATORS["lstm_grad"], "float64") if "peepholes" in each.arguments
    ][:1]
    exact = opgrad.lstm_grad(**given, needs=("dpeepholes",))
    without = opgrad.lstm_grad(**{k: v for k, v in given.items() if k != "peepholes"}, needs=("dpeepholes",))
    assert without.shape == exact.shape
    assert not np.allclose(without, exact)


def test_no_steps():
    """The last states are the initial ones, and gradients go straight through."""
    example = next(e for e in examples(OPERATORS["lstm_training"], "float32") if not len(e.arguments["x"]))
    y, y_h, y_c, cells, gates = opgrad.lstm_training(**example.arguments)
    assert y.size == cells.size == gates.size == 0
    np.testing.assert_array_equal(y_h, example.arguments["initial_h"])
    np.testing.assert_array_equal(y_c, example.arguments["initial_c"])
