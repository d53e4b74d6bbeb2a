"""Recurrent layers that keep what their gradients need, and these gradients, step by step.

A step is over N sequences at once: h and c are [N, H], x[t] is [N, I].
"""

import functools
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from opgrad.contract import IN_GRAPHS, OnnxName, Tensor, choosing, chosen, like, one_of, operator, shaped_like
from opgrad.contract.attributes import Array, Attributes, Beside, Shape, Shapes, flag, integer, number
from opgrad.ops.activation import sigmoid


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


def _of_inputs(dz: Array, x: Array, w: Array) -> tuple[Array, Array, Array]:
    """The gradients of x, of W and of its bias, from those of the sums that x takes part in."""
    dx = np.einsum("tdng,dgi->tni", dz, w)
    return dx, np.einsum("tdng,tni->dgi", dz, x), dz.sum((0, 2))


def _reset_back(r: Sequence[Array], bias: Array, dn: Array, s: Array, h: Array) -> tuple[Array, Array, Array]:
    """Of n = tanh(… + (s * h) @ R.T), whose argument has the gradient dn: dh, and that of the sums of s and n."""
    reset = dn @ r[2]
    return reset * s, reset * h * s * (1 - s), dn


def _linear_back(r: Sequence[Array], bias: Array, dn: Array, s: Array, h: Array) -> tuple[Array, Array, Array]:
    """The same from n = tanh(… + s * (h @ R.T + bias))."""
    return (dn * s) @ r[2], dn * (h @ r[2].T + bias) * s * (1 - s), dn * s


NUMBERS = ("float32", "float64")
DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}
LSTM, GRU = 4, 3  # gates
NO_CLIPPING = 3.4e38  # from here on: 1.19.2 writes the largest float32 where nothing is clipped


# --- shapes: T steps of N sequences of I numbers, D directions, states of H numbers ---------------------------------


def _lengths(operator: str) -> Tensor:
    def refused(shapes: Shapes, attributes: Attributes) -> Shape:
        raise NotImplementedError(f"{operator}: sequence_lens is given, expected none: sequences are as long as x")

    return Tensor(("int32",), refused)


def _tensor(axes: str, as_in: str, parts: int = 1) -> Tensor:
    """An array whose axes are named by the letters above; G is so many times H."""

    def shape(shapes: Shapes, attributes: Attributes) -> Shape:
        given = attributes["hidden_size"]
        hidden = shapes["r"][2] if given is None else given
        sizes = dict(zip("TNI", shapes["x"], strict=True))
        sizes |= {"D": DIRECTIONS[attributes["direction"]], "H": hidden, "G": parts * hidden}
        return tuple(sizes[axis] for axis in axes)

    return Tensor(NUMBERS, shape, as_in, dtype_of="x", ranks=range(len(axes), len(axes) + 1))


def _weights(gates: int, columns: str, of: str) -> Tensor:
    return _tensor(f"DG{columns}", f"directions, {gates} gates of each number, numbers of {of}", gates)


def _vectors(parts: int) -> Tensor:
    return _tensor("DG", f"directions, {parts} times the numbers of a state", parts)


def _steps(parts: int = 1) -> Tensor:
    each = "numbers of a state" if parts == 1 else f"{parts} gates of each number of a state"
    return _tensor("TDNG", f"steps, directions, sequences, {each}", parts)


STATE = _tensor("DNH", "directions, sequences, numbers of a state")
X = Annotated[Array, Tensor(NUMBERS, ranks=range(3, 4))]
State = Annotated[Array, STATE]
Steps = Annotated[Array, _steps()]
LstmW = Annotated[Array, _weights(LSTM, "I", "x")]
LstmR = Annotated[Array, _weights(LSTM, "H", "a state")]
LstmBias = Annotated[Array, _vectors(2 * LSTM)]
LstmGates = Annotated[Array, _steps(LSTM)]
Peepholes = Annotated[Array, _vectors(3)]
GruW = Annotated[Array, _weights(GRU, "I", "x")]
GruR = Annotated[Array, _weights(GRU, "H", "a state")]
GruBias = Annotated[Array, _vectors(2 * GRU)]
GruGates = Annotated[Array, _steps(GRU)]
OF_X = like("x", NUMBERS)
OF_W = shaped_like("w", NUMBERS, dtype_of="x")
OF_R = shaped_like("r", NUMBERS, dtype_of="x")


# --- attributes -----------------------------------------------------------------------------------------------------


def _none_clipped(what: str, value: Any, beside: Beside) -> float:
    found = number(what, value)
    if found != 0 and not found >= NO_CLIPPING:
        raise NotImplementedError(f"{what} is {found}, expected 0: nothing is clipped")
    return 0.0


def _separate_gates(what: str, value: Any, beside: Beside) -> bool:
    if flag(what, value):
        raise NotImplementedError(f"{what} is True, expected False: the gates i and f are not coupled")
    return False


def _time_first(what: str, value: Any, beside: Beside) -> int:
    if integer(what, value):
        raise NotImplementedError(f"{what} is {value}, expected 0: the first axis of x is time")
    return 0


Direction = Annotated[str, one_of(*DIRECTIONS)]
Clip = Annotated[float, _none_clipped]
InputForget = Annotated[bool, _separate_gates]
Layout = Annotated[int, _time_first]
ATTRIBUTES: dict[str, Any] = {"hidden_size": None, "direction": "forward", "clip": 0.0, "layout": 0}
LSTM_ATTRIBUTES = ATTRIBUTES | {"input_forget": 0}
GRU_ATTRIBUTES = ATTRIBUTES | {"linear_before_reset": 0}
# onnxruntime does not let custom operators read lists of text, so that a node may not have them.
UNREAD = ("activations",)


# --- LSTM -----------------------------------------------------------------------------------------------------------


@operator(
    support=IN_GRAPHS,
    results={"y": _steps(), "y_h": STATE, "y_c": STATE, "cells": _steps(), "gates": _steps(LSTM)},
    onnx=OnnxName(
        "LSTMTraining", outputs=("y?", "y_h?", "y_c?", "cells?", "gates?"), attributes=LSTM_ATTRIBUTES, unread=UNREAD
    ),
)
def lstm_training(
    x: X, w: LstmW, r: LstmR, bias: LstmBias | None = None,
    sequence_lens: Annotated[Array, _lengths("lstm_training")] | None = None,
    initial_h: State | None = None, initial_c: State | None = None, peepholes: Peepholes | None = None,
    hidden_size: int | None = None, direction: Direction = "forward",
    input_forget: InputForget = False, clip: Clip = 0.0, layout: Layout = 0, *, out: Any = None,
) -> Any:  # fmt: skip
    """A layer of long short-term memory, with the cells and gates that its gradient needs.

    x: steps x sequences x numbers of input, T x N x I; float32 or float64.
    w: the weights of x, D x 4H x I: rows of the gates i, o, f and g behind each other; D directions; of the dtype of x.
    r: the weights of the states, D x 4H x H; of the dtype of x.
    bias: D x 8H, what is added to x W and then what is added to h R; None: 0.
    sequence_lens: is refused; all sequences have T steps.
    initial_h, initial_c: the states and cells before the first step, D x N x H; None: 0.
    peepholes: D x 3H, what the gates i, o and f take of the cells; None: nothing.
    hidden_size: H, as r has it, or None.
    direction: "forward", "reverse" (from the last step to the first) or "bidirectional" (D = 2).
    input_forget, clip, layout: False, 0 and 0; others are refused.

    Returns (y, y_h, y_c, cells, gates): the states of all steps, T x D x N x H; the last states and cells,
    D x N x H; the cells of all steps, T x D x N x H; the gates i, o, f and g of all steps, T x D x N x 4H.
    Raises TypeError, ValueError, NotImplementedError for what is refused.

    Formula: i = sigmoid(x Wi + h Ri + bi + Pi * c), f likewise, g = tanh(x Wg + h Rg + bg); c = f * c + i * g;
    o = sigmoid(x Wo + h Ro + bo + Po * c); h = o * tanh(c). Source: com.microsoft LSTMTraining.

    Example:
    >>> x = np.ones((2, 1, 1), np.float32)  # two steps, one sequence, one feature
    >>> w, r = np.full((1, 4, 1), 0.5, np.float32), np.full((1, 4, 1), 0.1, np.float32)
    >>> y, y_h, y_c, cells, gates = opgrad.lstm_training(x, w, r)
    >>> y.ravel()
    array([0.1743, 0.2787], dtype=float32)
    """
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


@operator(
    "dx, dw, dr, … from dy, dy_h, dy_c through h = o * tanh(c), c = f * c before + i * g, from the last step on",
    support=IN_GRAPHS,
    results={
        "dx": OF_X,
        "dw": OF_W,
        "dr": OF_R,
        "dbias": _vectors(8),
        "dinitial_h": STATE,
        "dinitial_c": STATE,
        "dpeepholes": _vectors(3),
    },
    onnx=OnnxName(
        "LSTMGrad",
        (
            *("x", "w", "r", "sequence_lens?", "initial_h?", "initial_c?", "y", "cells", "gates"),
            *("dy?", "dy_h?", "dy_c?", "peepholes?"),
        ),
        ("dx?", "dw?", "dr?", "dbias?", "dinitial_h?", "dinitial_c?", "dpeepholes?"),
        LSTM_ATTRIBUTES,
        unread=UNREAD,
    ),
    general=choosing(),
)
def lstm_grad(
    x: X, w: LstmW, r: LstmR, y: Steps, cells: Steps, gates: LstmGates,
    dy: Steps | None = None, dy_h: State | None = None, dy_c: State | None = None,
    sequence_lens: Annotated[Array, _lengths("lstm_grad")] | None = None,
    initial_h: State | None = None, initial_c: State | None = None, peepholes: Peepholes | None = None,
    hidden_size: int | None = None, direction: Direction = "forward",
    input_forget: InputForget = False, clip: Clip = 0.0, layout: Layout = 0,
    *, needs: tuple[str, ...] | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """Gradients of lstm_training with respect to its arrays.

    x, w, r, sequence_lens, initial_h, initial_c, peepholes, hidden_size, direction, input_forget, clip, layout: as
        given to lstm_training; float32 or float64, all of one dtype.
    y, cells, gates: its results of these names.
    dy, dy_h, dy_c: gradients with respect to y, y_h and y_c, of their shapes; None: 0.

    Returns (dx, dw, dr, dbias, dinitial_h, dinitial_c, dpeepholes), or those in needs, of the shapes of x, w, r, bias
    (D x 8H), initial_h, initial_c and peepholes (D x 3H). Raises TypeError, ValueError, NotImplementedError.

    Formula: with dh and dc of h and c, from the last step to the first: dh += dy; do = dh * tanh(c) * o * (1 - o);
    dc += dh * o * (1 - tanh(c)**2) + Po * do; di = dc * g * i * (1 - i); df = dc * c before * f * (1 - f);
    dg = dc * i * (1 - g * g); dz = (di, do, df, dg); dx = dz W; dw = sum of dz x; dr = sum of dz h before; dbias = sum
    of dz; dh before = dz R; dc before = dc * f + Pi * di + Pf * df.
    Source: com.microsoft LSTMGrad; the original gets no peepholes, and leaves out what goes through them.

    Example:
    >>> x = np.ones((2, 1, 1), np.float32)
    >>> w, r = np.full((1, 4, 1), 0.5, np.float32), np.full((1, 4, 1), 0.1, np.float32)
    >>> y, _, _, cells, gates = opgrad.lstm_training(x, w, r)
    >>> dx, dw, dr, *_ = opgrad.lstm_grad(x, w, r, y, cells, gates, dy=np.ones_like(y))
    >>> dx.ravel()
    array([0.3076, 0.2187], dtype=float32)
    """
    state = len(r), x.shape[1], r.shape[2]
    dy, peep = _or_zeros(dy, *y.shape), _or_zeros(peepholes, len(r), 3, r.shape[2])
    first_h, first_c, dh0, dc0 = (_or_zeros(each, *state) for each in (initial_h, initial_c, dy_h, dy_c))
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
    names = ("dx", "dw", "dr", "dbias", "dinitial_h", "dinitial_c", "dpeepholes")
    found = dx, dw, dr, np.concatenate([dbias, dbias], 1), dh0, dc0, dp.reshape(len(r), -1)
    return chosen(dict(zip(names, found, strict=True)), needs)


# --- GRU ------------------------------------------------------------------------------------------------------------


@operator(
    support=IN_GRAPHS,
    results={"y": _steps(), "y_h": STATE, "gates": _steps(GRU)},
    onnx=OnnxName("GRUTraining", outputs=("y?", "y_h?", "gates?"), attributes=GRU_ATTRIBUTES, unread=UNREAD),
)
def gru_training(
    x: X, w: GruW, r: GruR, bias: GruBias | None = None,
    sequence_lens: Annotated[Array, _lengths("gru_training")] | None = None, initial_h: State | None = None,
    hidden_size: int | None = None, direction: Direction = "forward", linear_before_reset: bool = False,
    clip: Clip = 0.0, layout: Layout = 0, *, out: Any = None,
) -> Any:  # fmt: skip
    """A layer of gated recurrent units, with the gates that its gradient needs.

    x: steps x sequences x numbers of input, T x N x I; float32 or float64.
    w: the weights of x, D x 3H x I: rows of the gates z, r and n behind each other; D directions; of the dtype of x.
    r: the weights of the states, D x 3H x H; of the dtype of x.
    bias: D x 6H, what is added to x W and then what is added to h R; None: 0.
    sequence_lens: is refused; all sequences have T steps.
    initial_h: the states before the first step, D x N x H; None: 0.
    hidden_size: H, as r has it, or None.
    direction: "forward", "reverse" (from the last step to the first) or "bidirectional" (D = 2).
    linear_before_reset: whether n takes r * (h R + b) (as PyTorch) instead of (r * h) R + b.
    clip, layout: 0; others are refused.

    Returns (y, y_h, gates): the states of all steps, T x D x N x H; the last states, D x N x H; the gates z, r and n of
    all steps, T x D x N x 3H. Raises TypeError, ValueError, NotImplementedError for what is refused.

    Formula: z = sigmoid(x Wz + h Rz + bz), r likewise; n = tanh(x Wn + (r * h) Rn + bn); h = (1 - z) * n + z * h.
    Source: com.microsoft GRUTraining.

    Example:
    >>> x = np.ones((2, 1, 1), np.float32)  # two steps, one sequence, one feature
    >>> w, r = np.full((1, 3, 1), 0.5, np.float32), np.full((1, 3, 1), 0.1, np.float32)
    >>> y, y_h, gates = opgrad.gru_training(x, w, r)
    >>> y.ravel()
    array([0.1745, 0.2851], dtype=float32)
    """
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


@operator(
    "dx, dw, dr, … from dy, dy_h through h = (1 - z) * n + z * h before, from the last step on",
    support=IN_GRAPHS,
    results={"dx": OF_X, "dw": OF_W, "dr": OF_R, "dbias": _vectors(6), "dinitial_h": STATE},
    onnx=OnnxName(
        "GRUGrad",
        ("x", "w", "r", "bias?", "sequence_lens?", "initial_h?", "y", "gates", "dy?", "dy_h?"),
        ("dx?", "dw?", "dr?", "dbias?", "dinitial_h?"),
        GRU_ATTRIBUTES,
        unread=UNREAD,
    ),
    general=choosing(),
)
def gru_grad(
    x: X, w: GruW, r: GruR, y: Steps, gates: GruGates, dy: Steps | None = None, dy_h: State | None = None,
    bias: GruBias | None = None,
    sequence_lens: Annotated[Array, _lengths("gru_grad")] | None = None, initial_h: State | None = None,
    hidden_size: int | None = None, direction: Direction = "forward", linear_before_reset: bool = False,
    clip: Clip = 0.0, layout: Layout = 0, *, needs: tuple[str, ...] | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """Gradients of gru_training with respect to its arrays.

    x, w, r, bias, sequence_lens, initial_h, hidden_size, direction, linear_before_reset, clip, layout: as given to
        gru_training; float32 or float64, all of one dtype.
    y, gates: its results of these names.
    dy, dy_h: gradients with respect to y and y_h, of their shapes; None: 0.

    Returns (dx, dw, dr, dbias, dinitial_h), or those in needs, of the shapes of x, w, r, bias (D x 6H) and initial_h.
    Raises TypeError, ValueError, NotImplementedError.

    Formula: with dh of h, from the last step to the first: dh += dy; dz = dh * (h before - n) * z * (1 - z);
    dn = dh * (1 - z) * (1 - n * n); dr = (dn Rn) * h before * r * (1 - r); dx = (dz, dr, dn) W; dh before = dh * z +
    (dn Rn) * r + (dz, dr) R. Source: com.microsoft GRUGrad.

    Example:
    >>> x = np.ones((2, 1, 1), np.float32)
    >>> w, r = np.full((1, 3, 1), 0.5, np.float32), np.full((1, 3, 1), 0.1, np.float32)
    >>> y, _, gates = opgrad.gru_training(x, w, r)
    >>> dx, dw, dr, *_ = opgrad.gru_grad(x, w, r, y, gates, dy=np.ones_like(y))
    >>> dx.ravel()
    array([0.1542, 0.1113], dtype=float32)
    """
    directions, _, hidden = r.shape
    dy, biases = _or_zeros(dy, *y.shape), _or_zeros(bias, directions, 2, 3 * hidden)[:, 1]
    first_h, dh0 = (_or_zeros(each, directions, x.shape[1], hidden) for each in (initial_h, dy_h))
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
    found = {"dx": dx, "dw": dw, "dr": dr, "dbias": np.concatenate([dbias, dz_h.sum((0, 2))], 1), "dinitial_h": dh0}
    return chosen(found, needs)
