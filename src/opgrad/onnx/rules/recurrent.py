"""Recurrent layers: RNN, GRU and LSTM.

Where opgrad has kernels for the layer, the forward node becomes one that also returns its gates, and one node computes
the gradient. Elsewhere the gates of all steps are computed at once from the hidden states, which the forward node
returns; only the gradients of the states go from step to step, in a Scan from the last step to the first.
"""

from collections.abc import Callable, Sequence
from typing import Any

from onnx import TensorProto

from opgrad.onnx.graph.formulas import Body, Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.plain.recurrent import (
    ACTIVATIONS,
    DIRECTIONS,
    NO_CLIPPING,
    SLOPES,
    Direction,
    Stepped,
    gru_gradients,
    joined,
    lstm_gradients,
    plus,
)
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import Gradients, NoGradient, decomposition, gradient
from opgrad.onnx.rules.shaping import sizes_of

BIAS, LENGTHS, H, C, PEEPHOLES = range(3, 8)  # indices of inputs
AXES = (None, 0, 0, 0, 0, 0, 0)  # along which the gradients of directions are joined; that of x is a sum
Write = Callable[[Node, Direction, Sequence[str]], list[Value]]


@gradient("RNN", constant=(LENGTHS,))
def rnn(node: Node) -> Gradients:
    """dz = dh * f'(z), dh = dy + dz @ R of the step behind; dx = dz @ W, dW = dz.T @ x, dR = dz.T @ h."""
    return _layer(node, _rnn_direction)


@gradient("GRU", constant=(LENGTHS,))
def gru(node: Node) -> Gradients:
    """dh goes to the gates z and r and the new state n of h = (1 - z) * n + z * h before, from them to x, W and R."""
    if not _has_kernels(node):
        return _layer(node, _gru_direction)
    attributes = _become(node, "GRUTraining", linear_before_reset=node.get("linear_before_reset", 0))
    y, gates = node.output(0, "_states"), node.output(2, "_gates")
    given = [node.input(index) for index in range(6)]
    dx, dw, dr, db, dh = node.results("GRUGrad", 5, *given, y, gates, *_upstream(node, 2), **attributes)
    return [dx, dw, dr, db, None, dh]


@gradient("LSTM", constant=(LENGTHS,))
def lstm(node: Node) -> Gradients:
    """dh and dc go to the gates of c = f * c before + i * g, h = o * tanh(c), and from them to x, W and R."""
    if not _has_kernels(node):
        return _layer(node, _lstm_direction)
    attributes = _become(node, "LSTMTraining")
    kept = node.output(0, "_states"), node.output(3, "_cells"), node.output(4, "_gates")
    x, w, r, _, lengths, h, c, peepholes = (node.input(index) for index in range(8))
    given = x, w, r, lengths, h, c, *kept, *_upstream(node, 3), peepholes
    dx, dw, dr, db, dh, dc, dp = node.results("LSTMGrad", 7, *given, **attributes)
    return [dx, dw, dr, db, None, dh, dc, dp]


@decomposition("GRUTraining", "LSTMTraining", domain=MICROSOFT)
def of_training_graphs(node: Node) -> Gradients:
    """The layer as an operator of ai.onnx, without the outputs for its own gradient operator."""
    op, count = node.proto.op_type.removesuffix("Training"), 2 + (node.proto.op_type == "LSTMTraining")
    attributes = {name: value for name, value in node.attributes.items() if name not in ("output_sequence",)}
    return node.body.nodes_of(op, count, *node.inputs, **attributes)


def _layer(node: Node, write: Write) -> Gradients:
    """The gradients of all inputs: for x the sum over the directions, for the others their concatenation."""
    flags, names = DIRECTIONS[node.get("direction", "forward")], _activations(node)
    dtype, count = node.x.element_type or TensorProto.FLOAT, len(names) // len(flags)
    directions = (Direction(node, *each, dtype, node.input(LENGTHS)) for each in enumerate(flags))
    parts = [write(node, each, names[each.index * count :][:count]) for each in directions]
    found: list[Value | None] = [*joined(parts, AXES)]
    return [*found[:LENGTHS], None, *found[LENGTHS:]]


def _activations(node: Node) -> list[str]:
    """The activations of all directions, as operators. Raises NoGradient for what has no rule."""
    op, flags = node.proto.op_type, DIRECTIONS.get(node.get("direction", "forward"), [])
    for name in ("layout", "input_forget"):
        if node.get(name, 0):
            raise NoGradient(f"its attribute {name} is {node.get(name)}, expected 0")
    if node.get("clip", 0.0) and node.get("clip", 0.0) < NO_CLIPPING:
        raise NoGradient(f"its attribute clip is {node.get('clip')}, expected none")
    known, default = {name.lower(): name for name in SLOPES}, ACTIVATIONS[op] * len(flags)
    names = [known.get(name.lower(), "") for name in node.get("activations") or default]
    if len(names) != len(default) or "" in names:
        expected = f"{len(default)} of {', '.join(SLOPES)}"
        raise NoGradient(f"its activations are {node.get('activations')}, expected {expected}")
    return names


def _has_kernels(node: Node) -> bool:
    """Whether opgrad has kernels for the node and its gradient. Raises what `_activations` raises."""
    default = ACTIVATIONS[node.proto.op_type]
    if _activations(node) not in (default, default * 2):
        return False
    dtypes = TensorProto.FLOAT, TensorProto.DOUBLE
    return not node.body.plain and node.input(LENGTHS) is None and node.x.element_type in dtypes


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


# --- in plain operators ---


def _states(node: Node, own: Direction) -> tuple[Value, Value]:
    """The states of all steps, and those before them."""
    states = own.part(node.output(0, "_states"), 1)
    return states, own.before(states, own.state(H))


def _dys(node: Node, own: Direction) -> tuple[Value | None, Value, Value]:
    """The gradients of the states of all steps, None for zeros, and of the last state and cell.

    onnxruntime gives 0 as the last ones of a sequence without steps, whatever the first ones are.
    """
    dy, *given = _upstream(node, 3)
    dh, dc = (own.zeros() if each is None else own.part(each) for each in given)
    if own.lengths is not None:
        counts = own.lengths.reshape([-1, 1]) > 0
        dh, dc = node.where(counts, dh, 0), node.where(counts, dc, 0)
    return None if dy is None else own.part(dy, 1), dh, dc


def _biases(own: Direction) -> list[Value | None]:
    """The biases of W and of R."""
    bias = own.of(BIAS)
    return [None, None] if bias is None else [*bias.split(2, 0)]


def _rnn_direction(node: Node, own: Direction, activations: Sequence[str]) -> list[Value]:
    (states, before), (dy, dh, _) = _states(node, own), _dys(node, own)

    def step(inner: Body, dh: Value, dy: Value | None, slope: Value) -> Stepped:
        dz = (dh if dy is None else dy + dh) * slope
        return [inner.node("MatMul", dz, inner.outer(own.r))], [dz]

    dh, dz = own.back([dh], dy, [SLOPES[activations[0]](states)], step)
    return own.gradients(dz, dz, before, dh)


def _gru_direction(node: Node, own: Direction, activations: Sequence[str]) -> list[Value]:
    body, (_, before), (dy, dh, _) = own.body, _states(node, own), _dys(node, own)
    of_x, of_h = _biases(own)
    *biases, bias = [None, None, None] if of_h is None else of_h.split(3, 0)
    weights = [each.transpose(1, 0) for each in own.r.split(3, 0)]
    *sums, zn = own.sums(of_x).split(3, 2)
    z, r = (
        plus(each + body.node("MatMul", before, weight), more).apply(activations[0])
        for each, weight, more in zip(sums, weights, biases, strict=False)
    )
    if node.get("linear_before_reset", 0):
        n = zn + r * plus(body.node("MatMul", before, weights[2]), bias)
    else:
        n = plus(zn + body.node("MatMul", r * before, weights[2]), bias)
    return gru_gradients(own, (z, r, n.apply(activations[1])), before, (dy, dh), bias, activations)


def _lstm_direction(node: Node, own: Direction, activations: Sequence[str]) -> list[Value]:
    (_, before), dys, (of_x, of_h), gate = _states(node, own), _dys(node, own), _biases(own), activations[0]
    z = plus(own.sums(of_x) + own.body.node("MatMul", before, own.r.transpose(1, 0)), of_h)
    zi, zo, zf, zg = z.split(4, 2)
    g, first, peepholes = zg.apply(activations[1]), own.state(C), own.of(PEEPHOLES)
    if peepholes is None:
        i, o, f = (each.apply(gate) for each in (zi, zo, zf))
        c = _cells(own, first, [i, f, g])
        c_before = own.before(c, first)
    else:
        pi, po, pf = peepholes.split(3, 0)
        c = _cells(own, first, [zi, zf, g], (pi, pf), gate)
        c_before = own.before(c, first)
        i, o, f = (
            (each + p * cells).apply(gate) for each, p, cells in ((zi, pi, c_before), (zo, po, c), (zf, pf, c_before))
        )
    return lstm_gradients(
        own, (i, o, f, g), (before, c_before, c, c.apply(activations[2])), dys, peepholes, activations
    )


def _cells(
    own: Direction, first: Value, sequences: Sequence[Value], peepholes: Sequence[Value] = (), gate: str = ""
) -> Value:
    """The cells of all steps, computed again: the forward node returns the last ones.

    sequences: the gates i and f, and g; with peepholes, the sums of which `gate` makes i and f.
    """

    def step(inner: Body, c: Value, i: Value, f: Value, g: Value) -> Stepped:
        if peepholes:
            i, f = ((each + c * inner.outer(p)).apply(gate) for each, p in zip((i, f), peepholes, strict=True))
        new = f * c + i * g
        return [new], [new]

    return own.scan([first], sequences, step, own.backward)[1]
