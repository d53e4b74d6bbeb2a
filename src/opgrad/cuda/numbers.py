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
