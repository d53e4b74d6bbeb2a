"""The steps of an LSTM, and their gradients: a unit is one sequence of one direction, all steps of it.

Threads share the sequences, so that none waits for another between steps.
"""

from typing import NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline, kernel
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


class CellWeights(NamedTuple):
    """The weights of the states, the peephole weights of the cells, and whether the latter are given."""

    r: Panels
    peepholes: Rows
    peep: int


class Start(NamedTuple):
    """The states and cells before the first step."""

    h: States
    c: States


class Above(NamedTuple):
    """The gradients with respect to all states, and to the last states and cells, from the layers after this one."""

    y: Rows
    h: States
    c: States


@inline
def cell(total, arrays, i: int, whole: bool, mask, numbers):
    """One vector of a step; the sums that x and h give the gates are replaced by the gates."""
    zi, zo, zf, zg, bi, bo, bf, bg, pi, po, pf, before, y, after = arrays
    c = get(before, i, whole, mask)
    a, f = get(zi, i, whole, mask) + get(bi, i, whole, mask), get(zf, i, whole, mask) + get(bf, i, whole, mask)
    if numbers[0]:
        a, f = v.fma(get(pi, i, whole, mask), c, a), v.fma(get(pf, i, whole, mask), c, f)
    a, f, g = sigmoid(a), sigmoid(f), tanh(get(zg, i, whole, mask) + get(bg, i, whole, mask))
    c = v.fma(f, c, a * g)
    o = get(zo, i, whole, mask) + get(bo, i, whole, mask)
    if numbers[0]:
        o = v.fma(get(po, i, whole, mask), c, o)
    o = sigmoid(o)
    put(zi, i, a, whole, mask, 0)
    put(zo, i, o, whole, mask, 0)
    put(zf, i, f, whole, mask, 0)
    put(zg, i, g, whole, mask, 0)
    put(after, i, c, whole, mask, 0)
    put(y, i, o * tanh(c), whole, mask, 0)
    return total


cells_of_row = fold(cell)


@kernel
def lstm_steps(
    units: Units, layer: Layer, weights: CellWeights, bias: Rows, start: Start, gates: Pointer, y: Pointer,
    cells: Pointer, y_h: Pointer, y_c: Pointer,
):  # fmt: skip
    """gates: the gates' products with x, without bias."""
    n, batch, r, peepholes = layer.hidden, layer.batch, weights.r, weights.peepholes
    for direction in range(units.start // batch, -(-units.stop // batch)):
        begin, end = sequences_of(layer, units, direction)
        b, p = bias.data + direction * bias.step, peepholes.data + direction * peepholes.step
        h, h_row = start.h.data + direction * start.h.direction, start.h.row
        c, c_row = start.c.data + direction * start.c.direction, start.c.row
        panels = r.data + direction * r.direction
        for step in range(layer.steps):
            place = place_of(layer, direction, time_of(layer, direction, step))
            z, h_next, c_next = gates + place * 4 * n, y + place * n, cells + place * n
            multiply(z, 4 * n, h, h_row, 1, panels, r.panel, n, 4 * n, range(begin, end), 1)
            for row in range(begin, end):
                zi = z + row * 4 * n
                sums, biases = (zi, zi + n, zi + 2 * n, zi + 3 * n), (b, b + n, b + 2 * n, b + 3 * n)
                states = c + row * c_row, h_next + row * n, c_next + row * n
                cells_of_row((), 0, n, sums + biases + (p, p + n, p + 2 * n) + states, (weights.peep,))
            h, h_row, c, c_row = h_next, n, c_next, n
        copy_states(y_h + direction * batch * n, h, h_row, begin, end, n)
        copy_states(y_c + direction * batch * n, c, c_row, begin, end, n)


@inline
def cell_back(total, arrays, i: int, whole: bool, mask, numbers):
    """One vector of a step's gradients: of the sums that x and h gave the gates, and of the cell before."""
    i_, o_, f_, g_, after, before, dy, dh, pi, po, pf, dc, dzi, dzo, dzf, dzg = arrays
    a, o = get(i_, i, whole, mask), get(o_, i, whole, mask)
    f, g = get(f_, i, whole, mask), get(g_, i, whole, mask)
    t, d = tanh(get(after, i, whole, mask)), get(dy, i, whole, mask) + get(dh, i, whole, mask)
    do = d * t * o * (1.0 - o)
    dcell = v.fma(d * o, v.fma(-t, t, 1.0), get(dc, i, whole, mask))
    if numbers[0]:
        dcell = v.fma(do, get(po, i, whole, mask), dcell)
    di, df = dcell * g * a * (1.0 - a), dcell * get(before, i, whole, mask) * f * (1.0 - f)
    back = dcell * f
    if numbers[0]:
        back = v.fma(di, get(pi, i, whole, mask), v.fma(df, get(pf, i, whole, mask), back))
    put(dzi, i, di, whole, mask, 0)
    put(dzo, i, do, whole, mask, 0)
    put(dzf, i, df, whole, mask, 0)
    put(dzg, i, dcell * a * v.fma(-g, g, 1.0), whole, mask, 0)
    put(dc, i, back, whole, mask, 0)
    return total


cells_back_of_row = fold(cell_back)


@kernel
def lstm_steps_back(
    units: Units, layer: Layer, weights: CellWeights, c0: States, gates: Pointer, cells: Pointer, above: Above,
    dz: Pointer, dh: Pointer, dc: Pointer,
):  # fmt: skip
    """dh and dc hold the gradients of the states on the way; dz has a matrix of all steps for each direction."""
    n, batch, r, dy = layer.hidden, layer.batch, weights.r, above.y
    for direction in range(units.start // batch, -(-units.stop // batch)):
        begin, end = sequences_of(layer, units, direction)
        p, panels = weights.peepholes.data + direction * weights.peepholes.step, r.data + direction * r.direction
        own_h, own_c = dh + direction * batch * n, dc + direction * batch * n
        copy_states(own_h, above.h.data + direction * above.h.direction, above.h.row, begin, end, n)
        copy_states(own_c, above.c.data + direction * above.c.direction, above.c.row, begin, end, n)
        for step in range(layer.steps - 1, -1, -1):
            t = time_of(layer, direction, step)
            place, z = place_of(layer, direction, t), dz + (direction * layer.steps + t) * batch * 4 * n
            c, c_row = states_before(layer, c0, cells, direction, step)
            for row in range(begin, end):
                gate, d = gates + (place + row) * 4 * n, z + row * 4 * n
                now = gate, gate + n, gate + 2 * n, gate + 3 * n
                states = cells + (place + row) * n, c + row * c_row, dy.data + (place + row) * dy.step, own_h + row * n
                out = own_c + row * n, d, d + n, d + 2 * n, d + 3 * n
                cells_back_of_row((), 0, n, now + states + (p, p + n, p + 2 * n) + out, (weights.peep,))
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
