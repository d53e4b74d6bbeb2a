"""Numbers in kernels: half precision is widened when loaded and rounded once when stored; functions on them."""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOG2_E_REST: tl.constexpr = tl.constexpr(1.92596298909109e-08)  # what float32 cannot hold of it
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
MINUS_INFINITY: tl.constexpr = tl.constexpr(float("-inf"))
# Beyond these exp is 0 and infinite in float32.
LEAST_EXPONENT: tl.constexpr = tl.constexpr(-150.0)
MOST_EXPONENT: tl.constexpr = tl.constexpr(128.0)


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
def only_if(condition, mask):
    """The mask if a condition for the whole program holds, else nothing.

    `mask & condition` would do, but is no mask any more in the interpreter of Triton 3.9.
    """
    of_each = tl.zeros_like(mask).to(tl.int32) + condition.to(tl.int32)
    return mask & (of_each != 0)
