"""Recurrent layers that keep their gates, and their gradients, as scans over the steps."""

from collections.abc import Callable, Sequence

from onnx import TensorProto

from opgrad.onnx.graph.formulas import LAST, Body, NodeView, Value
from opgrad.onnx.plain.lowering import Call, NoForm, Results, lowers

DIRECTIONS = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}  # from the last step to the first?
ACTIVATIONS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}  # of one direction
NO_CLIPPING = 3.4e38  # from here on: onnxruntime-training writes the largest float32 where nothing is clipped
Stepped = tuple[list[Value], list[Value]]  # the new states, and what a step gives
Step = Callable[..., Stepped]


class Direction:
    """One direction of a layer: its arrays, those of all steps as [steps, sequences, …].

    node: the layer or its gradient; its first inputs are x, W and R. backward: whether the direction goes from the last
    step to the first. dtype: of all states. lengths: those of the sequences, whose other steps change no state; None:
    all have the same.
    """

    def __init__(self, node: NodeView, index: int, backward: bool, dtype: int, lengths: Value | None = None):
        self.node, self.body, self.index, self.backward, self.dtype = node, node.body, index, backward, dtype
        self.x, self.w, self.r = node.required(0), self.part(node.required(1)), self.part(node.required(2))
        self.lengths = None if lengths is None else lengths.cast(TensorProto.INT64)

    def part(self, value: Value, axis: int = 0) -> Value:
        """What an array has for this direction."""
        return value.slice(self.index, self.index + 1, axis).squeeze(axis)

    def of(self, index: int) -> Value | None:
        """The same of an optional input."""
        value = self.node.input(index)
        return None if value is None else self.part(value)

    def state(self, index: int) -> Value:
        """The same of a state, [sequences, hidden]; zeros where there is none."""
        return self.of(index) or self.zeros()

    def zeros(self) -> Value:
        """A state of zeros."""
        return self.body.full(self.body.concat(self.x.shape(1, 2), self.r.shape(1, 2)), 0, self.x)

    def of_steps(self, index: int) -> Value:
        """What an input of states or gates has for this direction."""
        return self.part(self.node.required(index), 1)

    def before(self, states: Value, first: Value) -> Value:
        """The states before each step."""
        first = first.unsqueeze(0)
        if not self.backward:
            return self.body.concat(first, states.slice(0, -1))
        shifted = self.body.concat(states.slice(1, LAST), first)
        return shifted if self.lengths is None else self.body.where(self.counts(1), shifted, first)

    def counts(self, later: int = 0) -> Value:
        """Whether a step, or one that is so much later, is one of its sequence: [steps, sequences, 1]."""
        assert self.lengths is not None
        steps = self.body.range(self.x.shape(0, 1).squeeze(0)).reshape([-1, 1, 1])
        return steps + later < self.lengths.reshape([1, -1, 1])

    def scan(self, states: Sequence[Value], sequences: Sequence[Value], step: Step, backward: bool) -> list[Value]:
        """A scan of matrices over the steps, whose results are the last states and what the steps give.

        Steps beyond the length of a sequence leave its states as they are, and give 0.
        """
        known, running = ([Value(self.body, each.name, self.dtype) for each in some] for some in (states, sequences))
        if self.lengths is None:
            return self.body.scan(known, running, step, backward, rank=2)
        zero = self.body.number(0, self.x)

        def masked(inner: Body, *values: Value) -> Stepped:
            new, given = step(inner, *values[:-1])
            kept = [inner.node("Where", values[-1], *pair) for pair in zip(new, values, strict=False)]
            return kept, [inner.node("Where", values[-1], each, inner.outer(zero)) for each in given]

        counts = Value(self.body, self.counts().name, TensorProto.BOOL)
        return self.body.scan(known, [*running, counts], masked, backward, rank=2)

    def back(self, states: Sequence[Value], dy: Value | None, sequences: Sequence[Value], step: Step) -> list[Value]:
        """The scan from the direction's last step to its first; `step` gets None for a missing dy."""
        if dy is not None:
            return self.scan(states, [dy, *sequences], step, not self.backward)

        def without(inner: Body, *values: Value) -> Stepped:
            return step(inner, *values[: len(states)], None, *values[len(states) :])

        return self.scan(states, sequences, without, not self.backward)

    def sums(self, bias: Value | None) -> Value:
        """x @ W.T + bias, [steps, sequences, gates * hidden]."""
        return plus(self.body.node("MatMul", self.x, self.w.transpose(1, 0)), bias)

    def weights(self, dz: Value, inputs: Value) -> Value:
        """dz.T @ inputs, over all steps and sequences."""
        rows = [each.reshape(self.body.concat(self.body.ints([-1]), each.shape(2, 3))) for each in (dz, inputs)]
        return self.body.node("Gemm", *rows, transA=1)

    def gradients(self, of_x: Value, of_h: Value, before: Value, *states: Value) -> list[Value]:
        """dx, dw, dr, dbias and those of the initial states, from those of what x and h give the gates."""
        dbias = self.body.concat(*(each.sum([0, 1], keepdims=False) for each in (of_x, of_h)))
        products = self.body.node("MatMul", of_x, self.w), self.weights(of_x, self.x), self.weights(of_h, before)
        return [*products, dbias, *states]


def plus(value: Value, other: Value | None) -> Value:
    """The sum, where there is something to add."""
    return value if other is None else value + other


def sigmoid_slope(y: Value) -> Value:
    """The derivative of Sigmoid where its result is y."""
    return y * (1.0 - y)


def tanh_slope(y: Value) -> Value:
    """The derivative of Tanh where its result is y."""
    return 1.0 - y * y


def joined(found: Sequence[Sequence[Value]], axes: Sequence[int | None]) -> list[Value]:
    """The results of all directions, behind each other along these axes; None: their sum."""
    results = []
    for axis, each in zip(axes, zip(*found, strict=True), strict=False):
        if axis is None:
            results.append(each[0] if len(each) == 1 else each[0] + each[1])
        else:
            results.append(each[0].body.concat(*(one.unsqueeze(axis) for one in each), axis=axis))
    return results


def _layer(
    name: str, op: str, lengths: int, axes: Sequence[int | None]
) -> Callable[[Callable[[Direction], Sequence[Value]]], Callable[[Direction], Sequence[Value]]]:
    """Declare the form of a layer by a function of one direction, whose results are joined along these axes.

    lengths: the index of the input with the lengths of sequences. The form raises NoForm for what the original does not
    compute, either.
    """

    def declare(write: Callable[[Direction], Sequence[Value]]) -> Callable[[Direction], Sequence[Value]]:
        @lowers(name)
        def form(call: Call) -> Results:
            if call.get("direction", "forward") not in DIRECTIONS:
                raise NoForm(f"its direction is {call.get('direction')!r}, expected one of {', '.join(DIRECTIONS)}")
            clip = call.get("clip", 0.0)
            if clip and clip < NO_CLIPPING:
                raise NoForm(f"its attribute clip is {clip}, expected none")
            for each in ("input_forget", "layout"):
                if call.get(each, 0):
                    raise NoForm(f"its attribute {each} is {call.get(each)}, expected 0")
            flags = DIRECTIONS[call.get("direction", "forward")]
            given = [each.lower() for each in call.get("activations", [])]
            if given and given != [each.lower() for each in ACTIVATIONS[op]] * len(flags):
                raise NoForm(f"its activations are {call.get('activations')}, expected those of ONNX's {op}")
            if call.input(lengths) is not None:
                raise NoForm("it has lengths of sequences, expected none")
            dtype = next(filter(None, call.input_types), None)
            if dtype is None:
                raise NoForm("the graph does not tell the type of its inputs")
            return joined([write(Direction(call, *each, dtype)) for each in enumerate(flags)], axes)

        return write

    return declare


@_layer("LSTMTraining", "LSTM", 4, (1, 0, 0, 1, 1))
def _lstm_steps(own: Direction) -> list[Value]:
    """y, y_h, y_c, the cells and the gates i, o, f, g."""
    bias, peepholes = own.of(3), own.of(7)
    if bias is not None:
        of_x, of_h = bias.split(2, 0)
        bias = of_x + of_h
    to_gates = own.r.transpose(1, 0)
    pi, po, pf = (None, None, None) if peepholes is None else peepholes.split(3, 0)

    def step(inner: Body, h: Value, c: Value, z: Value) -> Stepped:
        zi, zo, zf, zg = (z + inner.node("MatMul", h, inner.outer(to_gates))).split(4, 1)
        i, f = _peep(inner, zi, pi, c).apply("Sigmoid"), _peep(inner, zf, pf, c).apply("Sigmoid")
        g = zg.apply("Tanh")
        new = f * c + i * g
        o = _peep(inner, zo, po, new).apply("Sigmoid")
        state = o * new.apply("Tanh")
        return [state, new], [state, new, inner.concat(i, o, f, g, axis=1)]

    last_h, last_c, y, cells, gates = own.scan([own.state(5), own.state(6)], [own.sums(bias)], step, own.backward)
    return [y, last_h, last_c, cells, gates]


def _peep(inner: Body, z: Value, weights: Value | None, c: Value) -> Value:
    return z if weights is None else z + inner.outer(weights) * c


@_layer("LSTMGrad", "LSTM", 3, (None, 0, 0, 0, 0, 0, 0))
def _lstm_back(own: Direction) -> list[Value]:
    """dx, dw, dr, dbias, dinitial_h, dinitial_c and dpeepholes."""
    c, dy, gates = own.of_steps(7), own.node.input(9), own.of_steps(8).split(4, 2)
    states = own.before(own.of_steps(6), own.state(4)), own.before(c, own.state(5)), c, c.apply("Tanh")
    dys = None if dy is None else own.part(dy, 1), own.state(10), own.state(11)
    slopes = [*(sigmoid_slope(each) for each in gates[:3]), tanh_slope(gates[3]), tanh_slope(states[3])]
    return lstm_gradients(own, gates, slopes, states, dys, own.of(12))


def lstm_gradients(
    own: Direction,
    gates: Sequence[Value],
    slopes: Sequence[Value],
    states: Sequence[Value],
    dys: tuple[Value | None, Value, Value],
    peepholes: Value | None,
    coupled: bool = False,
) -> list[Value]:
    """dx, dw, dr, dbias, dinitial_h, dinitial_c and dpeepholes.

    gates: i, o, f and g of all steps. states: of all steps, h and c before, c, and t, what the last activation makes of
    c. slopes: the derivatives of the gates by their sums, and of t by c. dys: the gradients of the states of all steps,
    None for zeros, and those of the last state and cell. coupled: whether f is 1 - i.
    """
    (i, o, f, g), (before, c_before, c, t), (dy, dh, dc) = gates, states, dys
    of_i, of_o, of_f, of_g, of_t = slopes
    pi, po, pf = (None, None, None) if peepholes is None else peepholes.split(3, 0)
    by_i, by_f = (g - c_before, own.body.number(0.0, c)) if coupled else (g, c_before)
    factors = [t * of_o, o * of_t, by_i * of_i, by_f * of_f, i * of_g, f]

    def step(inner: Body, dh: Value, dc: Value, dy: Value | None, *now: Value) -> Stepped:
        to_o, to_c, to_i, to_f, to_g, f = now
        whole = dh if dy is None else dy + dh
        do = whole * to_o
        cell = _peep(inner, dc + whole * to_c, po, do)
        di, df, dg = cell * to_i, cell * to_f, cell * to_g
        back = _peep(inner, _peep(inner, cell * f, pi, di), pf, df)
        dz = inner.concat(di, do, df, dg, axis=1)
        return [inner.node("MatMul", dz, inner.outer(own.r)), back], [dz]

    dh, dc, dz = own.back([dh, dc], dy, factors, step)
    di, do, df, _ = dz.split(4, 2)
    dp = [(each * state).sum([0, 1], keepdims=False) for each, state in ((di, c_before), (do, c), (df, c_before))]
    return [*own.gradients(dz, dz, before, dh, dc), own.body.concat(*dp)]


@_layer("GRUTraining", "GRU", 4, (1, 0, 1))
def _gru_steps(own: Direction) -> list[Value]:
    """y, y_h and the gates z, r, n."""
    body, bias, linear, of_new = own.body, own.of(3), own.node.get("linear_before_reset", 0), None
    if bias is not None:
        *of_x, hz, hr, of_new = bias.split(6, 0)
        more = (hz, hr) if linear else (hz, hr, of_new)
        bias = body.concat(*[a + b for a, b in zip(of_x, more, strict=False)], *of_x[len(more) :])
    rz, rr, rn = (each.transpose(1, 0) for each in own.r.split(3, 0))

    def step(inner: Body, h: Value, sums: Value) -> Stepped:
        zz, zr, zn = sums.split(3, 1)
        z = (zz + inner.node("MatMul", h, inner.outer(rz))).apply("Sigmoid")
        r = (zr + inner.node("MatMul", h, inner.outer(rr))).apply("Sigmoid")
        if linear:
            q = inner.node("MatMul", h, inner.outer(rn))
            n = (zn + r * (q if of_new is None else q + inner.outer(of_new))).apply("Tanh")
        else:
            n = (zn + inner.node("MatMul", r * h, inner.outer(rn))).apply("Tanh")
        state = n + z * (h - n)
        return [state], [state, inner.concat(z, r, n, axis=1)]

    last, y, gates = own.scan([own.state(5)], [own.sums(bias)], step, own.backward)
    return [y, last, gates]


@_layer("GRUGrad", "GRU", 4, (None, 0, 0, 0, 0))
def _gru_back(own: Direction) -> list[Value]:
    """dx, dw, dr, dbias and dinitial_h."""
    bias, dy, before = own.of(3), own.node.input(8), own.before(own.of_steps(6), own.state(5))
    dys, (z, r, n) = (None if dy is None else own.part(dy, 1), own.state(9)), own.of_steps(7).split(3, 2)
    slopes = sigmoid_slope(z), sigmoid_slope(r), tanh_slope(n)
    return gru_gradients(own, (z, r, n), slopes, before, dys, None if bias is None else bias.split(6, 0)[5])


def gru_gradients(
    own: Direction,
    gates: Sequence[Value],
    slopes: Sequence[Value],
    before: Value,
    dys: tuple[Value | None, Value],
    bias: Value | None,
) -> list[Value]:
    """dx, dw, dr, dbias and dinitial_h.

    gates: z, r and n of all steps. slopes: their derivatives by their sums. before: the states before these. dys: the
    gradients of the states of all steps, None for zeros, and that of the last one. bias: of what R gives n.
    """
    body, (z, r, n), (dy, dh), linear = own.body, gates, dys, own.node.get("linear_before_reset", 0)
    of_z, of_r, of_n = slopes
    *others, r_new = own.r.split(3, 0)
    r_gates = body.concat(*others)
    behind_reset = plus(body.node("MatMul", before, r_new.transpose(1, 0)), bias) if linear else before
    factors = [z, r, (before - n) * of_z, behind_reset * of_r, (1 - z) * of_n]

    def step(inner: Body, dh: Value, dy: Value | None, *now: Value) -> Stepped:
        z, r, to_z, to_r, to_n = now
        whole = dh if dy is None else dy + dh
        dz, dn = whole * to_z, whole * to_n
        if linear:
            dq, dr = dn * r, dn * to_r
            through = inner.node("MatMul", dq, inner.outer(r_new))
        else:
            reset = inner.node("MatMul", dn, inner.outer(r_new))
            dq, dr, through = dn, reset * to_r, reset * r
        of_gates = inner.node("MatMul", inner.concat(dz, dr, axis=1), inner.outer(r_gates))
        return [whole * z + of_gates + through], [dz, dr, dn, dq]

    dh, dz, dr, dn, dq = own.back([dh], dy, factors, step)
    both = body.concat(dz, dr, axis=2)
    found = own.gradients(body.concat(both, dn, axis=2), body.concat(both, dq, axis=2), before, dh)
    # Only the new state n reads the previous state through the reset gate.
    found[2] = body.concat(own.weights(both, before), own.weights(dq, before if linear else r * before))
    return found
