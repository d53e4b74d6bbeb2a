"""Numbers in kernels: narrow ones are widened when loaded and rounded once when stored; functions on them.

float8 and bool are bytes to a kernel, which has their FORMAT as an argument. float8 is converted by arithmetic on bits:
older devices have no instructions for it, and those of newer devices turn numbers that are too large into the largest.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOG2_E_REST: tl.constexpr = tl.constexpr(1.92596298909109e-08)  # log2(e) less its float32 value
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
MINUS_INFINITY: tl.constexpr = tl.constexpr(float("-inf"))
# Formats of what a kernel sees as uint8; PLAIN: what its dtype says.
PLAIN, BOOL, FLOAT8_E5M2, FLOAT8_E4M3FN = map(tl.constexpr, range(4))
# Beyond these exp is 0 and infinite in float32.
LEAST_EXPONENT: tl.constexpr = tl.constexpr(-150.0)
MOST_EXPONENT: tl.constexpr = tl.constexpr(128.0)


@triton.jit
def scalar(value, NUMBER: tl.constexpr):
    """An argument of a kernel that is declared as tl.float64, in the precision of the computation.

    Triton compiles a kernel once for all values of such an argument. Its interpreter has it as a number of Python.
    """
    return tl.full([], value, NUMBER)


@triton.jit
def widen(x):
    """float64 as it is, everything else as float32."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """x rounded to the nearest number of a dtype; float64 reaches bfloat16 by way of float32."""
    if tl.bfloat16 == DTYPE:
        narrowed = x.to(tl.float32).to(tl.bfloat16, fp_downcast_rounding="rtne")
    else:
        narrowed = x.to(DTYPE)
    return narrowed


@triton.jit
def decoded(stored, FORMAT: tl.constexpr, NUMBER: tl.constexpr):
    """What was loaded, of any dtype and format, as float32 or float64."""
    if FORMAT == FLOAT8_E5M2:
        number = (stored.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(NUMBER)
    elif FORMAT == FLOAT8_E4M3FN:
        bits = stored.to(tl.int32)
        # As float16 with the same digits, whose exponents are larger by 8.
        half = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.int16).to(tl.float16, bitcast=True)
        number = tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(NUMBER) * 256.0)
    elif stored.dtype == tl.bfloat16:
        number = stored.to(tl.float32).to(NUMBER)
    else:
        number = stored.to(NUMBER)
    return number


@triton.jit
def encoded(x, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """x, float32 or float64, as it is stored in any dtype and format."""
    if FORMAT == FLOAT8_E5M2:
        stored = float8(x, 2, 15, 0x7C, 0x7E)
    elif FORMAT == FLOAT8_E4M3FN:
        stored = float8(x, 3, 7, 0x7F, 0x7F)
    elif FORMAT == BOOL:
        stored = x.to(tl.uint8)
    elif tl.int8 == DTYPE:
        stored = whole(x, -128.0, 127.0).to(tl.int8)
    elif tl.uint8 == DTYPE:
        stored = whole(x, 0.0, 255.0).to(tl.uint8)
    else:
        stored = narrow(x, DTYPE)
    return stored


@triton.jit
def float8(x, DIGITS: tl.constexpr, BIAS: tl.constexpr, BEYOND: tl.constexpr, NAN: tl.constexpr):
    """x rounded to the nearest float8, ties to even, as a byte; float64 by way of float32, as ml_dtypes does.

    DIGITS: bits of the mantissa. BIAS: of the exponent. BEYOND: the byte for what is too large.
    """
    DROPPED: tl.constexpr = 23 - DIGITS
    single = x.to(tl.float32)
    bits, size = single.to(tl.int32, bitcast=True), tl.abs(single)
    magnitude = size.to(tl.int32, bitcast=True)
    normal = (magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)) >> DROPPED
    normal -= (127 - BIAS) << DIGITS
    # Below the smallest normal number all neighbours are equally far apart: as those of `even` are, which rounds.
    even = tl.full([1, 1], (128 - BIAS + DROPPED) << 23, tl.int32)
    denormal = (size + even.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - even
    byte = tl.where(magnitude < (128 - BIAS) << 23, denormal, normal)
    byte = tl.where(single == single, tl.minimum(byte, BEYOND), NAN)
    return (byte | tl.where(bits < 0, 0x80, 0)).to(tl.uint8)


@triton.jit
def round_to_even(x):
    """The nearest integer, ties to even: above 2**23, in float64 2**52, there are only integers."""
    if x.dtype == tl.float64:
        all_whole = tl.full([], 4503599627370496.0, tl.float64)
    else:
        all_whole = tl.full([], 8388608.0, tl.float32)
    size = tl.abs(x)
    nearest = tl.where(size < all_whole, (size + all_whole) - all_whole, size)
    return tl.where(x < 0, -nearest, nearest)


@triton.jit
def whole(x, LEAST: tl.constexpr, MOST: tl.constexpr):
    """The nearest integer between two bounds, ties to even, as int32; 0 for NaN."""
    number = tl.where(x == x, x, 0.0)
    return round_to_even(tl.minimum(tl.maximum(number, LEAST), MOST)).to(tl.int32)


@triton.jit
def divide(x, y):
    """x / y rounded to the nearest; in float32 Triton's own quotient errs by 2 ulp."""
    if x.dtype == tl.float64:
        quotient = x / y
    else:
        quotient = tl.div_rn(x, y)
    return quotient


@triton.jit
def exp(x):
    """e to the power of x.

    The hardware has 2 to a power. The product x * log2(e) is rounded, as log2(e) itself is, which for x = -80 would
    be errors of 50 and of 9 ulp; what was rounded off is put back by a second factor.
    """
    if x.dtype == tl.float64:
        power = tl.exp(x)
    else:
        bounded = tl.clamp(x, LEAST_EXPONENT, MOST_EXPONENT, propagate_nan=tl.PropagateNan.ALL)
        exponent = bounded * LOG2_E
        rounded_off = tl.fma(bounded, LOG2_E_REST, tl.fma(bounded, LOG2_E, -exponent))
        power = tl.exp2(exponent) * tl.fma(rounded_off, LN_2, 1.0)
    return power


@triton.jit
def short_exp(x):
    """e to the power of x <= 0 for results of 16 bits: 2 instructions in place of 8.

    The rounding of x * log2(e) is an error of |x| * 2**-24 of the power, for x = -80 a hundredth of a last digit of
    float16. Of a sum of such powers it is the mean of |x| with these as weights, below the logarithm of their number.
    """
    return tl.exp2(x * LOG2_E)


@triton.jit
def only_if(condition, mask):
    """The mask if a condition for the whole program holds, else nothing.

    `mask & condition` would do, but is no mask any more in the interpreter of Triton 3.9.
    """
    of_each = tl.zeros_like(mask).to(tl.int32) + condition.to(tl.int32)
    return mask & (of_each != 0)


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
