"""Kernels of the engine on flat float32 memory: optimizers' steps, the norm that clips gradients, sums of batches.

Each function gives launches whose operands are numbered as its arrays stand in `Pass` of onnxruntime/device_plans.py.
Numbers among the arguments are those of the first run: each run sets its own.
"""

from typing import Any

import triton
import triton.language as tl

from opgrad.contract.signature import Operand
from opgrad.cuda import PARTS
from opgrad.cuda.execute import Launch
from opgrad.cuda.numbers import divide

BLOCK, WARPS = 1024, 4
REACH = (1 << 31) - PARTS * BLOCK  # positions below this fit into 32 bits


@triton.jit
def _places(n, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    return place, place < n


@triton.jit
def _gradient(g, clip, place, inside, CLIPS: tl.constexpr):
    """The gradients, which are clipped in memory, too."""
    gradient = tl.load(g + place, mask=inside, other=0.0)
    if CLIPS:
        gradient = gradient * tl.load(clip)
        tl.store(g + place, gradient, mask=inside)
    return gradient


@triton.jit
def _sgd(p, g, clip, n, rate, CLIPS: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    place, inside = _places(n, INDEX, BLOCK)
    gradient = _gradient(g, clip, place, inside, CLIPS)
    tl.store(p + place, tl.load(p + place, mask=inside, other=0.0) - gradient * rate, mask=inside)


@triton.jit
def _adamw(
    p, g, m, s, clip, n, alpha, rest_of_alpha, beta, rest_of_beta, rate, epsilon, before, after,
    CLIPS: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, inside = _places(n, INDEX, BLOCK)
    gradient = _gradient(g, clip, place, inside, CLIPS)
    first = tl.load(m + place, mask=inside, other=0.0) * alpha + gradient * rest_of_alpha
    second = tl.load(s + place, mask=inside, other=0.0) * beta + gradient * gradient * rest_of_beta
    old = tl.load(p + place, mask=inside, other=0.0)
    new = (old * before - divide(first * rate, tl.sqrt_rn(second) + epsilon)) * after
    tl.store(p + place, new, mask=inside)
    tl.store(m + place, first, mask=inside)
    tl.store(s + place, second, mask=inside)


@triton.jit
def _scale(x, n, factor, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    place, inside = _places(n, INDEX, BLOCK)
    tl.store(x + place, tl.load(x + place, mask=inside, other=0.0) * factor, mask=inside)


@triton.jit
def _add(x, y, n, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    place, inside = _places(n, INDEX, BLOCK)
    total = tl.load(x + place, mask=inside, other=0.0) + tl.load(y + place, mask=inside, other=0.0)
    tl.store(x + place, total, mask=inside)


@triton.jit
def _squares(x, partial, n, rounds, PARTS: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of the squares of every PARTS-th block, in float64."""
    total = tl.zeros([BLOCK], tl.float64)
    place = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(rounds):
        value = tl.load(x + place, mask=place < n, other=0.0).to(tl.float64)
        total += value * value
        place += PARTS * BLOCK
    tl.store(partial + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _clip_factor(partial, clip, most, PARTS: tl.constexpr):
    """min(1, most / (norm + 1e-6)); NaN for a NaN."""
    norm = tl.sqrt(tl.sum(tl.load(partial + tl.arange(0, PARTS)), 0))
    factor = most / (norm + 1e-6)
    tl.store(clip, tl.where(factor > 1.0, 1.0, factor).to(tl.float32))


def _launch(kernel: Any, n: int, arrays: str, *numbers: str, grid: int = 0, **constants: Any) -> Launch:
    """A launch over n elements of these arrays, which are numbered in their order. grid: 0 for a program a block."""
    given: dict[str, Any] = {name: Operand(number, "float32") for number, name in enumerate(arrays.split())}
    given |= {"n": n, **dict.fromkeys(numbers, 1.0), **constants}
    given |= {"INDEX": tl.int32 if n < REACH else tl.int64, "BLOCK": BLOCK}
    return Launch(kernel, (grid or triton.cdiv(n, BLOCK),), given, warps=WARPS)


def squares(n: int, array: int = 0, partial: int = 1) -> list[Launch]:
    """Sums of the squares of x, in partial: float64 [PARTS], of which those that no program writes have to be 0."""
    arrays, grid = {"x": Operand(array, "float32"), "partial": Operand(partial, "float64")}, triton.cdiv(n, BLOCK)
    rounds = triton.cdiv(grid, PARTS)
    return [_launch(_squares, n, "", grid=min(PARTS, grid), rounds=rounds, PARTS=PARTS, **arrays)]


def _clipped(step: Launch, n: int, clips: bool) -> list[Launch]:
    """A step, and before it what clips the gradients to the norm `most`, with partial sums behind the step's arrays."""
    partial, clip = (step.arguments["clip"].number + more for more in (1, 0))
    factor = {"partial": Operand(partial, "float64"), "clip": Operand(clip, "float32"), "most": 1.0, "PARTS": PARTS}
    return [*squares(n, 1, partial), Launch(_clip_factor, (1,), factor, warps=WARPS), step] if clips else [step]


def sgd(n: int, clips: bool = False) -> list[Launch]:
    """Gradient descent on parameters and gradients; then clip: [1], and partial."""
    return _clipped(_launch(_sgd, n, "p g clip", "rate", CLIPS=clips), n, clips)


def adamw(n: int, clips: bool = False) -> list[Launch]:
    """AdamW on parameters, gradients and two moments; then clip: [1], and partial."""
    rates = "alpha", "rest_of_alpha", "beta", "rest_of_beta"
    step = _launch(_adamw, n, "p g m s clip", *rates, "rate", "epsilon", "before", "after", CLIPS=clips)
    return _clipped(step, n, clips)


def scale(n: int) -> list[Launch]:
    """x *= factor."""
    return [_launch(_scale, n, "x", "factor")]


def add(n: int) -> list[Launch]:
    """x += y."""
    return [_launch(_add, n, "x y")]


def every(n: int) -> list[Launch]:
    """All launches of the engine on n elements, to be compiled ahead."""
    steps = [launch for make in (sgd, adamw) for clips in (False, True) for launch in make(n, clips)]
    return [*steps, *scale(n), *add(n)]
