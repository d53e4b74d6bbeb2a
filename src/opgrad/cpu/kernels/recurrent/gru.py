"""The steps of a GRU, and their gradients: a unit is one sequence of one direction, all steps of it.

The reset gate is applied before the product of the states with the weights of n, or after it; each has its kernels.
"""

from collections.abc import Callable
from typing import NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.gemm import multiply
from opgrad.cpu.kernels.loops.map import mapped_to_each
from opgrad.cpu.kernels.numerics.elementary import sigmoid, tanh
from opgrad.cpu.kernels.recurrent.matrices import (
    Layer,
    Panels,
    States,
    copy_states,
    place_of,
    sequences_of,
    states_before,
    time_of,
)


class GateWeights(NamedTuple):
    """The matrices that the states are multiplied by: for the gates z and r, or for all gates, and for n."""

    gates: Panels
    new: Panels


# --- steps ----------------------------------------------------------------------------------------------------------


def reset(z: Vector, r: Vector, bz: Vector, br: Vector, before: Vector) -> tuple[Vector, ...]:
    """The gates z and r, and r * h."""
    r = sigmoid(r + br)
    return sigmoid(z + bz), r, r * before


def mix(z: Vector, n: Vector, bn: Vector, before: Vector) -> tuple[Vector, ...]:
    """n, and the state (1 - z) * n + z * h."""
    n = tanh(n + bn)
    return n, v.fma(z, before - n, n)


def mix_linear(
    z: Vector, r: Vector, n: Vector, bz: Vector, br: Vector, bn: Vector, bq: Vector, q: Vector, before: Vector
) -> tuple[Vector, ...]:
    """All gates and the state, from the product q of the state before with the weights of n."""
    z, r = sigmoid(z + bz), sigmoid(r + br)
    n = tanh(v.fma(r, q + bq, n + bn))
    return z, r, n, v.fma(z, before - n, n)


write_reset, write_mix, write_mix_linear = mapped_to_each(reset), mapped_to_each(mix), mapped_to_each(mix_linear)


def steps_of(new_states: Callable[..., None]) -> Kernel:
    """The kernel of all steps. `new_states` makes a step's states of the sums of z and r and n's product with x."""
    inline(new_states)

    @kernel
    def gru_steps(
        units: Units, layer: Layer, r: GateWeights, bias: Rows, h0: States, product: Pointer, gates: Pointer,
        y: Pointer, y_h: Pointer,
    ):  # fmt: skip
        """gates: the gates' products with x, without bias. product: memory for a row of each unit."""
        n, batch = layer.hidden, layer.batch
        for direction in range(units.start // batch, -(-units.stop // batch)):
            begin, end = sequences_of(layer, units, direction)
            b, own = bias.data + direction * bias.step, product + direction * batch * n
            h, h_row = h0.data + direction * h0.direction, h0.row
            to_gates, to_new = r.gates.data + direction * r.gates.direction, r.new.data + direction * r.new.direction
            for step in range(layer.steps):
                place = place_of(layer, direction, time_of(layer, direction, step))
                z, h_next = gates + place * 3 * n, y + place * n
                multiply(z, 3 * n, h, h_row, 1, to_gates, r.gates.panel, n, 2 * n, range(begin, end), 1)
                new_states(z, own, b, h, h_row, h_next, to_new, r.new.panel, n, begin, end)
                h, h_row = h_next, n
            copy_states(y_h + direction * batch * n, h, h_row, begin, end, n)

    return gru_steps


@steps_of
def gru_steps(z, own, b, h, h_row: int, h_next, to_new, panel: int, n: int, begin: int, end: int) -> None:
    for row in range(begin, end):
        gates = z + row * 3 * n, z + (row * 3 + 1) * n
        write_reset((*gates, own + row * n), 0, n, (*gates, b, b + n, h + row * h_row), ())
    multiply(z + 2 * n, 3 * n, own, n, 1, to_new, panel, n, n, range(begin, end), 1)
    for row in range(begin, end):
        each, new = z + row * 3 * n, z + (row * 3 + 2) * n
        write_mix((new, h_next + row * n), 0, n, (each, new, b + 2 * n, h + row * h_row), ())


@steps_of
def gru_steps_linear(z, own, b, h, h_row: int, h_next, to_new, panel: int, n: int, begin: int, end: int) -> None:
    """With linear_before_reset."""
    multiply(own, n, h, h_row, 1, to_new, panel, n, n, range(begin, end), 0)
    for row in range(begin, end):
        each = z + row * 3 * n
        gates, biases = (each, each + n, each + 2 * n), (b, b + n, b + 2 * n, b + 3 * n)
        states = own + row * n, h + row * h_row
        write_mix_linear((*gates, h_next + row * n), 0, n, (*gates, *biases, *states), ())


# --- gradients ------------------------------------------------------------------------------------------------------


def mix_back(z: Vector, n: Vector, before: Vector, dy: Vector, dh: Vector) -> tuple[Vector, ...]:
    """The gradients of the sums of z and n, and the part of the state's gradient that bypasses both."""
    d = dy + dh
    return d * (before - n) * z * (1.0 - z), d * (1.0 - z) * v.fma(-n, n, 1.0), d * z


def reset_back(r: Vector, before: Vector, d: Vector, dh: Vector) -> tuple[Vector, ...]:
    """From the gradient d of r * h: the gradient of the sum of r, dh with its part, and r * h again."""
    return d * before * r * (1.0 - r), v.fma(d, r, dh), r * before


def linear_back(
    z: Vector, r: Vector, n: Vector, before: Vector, bq: Vector, q: Vector, dy: Vector, dh: Vector
) -> tuple[Vector, ...]:
    """The gradients of all sums with x, then of those with the states: in n these are r times as large; then dh."""
    d = dy + dh
    update, new = d * (before - n) * z * (1.0 - z), d * (1.0 - z) * v.fma(-n, n, 1.0)
    r_sum = new * (q + bq) * r * (1.0 - r)
    return update, r_sum, new, update, r_sum, new * r, d * z


write_mix_back, write_reset_back = mapped_to_each(mix_back), mapped_to_each(reset_back)
write_linear_back = mapped_to_each(linear_back)


@kernel
def gru_steps_back(
    units: Units, layer: Layer, r: GateWeights, gates: Pointer, y: Pointer, h0: States, dy: Rows, dh_last: States,
    dz: Pointer, product: Pointer, dh: Pointer,
):  # fmt: skip
    """dh holds the gradients of the states on the way; dz, and r * h, have a matrix of all steps for each direction."""
    n, batch = layer.hidden, layer.batch
    for direction in range(units.start // batch, -(-units.stop // batch)):
        begin, end = sequences_of(layer, units, direction)
        own = dh + direction * batch * n
        to_gates, to_new = r.gates.data + direction * r.gates.direction, r.new.data + direction * r.new.direction
        copy_states(own, dh_last.data + direction * dh_last.direction, dh_last.row, begin, end, n)
        for step in range(layer.steps - 1, -1, -1):
            t = time_of(layer, direction, step)
            place, matrix_row = place_of(layer, direction, t), (direction * layer.steps + t) * batch
            d_gates, resets = dz + matrix_row * 3 * n, product + matrix_row * n
            h, h_row = states_before(layer, h0, y, direction, step)
            for row in range(begin, end):
                gate, d = gates + (place + row) * 3 * n, d_gates + row * 3 * n
                states = h + row * h_row, dy.data + (place + row) * dy.step, own + row * n
                write_mix_back((d, d + 2 * n, own + row * n), 0, n, (gate, gate + 2 * n, *states), ())
            multiply(resets, n, d_gates + 2 * n, 3 * n, 1, to_new, r.new.panel, n, n, range(begin, end), 0)
            for row in range(begin, end):
                reset, dr = gates + ((place + row) * 3 + 1) * n, d_gates + (row * 3 + 1) * n
                dh_row, product_row = own + row * n, resets + row * n
                write_reset_back((dr, dh_row, product_row), 0, n, (reset, h + row * h_row, product_row, dh_row), ())
            multiply(own, n, d_gates, 3 * n, 1, to_gates, r.gates.panel, 2 * n, n, range(begin, end), 1)


@kernel
def gru_steps_linear_back(
    units: Units, layer: Layer, r: GateWeights, bias: Rows, gates: Pointer, y: Pointer, h0: States, dy: Rows,
    dh_last: States, dz: Pointer, dz_h: Pointer, product: Pointer, dh: Pointer,
):  # fmt: skip
    """`gru_steps_back` with linear_before_reset.

    dz, dz_h: of the gates' products with x and with the states. product: memory for a row of each unit. r.new: packed
    as for the steps.
    """
    n, batch = layer.hidden, layer.batch
    for direction in range(units.start // batch, -(-units.stop // batch)):
        begin, end = sequences_of(layer, units, direction)
        own, q = dh + direction * batch * n, product + direction * batch * n
        bq = bias.data + direction * bias.step + 3 * n
        to_states, to_new = r.gates.data + direction * r.gates.direction, r.new.data + direction * r.new.direction
        copy_states(own, dh_last.data + direction * dh_last.direction, dh_last.row, begin, end, n)
        for step in range(layer.steps - 1, -1, -1):
            t = time_of(layer, direction, step)
            place, matrix_row = place_of(layer, direction, t), (direction * layer.steps + t) * batch
            of_x, of_h = dz + matrix_row * 3 * n, dz_h + matrix_row * 3 * n
            h, h_row = states_before(layer, h0, y, direction, step)
            multiply(q, n, h, h_row, 1, to_new, r.new.panel, n, n, range(begin, end), 0)
            for row in range(begin, end):
                gate, d, e = gates + (place + row) * 3 * n, of_x + row * 3 * n, of_h + row * 3 * n
                states = h + row * h_row, bq, q + row * n, dy.data + (place + row) * dy.step, own + row * n
                now, out = (gate, gate + n, gate + 2 * n), (d, d + n, d + 2 * n, e, e + n, e + 2 * n)
                write_linear_back((*out, own + row * n), 0, n, (*now, *states), ())
            multiply(own, n, of_h, 3 * n, 1, to_states, r.gates.panel, 3 * n, n, range(begin, end), 1)
