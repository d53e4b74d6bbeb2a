"""Optimizers on NumPy arrays: of the rows of a table that a batch has touched, and of bfloat16 weights.

`gather_grad(..., sparse=True)` gives the rows and their gradients. The functions change the rows that it names and no
others; the moments of a row stand still while no batch touches it, as in torch.optim.SparseAdam.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from opgrad.cpu.kernels import optimizer as kernels
from opgrad.cpu.programs.optimizer import AdamWStep, adamw_in_place, checked_rates, sgd_in_place
from opgrad.cpu.runtime.plan import Pass, RepeatedKernel, units_per_part

FLOATS = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
BLOCK = 1 << 14  # weights that are float32 at a time: 64 KiB, which stay in the second-level cache

Array = np.ndarray[Any, Any]


# --- rows of a table -------------------------------------------------------------------------------------------------


def sgd_rows(table: Array, rows: Array, values: Array, learning_rate: float) -> None:
    """A step of gradient descent for some rows of a table, in place.

    table: shape (V, D1, …); float32, float64, float16 or bfloat16; contiguous.
    rows: int64 [k], rows of the table, rising. values: shape (k, D1, …), their gradients; any of the four dtypes.

    Raises TypeError for a wrong dtype, ValueError for wrong shapes or rows, before anything is written.

    Formula: table[rows] -= learning_rate * values. Source: torch.optim.SGD on a sparse gradient.
    """
    factors = np.array([learning_rate, 0, 1, 1, 1], np.float64)
    _run("sgd_rows", kernels.sgd_rows, rows, values, [table], factors, lambda p, g: {"p": p, "g": g})


def adagrad_rows(
    table: Array, sums: Array, rows: Array, values: Array, learning_rate: float, epsilon: float = 1e-10
) -> None:
    """A step of Adagrad for some rows of a table, in place.

    table, rows, values: as for sgd_rows. sums: like table, of any of the four dtypes; changed, too.
    epsilon: what keeps the denominator from 0.

    Raises what sgd_rows raises.

    Formula: sums[rows] += values**2; table[rows] -= learning_rate * values / (sqrt(sums[rows]) + epsilon).
    Source: Adaptive Subgradient Methods, Duchi et al. 2011; torch.optim.Adagrad.
    """
    factors = np.array([learning_rate, epsilon, 1, 1, 1], np.float64)
    _run(
        "adagrad_rows", kernels.adagrad_rows, rows, values, [table, sums], factors,
        lambda p, g, s: {"p": p, "g": g, "s": s},
    )  # fmt: skip


def adam_rows(
    table: Array, first_moment: Array, second_moment: Array, rows: Array, values: Array, learning_rate: float,
    step: int, alpha: float = 0.9, beta: float = 0.999, epsilon: float = 1e-8, weight_decay: float = 0.0,
    adam_mode: int = 0, correct_bias: bool = True,
) -> None:  # fmt: skip
    """A step of Adam, or with weight_decay of AdamW, for some rows of a table, in place.

    table, rows, values: as for sgd_rows. first_moment, second_moment: like table, of any of the four dtypes; changed,
        too. step: the number of this step, from 1, for all rows.
    alpha, beta: the decay rates of the moments. epsilon: what keeps the denominator from 0. weight_decay: the decay
        of the rows, times the learning rate. adam_mode, correct_bias: as for adamw_optimizer.

    Raises what sgd_rows raises.

    Formula: that of adamw_optimizer, on table[rows] and the same rows of the moments.
    Source: torch.optim.SparseAdam; Decoupled Weight Decay Regularization, arXiv 1711.05101.
    """
    if step < 1:
        raise ValueError(f"adam_rows: step is {step}, expected at least 1")
    rates = checked_rates("adam_rows", alpha, beta, adam_mode, correct_bias)
    found = AdamWStep(learning_rate, step, alpha, beta, epsilon, weight_decay, adam_mode, correct_bias).factors()
    _run(
        "adam_rows", kernels.adamw_rows, rows, values, [table, first_moment, second_moment],
        np.array([*found, 1.0], np.float64),
        lambda p, g, m, v: {"state": kernels.State(p, g, m, v), "rates": rates},
    )  # fmt: skip


def _run(
    name: str, kernel: Any, rows: Array, values: Array, tables: Sequence[Array], factors: Array,
    named: Callable[..., dict[str, Any]],
) -> None:  # fmt: skip
    """Run a kernel over rows; `named` gives its arguments from table, values and the other tables."""
    rows, values = np.ascontiguousarray(rows), np.ascontiguousarray(values)
    _check(name, rows, values, tables)
    count, width = len(rows), values[0].size if len(rows) else 0
    if not count * width:
        return
    arrays = [rows, tables[0], values, *tables[1:]]
    given = {"width": width, "factors": factors.ctypes.data}
    traffic = sum(array.itemsize for array in arrays[1:]) * count * width
    each = units_per_part(count, traffic / count)
    RepeatedKernel(kernel, arrays, count, each, traffic, lambda of: {**given, "rows": of[0], **named(*of[1:])})()


def _check(name: str, rows: Array, values: Array, tables: Sequence[Array]) -> None:
    table = tables[0]
    if rows.dtype != np.int64 or rows.ndim != 1:
        raise TypeError(f"{name}: rows is {rows.dtype} of shape {rows.shape}, expected int64 of one dimension")
    for array in (*tables, values):
        if array.dtype not in FLOATS:
            raise TypeError(f"{name}: an array has dtype {array.dtype}, expected float32, float64, float16 or bfloat16")
    for array in tables:
        if array.shape != table.shape or not (array.flags.c_contiguous and array.flags.writeable):
            raise ValueError(f"{name}: an array is read-only, strided or not of shape {table.shape}, that of table")
    if values.shape != (len(rows), *table.shape[1:]):
        raise ValueError(f"{name}: values has shape {values.shape}, expected {(len(rows), *table.shape[1:])}")
    if len(rows) and not (rows[0] >= 0 and rows[-1] < len(table) and bool((np.diff(rows) > 0).all())):
        raise ValueError(f"{name}: rows are not rising numbers from 0 to {len(table) - 1}")


# --- bfloat16 weights ------------------------------------------------------------------------------------------------


class _Split:
    """Weights of which the caller has the upper halves, bfloat16, and the optimizer the lower ones.

    A float32 weight is its upper 16 bits, rounded to the nearest bfloat16, and what is missing, as an int16. A step
    joins, updates and splits a block after the other. Subclasses give the pass that updates a block, and its factors.
    """

    __slots__ = (
        "__weakref__", "_factors", "_gradients", "_high", "_passes", "_slope", "_weights", "learning_rate", "low",
        "steps",
    )  # fmt: skip

    def __init__(self, parameters: Array, gradients: Array, learning_rate: float):
        self.learning_rate, self.steps = learning_rate, 0
        self.low = np.zeros(parameters.size, np.int16)
        self.rebind(parameters, gradients)
        self._weights, self._slope = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        self._factors = np.ones(kernels.FACTORS)
        self._passes = [self._pass(block, block.stop - block.start) for block in self._blocks()]

    def rebind(self, parameters: Array, gradients: Array) -> None:
        """Go on with the same parameters, and with gradients, in other memory."""
        size = self.low.size
        for name, array in (("parameters", parameters), ("gradients", gradients)):
            if array.shape != (size,) or not array.flags.c_contiguous:
                raise ValueError(f"{name} has shape {array.shape}, expected contiguous ({size},)")
        if parameters.dtype != ml_dtypes.bfloat16 or not parameters.flags.writeable:
            raise TypeError(f"parameters is {parameters.dtype}, expected bfloat16 that may be written to")
        if gradients.dtype not in (np.float32, ml_dtypes.bfloat16):
            raise TypeError(f"gradients is {gradients.dtype}, expected float32 or bfloat16")
        self._high, self._gradients = parameters.view(np.uint16), gradients

    def weights(self) -> Array:
        """The weights in float32, [n], a copy."""
        found = np.empty(self._high.size, np.float32)
        _join(self._high, self.low, found)
        return found

    def _blocks(self) -> list[slice]:
        size = self._high.size
        return [slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)]

    def step(self) -> None:
        """Change the parameters in place, and the moments if there are any."""
        self.steps += 1
        self._set_factors()
        for block, run in zip(self._blocks(), self._passes, strict=True):
            weights = self._weights[: block.stop - block.start]
            _join(self._high[block], self.low[block], weights)
            self._slope[: weights.size] = self._gradients[block]
            run()
            _split(weights, self._high[block], self.low[block])

    def _pass(self, block: slice, size: int) -> Pass:
        raise NotImplementedError

    def _set_factors(self) -> None:
        raise NotImplementedError


def _join(high: Array, low: Array, weights: Array) -> None:
    bits = weights.view(np.int32)
    np.left_shift(high, 16, out=bits.view(np.uint32), dtype=np.uint32)
    np.add(bits, low, out=bits)


def _split(weights: Array, high: Array, low: Array) -> None:
    bits = weights.view(np.uint32)
    low[...] = bits.astype(np.uint16).view(np.int16)
    np.add(bits, 0x8000, out=bits)
    np.right_shift(bits, 16, out=bits)
    high[...] = bits.astype(np.uint16)


class SplitSGD(_Split):
    """Gradient descent of bfloat16 weights, as exact as that of float32 ones: the other 16 bits of each are kept here.

    parameters: bfloat16 [n], changed by every step; float32 weights, rounded. gradients: float32 or bfloat16 [n], read
        by every step. learning_rate: an attribute, which may be set at any time.

    low: int16 [n], what the float32 weights' bits have beside the parameters'. steps: how many there have been.
    Two bytes for each weight, where a float32 copy takes four. Raises TypeError, ValueError.

    Formula: w -= learning_rate * g for w = parameters and low together. Source: split SGD, arXiv 2005.04680.
    """

    __slots__ = ()

    def _pass(self, block: slice, size: int) -> Pass:
        factors = self._factors.ctypes.data
        return Pass(kernels.sgd, [self._weights[:size], self._slope[:size]], lambda of: sgd_in_place(of, factors))

    def _set_factors(self) -> None:
        self._factors[kernels.RATE] = self.learning_rate


class SplitAdamW(_Split):
    """AdamW of bfloat16 weights, as exact as that of float32 ones: the other 16 bits of each are kept here.

    parameters, gradients, learning_rate, low, steps: as for SplitSGD.
    alpha, beta: the decay rates of the moments. epsilon: what keeps the denominator from 0. weight_decay: the decay
        of the weights, times the learning rate.

    first_moment, second_moment: float32 [n]. Raises TypeError, ValueError.

    Formula: that of adamw_optimizer with adam_mode 0, for weights that are parameters and low together.
    Source: Decoupled Weight Decay Regularization, arXiv 1711.05101; split SGD, arXiv 2005.04680.
    """

    __slots__ = ("_rule", "first_moment", "second_moment")

    def __init__(
        self, parameters: Array, gradients: Array, learning_rate: float, alpha: float = 0.9, beta: float = 0.999,
        epsilon: float = 1e-8, weight_decay: float = 0.01,
    ):  # fmt: skip
        self._rule = alpha, beta, epsilon, weight_decay
        self.first_moment, self.second_moment = (np.zeros(parameters.size, np.float32) for _ in range(2))
        super().__init__(parameters, gradients, learning_rate)

    def _pass(self, block: slice, size: int) -> Pass:
        (alpha, beta, *_), factors = self._rule, self._factors.ctypes.data
        moments = [self.first_moment[block], self.second_moment[block]]
        arrays = [self._weights[:size], self._slope[:size], *moments]
        return Pass(kernels.adamw, arrays, lambda of: adamw_in_place(of, alpha, beta, factors))

    def _set_factors(self) -> None:
        self._factors[: kernels.CLIP] = AdamWStep(self.learning_rate, self.steps, *self._rule).factors()
