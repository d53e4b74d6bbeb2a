"""Activations, gelu and gated linear units, and their gradients: the formula of one vector for each operator."""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.map import elementwise, mapped_to_each
from opgrad.cpu.kernels.numerics import elementary, eltwise

relu = elementwise(lambda x, alpha: v.select(x <= 0.0, 0.0, x))
relu_grad = elementwise(lambda dy, x, alpha: v.select(x > 0.0, dy, 0.0))
leaky_relu = elementwise(lambda x, alpha: v.select(x > 0.0, x, x * alpha))
leaky_relu_grad = elementwise(lambda dy, y, alpha: v.select(y > 0.0, dy, dy * alpha))
sigmoid = elementwise(lambda x, alpha: elementary.sigmoid(x))
sigmoid_grad = elementwise(lambda dy, y, alpha: dy * y * (1.0 - y))
tanh = elementwise(lambda x, alpha: elementary.tanh(x))
tanh_grad = elementwise(lambda dy, y, alpha: dy * v.fma(-y, y, 1.0))
gelu = elementwise(
    lambda x, alpha: eltwise.gelu_erf(x, alpha, 0.0), coarse=lambda x, alpha: eltwise.coarse_gelu_erf(x, alpha, 0.0)
)
gelu_grad = elementwise(lambda dy, x, alpha: eltwise.gelu_erf_grad(dy, x, alpha, 0.0))
fast_gelu = elementwise(lambda x, alpha: eltwise.gelu_tanh(x, alpha, 0.0))
fast_gelu_grad = elementwise(lambda dy, x, alpha: eltwise.gelu_tanh_grad(dy, x, alpha, 0.0))
quick_gelu = elementwise(lambda x, alpha: x * elementary.sigmoid(x * alpha))


@elementwise
def quick_gelu_grad(dy: Vector, x: Vector, alpha: float) -> Vector:
    scaled = x * alpha
    s = elementary.sigmoid(scaled)
    return dy * s * v.fma(scaled, 1.0 - s, 1.0)


# Of gelu behind the addition of a bias.
BIAS_GELU_GRAD = elementwise(lambda dy, x, bias, alpha: eltwise.gelu_erf_grad(dy, x + bias, alpha, 0.0))
BIAS_FAST_GELU_GRAD = elementwise(lambda dy, x, bias, alpha: eltwise.gelu_tanh_grad(dy, x + bias, alpha, 0.0))


GATED_BLOCK: Final = 1 << 14  # elements of a unit


GATED: Final = {
    "silu": elementwise(lambda gate, up, alpha: gate * elementary.sigmoid(gate) * up),
    "gelu": elementwise(lambda gate, up, alpha: eltwise.gelu_erf(gate, alpha, 0.0) * up),
    "gelu_tanh": elementwise(lambda gate, up, alpha: eltwise.gelu_tanh(gate, alpha, 0.0) * up),
}


def _silu_slopes(dy: Vector, gate: Vector, up: Vector):
    s = elementary.sigmoid(gate)
    value = gate * s
    return dy * up * (s + value * (1.0 - s)), dy * value


def _gated_gradient(slopes: Callable[..., Any]) -> Kernel:
    """The kernel of both gradients; a unit is a block of elements."""
    write = mapped_to_each(slopes)

    @kernel
    def gated_gradient(units: Units, n, dy: Pointer, gate: Pointer, up: Pointer, dgate: Pointer, dup: Pointer):
        for unit in units:
            write((dgate, dup), unit * GATED_BLOCK, min((unit + 1) * GATED_BLOCK, n), (dy, gate, up), ())

    return gated_gradient


def _gelu_slopes(value: Callable[..., Vector], gradient: Callable[..., Vector]) -> Callable[..., Any]:
    return lambda dy, gate, up: (gradient(dy * up, gate, 0.0, 0.0), dy * value(gate, 0.0, 0.0))


GATED_GRADIENTS: Final = {
    "silu": _gated_gradient(_silu_slopes),
    "gelu": _gated_gradient(_gelu_slopes(eltwise.gelu_erf, eltwise.gelu_erf_grad)),
    "gelu_tanh": _gated_gradient(_gelu_slopes(eltwise.gelu_tanh, eltwise.gelu_tanh_grad)),
}
