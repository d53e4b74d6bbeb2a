"""Gelu, its approximation by tanh, and their gradients, by the formulas of the post-ops."""

from collections.abc import Callable

from opgrad.cpu.compiler.decorators import Kernel, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.map import BLOCK, elementwise, mapped
from opgrad.cpu.kernels.numerics import eltwise

gelu = elementwise(
    lambda x, alpha: eltwise.gelu_erf(x, alpha, 0.0), coarse=lambda x, alpha: eltwise.coarse_gelu_erf(x, alpha, 0.0)
)


@elementwise
def fast_gelu(x: Vector, alpha: float) -> Vector:
    return eltwise.gelu_tanh(x, alpha, 0.0)


@elementwise
def gelu_grad(dy: Vector, x: Vector, alpha: float) -> Vector:
    return eltwise.gelu_erf_grad(dy, x, alpha, 0.0)


@elementwise
def fast_gelu_grad(dy: Vector, x: Vector, alpha: float) -> Vector:
    return eltwise.gelu_tanh_grad(dy, x, alpha, 0.0)


def _gradient_behind_bias(formula: Callable[..., Vector]) -> Kernel:
    """The kernel dx = formula(dy, x + bias), by rows of the bias's length."""
    write = mapped(lambda dy, x, bias: formula(dy, x + bias, 0.0, 0.0))

    @kernel
    def bias_gradient(units: Units, blocks, n, dy: Pointer, x: Pointer, bias: Pointer, dx: Pointer, stream):
        for unit in units:
            row, begin = unit // blocks * n, unit % blocks * BLOCK
            write(dx + row, begin, min(begin + BLOCK, n), stream, (dy + row, x + row, bias), ())

    return bias_gradient


BIAS_GELU_GRAD, BIAS_FAST_GELU_GRAD = map(_gradient_behind_bias, (eltwise.gelu_erf_grad, eltwise.gelu_tanh_grad))
