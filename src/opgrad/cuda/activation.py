"""Activations and their gradients: the formula of one element for each operator.

For 16-bit numbers the arithmetic takes almost as long as the memory accesses, so that every instruction counts. exp2
and rsqrt flush denormals to 0 here; the formulas avoid denormal arguments and results.
"""

import triton
import triton.language as tl

from opgrad.cuda.elements import operator
from opgrad.cuda.numbers import hyperbolic_tangent, logistic

# --- the formulas --------------------------------------------------------------------------------------------------


@triton.jit
def _relu(x, alpha):
    return tl.where(x <= 0, 0.0, x)


@triton.jit
def _relu_grad(dy, x, alpha):
    return tl.where(x > 0, dy, 0.0)


@triton.jit
def _sigmoid(x, alpha):
    return logistic(x)


@triton.jit
def _sigmoid_grad(dy, y, alpha):
    return dy * y * (1.0 - y)


@triton.jit
def _tanh(x, alpha):
    return hyperbolic_tangent(x)


@triton.jit
def _tanh_grad(dy, y, alpha):
    return dy * tl.fma(-y, y, 1.0)


@triton.jit
def _quick_gelu(x, alpha):
    return x * logistic(x * alpha)


@triton.jit
def _quick_gelu_grad(dy, x, alpha):
    v = x * alpha
    s = logistic(v)
    return dy * s * tl.fma(v, 1.0 - s, 1.0)


@triton.jit
def _leaky_relu(x, alpha):
    return tl.where(x > 0, x, x * alpha)


@triton.jit
def _leaky_relu_grad(dy, y, alpha):
    return tl.where(y > 0, dy, dy * alpha)


# --- the operators -------------------------------------------------------------------------------------------------

relu = operator(_relu, "y", "x")
relu_grad = operator(_relu_grad, "dx", "dy", "x")
sigmoid = operator(_sigmoid, "y", "x")
sigmoid_grad = operator(_sigmoid_grad, "dx", "dy", "y")
tanh = operator(_tanh, "y", "x")
tanh_grad = operator(_tanh_grad, "dx", "dy", "y")
quick_gelu = operator(_quick_gelu, "y", "x")
quick_gelu_grad = operator(_quick_gelu_grad, "dx", "dy", "x")
leaky_relu = operator(_leaky_relu, "y", "x")
leaky_relu_grad = operator(_leaky_relu_grad, "dx", "dy", "y")
