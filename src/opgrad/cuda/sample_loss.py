"""Cross-entropy with all its options: what each row of logits gives, and the gradient of that.

One kernel goes over tiles of rows in steps, once for all sums, and once more from the end for the gradient, where the
steps are still in the L2 cache. A sample whose label is out of range has NaN for results and gradient; its label is
never followed.
"""

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from opgrad.contract.signature import Operand, Problem, wrong_label
from opgrad.cuda import regimes
from opgrad.cuda.execute import Launch, Program, Space
from opgrad.cuda.functions import hyperbolic_tangent
from opgrad.cuda.labels import checks, is_label, read_labels, weights_of
from opgrad.cuda.numbers import MINUS_INFINITY, exp, narrow, scalar
from opgrad.cuda.rows import LOOP, array_of, fold_rows, frame, rows_of, shift_for, strides, tiles, write_rows

LEAST: tl.constexpr = tl.constexpr(-800.0)  # z - m of which exp is 0, in the place of -inf, where that would make NaN


@triton.jit
def capped(x, before, after):
    """z of the logits; after is None where they have no cap."""
    return x * before if after is None else hyperbolic_tangent(x * before) * after


@triton.jit
def targets_of(q, column, inside, given):
    """weight * q without what labels add; 0 outside. q: probabilities, if there are any."""
    weight, base, share, _, _, probabilities = given
    if weight is None:
        factor = tl.where(inside, 1.0, 0.0).to(q.dtype)
    else:
        factor = tl.load(weight + column, mask=inside, other=0.0).to(q.dtype)
    if probabilities is None:
        target = factor * base
    else:
        target = factor * base + factor * q * share
    return target


@triton.jit
def take(found, x, q, column, inside, given):
    """Take a tile into the running sums of its rows.

    They are the largest z, the sum of exp(z - m), that of exp(z - m) * (z - m), the largest logit, its place, the sums
    of target * z and of targets. A NaN is larger than any number.
    """
    m, d, slack, best, place, spread, mass = found
    _, _, _, before, after, _ = given
    target = targets_of(q, column, inside, given)
    z = tl.where(inside, capped(x, before, after), MINUS_INFINITY)
    larger = tl.maximum(m, tl.max(z, 1))
    shift = shift_for(larger)
    down = tl.where(d == 0, 0.0, m - shift)
    below = z - shift[:, None]
    e = exp(below)
    scale = exp(down)
    slack = (slack + d * down) * scale + tl.sum(e * tl.where(below < LEAST, LEAST, below), 1)
    d = d * scale + tl.sum(e, 1)
    top = tl.max(tl.where(inside, x, MINUS_INFINITY), 1)
    top = tl.where(tl.max((inside & (x != x)).to(tl.int32), 1) > 0, float("nan"), top)
    same = (x == top[:, None]) | ((x != x) & (top != top)[:, None])
    first = tl.min(tl.where(inside & same, column, 2147483647).to(tl.int64), 1)
    is_larger = (top > best) | (top != top) | (place < 0)
    place = tl.where(is_larger & (best == best) & (first < 2147483647), first, place)
    spread += tl.sum(tl.where(target == 0, 0.0, target * z), 1)
    best = tl.where(is_larger & (best == best), top, best)
    return larger, d, slack, best, place, spread, mass + tl.sum(target, 1)


@triton.jit
def no_sums(T: tl.constexpr):
    """The sums of `take` for no element."""
    zero = tl.zeros([T.rows], T.number)
    lowest = tl.full([T.rows], MINUS_INFINITY, T.number)
    return lowest, zero, zero, lowest, tl.full([T.rows], -1, tl.int64), zero, zero


@triton.jit
def gradient_at(
    upstream, PRESENT: tl.constexpr, PLACE: tl.constexpr, sample, exists, DEFAULT: tl.constexpr, T: tl.constexpr
):
    """The gradients of a result of the samples, or the default if there are none."""
    if PRESENT[PLACE]:
        value = tl.load(upstream[PLACE] + sample, mask=exists, other=0.0).to(T.number)
    else:
        value = tl.full([T.rows], DEFAULT, T.number)
    return value


@triton.jit
def store_results(pointers, sample, exists, counts, values):
    """Four results of samples: 0 for those that are ignored."""
    for i in tl.static_range(4):
        value = tl.where(counts, values[i], 0.0)
        tl.store(pointers[i] + sample, narrow(value, pointers[i].dtype.element_ty), mask=exists)


@triton.jit
def gradient_of(x, q, numbers, column, inside, given):
    m, inverse, constant, curved, of_target, of_label, counts, label = numbers
    _, _, _, before, after, _ = given
    z = capped(x, before, after)
    below = z - m[:, None]
    p = exp(below) * inverse[:, None]
    dz = p * (constant[:, None] + curved[:, None] * tl.where(below < LEAST, LEAST, below))
    of_column = tl.where(is_label(column, label), of_label[:, None], 0.0)
    dz += of_column - of_target[:, None] * targets_of(q, column, inside, given)
    if after is None:
        dx = dz * before
    else:
        t = z * (1.0 / after)
        dx = dz * (1.0 - t * t) * (before * after)
    return tl.where(counts[:, None], dx, 0.0)


@triton.jit
def coefficients(
    found, log_d, spare, of_label, sample, exists, valid, counts, label, upstream, PRESENT: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """The numbers of rows that `gradient_of` takes: made of the gradients of their results."""
    m, d, _, _, _, _, mass = found
    by_loss = gradient_at(upstream, PRESENT, 0, sample, exists, 1.0, T)
    by_log_prob = gradient_at(upstream, PRESENT, 3, sample, exists, 0.0, T)
    by_entropy = gradient_at(upstream, PRESENT, 4, sample, exists, 0.0, T)
    constant = by_loss * (mass + of_label) + gradient_at(upstream, PRESENT, 1, sample, exists, 0.0, T) - by_log_prob
    constant += 2.0 * (m + log_d) * gradient_at(upstream, PRESENT, 2, sample, exists, 0.0, T)
    constant += by_entropy * (log_d - spare) + tl.where(valid, 0.0, float("nan"))
    return m, 1.0 / d, constant, -by_entropy, by_loss, by_log_prob - by_loss * of_label, counts, label


@triton.jit
def losses(
    x, x_outer, x_n, x_inner, y, y_outer, y_n, y_inner, q, q_outer, q_n, q_inner, labels, weight, upstream, results,
    samples, n, inner, ignore, before: tl.float64, after: tl.float64, base: tl.float64, share: tl.float64,
    PRESENT: tl.constexpr, IGNORES: tl.constexpr, CAPPED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    before, cap = scalar(before, T.number), scalar(after, T.number) if CAPPED else None
    base, share = scalar(base, T.number), scalar(share, T.number)
    given = (weight, base, share, before, cap, q)
    rows = rows_of(samples, n, inner, x_outer, x_inner, 1, LOOP, T)
    sample, exists, _, _, _ = rows
    label, counts, valid = read_labels(labels, sample, exists, n, ignore, IGNORES)
    label = tl.where(valid, label, -1)
    a = array_of(x, rows, inner, x_outer, x_n, x_inner)
    b = array_of(q, rows, inner, q_outer, q_n, q_inner) if q is not None else None
    found = fold_rows(no_sums(T), a, b, rows, n, 0, given, take, 0.0, LOOP, T)
    m, d, slack, _, place, spread, mass = found
    picked = tl.load(x + a[1] + label * x_n, mask=label >= 0, other=float("nan")).to(T.number)
    log_d = tl.log(d)
    below = log_d + (m - capped(picked, before, cap))
    total = mass * (m + log_d) - spread + tl.where(valid, d - d, float("nan"))
    of_label = tl.zeros([T.rows], T.number)
    if q is None:
        of_label = weights_of(weight, label, counts, valid).to(T.number) * share
        total += tl.where(of_label == 0, 0.0, of_label * below)
    spare = log_d - slack / d
    store_results(results, sample, exists, counts, (total, m + log_d, -below, spare))
    tl.store(results[4] + sample, tl.where(counts, place, -1), mask=exists)
    if y is not None:
        numbers = coefficients(
            found, log_d, spare, of_label, sample, exists, valid, counts, label, upstream, PRESENT, T
        )  # fmt: skip
        y_rows = array_of(y, rows, inner, y_outer, y_n, y_inner)
        write_rows(y_rows, a, b, a, rows, n, 0, numbers, given, gradient_of, 0.0, LOOP, T)


# --- programs ------------------------------------------------------------------------------------------------------

UPSTREAM = ("dloss", "dlse", "dlse_square", "dlog_prob", "dentropy")
RESULTS = ("loss", "lse", "log_prob", "entropy", "predicted")
STEP = 4096  # elements of a step in a loop: sums and targets need registers beside the logits


def options(problem: Problem) -> dict[str, Any]:
    """The arguments that say how z and the targets are made, in the precision of the sums."""
    given = problem.attributes
    softcap, temperature, smoothing = given["softcap"], given["temperature"], given["label_smoothing"]
    return {
        "labels": problem["labels"],
        "weight": problem["weight"],
        "ignore": given["ignore_index"] or 0,
        "IGNORES": given["ignore_index"] is not None,
        "CAPPED": softcap > 0,
        "before": 1 / softcap if softcap else 1 / temperature,
        "after": softcap / temperature if softcap else 1.0,
        "base": smoothing / max(problem.n, 1),
        "share": 1.0 - smoothing,
    }


def _program(problem: Problem, operator: str, gradient: Operand | None) -> Program:
    q, samples, space = problem["probabilities"], problem.outer * problem.inner, Space()
    space.take(2, "int64")  # the status of the checks
    operands = [each for each in (problem["logits"], gradient, q) if each is not None]
    given, launches, name = options(problem), [], ""
    if samples:
        regime = regimes.choose(problem, operands, streams=2, labelled=True, alone=True, functions=True)
        regime = replace(regime, block=min(regime.block, max(STEP // regime.rows, 1)))
        name = regime.name
        present = [gradient is not None and problem[each] is not None for each in UPSTREAM]
        given["results"] = tuple(problem[each] for each in RESULTS)
        given["PRESENT"] = tuple(present)
        given["upstream"] = tuple(
            problem[each] if there else problem["loss"] for each, there in zip(UPSTREAM, present, strict=True)
        )
        given |= frame(problem, regime, operands) | strides(x=problem["logits"], y=gradient, q=q)
        launches.append(Launch(losses, (tiles(problem, regime),), given, regime.warps))
    checking = checks(problem["labels"], samples, 0, problem.n, problem.attributes["ignore_index"])
    return Program(launches, space.size, name, checking, wrong_label(problem, operator))


def sample_losses(problem: Problem) -> Program:
    return _program(problem, "sample_losses", None)


def sample_losses_and_grad(problem: Problem) -> Program:
    return _program(problem, "sample_losses_and_grad", problem["dlogits"])
