"""Attention and its gradient; softmax with a bias before it, or with dropout behind it, as softmax with attributes."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from opgrad.contract import Shape, Spec
from opgrad.contract.arrangement import contiguous
from opgrad.contract.signature import Problem
from opgrad.cpu.kernels.attention import forward
from opgrad.cpu.programs.attending import AttentionGradientSteps, AttentionSteps
from opgrad.cpu.programs.softmax import softmax, softmax_grad
from opgrad.cpu.runtime.program import Program, ceil_div, whole_vectors
from opgrad.ops.reference.random import kept_scale

ORDER: Final = (0, 1, 2)
ATTRIBUTES: Final[Mapping[str, Any]] = {
    "axis": (2,), "logit_scale": 1.0, "result_scale": 1.0, "out_scale": 1.0, "dropout": None, "post_ops": (),
    "inf_as_zero": False, "accumulation": "any",
}  # fmt: skip
ROWS: Final = 192  # of a tile of attention's scores
FEWEST_UNITS: Final = 16  # into which attention is cut, if there are keys enough


def _row_sizes(problem: Problem, name: str) -> tuple[int, int]:
    """How many rows there are, and how long they are."""
    shape, start = problem.specs[name].shape, problem.attributes["axis"].start
    return math.prod(shape[:start]), math.prod(shape[start:])


def _as_rows(problem: Problem, shape: Shape, repeated: Mapping[str, int], **attributes: float) -> Problem:
    """The problem on arrays of this shape, reduced over the last axis; `repeated` ones stay the same along an axis."""

    def spec(name: str, original: Spec) -> Spec:
        axis = repeated.get(name)
        stored = tuple(1 if each == axis else size for each, size in enumerate(shape))
        strides = contiguous(stored, ORDER, original.dtype.itemsize)
        return Spec(shape, original.dtype, tuple(0 if each == axis else step for each, step in enumerate(strides)))

    specs = {name: spec(name, original) for name, original in problem.specs.items()}
    sizes = {"outer": shape[0] * shape[1], "n": shape[2], "inner": 1}
    return replace(
        problem, **sizes, specs=specs, orders=dict.fromkeys(specs, ORDER), attributes={**ATTRIBUTES, **attributes}
    )


def bias_softmax(problem: Problem) -> Program:
    rows, n = _row_sizes(problem, "x")
    if not rows * n:
        return Program(())
    count = math.prod(problem.specs["bias"].shape) // n
    inner = problem.attributes["is_inner_broadcast"]
    shape = (count, rows // count, n) if inner else (rows // count, count, n)
    return softmax(_as_rows(problem, shape, {"bias": 1 if inner else 0}))


def softmax_dropout_grad(problem: Problem) -> Program:
    """Dropout's mask is that of the gradient's elements, whose scale is that of the result."""
    rows, n = _row_sizes(problem, "dy")
    if not rows * n:
        return Program(())
    by_rows = _as_rows(problem, (1, rows, n), {}, result_scale=kept_scale(problem.attributes["ratio"]))
    names = {"dy": "dy", "y": "y", "mask": "where", "dx": "dx"}
    specs = {to: by_rows.specs[name] for name, to in names.items()}
    operands = {to: by_rows.operands[name] for name, to in names.items()}
    return softmax_grad(replace(by_rows, specs=specs, operands=operands, orders=dict.fromkeys(specs, ORDER)))


def attention(problem: Problem) -> Program:
    b = AttentionSteps(problem, "attention")
    s = b.sizes
    if not s.batch * s.heads * s.queries:
        return b.program("attention", b.explain)
    sizes = b.with_block(ROWS)
    rows, keys, private = sizes.block * b.group, forward.KEYS, b.workspace.private
    (k, k_panel), (v, v_panel) = b.private_panels(s.size, keys), b.private_panels(keys, s.v_size)
    tile = private(rows * forward.PITCH), private(keys)
    arguments = {
        **b.for_scores(sizes),
        "inputs": forward.ForwardInputs(b.heads("q"), b.heads("k"), b.heads("v"), *b.sink()),
        "results": forward.ForwardResults(b.heads("y"), b.rows("lse"), int(b.given("y")), int(b.given("lse"))),
        "memory": forward.ForwardMemory(private(rows * s.size), k, v, k_panel, v_panel, *tile),
    }
    units, pitch = s.batch * s.kv_heads * -(-s.queries // sizes.block), whole_vectors(s.v_size, b.workspace.precision)
    parts = min(-(-FEWEST_UNITS // units), s.keys // keys)
    if parts > 1:
        return _in_parts(b, units, pitch, parts, arguments)
    sums = forward.Sums(private(rows * pitch), pitch, private(rows), private(rows))
    b.add_parts(forward.attend, units, **arguments, sums=sums)
    return b.program("attention", b.explain)


def _in_parts(b: AttentionSteps, units: int, pitch: int, count: int, arguments: Mapping[str, Any]) -> Program:
    """The program that cuts the keys into parts, so that there are units for threads."""
    rows, per_part = arguments["sizes"].block * b.group, ceil_div(b.sizes.keys, count)
    parts = forward.Parts(count, per_part, rows)
    y, top, total = (b.workspace.shared(units * count * rows * size) for size in (pitch, 1, 1))
    arguments = {**arguments, "parts": parts, "sums": forward.PartSums(y, pitch, top, total)}
    b.add_parts(forward.attend_parts, units * count, **arguments)
    b.add_parts(forward.join_parts, units, **arguments)
    return b.program("attention_parts", b.explain)


def attention_grad(problem: Problem) -> Program:
    b = AttentionGradientSteps(problem)
    b.prepare()
    if b.given("dsink"):
        b.sinks()
    if b.given("dmask"):
        if problem["mask"].dtype == "bool":
            raise TypeError("attention_grad: mask has dtype bool, expected one of floats, as needs has dmask")
        b.masks()
    if b.wanted:
        b.add_waves()
    return b.program("attention_grad", b.explain)
