"""Activations and their gradients: the formula of one vector for each operator."""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.numerics import math
from opgrad.cpu.programs.elements import operator


@operator("y", "x")
def relu(x: Vector, alpha: float) -> Vector:
    return v.select(x <= 0.0, 0.0, x)


@operator("dx", "dy", "x")
def relu_grad(dy: Vector, x: Vector, alpha: float) -> Vector:
    return v.select(x > 0.0, dy, 0.0)


@operator("y", "x")
def sigmoid(x: Vector, alpha: float) -> Vector:
    return math.sigmoid(x)


@operator("dx", "dy", "y")
def sigmoid_grad(dy: Vector, y: Vector, alpha: float) -> Vector:
    return dy * y * (1.0 - y)


@operator("y", "x")
def tanh(x: Vector, alpha: float) -> Vector:
    return math.tanh(x)


@operator("dx", "dy", "y")
def tanh_grad(dy: Vector, y: Vector, alpha: float) -> Vector:
    return dy * v.fma(-y, y, 1.0)


@operator("y", "x")
def quick_gelu(x: Vector, alpha: float) -> Vector:
    return x * math.sigmoid(x * alpha)


@operator("dx", "dy", "x")
def quick_gelu_grad(dy: Vector, x: Vector, alpha: float) -> Vector:
    scaled = x * alpha
    s = math.sigmoid(scaled)
    return dy * s * v.fma(scaled, 1.0 - s, 1.0)


@operator("y", "x")
def leaky_relu(x: Vector, alpha: float) -> Vector:
    return v.select(x > 0.0, x, x * alpha)


@operator("dx", "dy", "y")
def leaky_relu_grad(dy: Vector, y: Vector, alpha: float) -> Vector:
    return v.select(y > 0.0, dy, dy * alpha)
