"""Recurrent layers: RNN, GRU and LSTM.

Where opgrad has kernels for the layer, the forward node becomes one that also returns its gates, and one node computes
the gradient. Elsewhere the gates of all steps are computed at once from the hidden states, which the forward node
returns; only the gradients of the states go from step to step, in a Scan from the last step to the first.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from onnx import TensorProto

from opgrad.onnx.graph.formulas import Body, Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.plain import recurrent
from opgrad.onnx.rules.node import Gradients, Node, NoGradient, decomposition, gradient, sizes_of

BIAS, LENGTHS, H, C, PEEPHOLES = range(3, 8)  # indices of inputs
AXES = (None, 0, 0, 0, 0, 0, 0)  # along which the gradients of directions are joined; that of x is a sum
# The numbers of activations where a layer gives none: those of onnxruntime.
NUMBERS = {
    "Affine": {"alpha": 0.0, "beta": 0.0},
    "LeakyRelu": {"alpha": 0.01},
    "ThresholdedRelu": {"alpha": 0.0},
    "ScaledTanh": {"alpha": 0.0, "beta": 0.0},
    "HardSigmoid": {"alpha": 0.2, "beta": 0.5},
    "Elu": {"alpha": 1.0},
}
# The derivatives of activations at z, where the result is y; a, b: their numbers alpha and beta.
SLOPES: dict[str, Callable[..., Value]] = {
    "Sigmoid": lambda z, y: recurrent.sigmoid_slope(y),
    "Tanh": lambda z, y: recurrent.tanh_slope(y),
    "Relu": lambda z, y: (y > 0.0).like(y),
    "Affine": lambda z, y, a, b: a.expand(y.shape()),
    "LeakyRelu": lambda z, y, a: z.body.where(z < 0.0, a, 1.0),
    "ThresholdedRelu": lambda z, y, a: (z > a).like(y),
    "ScaledTanh": lambda z, y, a, b: recurrent.tanh_slope((z * b).apply("Tanh")) * (a * b),
    "HardSigmoid": lambda z, y, a, b: y.body.where((y > 0.0) & (y < 1.0), a, 0.0),
    "Elu": lambda z, y, a: z.body.where(z < 0.0, y + a, 1.0),
    "Softsign": lambda z, y: (1.0 - y.apply("Abs")) ** 2.0,
    "Softplus": lambda z, y: 1.0 - (-y).apply("Exp"),
}


class Gate(NamedTuple):
    """An activation.

    numbers: its alpha and beta, as it has them. clip: what sums are clipped to before it, 0 for nothing.
    """

    name: str
    numbers: dict[str, float]
    clip: float

    def of(self, z: Value) -> Value:
        """What the activation makes of a sum, whose dtype is known."""
        numbers, z = self._numbers(z), self._clipped(z)
        if self.name == "Affine":
            return z * numbers[0] + numbers[1]
        if self.name == "ScaledTanh":
            return (z * numbers[1]).apply("Tanh") * numbers[0]
        return z.apply(self.name, **self.numbers)

    def slope(self, z: Value, y: Value) -> Value:
        """The derivative by the sum, 0 where it is clipped; y: the result."""
        slope = SLOPES[self.name](self._clipped(z), y, *self._numbers(y))
        return z.body.where(z.apply("Abs") > self.clip, 0.0, slope) if self.clip else slope

    def _numbers(self, like: Value) -> list[Value]:
        return [like.body.number(each, like) for each in self.numbers.values()]

    def _clipped(self, z: Value) -> Value:
        limits = [z.body.number(each, z) for each in (-self.clip, self.clip)]
        return z.body.node("Clip", z, *limits) if self.clip else z


Write = Callable[[Node, recurrent.Direction, Sequence[Gate]], list[Value]]


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
    gates, flags = _gates(node), recurrent.DIRECTIONS[node.get("direction", "forward")]
    dtype, count = node.x.element_type or TensorProto.FLOAT, len(gates) // len(flags)
    directions = (recurrent.Direction(node, *each, dtype, node.input(LENGTHS)) for each in enumerate(flags))
    parts = [write(node, each, gates[each.index * count :][:count]) for each in directions]
    found: list[Value | None] = [*recurrent.joined(parts, AXES)]
    return [*found[:LENGTHS], None, *found[LENGTHS:]]


def _gates(node: Node) -> list[Gate]:
    """The activations of all directions. Raises NoGradient for what has no rule."""
    op, clip = node.proto.op_type, node.get("clip", 0.0)
    flags = recurrent.DIRECTIONS.get(node.get("direction", "forward"), [])
    if node.get("layout", 0):
        raise NoGradient(f"its attribute layout is {node.get('layout')}, expected 0")
    if not clip >= 0:
        raise NoGradient(f"its attribute clip is {clip}, expected a number above 0")
    known, default = {name.lower(): name for name in SLOPES}, recurrent.ACTIVATIONS[op] * len(flags)
    names = [known.get(name.lower(), "") for name in node.get("activations") or default]
    if len(names) != len(default) or "" in names:
        expected = f"{len(default)} of {', '.join(SLOPES)}"
        raise NoGradient(f"its activations are {node.get('activations')}, expected {expected}")
    # Each activation takes the next numbers of the lists that it needs, while there are any.
    left, found = {each: [*node.get(f"activation_{each}", [])] for each in ("alpha", "beta")}, []
    for index, name in enumerate(names):
        numbers = {each: left[each].pop(0) if left[each] else own for each, own in NUMBERS.get(name, {}).items()}
        of_cells = op == "LSTM" and index % 3 == 2  # which are not clipped
        found.append(Gate(name, numbers, 0.0 if of_cells or clip >= recurrent.NO_CLIPPING else clip))
    return found


def _has_kernels(node: Node) -> bool:
    """Whether opgrad has kernels for the node and its gradient. Raises what `_gates` raises."""
    gates, default = _gates(node), recurrent.ACTIVATIONS[node.proto.op_type]
    if [each.name for each in gates] not in (default, default * 2) or gates[0].clip or node.get("input_forget", 0):
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


def _states(node: Node, own: recurrent.Direction) -> tuple[Value, Value]:
    """The states of all steps, and those before them."""
    states = own.part(node.output(0, "_states"), 1)
    return states, own.before(states, own.state(H))


def _dys(node: Node, own: recurrent.Direction) -> tuple[Value | None, Value, Value]:
    """The gradients of the states of all steps, None for zeros, and of the last state and cell.

    onnxruntime gives 0 as the last ones of a sequence without steps, whatever the first ones are.
    """
    dy, *given = _upstream(node, 3)
    dh, dc = (own.zeros() if each is None else own.part(each) for each in given)
    if own.lengths is not None:
        counts = own.lengths.reshape([-1, 1]) > 0
        dh, dc = node.where(counts, dh, 0), node.where(counts, dc, 0)
    return None if dy is None else own.part(dy, 1), dh, dc


def _biases(own: recurrent.Direction) -> list[Value | None]:
    """The biases of W and of R."""
    bias = own.of(BIAS)
    return [None, None] if bias is None else [*bias.split(2, 0)]


def _rnn_direction(node: Node, own: recurrent.Direction, gates: Sequence[Gate]) -> list[Value]:
    (states, before), (dy, dh, _), (of_x, of_h) = _states(node, own), _dys(node, own), _biases(own)
    z = recurrent.plus(own.sums(of_x) + own.body.node("MatMul", before, own.r.transpose(1, 0)), of_h)

    def step(inner: Body, dh: Value, dy: Value | None, slope: Value) -> recurrent.Stepped:
        dz = (dh if dy is None else dy + dh) * slope
        return [inner.node("MatMul", dz, inner.outer(own.r))], [dz]

    dh, dz = own.back([dh], dy, [gates[0].slope(z, states)], step)
    return own.gradients(dz, dz, before, dh)


def _gru_direction(node: Node, own: recurrent.Direction, gates: Sequence[Gate]) -> list[Value]:
    body, (_, before), (dy, dh, _), (gate, new) = own.body, _states(node, own), _dys(node, own), gates
    of_x, of_h = _biases(own)
    *biases, bias = [None, None, None] if of_h is None else of_h.split(3, 0)
    weights = [each.transpose(1, 0) for each in own.r.split(3, 0)]
    *sums, zn = own.sums(of_x).split(3, 2)
    zz, zr = (
        recurrent.plus(each + body.node("MatMul", before, weight), more)
        for each, weight, more in zip(sums, weights, biases, strict=False)
    )
    z, r = gate.of(zz), gate.of(zr)
    if node.get("linear_before_reset", 0):
        zn = zn + r * recurrent.plus(body.node("MatMul", before, weights[2]), bias)
    else:
        zn = recurrent.plus(zn + body.node("MatMul", r * before, weights[2]), bias)
    n = new.of(zn)
    slopes = gate.slope(zz, z), gate.slope(zr, r), new.slope(zn, n)
    return recurrent.gru_gradients(own, (z, r, n), slopes, before, (dy, dh), bias)


def _lstm_direction(node: Node, own: recurrent.Direction, gates: Sequence[Gate]) -> list[Value]:
    (_, before), dys, (of_x, of_h), (gate, new, last) = _states(node, own), _dys(node, own), _biases(own), gates
    z = recurrent.plus(own.sums(of_x) + own.body.node("MatMul", before, own.r.transpose(1, 0)), of_h)
    zi, zo, zf, zg = z.split(4, 2)
    g, first, peepholes, coupled = new.of(zg), own.state(C), own.of(PEEPHOLES), bool(node.get("input_forget", 0))
    pi, po, pf = (None, None, None) if peepholes is None else peepholes.split(3, 0)
    c = _cells(own, first, (zi, zf), g, (pi, pf), gate, coupled)
    c_before, t = own.before(c, first), last.of(c)
    sums = [
        recurrent.plus(each, None if p is None else p * cells)
        for each, p, cells in ((zi, pi, c_before), (zo, po, c), (zf, pf, c_before))
    ]
    i, o, f = (gate.of(each) for each in sums)
    slopes = [*map(gate.slope, sums, (i, o, f)), new.slope(zg, g), last.slope(c, t)]
    f = 1.0 - i if coupled else f
    return recurrent.lstm_gradients(own, (i, o, f, g), slopes, (before, c_before, c, t), dys, peepholes, coupled)


def _cells(
    own: recurrent.Direction,
    first: Value,
    sums: Sequence[Value],
    g: Value,
    peepholes: Sequence[Value | None],
    gate: Gate,
    coupled: bool,
) -> Value:
    """The cells of all steps, computed again: the forward node returns the last ones.

    sums: of the gates i and f, without their peepholes. coupled: whether f is 1 - i.
    """

    def step(inner: Body, c: Value, g: Value, *now: Value) -> recurrent.Stepped:
        found = []
        for z, p in zip(now, peepholes, strict=False):
            total = z if p is None else z + c * inner.outer(p)
            found.append(z if p is None else gate.of(Value(inner, total.name, own.dtype)))
        new = c + found[0] * (g - c) if coupled else found[1] * c + found[0] * g
        return [new], [new]

    taken = sums[:1] if coupled else sums
    known = [gate.of(z) if p is None else z for z, p in zip(taken, peepholes, strict=False)]
    return own.scan([first], [g, *known], step, own.backward)[1]
