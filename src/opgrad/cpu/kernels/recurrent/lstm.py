"""The steps of an LSTM, and their gradients: a unit is one sequence of one direction, all steps of it.

Threads share the sequences, so that none waits for another between steps.
"""

from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
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


class CellWeights(NamedTuple):
    """The weights of the states, the peephole weights of the cells, and whether the latter are given."""

    r: Panels
    peepholes: Rows
    peep: int


def cell(
    i: Vector, o: Vector, f: Vector, g: Vector, bi: Vector, bo: Vector, bf: Vector, bg: Vector,
    pi: Vector, po: Vector, pf: Vector, c: Vector, peep: int,
) -> tuple[Vector, ...]:  # fmt: skip
    """The gates, from the sums that x and h give them, the next cell, and the next state. peep: see `CellWeights`."""
    i, f, o = i + bi, f + bf, o + bo
    if peep:
        i, f = v.fma(pi, c, i), v.fma(pf, c, f)
    i, f, g = sigmoid(i), sigmoid(f), tanh(g + bg)
    c = v.fma(f, c, i * g)
    if peep:
        o = v.fma(po, c, o)
    o = sigmoid(o)
    return i, o, f, g, c, o * tanh(c)


write_cells = mapped_to_each(cell)


@inline
def peepholes_of(weights: CellWeights, direction: int, n: int) -> Any:
    """Where a direction's peephole weights of the gates i, o and f begin; zeros if they are not given."""
    p, step = weights.peepholes.data + direction * weights.peepholes.step, n if weights.peep else 0
    return p, p + step, p + 2 * step


@kernel
def lstm_steps(
    units: Units, layer: Layer, weights: CellWeights, bias: Rows, h0: States, c0: States, gates: Pointer,
    y: Pointer, cells: Pointer, y_h: Pointer, y_c: Pointer,
):  # fmt: skip
    """gates: the gates' products with x, without bias."""
    n, batch, r = layer.hidden, layer.batch, weights.r
    for direction in range(units.start // batch, -(-units.stop // batch)):
        begin, end = sequences_of(layer, units, direction)
        b, peepholes = bias.data + direction * bias.step, peepholes_of(weights, direction, n)
        h, h_row = h0.data + direction * h0.direction, h0.row
        c, c_row = c0.data + direction * c0.direction, c0.row
        panels = r.data + direction * r.direction
        for step in range(layer.steps):
            place = place_of(layer, direction, time_of(layer, direction, step))
            z, h_next, c_next = gates + place * 4 * n, y + place * n, cells + place * n
            multiply(z, 4 * n, h, h_row, 1, panels, r.panel, n, 4 * n, range(begin, end), 1)
            for row in range(begin, end):
                zi = z + row * 4 * n
                sums, biases = (zi, zi + n, zi + 2 * n, zi + 3 * n), (b, b + n, b + 2 * n, b + 3 * n)
                out = *sums, c_next + row * n, h_next + row * n
                write_cells(out, 0, n, (*sums, *biases, *peepholes, c + row * c_row), (weights.peep,))
            h, h_row, c, c_row = h_next, n, c_next, n
        copy_states(y_h + direction * batch * n, h, h_row, begin, end, n)
        copy_states(y_c + direction * batch * n, c, c_row, begin, end, n)


def cell_back(
    i: Vector, o: Vector, f: Vector, g: Vector, after: Vector, before: Vector, dy: Vector, dh: Vector,
    pi: Vector, po: Vector, pf: Vector, dc: Vector, peep: int,
) -> tuple[Vector, ...]:  # fmt: skip
    """The gradients of the sums that x and h gave the gates, and that of the cell before."""
    t, d = tanh(after), dy + dh
    do = d * t * o * (1.0 - o)
    dc = v.fma(d * o, v.fma(-t, t, 1.0), dc)
    if peep:
        dc = v.fma(do, po, dc)
    di, df, back = dc * g * i * (1.0 - i), dc * before * f * (1.0 - f), dc * f
    if peep:
        back = v.fma(di, pi, v.fma(df, pf, back))
    return di, do, df, dc * i * v.fma(-g, g, 1.0), back


write_cells_back = mapped_to_each(cell_back)


@kernel
def lstm_steps_back(
    units: Units, layer: Layer, weights: CellWeights, c0: States, gates: Pointer, cells: Pointer, dy: Rows,
    dh_last: States, dc_last: States, dz: Pointer, dh: Pointer, dc: Pointer,
):  # fmt: skip
    """dh and dc hold the gradients of the states on the way; dz has a matrix of all steps for each direction."""
    n, batch, r = layer.hidden, layer.batch, weights.r
    for direction in range(units.start // batch, -(-units.stop // batch)):
        begin, end = sequences_of(layer, units, direction)
        peepholes, panels = peepholes_of(weights, direction, n), r.data + direction * r.direction
        own_h, own_c = dh + direction * batch * n, dc + direction * batch * n
        copy_states(own_h, dh_last.data + direction * dh_last.direction, dh_last.row, begin, end, n)
        copy_states(own_c, dc_last.data + direction * dc_last.direction, dc_last.row, begin, end, n)
        for step in range(layer.steps - 1, -1, -1):
            t = time_of(layer, direction, step)
            place, z = place_of(layer, direction, t), dz + (direction * layer.steps + t) * batch * 4 * n
            c, c_row = states_before(layer, c0, cells, direction, step)
            for row in range(begin, end):
                gate, d = gates + (place + row) * 4 * n, z + row * 4 * n
                now = gate, gate + n, gate + 2 * n, gate + 3 * n
                states = cells + (place + row) * n, c + row * c_row, dy.data + (place + row) * dy.step, own_h + row * n
                out, dc_row = (d, d + n, d + 2 * n, d + 3 * n), own_c + row * n
                write_cells_back((*out, dc_row), 0, n, (*now, *states, *peepholes, dc_row), (weights.peep,))
            multiply(own_h, n, z, 4 * n, 1, panels, r.panel, 4 * n, n, range(begin, end), 0)


@kernel
def peepholes_back(units: Units, strips, layer: Layer, cells: Pointer, c0: States, dz: Pointer, dp: Pointer):
    """dp = sums of di * c before, do * c, df * c before; a unit is a vector of columns of a direction."""
    n, batch, w = layer.hidden, layer.batch, v.lanes(dp)
    zero = v.full(dp, 0.0)
    for unit in units:
        direction, j = unit // strips, unit % strips * w
        total, mask = (zero, zero, zero), v.first(dp, n - j)
        for step in range(layer.steps):
            t = time_of(layer, direction, step)
            place, z = place_of(layer, direction, t), dz + ((direction * layer.steps + t) * batch * 4 * n + j)
            c, c_row = states_before(layer, c0, cells, direction, step)
            some = zero, zero, zero
            for row in range(batch):
                before = v.load_masked(c, row * c_row + j, mask, 0.0)
                after = v.load_masked(cells, (place + row) * n + j, mask, 0.0)
                di, do = v.load_masked(z, row * 4 * n, mask, 0.0), v.load_masked(z, (4 * row + 1) * n, mask, 0.0)
                df = v.load_masked(z, (4 * row + 2) * n, mask, 0.0)
                some = v.fma(di, before, some[0]), v.fma(do, after, some[1]), v.fma(df, before, some[2])
            total = v.add_each(total, some)
        out = dp + (3 * direction * n + j)
        v.store_masked(out, 0, total[0], mask)
        v.store_masked(out, n, total[1], mask)
        v.store_masked(out, 2 * n, total[2], mask)
