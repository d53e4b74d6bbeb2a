"""Examples for recurrent layers and their gradients."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from opgrad.cli.examples.arguments import Example
from opgrad.contract import Array, reference

LSTM, GRU = 4, 3  # gates
LARGE = (64, 32, 256, 256)
# Steps, sequences, numbers of x and of a state; the direction; which optional arrays are given.
SMALL = [
    ((3, 2, 4, 5), "forward", ("bias", "initial_h", "initial_c")),
    ((4, 9, 3, 33), "reverse", ("bias", "peepholes")),
    ((3, 3, 40, 6), "bidirectional", ("bias", "initial_h", "initial_c", "peepholes")),
    ((2, 17, 1, 1), "bidirectional", ()),
    ((1, 1, 7, 3), "forward", ("initial_c",)),
]
EMPTY = [((0, 2, 3, 4), "forward", ("initial_h", "initial_c")), ((2, 0, 3, 4), "bidirectional", ("bias",))]


def _layers(rng: np.random.Generator, large: bool, gates: int) -> list[dict[str, Any]]:
    """The arguments of layers; weights as small as those of layers that are trained."""
    found = []
    for (steps, batch, inputs, hidden), direction, given in [(LARGE, "forward", ("bias",))] if large else SMALL + EMPTY:
        directions = 1 + (direction == "bidirectional")
        state, scale = (directions, batch, hidden), 1 / np.sqrt(max(hidden, inputs))
        arrays = {
            "x": rng.normal(size=(steps, batch, inputs)),
            "w": scale * rng.normal(size=(directions, gates * hidden, inputs)),
            "r": scale * rng.normal(size=(directions, gates * hidden, hidden)),
            "bias": 0.1 * rng.normal(size=(directions, 2 * gates * hidden)),
            "initial_h": rng.uniform(-1, 1, state),
            "initial_c": rng.normal(size=state),
            "peepholes": 0.3 * rng.normal(size=(directions, 3 * hidden)),
        }
        kept = {name: array for name, array in arrays.items() if name in ("x", "w", "r", *given)}
        if gates == GRU:
            kept = {name: array for name, array in kept.items() if name not in ("initial_c", "peepholes")}
        found.append({**kept, "direction": direction})
    return found


def _terms(given: dict[str, Any], backward: bool = False) -> int:
    """The longest sum, and as many again for each step that hands its errors to the next."""
    steps, batch, inputs = given["x"].shape
    rows, hidden = given["r"].shape[1:]
    products = max(inputs, hidden, rows if backward else 0, steps * batch if backward else 0)
    return int(products + 4 * steps * hidden)


def lstm_training(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [Example(given, _terms(given)) for given in _layers(rng, large, LSTM)]


def lstm_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    found = []
    for number, given in enumerate(_layers(rng, large, LSTM)):
        optional = {name: given.get(name) for name in ("bias", "initial_h", "initial_c", "peepholes")}
        results = reference("lstm_training")(
            given["x"], given["w"], given["r"], direction=given["direction"], **optional
        )
        saved = dict(zip(("y", "y_h", "y_c", "cells", "gates"), results, strict=True))
        found.append(_gradient(rng, given, saved, ("y", "cells", "gates"), number))
    return found


def gru_training(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    layers = _layers(rng, large, GRU)
    return [Example({**given, "linear_before_reset": not i % 2}, _terms(given)) for i, given in enumerate(layers)]


def gru_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    found = []
    for number, given in enumerate(_layers(rng, large, GRU)):
        linear = not number % 2
        arguments: dict[str, Any] = {
            name: given.get(name) for name in ("x", "w", "r", "bias", "initial_h", "direction")
        }
        results = reference("gru_training")(**arguments, linear_before_reset=linear)
        saved = dict(zip(("y", "y_h", "gates"), results, strict=True))
        found.append(_gradient(rng, {**given, "linear_before_reset": linear}, saved, ("y", "gates"), number, "bias"))
    return found


def _gradient(
    rng: np.random.Generator, given: dict[str, Any], saved: dict[str, Array], kept: Sequence[str], number: int,
    *read: str,
) -> Example:  # fmt: skip
    """The arguments of the gradient; every third has none of the states of the steps, or none of the last states."""
    upstream = {f"d{name}": rng.normal(size=saved[name].shape) for name in ("y", "y_h", "y_c") if name in saved}
    if number % 3 == 1:
        del upstream["dy"]
    if number % 3 == 2:
        upstream = {"dy": upstream["dy"]}
    names = ("x", "w", "r", "initial_h", "initial_c", "peepholes", "direction", "linear_before_reset", *read)
    arguments = {name: given[name] for name in names if name in given}
    return Example(arguments | {name: saved[name] for name in kept} | upstream, _terms(given, backward=True))
