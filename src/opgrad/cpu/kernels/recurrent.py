"""Kernels of recurrent layers and their gradients: a unit is one sequence of one direction, all steps of it.

Threads share the sequences, so that none waits for another between steps. Products of matrices are taken over all steps
at once: the matrix on the right is packed for `gemm`, the one on the left read where it lies, or packed, too, if its
columns are rows in memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.gemm import VECTORS, multiply, pack_panel, pack_panel_transposed
from opgrad.cpu.kernels.loops.fold import column_sum_of
from opgrad.cpu.kernels.loops.map import mapped_to_each, write_same, write_sum
from opgrad.cpu.kernels.numerics.elementary import sigmoid, tanh


class States(NamedTuple):
    """A state for each sequence of each direction, and the distances between directions and between sequences."""

    data: Pointer
    direction: int
    row: int


class Layer(NamedTuple):
    """The number of steps, directions, sequences, and of a state's numbers; whether the first direction is reversed."""

    steps: int
    directions: int
    batch: int
    hidden: int
    reverse: int


@inline
def time_of(layer: Layer, direction: int, step: int) -> int:
    """The step of x that is a direction's step number `step`."""
    return layer.steps - 1 - step if layer.reverse or direction else step


@inline
def place_of(layer: Layer, direction: int, t: int) -> int:
    """The first of a direction's rows for a step of x, in an array [steps, directions, sequences]."""
    return (t * layer.directions + direction) * layer.batch


@inline
def sequences_of(layer: Layer, units: Any, direction: int) -> tuple[int, int]:
    """The sequences of a direction among these units. A unit is a sequence; one direction follows the other."""
    first = direction * layer.batch
    return max(units.start - first, 0), min(units.stop - first, layer.batch)


@inline
def states_before(layer: Layer, first: States, states: Any, direction: int, step: int) -> tuple[Any, int]:
    """Where the states before a direction's step begin, and the elements from one sequence's to the next."""
    if step:
        return states + place_of(layer, direction, time_of(layer, direction, step - 1)) * layer.hidden, layer.hidden
    return first.data + direction * first.direction, first.row


@inline
def copy_states(target: Any, source: Any, row_step: int, begin: int, end: int, n: int) -> None:
    """Copy the states of sequences [begin, end) into rows behind each other."""
    for row in range(begin, end):
        write_same(target + row * n, 0, n, 0, (source + row * row_step,), ())


class LayerMatrix(NamedTuple):
    """A matrix for each direction, with a block of rows for each step.

    first: the elements before the first row. direction, block, row: the distances between them.
    """

    data: Pointer
    first: int
    direction: int
    block: int
    row: int


class Panels(NamedTuple):
    """A packed matrix for each direction, and the distances between directions and between panels."""

    data: Pointer
    direction: int
    panel: int


@kernel
def multiply_rows(
    units: Units, blocks, block_rows, per_unit, per_block, first, depth, columns, add, a: LayerMatrix, b: Panels,
    c: LayerMatrix,
):  # fmt: skip
    """c (+)= a @ b for the directions from `first` on; a unit is some rows of a block, which has so many units."""
    for unit in units:
        block, begin = unit // per_block, unit % per_block * per_unit
        direction, block = first + block // blocks, block % blocks
        source = a.data + (a.first + direction * a.direction + block * a.block)
        target = c.data + (c.first + direction * c.direction + block * c.block)
        rows, panels = range(begin, min(begin + per_unit, block_rows)), b.data + direction * b.direction
        multiply(target, c.row, source, a.row, 1, panels, b.panel, depth, columns, rows, add)


@kernel
def multiply_panels(units: Units, panels, depth, rows, columns, a: Panels, b: Panels, c: LayerMatrix):
    """c = the transpose of a, times b, both packed; a unit is a panel of a, whose columns are rows of c."""
    width = VECTORS * v.lanes(c.data)
    for unit in units:
        direction, begin = unit // panels, unit % panels * width
        own = a.data + (direction * a.direction + unit % panels * a.panel)
        other, target = b.data + direction * b.direction, c.data + (c.first + direction * c.direction + begin * c.row)
        multiply(target, c.row, own, 1, width, other, b.panel, depth, columns, range(min(width, rows - begin)), 0)


@kernel
def pack_transposed(units: Units, panels, rows, depth, x: LayerMatrix, packed: Panels):
    """Packs the transpose of x, whose rows are the columns of the packed matrix; a unit is a panel."""
    w = VECTORS * v.lanes(packed.data)
    for unit in units:
        direction, panel = unit // panels, unit % panels
        target = packed.data + (direction * packed.direction + panel * packed.panel)
        source = x.data + (x.first + direction * x.direction + panel * w * x.row)
        pack_panel_transposed(target, source, x.row, depth, rows - panel * w)


@kernel
def pack_rows(units: Units, panels, blocks, rows, columns, shift, x: LayerMatrix, first: States, packed: Panels):
    """Packs x; a unit is a block of a panel.

    shift: 0, or how far each block's place in x is from that of the step before it in the first direction's time; the
    block of that step is packed then, and the first states where there is none.
    """
    w = VECTORS * v.lanes(packed.data)
    for unit in units:
        block, panel = unit % blocks, unit // blocks
        direction, panel = panel // panels, panel % panels
        target = packed.data + (direction * packed.direction + panel * packed.panel + block * rows * w)
        before = block + (-shift if direction else shift)
        source, row = first.data + direction * first.direction, first.row
        if 0 <= before < blocks:
            source, row = x.data + (x.first + direction * x.direction + before * x.block), x.row
        pack_panel(target, source + panel * w, row, rows, columns - panel * w)


@kernel
def add_biases(directions: Units, rows, joined, single, bias: Rows, sums: Rows):
    """The sums of the first `joined` biases of x and of h, then the next `single` of x, then those of h."""
    for direction in directions:
        b, out = bias.data + direction * bias.step, sums.data + direction * sums.step
        write_sum(out, 0, joined, 0, (b, b + rows), ())
        write_same(out + joined, 0, single, 0, (b + joined,), ())
        write_same(out + (joined + single), 0, single, 0, (b + (rows + joined),), ())


@kernel
def sum_columns(units: Units, strips, rows, columns, first, again, x: Rows, y: Rows):
    """Write the sums of a matrix's columns from y[first] on, and once more `again` elements behind, if that is not 0.

    A unit is a vector of columns. Behind the last row there is memory for a vector.
    """
    w = v.lanes(x.data)
    for unit in units:
        direction, j = unit // strips, unit % strips * w
        mask, out = v.first(y.data, columns - j), y.data + (direction * y.step + first + j)
        total = column_sum_of(x.data + (direction * x.step + j), rows, columns)
        v.store_masked(out, 0, total, mask)
        if again:
            v.store_masked(out, again, total, mask)


# --- LSTM ------------------------------------------------------------------------------------------------------------


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


@mapped_to_each
def write_cells_back(
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


# --- GRU: the reset gate is applied before the product of the states with the weights of n, or after it --------------


class GateWeights(NamedTuple):
    """The matrices that the states are multiplied by: for the gates z and r, or for all gates, and for n."""

    gates: Panels
    new: Panels


def reset(z: Vector, r: Vector, bz: Vector, br: Vector, before: Vector) -> tuple[Vector, ...]:
    """The gates z and r, and r * h."""
    r = sigmoid(r + br)
    return sigmoid(z + bz), r, r * before


@mapped_to_each
def write_mix(z: Vector, n: Vector, bn: Vector, before: Vector) -> tuple[Vector, ...]:
    """n, and the state (1 - z) * n + z * h."""
    n = tanh(n + bn)
    return n, v.fma(z, before - n, n)


@mapped_to_each
def write_mix_linear(
    z: Vector, r: Vector, n: Vector, bz: Vector, br: Vector, bn: Vector, bq: Vector, q: Vector, before: Vector
) -> tuple[Vector, ...]:
    """All gates and the state, from the product q of the state before with the weights of n."""
    z, r = sigmoid(z + bz), sigmoid(r + br)
    n = tanh(v.fma(r, q + bq, n + bn))
    return z, r, n, v.fma(z, before - n, n)


write_reset = mapped_to_each(reset)


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


@mapped_to_each
def write_mix_back(z: Vector, n: Vector, before: Vector, dy: Vector, dh: Vector) -> tuple[Vector, ...]:
    """The gradients of the sums of z and n, and the part of the state's gradient that bypasses both."""
    d = dy + dh
    return d * (before - n) * z * (1.0 - z), d * (1.0 - z) * v.fma(-n, n, 1.0), d * z


@mapped_to_each
def write_reset_back(r: Vector, before: Vector, d: Vector, dh: Vector) -> tuple[Vector, ...]:
    """From the gradient d of r * h: the gradient of the sum of r, dh with its part, and r * h again."""
    return d * before * r * (1.0 - r), v.fma(d, r, dh), r * before


@mapped_to_each
def write_linear_back(
    z: Vector, r: Vector, n: Vector, before: Vector, bq: Vector, q: Vector, dy: Vector, dh: Vector
) -> tuple[Vector, ...]:
    """The gradients of all sums with x, then of those with the states: in n these are r times as large; then dh."""
    d = dy + dh
    update, new = d * (before - n) * z * (1.0 - z), d * (1.0 - z) * v.fma(-n, n, 1.0)
    r_sum = new * (q + bq) * r * (1.0 - r)
    return update, r_sum, new, update, r_sum, new * r, d * z


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
