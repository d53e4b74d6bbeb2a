"""Activations and their gradients: the formula of one vector for each operator."""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.map import elementwise
from opgrad.cpu.kernels.numerics import elementary


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
