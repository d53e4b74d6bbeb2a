"""Gated linear units and their gradients, by the formulas of the post-ops."""

from collections.abc import Callable
from typing import Final

from opgrad.cpu.compiler.decorators import Kernel, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.map import elementwise, mapped_to_each
from opgrad.cpu.kernels.numerics import elementary, eltwise

BLOCK: Final = 1 << 14  # elements of a unit


@elementwise
def silu(gate: Vector, up: Vector, alpha: float) -> Vector:
    return gate * elementary.sigmoid(gate) * up


@elementwise
def gelu(gate: Vector, up: Vector, alpha: float) -> Vector:
    return eltwise.gelu_erf(gate, alpha, 0.0) * up


@elementwise
def gelu_tanh(gate: Vector, up: Vector, alpha: float) -> Vector:
    return eltwise.gelu_tanh(gate, alpha, 0.0) * up


def _silu_slopes(dy: Vector, gate: Vector, up: Vector):
    s = elementary.sigmoid(gate)
    value = gate * s
    return dy * up * (s + value * (1.0 - s)), dy * value


def _gelu_slopes(dy: Vector, gate: Vector, up: Vector):
    return eltwise.gelu_erf_grad(dy * up, gate, 0.0, 0.0), dy * eltwise.gelu_erf(gate, 0.0, 0.0)


def _gelu_tanh_slopes(dy: Vector, gate: Vector, up: Vector):
    return eltwise.gelu_tanh_grad(dy * up, gate, 0.0, 0.0), dy * eltwise.gelu_tanh(gate, 0.0, 0.0)


def _gradient(slopes: Callable[..., tuple[Vector, Vector]]) -> Kernel:
    """The kernel of both gradients; a unit is a block of elements."""

    write = mapped_to_each(slopes)

    @kernel
    def gated_gradient(units: Units, n, dy: Pointer, gate: Pointer, up: Pointer, dgate: Pointer, dup: Pointer):
        for unit in units:
            write((dgate, dup), unit * BLOCK, min((unit + 1) * BLOCK, n), (dy, gate, up), ())

    return gated_gradient


VALUES: Final = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}
GRADIENTS: Final = {
    name: _gradient(slopes)
    for name, slopes in {"silu": _silu_slopes, "gelu": _gelu_slopes, "gelu_tanh": _gelu_tanh_slopes}.items()
}
