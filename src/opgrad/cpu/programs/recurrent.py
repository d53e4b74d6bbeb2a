"""The programs of recurrent layers and of their gradients.

The gates are sums of a product with x and a product with the states. The products with x of all steps are one product
of matrices, and so is each gradient of the weights. The products with the states go from step to step, in a kernel
whose units are sequences.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from opgrad.base.locks import once
from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels import gemm, recurrent
from opgrad.cpu.kernels.loops.map import fill_zeros
from opgrad.cpu.kernels.recurrent import Layer, LayerMatrix, Panels, States
from opgrad.cpu.programs.building import ProductSteps
from opgrad.cpu.runtime.plan import Program, round_up
from opgrad.cpu.runtime.threads import chosen_threads

BLOCK_ROWS: Final = 64  # rows of a unit of a product, all of which read a chunk of a panel while it is in the cache
FEWEST_UNITS: Final = 16
FEWEST_SEQUENCES: Final = 4  # sequences of a thread: in every step, each thread reads all of R
PRODUCTS_OF_BYTE: Final = 2  # products that take as long as touching a byte


class RecurrentSteps(ProductSteps):
    """Puts the steps of a program together.

    length: the steps of x; gates: of each number of a state. W and R are [directions, gates * hidden, …]. rows: of W
    and of R for one direction. all_rows: of a matrix with one for each sequence of each step.
    """

    def __init__(self, problem: Problem, gates: int):
        super().__init__(problem)
        self.name, self.gates = problem.operator.name, gates
        self.length, self.batch, self.inputs = problem.specs["x"].shape
        self.directions, _, self.hidden = problem.specs["r"].shape
        self.rows, self.all_rows = gates * self.hidden, self.length * self.batch
        reverse = problem.attributes["direction"] == "reverse"
        self.layer = Layer(self.length, self.directions, self.batch, self.hidden, int(reverse))
        self._packed: dict[tuple[Any, ...], Panels] = {}

    def shared(self, count: int) -> Any:
        return self.workspace.shared(count)

    def add_sequences(self, kernel: Kernel, **arguments: Any) -> None:
        """The step of a kernel whose units are sequences: as few parts as keep the processors busy."""
        units = self.directions * self.batch
        parts = max(os.cpu_count() or 1, chosen_threads())
        per_part = max(FEWEST_SEQUENCES, -(-units // parts))
        self.add_parts(kernel, units, per_part, layer=self.layer, **arguments)

    # --- operands ---------------------------------------------------------------------------------------------------

    @once
    def zeros(self) -> Any:
        """A row of a state, all 0."""
        row = self.shared(self.hidden)
        self.add(fill_zeros, self.hidden, self.item, y=row, stream=0)
        return row

    def states(self, name: str) -> States:
        """An operand [directions, sequences, hidden]; zeros where it is missing."""
        found = self.given(name)
        step = self.hidden if found else 0
        return States(self.problem[name] if found else self.zeros, self.batch * step, step)

    def of_steps(self, name: str) -> Rows:
        """An operand [steps, directions, sequences, hidden]; zeros where it is missing."""
        found = self.given(name)
        return Rows(self.problem[name] if found else self.zeros, self.hidden if found else 0)

    def peepholes(self) -> tuple[Rows, int]:
        """The operand, and whether there is one."""
        found = self.given("peepholes")
        return Rows(self.problem["peepholes"] if found else self.zeros, 3 * self.hidden if found else 0), int(found)

    def result(self, name: str, count: int) -> Any:
        """A result, or memory in its place if nobody wants it."""
        return self.problem[name] if self.given(name) else self.shared(count)

    def biases(self, joined: int, single: int = 0) -> Rows:
        """For each direction: `joined` sums of a bias of x and one of h, `single` biases of x, as many of h."""
        size = joined + 2 * single
        added: Any = Rows(self.shared(self.directions * size), size)
        if self.given("bias"):
            given = {"rows": self.rows, "bias": Rows(self.problem["bias"], 2 * self.rows), "sums": added}
            self.add(recurrent.add_biases, self.directions, 3 * size * self.item, **given, joined=joined, single=single)
        else:
            self.add(fill_zeros, self.directions * size, self.item, y=added.data, stream=0)
        return added

    # --- matrices ---------------------------------------------------------------------------------------------------

    def weights(self, name: str, columns: int, first: int = 0) -> LayerMatrix:
        """W or R as a matrix for each direction, from its row `first` on."""
        data: Any = self.problem[name]
        return LayerMatrix(data, first * columns, self.rows * columns, 0, columns)

    def inputs_of_steps(self, name: str) -> LayerMatrix:
        """x or dx as a matrix with a block of rows for each step."""
        data: Any = self.problem[name]
        return LayerMatrix(data, 0, 0, self.batch * self.inputs, self.inputs)

    def states_of_steps(self, name: str, parts: int = 1) -> LayerMatrix:
        """y or the gates as a matrix with a block of rows for each step."""
        data: Any = self.problem[name]
        row = parts * self.hidden
        return LayerMatrix(data, 0, self.batch * row, self.directions * self.batch * row, row)

    def matrix(self, columns: int) -> LayerMatrix:
        """Memory for a row for each sequence of each step, of each direction."""
        data: Any = self.shared(self.directions * self.all_rows * columns)
        return LayerMatrix(data, 0, self.all_rows * columns, self.batch * columns, columns)

    # --- packing ----------------------------------------------------------------------------------------------------

    def memory_of_panels(self, depth: int, columns: int, directions: int) -> tuple[Panels, int]:
        """Memory for packed matrices, and how many panels each has."""
        count, panel = self.panels(depth, columns)
        data: Any = self.shared(directions * count * panel)
        return Panels(data, count * panel if directions > 1 else 0, panel), count

    def transposed(self, name: str, depth: int, rows: int, first: int = 0) -> Panels:
        """The transpose of some rows of W or R, which have `depth` columns."""
        packed, count = self.memory_of_panels(depth, rows, self.directions)
        x = self.weights(name, depth, first)
        arguments = {"panels": count, "rows": rows, "depth": depth, "x": x, "packed": packed}
        self.add(recurrent.pack_transposed, self.directions * count, 2 * packed.panel * self.item, **arguments)
        return packed

    def packed(
        self, x: LayerMatrix, blocks: int, rows: int, columns: int, directions: int | None = None, shift: int = 0,
        first: States | None = None,
    ) -> Panels:  # fmt: skip
        """The first columns of a matrix, of so many blocks of rows; packed when they are first asked for.

        shift, first: see the kernel.
        """
        directions = self.directions if directions is None else directions
        key = x, blocks, rows, columns, directions, shift
        if key in self._packed:
            return self._packed[key]
        packed, count = self.memory_of_panels(blocks * rows, columns, directions)
        arguments = {"panels": count, "blocks": blocks, "rows": rows, "columns": columns, "x": x, "packed": packed}
        arguments |= {"shift": shift, "first": first or States(x.data, 0, 0)}
        units, unit_bytes = directions * count * blocks, 2 * rows * self.width * self.item
        self.add(recurrent.pack_rows, units, unit_bytes, **arguments)
        self._packed[key] = packed
        return packed

    def packed_weights(self, name: str, columns: int, rows: int | None = None, first: int = 0) -> Panels:
        """Some rows of W or R."""
        return self.packed(self.weights(name, columns, first), 1, self.rows if rows is None else rows, columns)

    def packed_before(self) -> Panels:
        """The states before each step."""
        y, shift = self.states_of_steps("y"), 1 if self.layer.reverse else -1
        return self.packed(y, self.length, self.batch, self.hidden, shift=shift, first=self.states("initial_h"))

    # --- products over all steps ------------------------------------------------------------------------------------

    def multiply_rows(
        self, c: LayerMatrix, a: LayerMatrix, b: Panels, depth: int, columns: int, first: int | None = None
    ) -> None:
        """c = a @ b for all directions, or for direction `first` alone, which is added to c if it is not 0."""
        together = first is not None or self.directions == 1
        count, rows = (1, self.all_rows) if together else (self.length, self.batch)
        per_unit = min(BLOCK_ROWS, round_up(-(-rows // FEWEST_UNITS), gemm.ROWS) if together else rows)
        per_unit = max(per_unit, 1)
        per_block = -(-rows // per_unit)
        units = count * per_block * (1 if together else self.directions)
        unit_bytes = per_unit * depth * columns / PRODUCTS_OF_BYTE
        sizes = {"blocks": count, "block_rows": rows, "per_unit": per_unit, "per_block": per_block}
        sizes |= {"first": first or 0, "depth": depth, "columns": columns}
        self.add(recurrent.multiply_rows, units, unit_bytes, **sizes, add=bool(first), a=a, b=b, c=c)

    def gradient_of_x(self, dz: LayerMatrix) -> None:
        """dx = dz @ W, the sum over the directions."""
        if self.given("dx"):
            weights, dx = self.packed_weights("w", self.inputs), self.inputs_of_steps("dx")
            for direction in range(self.directions):
                self.multiply_rows(dx, dz, weights, self.rows, self.inputs, direction)

    def gradient_of_w(self, dz: LayerMatrix, parts: Sequence[tuple[int, int]]) -> None:
        """dw = dz.T @ x. parts: the first of some columns of dz, which are rows of dw, and their number."""
        if self.given("dw"):
            x = self.packed(self.inputs_of_steps("x"), self.length, self.batch, self.inputs, directions=1)
            for first, count in parts:
                self.multiply_panels("dw", dz, first, count, x, self.inputs)

    def gradient_of_r(self, dz: LayerMatrix, parts: Sequence[tuple[int, int, Callable[[], Panels]]]) -> None:
        """dr = dz.T @ states: those that the rows of R which belong to a part of dz were multiplied by."""
        if self.given("dr"):
            for first, count, states in parts:
                self.multiply_panels("dr", dz, first, count, states(), self.hidden)

    def multiply_panels(self, name: str, dz: LayerMatrix, first: int, count: int, b: Panels, columns: int) -> None:
        """The rows of dw or dr that belong to some columns of dz: the transpose of these times b."""
        c, panels = self.weights(name, columns, first), -(-count // self.width)
        a = self.packed(dz._replace(first=first), self.length, self.batch, count)
        sizes = {"panels": panels, "depth": self.all_rows, "rows": count, "columns": columns}
        unit_bytes = self.width * self.all_rows * columns / PRODUCTS_OF_BYTE
        self.add(recurrent.multiply_panels, self.directions * panels, unit_bytes, **sizes, a=a, b=b, c=c)

    def sum_columns(self, x: LayerMatrix, first: int, again: int) -> None:
        """Write the gradient of the biases from `first` on, and once more `again` elements behind, if not 0."""
        if not self.given("dbias"):
            return
        y: Any = Rows(self.problem["dbias"], 2 * self.rows)
        strips, columns = -(-self.rows // self.lanes), self.rows
        arguments = {"strips": strips, "rows": self.all_rows, "columns": columns, "first": first, "again": again}
        arguments |= {"x": Rows(x.data, x.direction), "y": y}
        self.add(recurrent.sum_columns, self.directions * strips, self.all_rows * self.lanes * self.item, **arguments)


# --- operators ------------------------------------------------------------------------------------------------------


LSTM, GRU = 4, 3  # gates


def _gates_from_x(building: RecurrentSteps) -> None:
    """Write the gates' products with x into the result that holds the gates later."""
    weights = building.transposed("w", building.inputs, building.rows)
    gates = building.states_of_steps("gates", building.gates)
    building.multiply_rows(gates, building.inputs_of_steps("x"), weights, building.inputs, building.rows)


def lstm_training(problem: Problem) -> Program:
    b = RecurrentSteps(problem, LSTM)
    _gates_from_x(b)
    b.add_sequences(
        recurrent.lstm_steps,
        weights=recurrent.CellWeights(b.transposed("r", b.hidden, b.rows), *b.peepholes()),
        bias=b.biases(b.rows),
        h0=b.states("initial_h"),
        c0=b.states("initial_c"),
    )
    return b


def lstm_grad(problem: Problem) -> Program:
    b = RecurrentSteps(problem, LSTM)
    dz, state = b.matrix(b.rows), b.directions * b.batch * b.hidden
    c0 = b.states("initial_c")
    b.add_sequences(
        recurrent.lstm_steps_back,
        weights=recurrent.CellWeights(b.packed_weights("r", b.hidden), *b.peepholes()),
        c0=c0,
        dy=b.of_steps("dy"),
        dh_last=b.states("dy_h"),
        dc_last=b.states("dy_c"),
        dz=dz.data,
        dh=b.result("dinitial_h", state),
        dc=b.result("dinitial_c", state),
    )
    b.gradient_of_x(dz)
    b.gradient_of_w(dz, [(0, b.rows)])
    b.gradient_of_r(dz, [(0, b.rows, b.packed_before)])
    b.sum_columns(dz, 0, b.rows)
    if b.given("dpeepholes"):
        strips, unit_bytes = -(-b.hidden // b.lanes), 5 * b.all_rows * b.lanes * b.item
        arguments = {"strips": strips, "layer": b.layer, "c0": c0, "dz": dz.data, "dp": problem["dpeepholes"]}
        b.add(recurrent.peepholes_back, b.directions * strips, unit_bytes, **arguments)
    return b


def _transposed_new(b: RecurrentSteps) -> Panels:
    """The packed matrix by which the steps multiply the states for n."""
    return b.transposed("r", b.hidden, b.hidden, first=2 * b.hidden)


def gru_training(problem: Problem) -> Program:
    b = RecurrentSteps(problem, GRU)
    linear = problem.attributes["linear_before_reset"]
    _gates_from_x(b)
    b.add_sequences(
        recurrent.gru_steps_linear if linear else recurrent.gru_steps,
        r=recurrent.GateWeights(b.transposed("r", b.hidden, 2 * b.hidden), _transposed_new(b)),
        bias=b.biases(2 * b.hidden, b.hidden) if linear else b.biases(b.rows),
        h0=b.states("initial_h"),
        product=b.shared(b.directions * b.batch * b.hidden),
    )
    return b


def gru_grad(problem: Problem) -> Program:
    b = RecurrentSteps(problem, GRU)
    dz = b.matrix(b.rows)
    common = {
        "h0": b.states("initial_h"),
        "dy": b.of_steps("dy"),
        "dh_last": b.states("dy_h"),
        "dh": b.result("dinitial_h", b.directions * b.batch * b.hidden),
    }
    back = _linear_back if problem.attributes["linear_before_reset"] else _reset_back
    dz_h = back(b, dz, common)
    b.gradient_of_x(dz)
    b.sum_columns(dz, 0, 0)
    b.sum_columns(dz_h, b.rows, 0)
    return b


def _reset_back(b: RecurrentSteps, dz: LayerMatrix, common: Mapping[str, Any]) -> LayerMatrix:
    """The steps back, dw and dr. Returns dz: the gradients of the gates' products with the states are the same."""
    resets = b.matrix(b.hidden)
    b.add_sequences(
        recurrent.gru_steps_back,
        r=recurrent.GateWeights(
            b.packed_weights("r", b.hidden, 2 * b.hidden), b.packed_weights("r", b.hidden, b.hidden, first=2 * b.hidden)
        ),
        dz=dz.data,
        product=resets.data,
        **common,
    )
    gates = 2 * b.hidden  # columns of z and r; those of n lie behind
    b.gradient_of_w(dz, [(0, gates), (gates, b.hidden)])
    of_n = partial(b.packed, resets, b.length, b.batch, b.hidden)  # the states after the reset gate
    b.gradient_of_r(dz, [(0, gates, b.packed_before), (gates, b.hidden, of_n)])
    return dz


def _linear_back(b: RecurrentSteps, dz: LayerMatrix, common: Mapping[str, Any]) -> LayerMatrix:
    """`_reset_back` for linear_before_reset: the reset gate multiplies the product for n, so its gradient differs."""
    dz_h = b.matrix(b.rows)
    b.add_sequences(
        recurrent.gru_steps_linear_back,
        r=recurrent.GateWeights(b.packed_weights("r", b.hidden), _transposed_new(b)),
        bias=b.biases(2 * b.hidden, b.hidden),
        dz=dz.data,
        dz_h=dz_h.data,
        product=b.shared(b.directions * b.batch * b.hidden),
        **common,
    )
    b.gradient_of_w(dz, [(0, b.rows)])
    b.gradient_of_r(dz_h, [(0, b.rows, b.packed_before)])
    return dz_h
