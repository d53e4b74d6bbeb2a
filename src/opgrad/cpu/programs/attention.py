"""Attention and its gradient; softmax as attention uses it, by stages: with a bias before it, dropout behind it."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from opgrad.contract import Shape, Spec
from opgrad.contract.layout import contiguous
from opgrad.contract.problem import Problem
from opgrad.cpu.kernels.attention import forward
from opgrad.cpu.kernels.fused import post_ops
from opgrad.cpu.programs.attending import Building, Gradient
from opgrad.cpu.programs.fused import stages as fused
from opgrad.cpu.programs.program import Program, Step
from opgrad.cpu.programs.softmax import in_place
from opgrad.random import kept_scale

ORDER = (0, 1, 2)
ROWS: Final = 192  # of a tile of attention's scores


def _row_sizes(problem: Problem, name: str) -> tuple[int, int]:
    """How many rows there are, and how long they are."""
    shape, start = problem.specs[name].shape, problem.attributes["axis"].start
    return math.prod(shape[:start]), math.prod(shape[start:])


def _as_rows(problem: Problem, shape: Shape, repeated: Mapping[str, int]) -> Problem:
    """The problem on arrays of this shape, reduced over the last axis; `repeated` ones stay the same along an axis."""

    def spec(name: str, original: Spec) -> Spec:
        axis = repeated.get(name)
        stored = tuple(1 if each == axis else size for each, size in enumerate(shape))
        strides = contiguous(stored, ORDER, original.dtype.itemsize)
        return Spec(shape, original.dtype, tuple(0 if each == axis else step for each, step in enumerate(strides)))

    specs = {name: spec(name, original) for name, original in problem.specs.items()}
    sizes = {"outer": shape[0] * shape[1], "n": shape[2], "inner": 1}
    return replace(problem, **sizes, specs=specs, orders=dict.fromkeys(specs, ORDER))


def bias_softmax(problem: Problem) -> Program:
    rows, n = _row_sizes(problem, "x")
    if not rows * n:
        return Program(())
    count = math.prod(problem.specs["bias"].shape) // n
    inner = problem.attributes["is_inner_broadcast"]
    shape = (count, rows // count, n) if inner else (rows // count, count, n)
    work = fused.cut(_as_rows(problem, shape, {"bias": 1 if inner else 0}), "x", ("y",))
    values, bias = work.block("values"), work.chunk("bias")
    added = work.of_buffers(post_ops.VALUES["add"], values, bias)
    before = [work.read("x", values), work.read("bias", bias), added]
    return work.program(in_place("softmax"), before, (), [work.write("y", values)])


def softmax_dropout_grad(problem: Problem) -> Program:
    rows, n = _row_sizes(problem, "dy")
    if not rows * n:
        return Program(())
    work = fused.cut(_as_rows(problem, (1, rows, n), {}), "dy", ("y", "dx"))
    g, y, kept = work.block("values"), work.block("y"), work.chunk("kept")
    dropped = work.of_buffers(post_ops.drop, g, kept, alpha=kept_scale(problem.attributes["ratio"]))
    before = [work.read("y", y), work.read("dy", g), work.read("mask", kept), dropped]
    return work.program(in_place("softmax_grad"), before, (), [work.write("dx", g)], other=y)


def attention(problem: Problem) -> Program:
    b = Building(problem, "attention")
    s = b.sizes
    if not s.batch * s.heads * s.queries:
        return b.program("attention")
    sizes = b.with_block(ROWS)
    rows, private = sizes.block * b.group, b.workspace.private
    pitch = -(-s.v_size // b.lanes) * b.lanes
    keys = forward.KEYS
    (k, k_panel), (v, v_panel) = b.panels(s.size, keys), b.panels(keys, s.v_size)
    tile = private(rows * forward.PITCH), private(keys)
    memory = forward.Memory(private(rows * s.size), k, v, k_panel, v_panel, *tile)
    arguments = {
        "sizes": sizes,
        "seen": b.seen,
        "scores": b.scores(),
        "drop": b.drop(),
        "inputs": forward.Inputs(b.heads("q"), b.heads("k"), b.heads("v"), *b.sink()),
        "results": forward.Results(b.heads("y"), b.rows("lse"), int(b.given("y")), int(b.given("lse"))),
        "memory": memory,
        "sums": forward.Sums(private(rows * pitch), pitch, private(rows), private(rows)),
    }
    units = s.batch * s.kv_heads * -(-s.queries // sizes.block)
    b.steps.append(Step(forward.attend, units, arguments))
    return b.program("attention")


def attention_grad(problem: Problem) -> Program:
    b = Gradient(problem)
    b.prepare()
    if b.given("dsink"):
        b.sinks()
    if b.given("dmask"):
        if problem["mask"].dtype == "bool":
            raise TypeError("attention_grad: mask has dtype bool, expected one of floats, as needs has dmask")
        b.masks()
    if b.wanted:
        b.add_waves()
    return b.program("attention_grad")
