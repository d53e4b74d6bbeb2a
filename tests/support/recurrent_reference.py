"""Recurrent layers for the reference evaluator, which has them for one direction alone."""

import numpy as np
from onnx.reference.op_run import OpRun


def _sigmoid(z):
    return 1 / (1 + np.exp(-z))


NAMES = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
# What an activation computes, and its alpha and beta where a layer of onnxruntime gives none; None: it takes none.
ACTIVATIONS = {
    "sigmoid": (lambda z, a, b: _sigmoid(z), None, None),
    "tanh": (lambda z, a, b: np.tanh(z), None, None),
    "relu": (lambda z, a, b: np.maximum(z, 0), None, None),
    "affine": (lambda z, a, b: a * z + b, 0, 0),
    "leakyrelu": (lambda z, a, b: np.where(z < 0, a * z, z), 0.01, None),
    "thresholdedrelu": (lambda z, a, b: np.where(z > a, z, 0), 0, None),
    "scaledtanh": (lambda z, a, b: a * np.tanh(b * z), 0, 0),
    "hardsigmoid": (lambda z, a, b: np.clip(a * z + b, 0, 1), 0.2, 0.5),
    "elu": (lambda z, a, b: np.where(z < 0, a * np.expm1(np.minimum(z, 0)), z), 1, None),
    "softsign": (lambda z, a, b: z / (1 + np.abs(z)), None, None),
    "softplus": (lambda z, a, b: np.log1p(np.exp(z)), None, None),
}


def activations(op, given):
    """The activations of one direction, behind clipping, but for the last one of LSTM, which is of its cells."""
    found, left = [], [list(given.get(f"activation_{name}") or []) for name in ("alpha", "beta")]
    for name in given.get("activations") or NAMES[op] * (1 + (given.get("direction") == "bidirectional")):
        function, *numbers = ACTIVATIONS[name.lower()]
        for place, each in enumerate(left):
            numbers[place] = each.pop(0) if each and numbers[place] is not None else numbers[place]
        found.append(lambda z, function=function, numbers=numbers: function(z, *numbers))
    count, clip = len(NAMES[op]), given.get("clip") or np.inf
    own = found[given["place"] * count :][:count]
    behind = [lambda z, each=each: each(np.clip(z, -clip, clip)) for each in own[:2]]
    return [*behind, *own[2:]]


class Recurrent(OpRun):
    """A layer; `step` takes a row of W @ x with its bias, the states, R and its bias, and gives new states."""

    def _run(self, x, w, r, b=None, lengths=None, h0=None, c0=None, p=None, **attributes):
        layout, directions = attributes.get("layout") or 0, len(w)
        if layout:
            x, h0, c0 = (None if each is None else each.swapaxes(0, 1) for each in (x, h0, c0))
        steps, rows, hidden = *x.shape[:2], r.shape[2]
        zeros = np.zeros((directions, rows, hidden), x.dtype)
        y, h, c = np.zeros((steps, *zeros.shape), x.dtype), *(zeros if s is None else s for s in (h0, c0))
        h, c, b = h.copy(), c.copy(), np.zeros((directions, 2 * w.shape[1]), x.dtype) if b is None else b
        for d in range(directions):
            wb, rb = np.split(b[d], 2)
            for n in range(rows):
                order = range(steps if lengths is None else lengths[n])
                if not order:  # as onnxruntime does
                    h[d, n] = c[d, n] = 0
                for t in order[::-1] if d or attributes.get("direction") == "reverse" else order:
                    given = {**attributes, "p": np.zeros(3 * hidden) if p is None else p[d], "place": d}
                    h[d, n], c[d, n] = self.step(x[t, n] @ w[d].T + wb, h[d, n], c[d, n], r[d], rb, given)
                    y[t, d, n] = h[d, n]
        if layout:
            y, h, c = y.transpose(2, 0, 1, 3), h.swapaxes(0, 1), c.swapaxes(0, 1)
        return y, h, c


class RNN(Recurrent):
    """One gate, with an activation."""

    def _run(self, *inputs, **attributes):
        return super()._run(*inputs, **attributes)[:2]

    def step(self, z, h, c, r, rb, given):
        """The new state."""
        return activations("RNN", given)[0](z + r @ h + rb), c


class GRU(Recurrent):
    """An update gate, a reset gate, a new state."""

    def _run(self, *inputs, **attributes):
        return super()._run(*inputs, **attributes)[:2]

    def step(self, z, h, c, r, rb, given):
        """The new state."""
        (zu, zr, zn), (ru, rr, rn), (bu, br, bn) = (np.split(each, 3) for each in (z, r, rb))
        f, g = activations("GRU", given)
        update, reset = f(zu + ru @ h + bu), f(zr + rr @ h + br)
        of_h = reset * (rn @ h + bn) if given.get("linear_before_reset") else rn @ (reset * h) + bn
        return (1 - update) * g(zn + of_h) + update * h, c


class LSTM(Recurrent):
    """Gates for input, output and forgetting, and cells."""

    def step(self, z, h, c, r, rb, given):
        """The new state and cell."""
        zi, zo, zf, zg = np.split(z + r @ h + rb, 4)
        pi, po, pf = np.split(given["p"], 3)
        f, g, h = activations("LSTM", given)
        i = f(zi + pi * c)
        new = (1 - i if given.get("input_forget") else f(zf + pf * c)) * c + i * g(zg)
        return f(zo + po * new) * h(new), new
