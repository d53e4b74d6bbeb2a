"""Recurrent layers that keep their gates, and their gradients, as scans over the steps."""

from collections.abc import Callable, Sequence

from opgrad.onnx.graph.formulas import Body, Value
from opgrad.onnx.plain.recurrent_activations import ACTIVATIONS, DEFAULTS, NO_CLIPPING, Gate
from opgrad.onnx.plain.registry import Call, NoForm, Results, lowers

DIRECTIONS = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}  # from the last step to the first?

Turned = tuple[list[Value], list[Value]]
Turn = Callable[..., Turned]


class Direction:
    """One direction of a layer: its arrays, those of all steps as [steps, sequences, …].

    backward: whether it goes from the last step to the first.
    """

    def __init__(self, call: Call, index: int, backward: bool):
        self.call, self.body, self.index, self.backward = call, call.body, index, backward
        self.x, w, r = call.operands(3)
        self.w, self.r = self._own(w), self._own(r)
        self.element_type = next(filter(None, call.input_types), None)
        if self.element_type is None:
            raise NoForm("the graph does not tell the type of its inputs")

    def _own(self, value: Value, axis: int = 0) -> Value:
        return value.slice(self.index, self.index + 1, axis).squeeze(axis)

    def of(self, place: int) -> Value | None:
        """What an optional input has for this direction."""
        value = self.call.input(place)
        return None if value is None else self._own(value)

    def state(self, place: int) -> Value:
        """The same of a state, [sequences, hidden]; zeros where there is none."""
        found = self.of(place)
        shape = self.body.concat(self.x.shape(1, 2), self.r.shape(1, 2))
        return self.body.full(shape, 0, self.x) if found is None else found

    def of_steps(self, place: int) -> Value:
        """What an input of states or gates has for this direction; NoForm if it is missing."""
        found = self.optional_of_steps(place)
        if found is None:
            raise NoForm(f"it has no input {place}")
        return found

    def optional_of_steps(self, place: int) -> Value | None:
        """The same where it may be missing."""
        value = self.call.input(place)
        return None if value is None else self._own(value, 1)

    def before(self, states: Value, first: Value) -> Value:
        """The states before each step."""
        if self.backward:
            return self.body.concat(states.slice(1, 2**63 - 1), first.unsqueeze(0))
        return self.body.concat(first.unsqueeze(0), states.slice(0, -1))

    def scan(self, states: Sequence[Value], sequences: Sequence[Value], turn: Turn, backward: bool) -> list[Value]:
        """A scan of matrices over the steps."""
        known, running = (
            [Value(self.body, each.name, self.element_type) for each in some] for some in (states, sequences)
        )
        return self.body.scan(known, running, turn, backward, rank=2)

    def back(self, states: Sequence[Value], dy: Value | None, sequences: Sequence[Value], turn: Turn) -> list[Value]:
        """The scan from the direction's last step to its first; `turn` gets zeros' place for a missing dy."""
        if dy is not None:
            return self.scan(states, [dy, *sequences], turn, not self.backward)

        def without(inner: Body, *values: Value) -> Turned:
            return turn(inner, *values[: len(states)], None, *values[len(states) :])

        return self.scan(states, sequences, without, not self.backward)

    def rows(self, value: Value) -> Value:
        """[steps * sequences, …]."""
        return value.reshape(self.body.concat(self.body.ints([-1]), value.shape(2, 3)))

    def weights(self, dz: Value, inputs: Value) -> Value:
        """dz.T @ inputs, over all steps and sequences."""
        return self.body.node("MatMul", self.rows(dz).transpose(1, 0), self.rows(inputs))


def _layer(call: Call, kind: str, write: Callable[[Direction], Sequence[Value]], axes: Sequence[int | None]) -> Results:
    """The results of all directions, behind each other along these axes; None: their sum."""
    _check(call, kind)
    flags = DIRECTIONS[call.get("direction", "forward")]
    found = [write(Direction(call, index, backward)) for index, backward in enumerate(flags)]
    results = []
    for axis, each in zip(axes, zip(*found, strict=True), strict=True):
        if axis is None:
            results.append(each[0] if len(each) == 1 else each[0] + each[1])
        else:
            results.append(call.body.concat(*(one.unsqueeze(axis) for one in each), axis=axis))
    return results


def _check(call: Call, kind: str) -> None:
    """Raise NoForm for what the original does not compute, either."""
    if call.get("direction", "forward") not in DIRECTIONS:
        raise NoForm(f"its direction is {call.get('direction')!r}, expected one of {', '.join(DIRECTIONS)}")
    clip = call.get("clip", 0.0)
    if clip and clip < NO_CLIPPING:
        raise NoForm(f"its attribute clip is {clip}, expected none")
    for name in ("input_forget", "layout"):
        if call.get(name, 0):
            raise NoForm(f"its attribute {name} is {call.get(name)}, expected 0")
    given = [each.lower() for each in call.get("activations", [])]
    if given and given != [each.lower() for each in DEFAULTS[kind]] * len(DIRECTIONS[call.get("direction", "forward")]):
        raise NoForm(f"its activations are {call.get('activations')}, expected those of ONNX's {kind}")


def _no_lengths(call: Call, place: int) -> None:
    if call.input(place) is not None:
        raise NoForm("it has lengths of sequences, expected none")


def _slope(name: str, y: Value) -> Value:
    """The derivative of the activation whose result is y."""
    return Gate(ACTIVATIONS[name]).slope(y, y)


# --- LSTM ---


@lowers("LSTMTraining")
def lstm_training(call: Call) -> Results:
    """y, y_h, y_c, the cells and the gates i, o, f, g."""
    _no_lengths(call, 4)
    return _layer(call, "LSTM", _lstm_steps, (1, 0, 0, 1, 1))


def _lstm_steps(own: Direction) -> list[Value]:
    body, bias, peepholes = own.body, own.of(3), own.of(7)
    sums = body.node("MatMul", own.x, own.w.transpose(1, 0))
    if bias is not None:
        of_x, of_h = bias.split(2, 0)
        sums = sums + (of_x + of_h)
    to_gates = own.r.transpose(1, 0)
    pi, po, pf = (None, None, None) if peepholes is None else peepholes.split(3, 0)

    def turn(inner: Body, h: Value, c: Value, z: Value) -> Turned:
        zi, zo, zf, zg = (z + inner.node("MatMul", h, inner.outer(to_gates))).split(4, 1)
        i, f = _peep(inner, zi, pi, c).apply("Sigmoid"), _peep(inner, zf, pf, c).apply("Sigmoid")
        g = zg.apply("Tanh")
        new = f * c + i * g
        o = _peep(inner, zo, po, new).apply("Sigmoid")
        state = o * new.apply("Tanh")
        return [state, new], [state, new, inner.concat(i, o, f, g, axis=1)]

    last_h, last_c, y, cells, gates = own.scan([own.state(5), own.state(6)], [sums], turn, own.backward)
    return [y, last_h, last_c, cells, gates]


def _peep(inner: Body, z: Value, weights: Value | None, c: Value) -> Value:
    return z if weights is None else z + inner.outer(weights) * c


@lowers("LSTMGrad")
def lstm_grad(call: Call) -> Results:
    """dx, dw, dr, dbias, dinitial_h, dinitial_c and dpeepholes."""
    call.operands(3)
    _no_lengths(call, 3)
    return _layer(call, "LSTM", _lstm_back, (None, 0, 0, 0, 0, 0, 0))


def _lstm_back(own: Direction) -> list[Value]:
    body, y, c, gates, peepholes = own.body, own.of_steps(6), own.of_steps(7), own.of_steps(8), own.of(12)
    i, o, f, g = gates.split(4, 2)
    c_before, t = own.before(c, own.state(5)), c.apply("Tanh")
    turn = lstm_turn(own.r, None if peepholes is None else peepholes.split(3, 0))
    slopes = [_slope("Sigmoid", each) for each in (i, o, f)] + [_slope("Tanh", g), _slope("Tanh", t)]
    factors = lstm_factors(i, o, f, g, t, c_before, slopes)
    dh, dc, dz = own.back([own.state(10), own.state(11)], own.optional_of_steps(9), factors, turn)
    di, do, df, _ = dz.split(4, 2)
    dx, dw = body.node("MatMul", dz, own.w), own.weights(dz, own.x)
    dr, dbias = own.weights(dz, own.before(y, own.state(4))), dz.sum([0, 1], keepdims=False)
    dp = [(each * state).sum([0, 1], keepdims=False) for each, state in ((di, c_before), (do, c), (df, c_before))]
    return [dx, dw, dr, body.concat(dbias, dbias), dh, dc, body.concat(*dp)]


def lstm_factors(
    i: Value, o: Value, f: Value, g: Value, t: Value, c_before: Value, slopes: Sequence[Value], coupled: bool = False
) -> list[Value]:
    """The sequences that `lstm_turn` reads in each step: derivatives of the gates, and f.

    t: what the last activation makes of the cells. slopes: those of i, o, f, g and t. coupled: whether f is 1 - i.
    """
    of_i, of_o, of_f, of_g, of_t = slopes
    by_i = g - c_before if coupled else g
    by_f = c_before * 0 if coupled else c_before
    return [t * of_o, o * of_t, by_i * of_i, by_f * of_f, i * of_g, f]


def lstm_turn(r: Value, peepholes: Sequence[Value] | None) -> Turn:
    """A step back: from dh and dc those of the step before, and the gradients of the gates' sums."""

    def turn(inner: Body, dh: Value, dc: Value, dy: Value | None, *now: Value) -> Turned:
        to_o, to_c, to_i, to_f, to_g, f = now
        whole = dh if dy is None else dy + dh
        do = whole * to_o
        cell = dc + whole * to_c
        if peepholes is not None:
            cell = cell + do * inner.outer(peepholes[1])
        di, df, dg = cell * to_i, cell * to_f, cell * to_g
        back = cell * f
        if peepholes is not None:
            back = back + di * inner.outer(peepholes[0]) + df * inner.outer(peepholes[2])
        dz = inner.concat(di, do, df, dg, axis=1)
        return [inner.node("MatMul", dz, inner.outer(r)), back], [dz]

    return turn


# --- GRU ---


@lowers("GRUTraining")
def gru_training(call: Call) -> Results:
    """y, y_h and the gates z, r, n."""
    _no_lengths(call, 4)
    return _layer(call, "GRU", _gru_steps, (1, 0, 1))


def _gru_steps(own: Direction) -> list[Value]:
    body, bias, linear = own.body, own.of(3), own.call.get("linear_before_reset", 0)
    sums, of_new = body.node("MatMul", own.x, own.w.transpose(1, 0)), None
    if bias is not None:
        *of_x, hz, hr, of_new = bias.split(6, 0)
        more = (hz, hr) if linear else (hz, hr, of_new)
        added = [a + b for a, b in zip(of_x, more, strict=False)] + of_x[len(more) :]
        sums = sums + body.concat(*added)
    rz, rr, rn = (each.transpose(1, 0) for each in own.r.split(3, 0))

    def turn(inner: Body, h: Value, sums: Value) -> Turned:
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

    last, y, gates = own.scan([own.state(5)], [sums], turn, own.backward)
    return [y, last, gates]


@lowers("GRUGrad")
def gru_grad(call: Call) -> Results:
    """dx, dw, dr, dbias and dinitial_h."""
    _no_lengths(call, 4)
    return _layer(call, "GRU", _gru_back, (None, 0, 0, 0, 0))


def _gru_back(own: Direction) -> list[Value]:
    body, bias, linear = own.body, own.of(3), bool(own.call.get("linear_before_reset", 0))
    z, r, n = own.of_steps(7).split(3, 2)
    before, (rz, rr, rn) = own.before(own.of_steps(6), own.state(5)), own.r.split(3, 0)
    slopes = _slope("Sigmoid", z), _slope("Sigmoid", r), _slope("Tanh", n)
    factors = [z, r, *gru_factors(z, n, before, _q(own, before, rn, bias) if linear else before, slopes)]
    turn = gru_turn(body.concat(rz, rr), rn, linear)
    dh, dz, dr, dn, dq = own.back([own.state(9)], own.optional_of_steps(8), factors, turn)
    of_x, of_h = body.concat(dz, dr, dn, axis=2), body.concat(dz, dr, dq, axis=2)
    dr = body.concat(
        own.weights(body.concat(dz, dr, axis=2), before), own.weights(dq, before if linear else r * before)
    )
    dbias = body.concat(*(each.sum([0, 1], keepdims=False) for each in (of_x, of_h)))
    return [body.node("MatMul", of_x, own.w), own.weights(of_x, own.x), dr, dbias, dh]


def _q(own: Direction, before: Value, r: Value, bias: Value | None) -> Value:
    """What the states before each step give n, for the reset gate behind it."""
    q = own.body.node("MatMul", before, r.transpose(1, 0))
    return q if bias is None else q + bias.split(6, 0)[5]


def gru_factors(z: Value, n: Value, before: Value, behind_reset: Value, slopes: Sequence[Value]) -> list[Value]:
    """The sequences that `gru_turn` reads in each step, beside z and r. slopes: those of the gates z, r and n."""
    of_z, of_r, of_n = slopes
    return [(before - n) * of_z, behind_reset * of_r, (1 - z) * of_n]


def gru_turn(r_gates: Value, r_new: Value, linear: bool) -> Turn:
    """A step back: from dh that of the step before, and the gradients of the sums of z, r, n, and of what R gives n."""

    def turn(inner: Body, dh: Value, dy: Value | None, *now: Value) -> Turned:
        z, r, to_z, to_r, to_n = now
        whole = dh if dy is None else dy + dh
        dz, dn = whole * to_z, whole * to_n
        if linear:
            dq, dr = dn * r, dn * to_r
            through = inner.node("MatMul", dq, inner.outer(r_new))
        else:
            reset = inner.node("MatMul", dn, inner.outer(r_new))
            dq, dr, through = dn, reset * to_r, reset * r
        gates = inner.node("MatMul", inner.concat(dz, dr, axis=1), inner.outer(r_gates))
        return [whole * z + gates + through], [dz, dr, dn, dq]

    return turn
