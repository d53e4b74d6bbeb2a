"""Recurrent layers: RNN, GRU and LSTM.

Where opgrad has kernels for the layer, the forward node becomes one that also returns its gates, and one node computes
the gradient. Elsewhere the gates of all steps are computed at once from the hidden states, which the forward node
returns; only the gradients of the states go from step to step, in a Scan from the last step to the first.
"""

from collections.abc import Callable
from typing import Any

from onnx import TensorProto

from opgrad.onnx.graph.formulas import Body, Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.plain.recurrent import gru_factors, gru_turn, lstm_factors, lstm_turn
from opgrad.onnx.plain.recurrent_activations import ACTIVATIONS, BY_NAME, DEFAULTS, NO_CLIPPING, gates
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import Gradients, NoGradient, decomposition, gradient
from opgrad.onnx.rules.shaping import sizes_of
from opgrad.onnx.rules.steps import Steps

LENGTHS = 4  # the place of the input with the lengths of the sequences
# The gradients of one direction: of the gates' inputs by x and by h, and of its own inputs by their places.
Parts = dict[int, Value]


@gradient("RNN", constant=(LENGTHS,))
def rnn(node: Node) -> Gradients:
    """dz = dh * f'(z), dh = dy + dz @ R of the step behind; dx = dz @ W, dW = dz.T @ x, dR = dz.T @ h."""
    return _layer(node, 1, _rnn_direction)


@gradient("GRU", constant=(LENGTHS,))
def gru(node: Node) -> Gradients:
    """dh goes to the gates z and r and the new state n of h = (1 - z) * n + z * h before, from them to x, W and R."""
    if not _has_kernels(node, "GRU"):
        return _layer(node, 3, _gru_direction)
    attributes = _become(node, "GRUTraining", linear_before_reset=node.get("linear_before_reset", 0))
    y, gates = node.output(0, "_states"), node.output(2, "_gates")
    given = [node.input(place) for place in range(6)]
    dx, dw, dr, db, dh = node.results("GRUGrad", 5, *given, y, gates, *_upstream(node, 2), **attributes)
    return [dx, dw, dr, db, None, dh]


@gradient("LSTM", constant=(LENGTHS,))
def lstm(node: Node) -> Gradients:
    """dh and dc go to the gates of c = f * c before + i * g, h = o * tanh(c), and from them to x, W and R."""
    if not _has_kernels(node, "LSTM"):
        return _layer(node, 4, _lstm_direction)
    attributes = _become(node, "LSTMTraining")
    kept = node.output(0, "_states"), node.output(3, "_cells"), node.output(4, "_gates")
    x, w, r, _, lengths, h, c, peepholes = (node.input(place) for place in range(8))
    given = x, w, r, lengths, h, c, *kept, *_upstream(node, 3), peepholes
    dx, dw, dr, db, dh, dc, dp = node.results("LSTMGrad", 7, *given, **attributes)
    return [dx, dw, dr, db, None, dh, dc, dp]


@decomposition("GRUTraining", "LSTMTraining", domain=MICROSOFT)
def of_training_graphs(node: Node) -> Gradients:
    """The layer as an operator of ai.onnx, without the outputs for its own gradient operator."""
    op, count = node.proto.op_type.removesuffix("Training"), 2 + (node.proto.op_type == "LSTMTraining")
    attributes = {name: value for name, value in node.attributes.items() if name not in ("output_sequence",)}
    return node.body.nodes_of(op, count, *node.inputs, **attributes)


def _layer(node: Node, gates: int, write: Callable[[Steps], Parts]) -> Gradients:
    """The gradients of all inputs: for x the sum over the directions, for the others their concatenation."""
    directions = _check(node)
    parts = [write(Steps(node, index, gates)) for index in range(directions)]
    found: list[Value | None] = []
    for place, value in enumerate(node.inputs):
        own = [each[place] for each in parts if place in each]
        if value is None or not own:
            found.append(None)
        elif place == 0:
            found.append(own[0] if len(own) == 1 else own[0] + own[1])
        else:
            found.append(node.body.concat(*(each.unsqueeze(0) for each in own), axis=0))
    return found


def _has_kernels(node: Node, op: str) -> bool:
    """Whether opgrad has kernels for the node and its gradient. Raises what `_check` raises."""
    plain = [each.lower() for each in DEFAULTS[op] * _check(node)]
    kinds = TensorProto.FLOAT, TensorProto.DOUBLE
    if _clip(node) or node.get("input_forget", 0) or [each.lower() for each in _activations(node)] != plain:
        return False
    return not node.body.plain and node.input(LENGTHS) is None and node.x.element_type in kinds


def _become(node: Node, op: str, **more: Any) -> dict[str, Any]:
    """Change the node into the operator that returns its gates; returns the attributes, which its gradient has, too."""
    hidden = node.get("hidden_size") or sizes_of(node.required(2))[2]
    known = {"hidden_size": hidden} if isinstance(hidden, int) else {}
    attributes = {"direction": node.get("direction", "forward"), **known, **more}
    node.become(op, MICROSOFT, **attributes)
    return attributes


def _upstream(node: Node, outputs: int) -> list[Value | None]:
    """The gradients of the first outputs, None for those that nothing depends on."""
    return [node.dys[index] if index < len(node.dys) else None for index in range(outputs)]


def _check(node: Node) -> int:
    """The number of directions. Raises NoGradient for what has no rule."""
    op, directions = node.proto.op_type, 2 if node.get("direction", "forward") == "bidirectional" else 1
    if node.get("layout", 0):
        raise NoGradient(f"its attribute layout is {node.get('layout')}, expected 0")
    if not node.get("clip", 0.0) >= 0:
        raise NoGradient(f"its attribute clip is {node.get('clip')}, expected a number above 0")
    count = len(DEFAULTS[op]) * directions
    if len(_activations(node)) != count or any(each.lower() not in BY_NAME for each in _activations(node)):
        raise NoGradient(f"its activations are {node.get('activations')}, expected {count} of {', '.join(ACTIVATIONS)}")
    return directions


def _activations(node: Node) -> list[str]:
    directions = 2 if node.get("direction", "forward") == "bidirectional" else 1
    return node.get("activations") or DEFAULTS[node.proto.op_type] * directions


def _clip(node: Node) -> float:
    """What the sums of gates are clipped to; 0: nothing is."""
    clip: float = node.get("clip", 0.0)
    return clip if clip < NO_CLIPPING else 0.0


class _Gates:
    """The activations of one direction, behind clipping."""

    def __init__(self, steps: Steps):
        node, count = steps.node, len(DEFAULTS[steps.node.proto.op_type])
        numbers = node.get("activation_alpha") or [], node.get("activation_beta") or []
        self.clip, self.element_type = _clip(node), node.x.element_type
        self.own = gates(_activations(node), *numbers)[steps.index * count :][:count]

    def of(self, place: int, z: Value) -> Value:
        """What an activation makes of a sum, outside of scans and within."""
        return self.own[place].of(self._clipped(Value(z.body, z.name, self.element_type)))

    def both(self, place: int, z: Value) -> tuple[Value, Value]:
        """The same, and its derivative, which is 0 where the sum is clipped."""
        clipped, gate = self._clipped(z), self.own[place]
        y = gate.of(clipped)
        return y, self._cut(z, gate.slope(clipped, y))

    def slope(self, place: int, y: Value, z: Callable[[], Value]) -> Value:
        """The derivative where the result is y; z is asked for where that does not tell it."""
        if self.own[place].activation.by_result and not self.clip:
            return self.own[place].slope(y, y)
        return self.both(place, z())[1]

    def _clipped(self, z: Value) -> Value:
        if not self.clip:
            return z
        bottom, top = (z.body.number(each, z) for each in (-self.clip, self.clip))
        clipped = z.body.node("Max", z.body.node("Min", z, top), bottom)
        return Value(z.body, clipped.name, self.element_type)

    def _cut(self, z: Value, slope: Value) -> Value:
        return z.body.where(z.apply("Abs") > self.clip, 0.0, slope) if self.clip else slope


# --- RNN ---


def _rnn_direction(steps: Steps) -> Parts:
    def sums() -> Value:
        of_h = steps.body.node("MatMul", steps.h_before, steps.r.transpose(1, 0))
        return steps.plus(steps.from_x() + of_h, steps.rb)

    slope = _Gates(steps).slope(0, steps.h, sums)

    def turn(inner: Body, dh: Value, dy: Value, slope: Value) -> tuple[list[Value], list[Value]]:
        dz = (dy + dh) * slope
        return [inner.node("MatMul", dz, inner.outer(steps.r))], [dz]

    (dh0,), (dz,) = steps.back([steps.dh], [steps.dy, slope], turn, 1)
    return steps.parts(dz, dz, steps.h_before, [dh0])


# --- GRU ---


def _gru_direction(steps: Steps) -> Parts:
    body, before, linear_before_reset = steps.body, steps.h_before, steps.node.get("linear_before_reset", 0)
    wz, wr, wn = steps.split(steps.from_x())
    rz, rr, rn = (body.node("MatMul", before, each.transpose(1, 0)) for each in steps.split(steps.r, 0))
    bz, br, bn = (None, None, None) if steps.rb is None else steps.split(steps.rb, 0)
    gates = _Gates(steps)
    (z, of_z), (r, of_r) = (gates.both(0, steps.plus(*each)) for each in ((wz + rz, bz), (wr + rr, br)))
    r_n = steps.split(steps.r, 0)[2]
    if linear_before_reset:
        behind_reset = steps.plus(rn, bn)
        zn = wn + r * behind_reset
    else:
        behind_reset = before
        zn = steps.plus(wn + body.node("MatMul", r * before, r_n.transpose(1, 0)), bn)
    n, of_n = gates.both(1, zn)
    turn = gru_turn(body.concat(*steps.split(steps.r, 0)[:2], axis=0), r_n, bool(linear_before_reset))
    factors = gru_factors(z, n, before, behind_reset, (of_z, of_r, of_n))
    (dh0,), (dz, dr, dn, dq) = steps.back([steps.dh], [steps.dy, z, r, *factors], turn, 4)
    both = body.concat(dz, dr, axis=2)
    hidden = before if linear_before_reset else r * before
    found = steps.parts(body.concat(both, dn, axis=2), body.concat(both, dq, axis=2), before, [dh0])
    # Only the new state n reads the previous state through the reset gate.
    found[2] = body.concat(steps.weights(both, before), steps.weights(dq, hidden), axis=0)
    return found


# --- LSTM ---


def _lstm_direction(steps: Steps) -> Parts:
    body, before = steps.body, steps.h_before
    inputs = steps.from_x() + body.node("MatMul", before, steps.r.transpose(1, 0))
    zi, zo, zf, zg = steps.split(inputs if steps.rb is None else inputs + steps.rb)
    peepholes = steps.of(7)
    pi, po, pf = (None, None, None) if peepholes is None else steps.split(peepholes, 0, 3)
    gates, coupled = _Gates(steps), bool(steps.node.get("input_forget", 0))
    g, of_g = gates.both(1, zg)
    c = _cells(steps, gates, zi, None if coupled else zf, g, pi, pf)
    c_before = steps.shifted(c, steps.initial(6))
    inputs_of = ((zi, pi, c_before), (zo, po, c), (zf, pf, c_before))
    (i, of_i), (o, of_o), *rest = (
        gates.both(0, steps.plus(z, None if p is None else p * cells)) for z, p, cells in inputs_of[: 3 - coupled]
    )
    f, of_f = (1.0 - i, of_i) if coupled else rest[0]
    t = gates.own[2].of(c)
    slopes = of_i, of_o, of_f, of_g, gates.own[2].slope(c, t)
    factors = lstm_factors(i, o, f, g, t, c_before, slopes, coupled)
    turn = lstm_turn(steps.r, None if peepholes is None else steps.split(peepholes, 0, 3))
    (dh0, dc0), (dz,) = steps.back([steps.dh, steps.dc], [steps.dy, *factors], turn, 1)
    found = steps.parts(dz, dz, before, [dh0, dc0])
    if peepholes is not None:
        di, do, df, _ = steps.split(dz)
        sums = [(each * state).sum([0, 1], keepdims=False) for each, state in ((di, c_before), (do, c), (df, c_before))]
        found[7] = body.concat(*sums, axis=0)
    return found


def _cells(
    steps: Steps, gates: _Gates, zi: Value, zf: Value | None, g: Value, pi: Value | None, pf: Value | None
) -> Value:
    """The cells of all steps, computed again: the forward node returns the last ones. zf: None where f is 1 - i."""
    mask, whole = steps.mask, pi is None
    sums = [each for each in (zi, zf) if each is not None]
    weights = (pi, pf)

    def turn(inner: Body, c: Value, *now: Value) -> tuple[list[Value], list[Value]]:
        found = []
        for z, p in zip(now, weights[: len(sums)], strict=False):
            found.append(z if p is None else gates.of(0, z + c * inner.outer(p)))
        i, g, *rest = found[0], *now[len(sums) :]
        f = found[1] if zf is not None else inner.outer(one) - i
        new = f * c + i * g
        new = inner.node("Where", rest[0], new, c) if rest else new
        return [new], [new]

    one, known = steps.body.number(1.0, g), [gates.of(0, each) for each in sums] if whole else sums
    return steps.body.scan([steps.initial(6)], [*known, g, *([] if mask is None else [mask])], turn)[1]
