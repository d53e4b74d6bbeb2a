"""Activations, gelu and gated linear units, and their gradients: the formula of one vector for each operator."""

from collections.abc import Callable
from typing import Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.map import BLOCK, elementwise, mapped, mapped_to_each
from opgrad.cpu.kernels.numerics import elementary, eltwise


@elementwise
def relu(x: Vector, alpha: float) -> Vector:
    return v.select(x <= 0.0, 0.0, x)


@elementwise
def relu_grad(dy: Vector, x: Vector, alpha: float) -> Vector:
    return v.select(x > 0.0, dy, 0.0)


@elementwise
def sigmoid(x: Vector, alpha: float) -> Vector:
    return elementary.sigmoid(x)


@elementwise
def sigmoid_grad(dy: Vector, y: Vector, alpha: float) -> Vector:
    return dy * y * (1.0 - y)


@elementwise
def tanh(x: Vector, alpha: float) -> Vector:
    return elementary.tanh(x)


@elementwise
def tanh_grad(dy: Vector, y: Vector, alpha: float) -> Vector:
    return dy * v.fma(-y, y, 1.0)


@elementwise
def quick_gelu(x: Vector, alpha: float) -> Vector:
    return x * elementary.sigmoid(x * alpha)


@elementwise
def quick_gelu_grad(dy: Vector, x: Vector, alpha: float) -> Vector:
    scaled = x * alpha
    s = elementary.sigmoid(scaled)
    return dy * s * v.fma(scaled, 1.0 - s, 1.0)


@elementwise
def leaky_relu(x: Vector, alpha: float) -> Vector:
    return v.select(x > 0.0, x, x * alpha)


@elementwise
def leaky_relu_grad(dy: Vector, y: Vector, alpha: float) -> Vector:
    return v.select(y > 0.0, dy, dy * alpha)


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


GATED_BLOCK: Final = 1 << 14  # elements of a unit


@elementwise
def gated_silu(gate: Vector, up: Vector, alpha: float) -> Vector:
    return gate * elementary.sigmoid(gate) * up


@elementwise
def gated_gelu(gate: Vector, up: Vector, alpha: float) -> Vector:
    return eltwise.gelu_erf(gate, alpha, 0.0) * up


@elementwise
def gated_gelu_tanh(gate: Vector, up: Vector, alpha: float) -> Vector:
    return eltwise.gelu_tanh(gate, alpha, 0.0) * up


def _silu_slopes(dy: Vector, gate: Vector, up: Vector):
    s = elementary.sigmoid(gate)
    value = gate * s
    return dy * up * (s + value * (1.0 - s)), dy * value


def _gelu_slopes(dy: Vector, gate: Vector, up: Vector):
    return eltwise.gelu_erf_grad(dy * up, gate, 0.0, 0.0), dy * eltwise.gelu_erf(gate, 0.0, 0.0)


def _gelu_tanh_slopes(dy: Vector, gate: Vector, up: Vector):
    return eltwise.gelu_tanh_grad(dy * up, gate, 0.0, 0.0), dy * eltwise.gelu_tanh(gate, 0.0, 0.0)


def _gated_gradient(slopes: Callable[..., tuple[Vector, Vector]]) -> Kernel:
    """The kernel of both gradients; a unit is a block of elements."""

    write = mapped_to_each(slopes)

    @kernel
    def gated_gradient(units: Units, n, dy: Pointer, gate: Pointer, up: Pointer, dgate: Pointer, dup: Pointer):
        for unit in units:
            write((dgate, dup), unit * GATED_BLOCK, min((unit + 1) * GATED_BLOCK, n), (dy, gate, up), ())

    return gated_gradient


GATED: Final = {"silu": gated_silu, "gelu": gated_gelu, "gelu_tanh": gated_gelu_tanh}
GATED_GRADIENTS: Final = {
    name: _gated_gradient(slopes)
    for name, slopes in {"silu": _silu_slopes, "gelu": _gelu_slopes, "gelu_tanh": _gelu_tanh_slopes}.items()
}
