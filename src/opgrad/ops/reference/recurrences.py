"""Recurrent layers step by step, and their gradients from the last step to the first: what the declarations refer to.

A step is over N sequences at once: h and c are [N, H], x[t] is [N, I].
"""

import functools
from collections.abc import Sequence

import numpy as np

from opgrad.contract import Array


def sigmoid(z: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -z))


def orders(direction: str, steps: int) -> list[range]:
    """The steps of each direction in its own time."""
    forward = range(steps)
    each = {"forward": [forward], "reverse": [forward[::-1]], "bidirectional": [forward, forward[::-1]]}
    return each[direction]


def _or_zeros(array: Array | None, *shape: int) -> Array:
    """A copy of an array in this shape, or zeros in place of one that is not given."""
    return np.zeros(shape) if array is None else array.reshape(shape).copy()


def before(order: range, states: Array, first: Array) -> Array:
    """The states before each step, by its place in x."""
    found = np.zeros_like(states)
    for place, t in enumerate(order):
        found[t] = states[order[place - 1]] if place else first
    return found


# --- LSTM ---


def lstm(
    x: Array,
    w: Array,
    r: Array,
    bias: Array | None,
    initial_h: Array | None,
    initial_c: Array | None,
    peepholes: Array | None,
    direction: str,
) -> tuple[Array, Array, Array, Array, Array]:
    """y, the last states and cells, the cells and the gates of all steps."""
    (steps, batch, _), (directions, _, hidden) = x.shape, r.shape
    y_h, y_c = (_or_zeros(state, directions, batch, hidden) for state in (initial_h, initial_c))
    y = np.zeros((steps, *y_h.shape))
    cells, gates = np.zeros_like(y), np.zeros((*y.shape[:-1], 4 * y.shape[-1]))
    # What joins W @ x and what joins R @ h are added to the same sums; peepholes are of the gates i, o and f.
    biases, peep = _or_zeros(bias, directions, 2, 4 * hidden).sum(1), _or_zeros(peepholes, directions, 3, hidden)
    for d, order in enumerate(orders(direction, steps)):
        h, c = y_h[d], y_c[d]
        for t in order:
            i, o, f, g = np.split(x[t] @ w[d].T + h @ r[d].T + biases[d], 4, axis=-1)
            i, f, g = sigmoid(i + peep[d, 0] * c), sigmoid(f + peep[d, 2] * c), np.tanh(g)
            c = f * c + i * g
            o = sigmoid(o + peep[d, 1] * c)
            h = o * np.tanh(c)
            y[t, d], cells[t, d], gates[t, d] = h, c, np.concatenate([i, o, f, g], -1)
        y_h[d], y_c[d] = h, c
    return y, y_h, y_c, cells, gates


def lstm_gradients(
    arrays: dict[str, Array | None], direction: str
) -> tuple[Array, Array, Array, Array, Array, Array, Array]:
    """dx, dw, dr, dbias, dinitial_h, dinitial_c and dpeepholes, from the arrays of lstm_grad by name."""
    x, w, r, y, cells, gates = (_given(arrays, name) for name in ("x", "w", "r", "y", "cells", "gates"))
    state = len(r), x.shape[1], r.shape[2]
    dy, peep = _or_zeros(arrays["dy"], *y.shape), _or_zeros(arrays["peepholes"], len(r), 3, r.shape[2])
    names = "initial_h", "initial_c", "dy_h", "dy_c"
    first_h, first_c, dh0, dc0 = (_or_zeros(arrays[name], *state) for name in names)
    dp, dz = np.zeros_like(peep), np.zeros_like(gates)
    for d, order in enumerate(orders(direction, len(x))):
        dh, dc, c_before = dh0[d], dc0[d], before(order, cells[:, d], first_c[d])
        for t in order[::-1]:
            i, o, f, g = np.split(gates[t, d], 4, axis=-1)
            c, p = cells[t, d], c_before[t]
            dh = dh + dy[t, d]
            do = dh * np.tanh(c) * o * (1 - o)
            dc = dc + dh * o * (1 - np.tanh(c) ** 2) + do * peep[d, 1]
            di, df, dg = dc * g * i * (1 - i), dc * p * f * (1 - f), dc * i * (1 - g * g)
            dz[t, d] = np.concatenate([di, do, df, dg], -1)
            dp[d] += [(di * p).sum(0), (do * c).sum(0), (df * p).sum(0)]
            dh, dc = dz[t, d] @ r[d], dc * f + di * peep[d, 0] + df * peep[d, 2]
        dh0[d], dc0[d] = dh, dc
    dx, dw, dbias = _of_inputs(dz, x, w)
    h_before = [before(order, y[:, d], first_h[d]) for d, order in enumerate(orders(direction, len(x)))]
    dr = np.stack([np.einsum("tng,tnh->gh", dz[:, d], each) for d, each in enumerate(h_before)])
    return dx, dw, dr, np.concatenate([dbias, dbias], 1), dh0, dc0, dp.reshape(len(r), -1)


def _given(arrays: dict[str, Array | None], name: str) -> Array:
    found = arrays[name]
    assert found is not None
    return found


def _of_inputs(dz: Array, x: Array, w: Array) -> tuple[Array, Array, Array]:
    """The gradients of x, of W and of its bias, from those of the sums that x takes part in."""
    dx = np.einsum("tdng,dgi->tni", dz, w)
    return dx, np.einsum("tdng,tni->dgi", dz, x), dz.sum((0, 2))


# --- GRU ---


def gru(
    x: Array, w: Array, r: Array, bias: Array | None, initial_h: Array | None, direction: str, linear_before_reset: bool
) -> tuple[Array, Array, Array]:
    """y, the last states and the gates of all steps."""
    (steps, batch, _), (directions, _, hidden) = x.shape, r.shape
    y_h = _or_zeros(initial_h, directions, batch, hidden)
    y = np.zeros((steps, *y_h.shape))
    gates, biases = np.zeros((*y.shape[:-1], 3 * hidden)), _or_zeros(bias, directions, 2, 3 * hidden)
    for d, order in enumerate(orders(direction, steps)):
        h = y_h[d]
        for t in order:
            z, s, n = np.split(x[t] @ w[d].T + biases[d, 0], 3, axis=-1)
            rz, rs, rn = np.split(r[d], 3)
            bz, bs, bn = np.split(biases[d, 1], 3)
            z, s = sigmoid(z + h @ rz.T + bz), sigmoid(s + h @ rs.T + bs)
            n = np.tanh(n + (s * (h @ rn.T + bn) if linear_before_reset else (s * h) @ rn.T + bn))
            h = (1 - z) * n + z * h
            y[t, d], gates[t, d] = h, np.concatenate([z, s, n], -1)
        y_h[d] = h
    return y, y_h, gates


def gru_gradients(
    arrays: dict[str, Array | None], direction: str, linear_before_reset: bool
) -> tuple[Array, Array, Array, Array, Array]:
    """dx, dw, dr, dbias and dinitial_h, from the arrays of gru_grad by name."""
    x, w, r, y, gates = (_given(arrays, name) for name in ("x", "w", "r", "y", "gates"))
    directions, _, hidden = r.shape
    dy, biases = _or_zeros(arrays["dy"], *y.shape), _or_zeros(arrays["bias"], directions, 2, 3 * hidden)[:, 1]
    first_h, dh0 = (_or_zeros(arrays[name], directions, x.shape[1], hidden) for name in ("initial_h", "dy_h"))
    dz_x, dz_h, dr = np.zeros_like(gates), np.zeros_like(gates), np.zeros(r.shape)
    back = _linear_back if linear_before_reset else _reset_back
    for d, order in enumerate(orders(direction, len(x))):
        dh, h_before = dh0[d], before(order, y[:, d], first_h[d])
        step = functools.partial(back, np.split(r[d], 3), np.split(biases[d], 3)[2])
        for t in order[::-1]:
            z, s, n = np.split(gates[t, d], 3, axis=-1)
            h, dh = h_before[t], dh + dy[t, d]
            dz, dn = dh * (h - n) * z * (1 - z), dh * (1 - z) * (1 - n * n)
            more, ds, dq = step(dn, s, h)
            dz_x[t, d], dz_h[t, d] = np.concatenate([dz, ds, dn], -1), np.concatenate([dz, ds, dq], -1)
            dr[d] += np.concatenate([dz.T @ h, ds.T @ h, dq.T @ (h if linear_before_reset else s * h)])
            dh = dh * z + more + np.concatenate([dz, ds], -1) @ r[d, : 2 * h.shape[-1]]
        dh0[d] = dh
    dx, dw, dbias = _of_inputs(dz_x, x, w)
    return dx, dw, dr, np.concatenate([dbias, dz_h.sum((0, 2))], 1), dh0


def _reset_back(r: Sequence[Array], bias: Array, dn: Array, s: Array, h: Array) -> tuple[Array, Array, Array]:
    """Of n = tanh(… + (s * h) @ R.T), whose argument has the gradient dn: dh, and that of the sums of s and n."""
    reset = dn @ r[2]
    return reset * s, reset * h * s * (1 - s), dn


def _linear_back(r: Sequence[Array], bias: Array, dn: Array, s: Array, h: Array) -> tuple[Array, Array, Array]:
    """The same from n = tanh(… + s * (h @ R.T + bias))."""
    return (dn * s) @ r[2], dn * (h @ r[2].T + bias) * s * (1 - s), dn * s
