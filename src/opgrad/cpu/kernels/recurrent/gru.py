"""The steps of a GRU, and their gradients: a unit is one sequence of one direction, all steps of it.

The reset gate is applied before the product of the states with the weights of n, or after it; each has its kernels.
"""

from collections.abc import Callable
from typing import NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Rows, Units
from opgrad.cpu.kernels.gemm import multiply
from opgrad.cpu.kernels.loops.fold import fold
from opgrad.cpu.kernels.loops.map import get, put
from opgrad.cpu.kernels.numerics.elementary import sigmoid, tanh
from opgrad.cpu.kernels.recurrent.layer import (
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


class KeptStates(NamedTuple):
    """Results of the forward steps: the gates, all states, and the states before the first step."""

    gates: Pointer
    y: Pointer
    h0: States


class Above(NamedTuple):
    """The gradients with respect to all states and to the last ones, from the layers after this one."""

    y: Rows
    h: States


class GateGradients(NamedTuple):
    """The gradients of the gates' products with x and with the states: a matrix of all steps for each direction."""

    x: Pointer
    h: Pointer


# --- steps ----------------------------------------------------------------------------------------------------------


@inline
def reset(total, arrays, i: int, whole: bool, mask, numbers):
    """The gates z and r, and r * h."""
    z, r, bz, br, before, product = arrays
    put(z, i, sigmoid(get(z, i, whole, mask) + get(bz, i, whole, mask)), whole, mask, 0)
    r_ = sigmoid(get(r, i, whole, mask) + get(br, i, whole, mask))
    put(r, i, r_, whole, mask, 0)
    put(product, i, r_ * get(before, i, whole, mask), whole, mask, 0)
    return total


@inline
def mix(total, arrays, i: int, whole: bool, mask, numbers):
    """n, and the state (1 - z) * n + z * h."""
    z, n, bn, before, y = arrays
    n_ = tanh(get(n, i, whole, mask) + get(bn, i, whole, mask))
    put(n, i, n_, whole, mask, 0)
    put(y, i, v.fma(get(z, i, whole, mask), get(before, i, whole, mask) - n_, n_), whole, mask, 0)
    return total


@inline
def mix_linear(total, arrays, i: int, whole: bool, mask, numbers):
    """All gates and the state, from the product q of the state before with the weights of n."""
    z, r, n, bz, br, bn, bq, q, before, y = arrays
    z_ = sigmoid(get(z, i, whole, mask) + get(bz, i, whole, mask))
    r_ = sigmoid(get(r, i, whole, mask) + get(br, i, whole, mask))
    sums = get(n, i, whole, mask) + get(bn, i, whole, mask)
    n_ = tanh(v.fma(r_, get(q, i, whole, mask) + get(bq, i, whole, mask), sums))
    put(z, i, z_, whole, mask, 0)
    put(r, i, r_, whole, mask, 0)
    put(n, i, n_, whole, mask, 0)
    put(y, i, v.fma(z_, get(before, i, whole, mask) - n_, n_), whole, mask, 0)
    return total


reset_of_row, mix_of_row, mix_linear_of_row = fold(reset), fold(mix), fold(mix_linear)


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
        each = z + row * 3 * n
        reset_of_row((), 0, n, (each, each + n, b, b + n, h + row * h_row, own + row * n), ())
    multiply(z + 2 * n, 3 * n, own, n, 1, to_new, panel, n, n, range(begin, end), 1)
    for row in range(begin, end):
        each = z + row * 3 * n
        mix_of_row((), 0, n, (each, each + 2 * n, b + 2 * n, h + row * h_row, h_next + row * n), ())


@steps_of
def gru_steps_linear(z, own, b, h, h_row: int, h_next, to_new, panel: int, n: int, begin: int, end: int) -> None:
    """With linear_before_reset."""
    multiply(own, n, h, h_row, 1, to_new, panel, n, n, range(begin, end), 0)
    for row in range(begin, end):
        each = z + row * 3 * n
        now, biases = (each, each + n, each + 2 * n), (b, b + n, b + 2 * n, b + 3 * n)
        states = own + row * n, h + row * h_row, h_next + row * n
        mix_linear_of_row((), 0, n, now + biases + states, ())


# --- gradients ------------------------------------------------------------------------------------------------------


@inline
def mix_back(total, arrays, i: int, whole: bool, mask, numbers):
    """The gradients of the sums of z and n. dh becomes the part of the state's gradient that bypasses both."""
    z, n, before, dy, dh, dz, dn = arrays
    z_, n_ = get(z, i, whole, mask), get(n, i, whole, mask)
    d = get(dy, i, whole, mask) + get(dh, i, whole, mask)
    put(dz, i, d * (get(before, i, whole, mask) - n_) * z_ * (1.0 - z_), whole, mask, 0)
    put(dn, i, d * (1.0 - z_) * v.fma(-n_, n_, 1.0), whole, mask, 0)
    put(dh, i, d * z_, whole, mask, 0)
    return total


@inline
def reset_back(total, arrays, i: int, whole: bool, mask, numbers):
    """The gradient of the sum of r, and its part of dh. `product` holds the gradient of r * h, and then r * h again."""
    r, before, product, dr, dh = arrays
    r_, h = get(r, i, whole, mask), get(before, i, whole, mask)
    d = get(product, i, whole, mask)
    put(dr, i, d * h * r_ * (1.0 - r_), whole, mask, 0)
    put(dh, i, v.fma(d, r_, get(dh, i, whole, mask)), whole, mask, 0)
    put(product, i, r_ * h, whole, mask, 0)
    return total


@inline
def linear_back(total, arrays, i: int, whole: bool, mask, numbers):
    """The gradients of all sums with x, then of those with the states: in n these are r times as large."""
    z, r, n, before, bq, q, dy, dh, dz, dr, dn, dz_h, dr_h, dq = arrays
    z_, r_, n_ = get(z, i, whole, mask), get(r, i, whole, mask), get(n, i, whole, mask)
    d = get(dy, i, whole, mask) + get(dh, i, whole, mask)
    update = d * (get(before, i, whole, mask) - n_) * z_ * (1.0 - z_)
    new = d * (1.0 - z_) * v.fma(-n_, n_, 1.0)
    r_sum = new * (get(q, i, whole, mask) + get(bq, i, whole, mask)) * r_ * (1.0 - r_)
    put(dz, i, update, whole, mask, 0)
    put(dr, i, r_sum, whole, mask, 0)
    put(dn, i, new, whole, mask, 0)
    put(dz_h, i, update, whole, mask, 0)
    put(dr_h, i, r_sum, whole, mask, 0)
    put(dq, i, new * r_, whole, mask, 0)
    put(dh, i, d * z_, whole, mask, 0)
    return total


mix_back_of_row, reset_back_of_row, linear_back_of_row = fold(mix_back), fold(reset_back), fold(linear_back)


@kernel
def gru_steps_back(
    units: Units, layer: Layer, r: GateWeights, kept: KeptStates, above: Above, dz: Pointer, product: Pointer,
    dh: Pointer,
):  # fmt: skip
    """dh holds the gradients of the states on the way; dz, and r * h, have a matrix of all steps for each direction."""
    n, batch, dy = layer.hidden, layer.batch, above.y
    for direction in range(units.start // batch, -(-units.stop // batch)):
        begin, end = sequences_of(layer, units, direction)
        own = dh + direction * batch * n
        to_gates, to_new = r.gates.data + direction * r.gates.direction, r.new.data + direction * r.new.direction
        copy_states(own, above.h.data + direction * above.h.direction, above.h.row, begin, end, n)
        for step in range(layer.steps - 1, -1, -1):
            t = time_of(layer, direction, step)
            place, matrix_row = place_of(layer, direction, t), (direction * layer.steps + t) * batch
            d_gates, resets = dz + matrix_row * 3 * n, product + matrix_row * n
            h, h_row = states_before(layer, kept.h0, kept.y, direction, step)
            for row in range(begin, end):
                gate, d = kept.gates + (place + row) * 3 * n, d_gates + row * 3 * n
                states = h + row * h_row, dy.data + (place + row) * dy.step, own + row * n
                now, out = (gate, gate + 2 * n), (d, d + 2 * n)
                mix_back_of_row((), 0, n, now + states + out, ())
            multiply(resets, n, d_gates + 2 * n, 3 * n, 1, to_new, r.new.panel, n, n, range(begin, end), 0)
            for row in range(begin, end):
                reset, dr = kept.gates + ((place + row) * 3 + 1) * n, d_gates + (row * 3 + 1) * n
                reset_back_of_row((), 0, n, (reset, h + row * h_row, resets + row * n, dr, own + row * n), ())
            multiply(own, n, d_gates, 3 * n, 1, to_gates, r.gates.panel, 2 * n, n, range(begin, end), 1)


@kernel
def gru_steps_linear_back(
    units: Units, layer: Layer, r: GateWeights, bias: Rows, kept: KeptStates, above: Above, dz: GateGradients,
    product: Pointer, dh: Pointer,
):  # fmt: skip
    """`gru_steps_back` with linear_before_reset.

    product: memory for a row of each unit. r.new: packed as for the steps.
    """
    n, batch, dy = layer.hidden, layer.batch, above.y
    for direction in range(units.start // batch, -(-units.stop // batch)):
        begin, end = sequences_of(layer, units, direction)
        own, q = dh + direction * batch * n, product + direction * batch * n
        bq = bias.data + direction * bias.step + 3 * n
        to_states, to_new = r.gates.data + direction * r.gates.direction, r.new.data + direction * r.new.direction
        copy_states(own, above.h.data + direction * above.h.direction, above.h.row, begin, end, n)
        for step in range(layer.steps - 1, -1, -1):
            t = time_of(layer, direction, step)
            place, matrix_row = place_of(layer, direction, t), (direction * layer.steps + t) * batch
            of_x, of_h = dz.x + matrix_row * 3 * n, dz.h + matrix_row * 3 * n
            h, h_row = states_before(layer, kept.h0, kept.y, direction, step)
            multiply(q, n, h, h_row, 1, to_new, r.new.panel, n, n, range(begin, end), 0)
            for row in range(begin, end):
                gate, d, e = kept.gates + (place + row) * 3 * n, of_x + row * 3 * n, of_h + row * 3 * n
                states = h + row * h_row, bq, q + row * n, dy.data + (place + row) * dy.step, own + row * n
                now, out = (gate, gate + n, gate + 2 * n), (d, d + n, d + 2 * n, e, e + n, e + 2 * n)
                linear_back_of_row((), 0, n, now + states + out, ())
            multiply(own, n, of_h, 3 * n, 1, to_states, r.gates.panel, 3 * n, n, range(begin, end), 1)
