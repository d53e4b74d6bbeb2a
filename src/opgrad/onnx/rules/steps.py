"""The steps of one direction of a recurrent layer, in the order of its time."""

from collections.abc import Callable, Sequence

from onnx import TensorProto

from opgrad.onnx.graph.formulas import Body, Value
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.shaping import sizes_of

X, W, R, B, LENGTHS, H0 = range(6)  # places of inputs
Turn = Callable[..., tuple[list[Value], list[Value]]]


class Steps:
    """One direction of a layer.

    node: the layer. index: of the direction. gates: how many there are.

    x: [T, N, I]. h: the states, [T, N, H]; h_before: those before each step.
    w, r: [gates * H, I] and [gates * H, H]. wb, rb: [gates * H]; None without bias.
    dy: the gradients of the states as results, [T, N, H]. dh, dc: those of the last state and cell.
    mask: whether a step counts, [T, N, 1]; None if all do.
    """

    def __init__(self, node: Node, index: int, gates: int):
        self.node, self.body, self.index, self.gates = node, node.body, index, gates
        direction = node.get("direction", "forward")
        self.backward = direction == "reverse" or index == 1
        self.lengths = node.input(LENGTHS)
        self.x = self._in_time(node.x)
        self.mask = self._mask()
        self.w, self.r = self._required(W), self._required(R)
        bias = self.of(B)
        parts: list[Value | None] = [None, None] if bias is None else [*self.split(bias, 0, 2)]
        self.wb, self.rb = parts
        self.h = self._in_time(self._direction(node.output(0, "_states"), 1))
        self.h_before = self.shifted(self.h, self.initial(H0))
        dys = node.dys[0] if node.dys else None
        zeros = self._like(self.h, 0)
        self.dy = zeros if dys is None else self._in_time(self._direction(dys, 1))
        self.dh, self.dc = self._last(1), self._last(2)

    # --- the layer's values ---

    def of(self, place: int) -> Value | None:
        """What an optional input has for this direction."""
        value = self.node.input(place)
        return None if value is None else self._direction(value, 0)

    def _required(self, place: int) -> Value:
        self.node.required(place)
        value = self.of(place)
        assert value is not None
        return value

    def _direction(self, value: Value, axis: int) -> Value:
        return value.slice(self.index, self.index + 1, axis).squeeze(axis)

    def _in_time(self, value: Value) -> Value:
        """[T, N, ..] in the order of this direction's time, or back in that of the layer."""
        if not self.backward:
            return value
        if self.lengths is None:
            return value.slice(-1, -(2**63) + 1, 0, -1)
        if value.element_type == TensorProto.BFLOAT16:  # the operator takes no bfloat16 before opset 28
            return self._in_time(value.cast(TensorProto.FLOAT)).cast(TensorProto.BFLOAT16)
        lengths = self.lengths.cast(TensorProto.INT64)
        return self.body.node("ReverseSequence", value, lengths, time_axis=0, batch_axis=1)

    def _mask(self) -> Value | None:
        if self.lengths is None:
            return None
        places = self.body.range(self.x.shape(0, 1).squeeze(0)).reshape([-1, 1, 1])
        return places < self.lengths.cast(TensorProto.INT64).reshape([1, -1, 1])

    def initial(self, place: int) -> Value:
        """The initial state, zeros where there is none: [N, H]."""
        value = self.node.input(place)
        return self._zeros() if value is None else self._direction(value, 0)

    def _last(self, output: int) -> Value:
        """The gradient of the last state or cell, [N, H]; of a sequence without steps onnxruntime's is always 0."""
        dys = self.node.dys
        found = dys[output] if output < len(dys) else None
        if found is None:
            return self._zeros()
        last = self._direction(found, 0)
        if self.lengths is None:
            return last
        return self.node.where(self.lengths.cast(TensorProto.INT64).reshape([-1, 1]) > 0, last, 0)

    def _zeros(self) -> Value:
        hidden = sizes_of(self.node.required(R))[2]
        width = self.body.ints([hidden]) if isinstance(hidden, int) else self.r.shape(1, 2)
        return self.body.number(0, self.node.x).expand(self.body.concat(self.x.shape(1, 2), width))

    def _like(self, value: Value, number: float) -> Value:
        return self.body.number(number, value).expand(value.shape())

    # --- arithmetic ---

    def from_x(self) -> Value:
        """The part of the gates' sums that comes from x: x @ W.T + biases, [T, N, gates * H]."""
        return self.plus(self.body.node("MatMul", self.x, self.w.transpose(1, 0)), self.wb)

    def plus(self, value: Value, other: Value | None) -> Value:
        """The sum, where there is something to add."""
        return value if other is None else value + other

    def split(self, value: Value, axis: int = -1, parts: int = 0) -> list[Value]:
        """The parts of each gate along an axis."""
        count = parts or self.gates
        if count == 1:
            return [value]
        axis = axis if axis >= 0 else 2
        hidden = sizes_of(self.node.required(R))[2] if parts != 2 else None
        size = hidden if isinstance(hidden, int) else None
        if size is not None:
            return [value.slice(index * size, (index + 1) * size, axis) for index in range(count)]
        return self.body.nodes_of("Split", count, value, axis=axis, **self._split_attributes(count))

    def _split_attributes(self, count: int) -> dict[str, int]:
        return {"num_outputs": count} if self.body.opset >= 18 else {}

    def shifted(self, values: Value, first: Value) -> Value:
        """The states before each step."""
        return self.body.concat(first.unsqueeze(0), values.slice(0, -1), axis=0)

    def weights(self, dz: Value, inputs: Value) -> Value:
        """dz.T @ inputs, over all steps and sequences."""
        rows = [self._rows(each) for each in (dz, inputs)]
        return self.body.node("Gemm", *rows, transA=1)

    def _rows(self, value: Value) -> Value:
        return value.reshape(self.body.concat(self.body.ints([-1]), value.shape(2, 3)))

    def back(
        self, states: Sequence[Value], sequences: Sequence[Value], turn: Turn, given: int
    ) -> tuple[list[Value], list[Value]]:
        """Scan from the last step to the first; steps that do not count leave states as they are and give 0."""
        mask = self.mask
        if mask is None:
            found = self.body.scan(states, sequences, turn, backward=True)
            return found[: len(states)], found[len(states) :]

        def masked(inner: Body, *values: Value) -> tuple[list[Value], list[Value]]:
            old, here = values[: len(states)], values[-1]
            new, elements = turn(inner, *values[:-1])
            kept = [inner.node("Where", here, each, before) for each, before in zip(new, old, strict=True)]
            return kept, [inner.node("Where", here, each, inner.outer(zero)) for each in elements]

        zero = self.body.number(0, self.node.x)
        found = self.body.scan(states, [*sequences, mask], masked, backward=True)
        return found[: len(states)], found[len(states) : len(states) + given]

    def parts(self, dz_x: Value, dz_h: Value, before: Value, states: Sequence[Value]) -> dict[int, Value]:
        """The gradients of the inputs, from those of what x and h give the gates."""
        dx = self._in_time(self.body.node("MatMul", dz_x, self.w))
        found = {X: dx, W: self.weights(dz_x, self.x), R: self.weights(dz_h, before)}
        sums = [each.sum([0, 1], keepdims=False) for each in (dz_x, dz_h)]
        found[B] = self.body.concat(*sums, axis=0)
        return found | {H0 + index: state for index, state in enumerate(states)}
