"""Recurrent layers: RNN, GRU and LSTM.

Where opgrad has kernels for the layer, the forward node becomes one that also returns its gates, and one node computes
the gradient. Elsewhere the gates of all steps are computed at once from the hidden states, which the forward node
returns; only the gradients of the states go from step to step, in a Scan from the last step to the first.
"""

from collections.abc import Callable
from typing import Any

from onnx import TensorProto

from opgrad.forms.recurrent import gru_factors, gru_turn, lstm_factors, lstm_turn
from opgrad.graph.formulas import Body, Value
from opgrad.graph.messages import MICROSOFT
from opgrad.rules.node import Node
from opgrad.rules.registry import Gradients, NoGradient, decomposition, gradient
from opgrad.rules.shaping import sizes_of
from opgrad.rules.steps import Steps

LENGTHS = 4  # the place of the input with the lengths of the sequences
ACTIVATIONS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
RNN_SLOPES: dict[str, Callable[[Value], Value]] = {
    "tanh": lambda h: 1 - h * h,
    "sigmoid": lambda h: h * (1 - h),
    "relu": lambda h: (h > 0).cast(h.element_type or TensorProto.FLOAT),
}

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
    _check(node)
    kinds = TensorProto.FLOAT, TensorProto.DOUBLE
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
    for name in ("clip", "input_forget", "layout"):
        if node.get(name, 0):
            raise NoGradient(f"its attribute {name} is {node.get(name)}, expected none")
    given = [each.lower() for each in node.get("activations") or ACTIVATIONS[op] * directions]
    plain = [each.lower() for each in ACTIVATIONS[op] * directions]
    if given != plain and not (op == "RNN" and set(given) <= RNN_SLOPES.keys()):
        raise NoGradient(f"its activations are {node.get('activations')}, expected {ACTIVATIONS[op]}")
    return directions


# --- RNN ---


def _rnn_direction(steps: Steps) -> Parts:
    activations = steps.node.get("activations") or ["Tanh"] * 2
    slope = RNN_SLOPES[activations[steps.index].lower()](steps.h)

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
    z, r = steps.plus(wz + rz, bz).apply("Sigmoid"), steps.plus(wr + rr, br).apply("Sigmoid")
    r_n = steps.split(steps.r, 0)[2]
    if linear_before_reset:
        behind_reset = steps.plus(rn, bn)
        n = (wn + r * behind_reset).apply("Tanh")
    else:
        behind_reset = before
        n = steps.plus(wn + body.node("MatMul", r * before, r_n.transpose(1, 0)), bn).apply("Tanh")
    turn = gru_turn(body.concat(*steps.split(steps.r, 0)[:2], axis=0), r_n, bool(linear_before_reset))
    factors = gru_factors(z, r, n, before, behind_reset)
    (dh0,), (dz, dr, dn, dq) = steps.back([steps.dh], [steps.dy, z, r, *factors], turn, 4)
    gates = body.concat(dz, dr, axis=2)
    hidden = before if linear_before_reset else r * before
    found = steps.parts(body.concat(gates, dn, axis=2), body.concat(gates, dq, axis=2), before, [dh0])
    # Only the new state n reads the previous state through the reset gate.
    found[2] = body.concat(steps.weights(gates, before), steps.weights(dq, hidden), axis=0)
    return found


# --- LSTM ---


def _lstm_direction(steps: Steps) -> Parts:
    body, before = steps.body, steps.h_before
    inputs = steps.from_x() + body.node("MatMul", before, steps.r.transpose(1, 0))
    zi, zo, zf, zg = steps.split(inputs if steps.rb is None else inputs + steps.rb)
    peepholes = steps.of(7)
    pi, po, pf = (None, None, None) if peepholes is None else steps.split(peepholes, 0, 3)
    g = zg.apply("Tanh")
    c = _cells(steps, zi, zf, g, pi, pf)
    c_before = steps.shifted(c, steps.initial(6))
    i, f = (steps.plus(z, None if p is None else p * c_before).apply("Sigmoid") for z, p in ((zi, pi), (zf, pf)))
    o = steps.plus(zo, None if po is None else po * c).apply("Sigmoid")
    factors = lstm_factors(i, o, f, g, c.apply("Tanh"), c_before)
    turn = lstm_turn(steps.r, None if peepholes is None else steps.split(peepholes, 0, 3))
    (dh0, dc0), (dz,) = steps.back([steps.dh, steps.dc], [steps.dy, *factors], turn, 1)
    found = steps.parts(dz, dz, before, [dh0, dc0])
    if peepholes is not None:
        di, do, df, _ = steps.split(dz)
        sums = [(each * state).sum([0, 1], keepdims=False) for each, state in ((di, c_before), (do, c), (df, c_before))]
        found[7] = body.concat(*sums, axis=0)
    return found


def _cells(steps: Steps, zi: Value, zf: Value, g: Value, pi: Value | None, pf: Value | None) -> Value:
    """The cells of all steps, computed again: the forward node only returns the last ones."""
    mask = steps.mask
    i, f = (each if p is not None else each.apply("Sigmoid") for each, p in ((zi, pi), (zf, pf)))

    def turn(inner: Body, c: Value, i: Value, f: Value, g: Value, *rest: Value) -> tuple[list[Value], list[Value]]:
        if pi is not None and pf is not None:
            i = (i + c * inner.outer(pi)).apply("Sigmoid")
            f = (f + c * inner.outer(pf)).apply("Sigmoid")
        new = f * c + i * g
        new = inner.node("Where", rest[0], new, c) if rest else new
        return [new], [new]

    return steps.body.scan([steps.initial(6)], [i, f, g, *([] if mask is None else [mask])], turn)[1]
