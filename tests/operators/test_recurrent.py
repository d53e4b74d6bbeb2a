"""Recurrent layers: the references against finite differences, larger sizes, what is wanted, errors."""

import numpy as np
import pytest
from graph_cases import call, changed, check_close

import opgrad
from opgrad.cli.examples import examples, expected, layers, listed
from opgrad.ops import graph_operators

OPERATORS = {name: graph_operators()[name] for name in ("lstm_training", "lstm_grad", "gru_training", "gru_grad")}
LAYERS = {"lstm": ("y", "y_h", "y_c", "cells", "gates"), "gru": ("y", "y_h", "gates")}
INPUTS = ("x", "w", "r", "bias", "initial_h", "initial_c", "peepholes")
STEP = 1e-5


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
    """Along random directions of all arrays at once, and of one at a time."""
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
    for each in (*shapes, None):
        moved = {key: rng.normal(size=shape) for key, shape in shapes.items() if each in (key, None)}
        ends = []
        for step in (STEP, -STEP):
            there = results_of(
                name, arrays | {key: arrays[key] + step * move for key, move in moved.items()} | attributes
            )
            ends.append(sum((there[key[1:]] * dy).sum() for key, dy in upstream.items()))
        slope = sum((found[f"d{key}"] * move).sum() for key, move in moved.items())
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * STEP), rtol=1e-7, atol=1e-8, err_msg=str(each))


# Sizes beyond a tile, a panel, a chunk of products and a unit of sequences, and such as end a little behind one.
LARGER = [((5, 37, 150, 70), "forward", ("bias", "initial_h")), ((3, 19, 33, 131), "bidirectional", ("bias",))]


@pytest.mark.parametrize("op", OPERATORS.values(), ids=OPERATORS)
def test_larger(op, threads, monkeypatch):
    monkeypatch.setattr(layers, "SMALL", LARGER)
    monkeypatch.setattr(layers, "EMPTY", [])
    for example in examples(op, "float32"):
        opgrad.set_num_threads(2)
        together = call(op, example.arguments)
        check_close(together, expected(op, example.arguments), example.terms)
        opgrad.set_num_threads(1)
        for alone, each in zip(call(op, example.arguments), together, strict=True):
            assert alone.tobytes() == each.tobytes()


@pytest.mark.parametrize("name", ["lstm_grad", "gru_grad"])
def test_only_what_is_needed(name):
    op = OPERATORS[name]
    for example in examples(op, "float32")[:3]:
        every = dict(zip(op.results, call(op, example.arguments), strict=True))
        for needs in [(each,) for each in op.results] + [("dx", "dw"), ("dr", "dinitial_h", "dbias")]:
            found = listed(getattr(opgrad, name)(**example.arguments, needs=needs))
            for each, array in zip([each for each in op.results if each in needs], found, strict=True):
                assert array.tobytes() == every[each].tobytes(), each


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


def small(**change):
    shapes = {"x": (3, 2, 4), "w": (1, 20, 4), "r": (1, 20, 5)}
    return {name: np.zeros(shape) for name, shape in shapes.items()} | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((3, 4))}, "x has 2 dimensions, expected 3"),
        ({"w": np.zeros((1, 20, 3))}, r"w has shape \(1, 20, 3\), expected \(1, 20, 4\)"),
        ({"w": np.zeros((1, 15, 4))}, r"w has shape \(1, 15, 4\), expected \(1, 20, 4\)"),
        ({"r": np.zeros((1, 21, 5))}, r"r has shape \(1, 21, 5\), expected \(1, 20, 5\)"),
        ({"direction": "bidirectional"}, r"w has shape \(1, 20, 4\), expected \(2, 20, 4\)"),
        ({"bias": np.zeros((1, 20))}, r"bias has shape \(1, 20\), expected \(1, 40\)"),
        ({"initial_h": np.zeros((1, 3, 5))}, r"initial_h has shape \(1, 3, 5\), expected \(1, 2, 5\)"),
        ({"peepholes": np.zeros((1, 20))}, r"peepholes has shape \(1, 20\), expected \(1, 15\)"),
        ({"r": np.zeros((1, 20, 5), "float32")}, "r has dtype float32, expected float64, the dtype of x"),
        ({"x": np.zeros((3, 2, 4), "float16")}, "x has dtype float16, expected one of float32, float64"),
        ({"direction": "both"}, "direction is 'both', expected one of forward, reverse, bidirectional"),
        ({"sequence_lens": np.zeros(2, "int32")}, "sequence_lens is given, expected none"),
        ({"clip": 1.5}, "clip is 1.5, expected 0"),
        ({"input_forget": True}, "input_forget is True, expected False"),
        ({"layout": 1}, "layout is 1, expected 0"),
        ({"hidden_size": 4}, r"w has shape \(1, 20, 4\), expected \(1, 16, 4\)"),
    ],
)
def test_errors(change, message):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=f"^lstm_training: {message}"):
        opgrad.lstm_training(**small(**change))


def test_errors_of_gradients():
    given = changed(examples(OPERATORS["gru_grad"], "float64")[0].arguments, np.asarray)
    with pytest.raises(ValueError, match=r"^gru_grad: gates has shape .*, expected .*, steps, directions, sequences"):
        opgrad.gru_grad(**{**given, "gates": given["gates"][..., 1:]})
    with pytest.raises(ValueError, match=r"^gru_grad: needs is \('dy',\), expected some of dx, dw, dr, dbias"):
        opgrad.gru_grad(**given, needs=("dy",))
