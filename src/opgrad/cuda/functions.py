"""Functions of one number that hardware and Triton lack, or have with too large an error.

They are built from what Triton itself has, since its interpreter knows no other library.
"""

import triton
import triton.language as tl

from opgrad.cuda.numbers import LEAST_EXPONENT, LN_2, exp

# log2(e) / 2 as the sum of two float32: the error of one alone would be 9 ulp of exp(-80).
HALF_LOG2_E: tl.constexpr = tl.constexpr(0.7213475108146667)
HALF_LOG2_E_REST: tl.constexpr = tl.constexpr(9.6298149e-9)
MINUS_2_LOG2_E: tl.constexpr = tl.constexpr(-2.8853900817779268)
NEAR_0: tl.constexpr = tl.constexpr(0.625)
BEYOND: tl.constexpr = tl.constexpr(40.0)  # exp(-x**2 / 2) is 0 in float64, too
SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
DENSITY_AT_0: tl.constexpr = tl.constexpr(0.3989422804014327)
HALF_OVER_DENSITY_AT_0: tl.constexpr = tl.constexpr(1.2533141373155003)
# (tanh(x) - x) / x**3 as a polynomial of x * x up to 0.4: Chebyshev fits, by which tanh errs by 0.3 of a rounding.
TANH_SINGLE: tl.constexpr = tl.constexpr(
    (-6.0967141659e-3, 2.0997178999e-2, -5.3850909579e-2, 0.13332769737, -0.33333328944)
)
TANH_DOUBLE: tl.constexpr = tl.constexpr(
    (
        -1.7244874494844330172e-5, 7.9599557352648080002e-5, -2.30776162695198579e-4, 5.8743728600943818973e-4,
        -1.455309297534642025e-3, 3.5920589774734553151e-3, -8.8632298309257087457e-3, 2.1869488260559114645e-2,
        -5.3968253961395570821e-2, 0.13333333333326657736, -0.33333333333333322565,
    )
)  # fmt: skip
# Chebyshev coefficients, fitted in 60 digits: 13 for float32, all for float64.
TAIL: tl.constexpr = tl.constexpr(
    (
        1.17756257419656, 5.3539045396156768e-3, -9.3775503422842091e-2, 5.436652555744322e-2,
        -1.8976596707845207e-2, 4.4534260614627116e-3, -6.3355317105531469e-4, 1.7661719523171592e-5,
        1.2841532864056671e-5, -2.0072285659059914e-6, -1.8075227904148371e-7, 7.5498283438250928e-8,
        1.8856685238386028e-9, -2.699519049798364e-9, -1.4600791199391049e-11, 1.036160744596949e-10,
        1.475715976623473e-12, -4.2773400643969108e-12, -2.07922492859799e-13, 1.8134502003176962e-13,
        1.9734255745447388e-14, -7.2879437375926732e-15, -1.5169878690228116e-15, 2.3514112258781404e-16,
        1.0006111691821668e-16,
    )
)  # fmt: skip

# --- sigmoid and tanh ----------------------------------------------------------------------------------------------


@triton.jit
def _reciprocal(x):
    """1 / x for x between 1 and 2: in float32 4 instructions, where a division is 8."""
    if x.dtype == tl.float64:
        inverse = 1.0 / x
    else:
        root = tl.rsqrt(x)
        rough = root * root
        inverse = tl.fma(-rough, tl.fma(x, rough, -1.0), rough)
    return inverse


@triton.jit
def _exp_minus(x):
    """exp(-x) for x >= 0: in float32 the square of exp(-x / 2), which is never denormal; see also numbers.exp."""
    if x.dtype == tl.float64:
        power = tl.exp(-x)
    else:
        bounded = tl.minimum(x, -LEAST_EXPONENT, propagate_nan=tl.PropagateNan.ALL)
        exponent = bounded * -HALF_LOG2_E
        rounded_off = tl.fma(bounded, HALF_LOG2_E_REST, tl.fma(bounded, HALF_LOG2_E, exponent))
        root = tl.exp2(exponent) * tl.fma(rounded_off, -LN_2, 1.0)
        power = root * root
    return power


@triton.jit
def logistic(x):
    """1 / (1 + exp(-x)), without overflow or cancellation on either side."""
    e = _exp_minus(tl.abs(x))
    return tl.where(x >= 0, 1.0, e) * _reciprocal(1.0 + e)


@triton.jit
def _polynomial(x, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr):
    """A polynomial by Horner's rule, the highest power first. fma would take a number as float32, whatever x is."""
    value = tl.full(x.shape, COEFFICIENTS[0], x.dtype)
    for j in tl.static_range(1, COUNT):
        value = tl.fma(value, x, tl.full(x.shape, COEFFICIENTS[j], x.dtype))
    return value


@triton.jit
def hyperbolic_tangent(x):
    """tanh(x) = (1 - e) / (1 + e) with e = exp(-2 * x), but for x near 0, where that cancels."""
    size, square = tl.abs(x), x * x
    if x.dtype == tl.float64:
        e = tl.exp(-2.0 * size)
        tail = _polynomial(square, TANH_DOUBLE, 11)
    else:
        # Where the rounding of the exponent would show, e no longer does.
        e = tl.exp2(size * MINUS_2_LOG2_E)
        tail = _polynomial(square, TANH_SINGLE, 5)
    near = tl.fma(x * square, tail, x)
    far = (1.0 - e) * _reciprocal(1.0 + e)
    return tl.where(size < NEAR_0, near, tl.where(x < 0, -far, far))


# --- exp and log beside 0 ------------------------------------------------------------------------------------------


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0: the error of u = exp(x) is the same above and below, in (u - 1) * x / log(u)."""
    u = exp(x)
    less = u - 1.0
    return tl.where(less == 0, x, tl.where(less == -1.0, less, less * (x / tl.log(u))))


@triton.jit
def log1p(u):
    """log(1 + u) for finite u >= 0: what 1 + u rounded off is made up for by u / ((1 + u) - 1)."""
    more = 1.0 + u
    return tl.where(more == 1.0, u, tl.log(more) * (u / (more - 1.0)))


@triton.jit
def softplus(x):
    """log(1 + exp(x))."""
    return tl.where(x > 0, x, tl.where(x == x, 0.0, x)) + log1p(exp(-tl.abs(x)))


# --- the normal distribution ---------------------------------------------------------------------------------------


@triton.jit
def _scaled_tail(t, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr):
    """A Chebyshev series at t, by Clenshaw's recurrence."""
    b, after = tl.zeros_like(t), tl.zeros_like(t)
    for j in tl.static_range(COUNT - 1, 0, -1):
        before = after
        after = b
        b = 2.0 * t * after - before + COEFFICIENTS[j]
    return t * b - after + COEFFICIENTS[0]


@triton.jit
def normal_density(x):
    """exp(-x**2 / 2) / sqrt(2 * pi). What x * x rounds off would be errors of 50 ulp for x = 13."""
    bounded = tl.minimum(tl.abs(x), BEYOND, propagate_nan=tl.PropagateNan.ALL)
    square = bounded * bounded
    rest = tl.fma(bounded, bounded, -square)
    return exp(-0.5 * square) * (1.0 - 0.5 * rest) * DENSITY_AT_0


@triton.jit
def normal_distribution(x):
    """(1 + erf(x / sqrt(2))) / 2, with all its digits in the tail too.

    (1 + 2 z) * exp(z**2) * erfc(z) is a smooth function of t = (z - 3) / (z + 3).
    """
    z = tl.minimum(tl.abs(x), BEYOND, propagate_nan=tl.PropagateNan.ALL) * SQRT_HALF
    t = (z - 3.0) / (z + 3.0)
    if x.dtype == tl.float64:
        scaled = _scaled_tail(t, TAIL, 25)
    else:
        scaled = _scaled_tail(t, TAIL, 13)
    tail = normal_density(x) * HALF_OVER_DENSITY_AT_0 * scaled / (1.0 + 2.0 * z)
    return tl.where(x < 0, tail, 1.0 - tail)


# --- powers and rounding -------------------------------------------------------------------------------------------


@triton.jit
def power(x, b):
    """x**b by the rules of C's pow, b being a single number.

    Computed in float64: an error of log(x) is multiplied by b.
    """
    wide, exponent = x.to(tl.float64), b.to(tl.float64)
    size, half = tl.abs(wide), exponent * 0.5
    result = tl.exp(exponent * tl.log(size))
    result = tl.where((exponent == 0) | (size == 1.0), 1.0, result)
    whole, odd = tl.floor(exponent) == exponent, tl.floor(half) != half
    result = tl.where((wide.to(tl.int64, bitcast=True) < 0) & whole & odd, -result, result)
    undefined = (wide < 0) & (size < float("inf")) & (exponent != tl.floor(exponent))
    return tl.where(undefined, float("nan"), result).to(x.dtype)
