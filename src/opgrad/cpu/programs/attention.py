"""Attention and its gradient; softmax with a bias before it, or with dropout behind it, as softmax with attributes."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from opgrad.contract import Shape, Spec
from opgrad.contract.arrangement import contiguous
from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.kernels import gemm
from opgrad.cpu.kernels.attention import backward as backward_kernels
from opgrad.cpu.kernels.attention import forward
from opgrad.cpu.kernels.rotary import turn
from opgrad.cpu.kernels.softmax.rows import soften, soften_back, sum_parts
from opgrad.cpu.programs.building import ProductSteps, ProgramSteps, row_sizes
from opgrad.cpu.programs.fusing import PLAIN
from opgrad.cpu.programs.indexing import check_indices
from opgrad.cpu.programs.softmax import softmax, softmax_grad
from opgrad.cpu.runtime.plan import Address, Program, Scratch, ceil_div, round_up
from opgrad.ops.attention import PACKED, rotation
from opgrad.ops.reference import attending
from opgrad.ops.reference.dropout import keep_threshold, kept_scale

LOG2_E: Final = math.log2(math.e)
KEYS_BACK: Final = 4 * gemm.CHUNK  # of a block of the gradient whose heads are small
SMALL_HEAD: Final = 64
SUMS_BYTES: Final = 24 << 20  # of memory in which gradients are summed up; threads wait for each other at its rounds
FAR: Final = 1 << 40  # keys on a side of a query, where they are not limited


class AttentionSteps(ProductSteps):
    """What the steps of both programs are given, made of a problem."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.name, self.explain, self.shapes = problem.operator.name, self.wrong_span, problem.shapes
        self.sizes = attending.sizes(self.shapes, problem.attributes)
        self.group = max(self.sizes.heads // max(self.sizes.kv_heads, 1), 1)
        self.is_packed = "cu_seqlens_q" in self.shapes
        self.seen = self._seen()

    # --- arrays -----------------------------------------------------------------------------------------------------

    def strides(self, name: str) -> tuple[int, ...]:
        """In elements."""
        spec = self.problem.specs[name]
        assert spec.strides is not None
        steps = zip(spec.shape, spec.strides, strict=True)
        return tuple(stride // spec.dtype.itemsize if size > 1 else 0 for size, stride in steps)

    def heads(self, name: str) -> Any:
        """Queries, keys or values; None if they are not given."""
        if not self.given(name):
            return None
        strides = self.strides(name)
        if self.is_packed:
            row, head, batch = strides[0], strides[1], 0
        elif self.problem.attributes["layout"] == "BHLD":
            batch, head, row = strides[:3]
        else:
            batch, row, head = strides[:3]
        return forward.Heads(self.problem[name], batch, head, row)

    def rows(self, name: str) -> Any:
        """What there is of each query of each head; None if it is not given."""
        if not self.given(name):
            return None
        strides = (0, *self.strides(name))[-3:]
        return forward.Heads(self.problem[name], *strides)

    def mask(self) -> forward.Mask:
        if not self.given("mask"):
            return forward.Mask(self.absent(), forward.NO_MASK, 0, 0, 0)
        batch, head, row, column = (0, 0, 0, 0, *self.strides("mask"))[-4:]
        numbers, of_row = self.problem["mask"].dtype != "bool", column == 0 and self.sizes.keys > 1
        kinds = (forward.ADDED, forward.ADDED_TO_ROW) if numbers else (forward.SELECTED, forward.ROW_SELECTED)
        return forward.Mask(self.problem["mask"], kinds[of_row], batch, head, row)

    def sink(self) -> tuple[Any, int]:
        return (self.problem["sink"], 1) if self.given("sink") else (self.absent(), 0)

    def absent(self) -> Any:
        """In place of an operand that is not given: of the dtype that most have, so that both share their kernels."""
        return Address(0, self.problem["q"].dtype)

    # --- scores -----------------------------------------------------------------------------------------------------

    def scores(self) -> forward.Scores:
        scale, cap = self.problem.attributes["scale"], self.problem.attributes["softcap"]
        scale = self.sizes.size**-0.5 if scale is None else scale
        return forward.Scores(scale / cap if cap else scale * LOG2_E, cap * LOG2_E, self.mask())

    def call(self, sizes: forward.TileSizes) -> forward.Attention:
        return forward.Attention(sizes, self.seen, self.scores(), self.drop())

    def drop(self) -> forward.Drop:
        probability = self.problem.attributes["dropout"]
        threshold = keep_threshold(probability) if probability else 0
        return forward.Drop(self._number("seed"), self._number("offset"), threshold, kept_scale(probability))

    def _number(self, name: str) -> Any:
        return self.problem[name] if self.given(name) else Address(self.tables.add([0]), "int64")

    # --- which keys a query sees ------------------------------------------------------------------------------------

    def _seen(self) -> forward.Seen:
        left, right = (FAR if side < 0 else side for side in self.problem.attributes["window"])
        causal = self.problem.attributes["causal"]
        count = self.shapes["cu_seqlens_q"][0] - 1 if self.is_packed else 1
        return forward.Seen(self._spans(), count, int(causal == "bottom_right"), left, 0 if causal else right)

    def _spans(self) -> Any:
        batch, queries, keys = self.sizes.batch, self.sizes.queries, self.sizes.keys
        if not self.is_packed and not self.given("key_lengths"):
            return self.tables.add(np.array([[0, queries, 0, keys]] * batch))
        count = self.shapes["cu_seqlens_q"][0] - 1 if self.is_packed else batch
        spans = self.workspace.shared(max(forward.SPAN * count, 1), "int64")
        arguments = {"queries": queries, "keys": keys, "spans": spans, "status": Scratch()}
        if self.is_packed:
            q = self.problem["cu_seqlens_q"]
            k = self.problem["cu_seqlens_k"] if self.given("cu_seqlens_k") else q
            self.add_parts(forward.spans_of_sequences, **arguments, count=count, q=q, k=k)
        else:
            lengths = self.problem["key_lengths"]
            self.add_parts(forward.spans_of_lengths, **arguments, batch=batch, lengths=lengths)
        return spans

    def wrong_span(self, position: int, value: int) -> Exception:
        """The error for a wrong length or start."""
        if not self.is_packed:
            return self._wrong("key_lengths", position, value, self.sizes.keys)
        count = self.shapes["cu_seqlens_q"][0]
        name, length = ("cu_seqlens_k", self.sizes.keys) if position >= count else ("cu_seqlens_q", self.sizes.queries)
        if not self.given("cu_seqlens_k"):
            name = "cu_seqlens_q"
        return self._wrong(name, position % count, value, length, rising=True)

    def _wrong(self, name: str, position: int, value: int, largest: int, rising: bool = False) -> Exception:
        expected = f"0 to {largest}" + (", rising" if rising else "")
        return ValueError(f"{self.problem.operator.name}: {name}[{position}] is {value}, expected {expected}")

    # --- working memory ---------------------------------------------------------------------------------------------

    def private_panels(self, depth: int, columns: int) -> tuple[Scratch, int]:
        """Private memory for packed rows, and the numbers of a panel."""
        count, panel = self.panels(depth, columns)
        return self.workspace.private(count * panel), panel

    def with_block(self, rows: int) -> forward.TileSizes:
        """The sizes with blocks of queries that make about so many rows in all heads that share keys."""
        s = self.sizes
        block = max(1, min(rows // self.group, s.queries))
        return forward.TileSizes(*s, block)

    def summing(self, sizes: forward.TileSizes) -> dict[str, Any]:
        """The arguments with which sums over the keys are formed, for so many queries at a time."""
        private, rows, keys = self.workspace.private, sizes.block * self.group, forward.KEYS
        (k, k_panel), (v, v_panel) = self.private_panels(sizes.size, keys), self.private_panels(keys, sizes.v_size)
        tile = private(rows * forward.PITCH), private(keys)
        return {
            "call": self.call(sizes),
            "inputs": forward.ForwardInputs(self.heads("q"), self.heads("k"), self.heads("v"), *self.sink()),
            "memory": forward.ForwardMemory(private(rows * sizes.size), k, v, k_panel, v_panel, *tile),
        }

    def sums(self, sizes: forward.TileSizes) -> forward.Sums:
        """Private memory for the sums of so many queries."""
        private, rows, pitch = self.workspace.private, sizes.block * self.group, round_up(sizes.v_size, self.lanes)
        return forward.Sums(private(rows * pitch), pitch, private(rows), private(rows))


# --- the gradient ---------------------------------------------------------------------------------------------------


class AttentionGradientSteps(AttentionSteps):
    """Puts the steps of the gradient together."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        s = self.sizes
        self.block_keys = KEYS_BACK if max(s.size, s.v_size) <= SMALL_HEAD else KEYS_BACK // 2
        self.block_queries = self.block_keys
        self.wanted = [name for name in ("dq", "dk", "dv") if self.given(name)]
        names = "power", "rest", "delta"
        self.of_queries = {name: self.workspace.shared(s.batch * s.heads * s.queries) for name in names}
        self.memory = self._memory()

    def add_rows(self, kernel: Kernel, heads: int, length: int, row: int, /, **arguments: Any) -> None:
        """Add a step whose units are rows of heads, of so many numbers each."""
        self.add(kernel, heads * length, 2 * row * self.item, **arguments)

    def prepare(self) -> None:
        s, has_dlse = self.sizes, self.given("dlse")
        lse = self.rows("lse")
        arguments = {"dy": self.heads("dy"), "y": self.heads("y"), "lse": lse, "sizes": self.with_block(1)}
        arguments |= {"dlse": self.rows("dlse") if has_dlse else lse, "has_dlse": has_dlse, **self.of_queries}
        self.add_rows(backward_kernels.prepare_rows, s.batch * s.heads, s.queries, s.v_size, **arguments)
        sizes = self.with_block(backward_kernels.ROWS)._replace(v_size=0)  # nothing is summed with the values
        given = {**self.summing(sizes), "sums": self.sums(sizes), **self.of_queries}
        given["call"] = given["call"]._replace(drop=self.drop()._replace(threshold=0))
        units = s.batch * s.kv_heads * -(-s.queries // sizes.block)
        self.add_parts(backward_kernels.sum_far_rows, units, **given)

    def masks(self) -> None:
        """The step that writes dmask."""
        keys, rows = self.block_keys, backward_kernels.ROWS
        batches, heads, queries, columns = (1, 1, 1, 1, *self.shapes["dmask"])[-4:]
        strides = (0, 0, 0, 0, *self.strides("dmask"))[-4:-1]
        sizes = (batches, heads, queries, columns)
        dmask = backward_kernels.MaskGradient(self.problem["dmask"], *strides, *sizes, keys)
        sums = self.workspace.private(rows * (keys + gemm.SPARE))
        units = batches * heads * -(-queries // rows) * -(-columns // keys)
        self.add_parts(backward_kernels.sum_mask, units, **self.memory, dmask=dmask, sums=sums)

    def sinks(self) -> None:
        s = self.sizes
        sizes = {"batches": s.batch, "heads": s.heads, "queries": s.queries}
        self.add(backward_kernels.sum_sinks, s.heads, 8 * s.batch * s.queries, **sizes, **self.of_queries)

    def add_waves(self) -> None:
        """Add the steps of all heads of keys, some at a time: clear the sums, add to them in waves, round them."""
        s, rounds = self.sizes, self.problem["q"].dtype != self.workspace.precision
        # Of each result the heads for each head of keys, the length, and the numbers of a head.
        of_result = {"dq": (self.group, s.queries, s.size), "dk": (1, s.keys, s.size), "dv": (1, s.keys, s.v_size)}
        every = s.batch * s.kv_heads
        at_once, sums = max(every, 1), {name: self.heads(name) for name in self.wanted}
        if rounds:  # sums are formed in working memory, and rounded when they are complete
            of_head = sum(math.prod(of_result[name]) for name in self.wanted) * self.item
            at_once = max(1, min(at_once, SUMS_BYTES // max(of_head, 1)))
            for name in self.wanted:
                heads, length, size = of_result[name]
                memory = self.workspace.shared(at_once * heads * length * size)
                sums[name] = forward.Heads(memory, heads * s.kv_heads * length * size, length * size, size)
        blocks, key_blocks = -(-s.queries // self.block_queries), -(-s.keys // self.block_keys)
        waves = max(blocks, key_blocks)
        nothing = forward.Heads(None, 0, 0, 0)  # type: ignore[arg-type]
        for first in range(0, every, at_once):
            count, rows, results = min(at_once, every - first), {}, dict.fromkeys(of_result, nothing)
            for name in self.wanted:
                (heads, length, size), x = of_result[name], sums[name]
                if rounds:  # memory of the first head of keys is used from head `first` on
                    x = x._replace(data=x.data.moved(-first * heads * length * size))
                arguments = {"first": first * heads, "heads": heads * s.kv_heads, "length": length, "size": size}
                rows[name], results[name] = ((count * heads, length, size), arguments | {"x": x}), x
                self.add_rows(backward_kernels.clear_rows, *rows[name][0], **rows[name][1])
            into = backward_kernels.BackwardResults(*results.values(), *(int(name in rows) for name in results))
            for wave in range(waves if key_blocks else 0):
                arguments = {**self.memory, "results": into, "first_head": first}
                arguments |= {"wave": wave, "waves": waves, "blocks": blocks, "block_keys": self.block_keys}
                self.add_parts(backward_kernels.attend_back, count * blocks, **arguments)
            for name in rows if rounds else ():
                self.add_rows(backward_kernels.round_rows, *rows[name][0], **rows[name][1], y=self.heads(name))

    def _memory(self) -> dict[str, Any]:
        """The arguments that the steps of all waves share with the step of dmask."""
        s, private, rows, keys = self.sizes, self.workspace.private, backward_kernels.ROWS, self.block_keys
        scale = s.size**-0.5 if self.problem.attributes["scale"] is None else self.problem.attributes["scale"]
        (q, q_panel), (dy, dy_panel) = self.private_panels(rows, s.size), self.private_panels(rows, s.v_size)
        (of_rows, row_panel), (k, k_panel) = self.private_panels(keys, s.size), self.private_panels(s.size, keys)
        v, v_panel = self.private_panels(s.v_size, keys)
        pitch = keys + gemm.SPARE
        tile = backward_kernels.Tile(private(rows * pitch), private(rows * pitch), pitch, private(keys), private(keys))
        arrays = [self.heads(name) for name in ("q", "k", "v", "dy")]
        packed_keys = backward_kernels.PackedKeys(of_rows, k, v, row_panel, k_panel, v_panel)
        as_rows = private(rows * s.size), private(rows * s.v_size)
        return {
            "call": self.call(self.with_block(self.block_queries * self.group)),
            "inputs": backward_kernels.BackwardInputs(*arrays, *self.of_queries.values(), scale),
            "packed": backward_kernels.Packed(*as_rows, q, dy, q_panel, dy_panel),
            "memory": backward_kernels.BackwardMemory(packed_keys, tile),
        }


def sink_softmax(problem: Problem) -> Program:
    steps, (batches, heads, length, n) = ProgramSteps(problem), problem.specs["x"].shape
    steps.add(soften, batches * heads * length, heads=heads, length=length, n=n)
    return steps


def sink_softmax_grad(problem: Problem) -> Program:
    steps, (batches, heads, length, n) = ProgramSteps(problem), problem.specs["dy"].shape
    rows, sizes = batches * heads * length, {"heads": heads, "length": length}
    parts = steps.workspace.shared(max(rows, 1))
    steps.add(soften_back, rows, **sizes, n=n, parts=parts)
    steps.add_parts(sum_parts, heads, **sizes, batches=batches, parts=parts)
    return steps


def _turning(problem: Problem, source: str, target: str, sign: float) -> Program:
    steps, sizes = ProgramSteps(problem), rotation(problem.operator.name, problem.shapes, dict(problem.attributes))
    cos, positions = problem.shapes["cos_cache"], problem["position_ids"]
    count = cos[0] if positions else 0
    if positions:
        check_indices(steps, count, "position_ids")
    rows = sizes.batch * sizes.heads * sizes.tokens
    if rows * sizes.size:
        heads = {"tokens": sizes.tokens, "heads": sizes.heads, "tokens_inside": sizes.heads_first}
        heads |= {"size": sizes.size, "half": sizes.half, "count": count}
        batch_step = sizes.tokens if len(cos) == PACKED and cos[0] > 1 else 0
        tables = {"cos": problem["cos_cache"], "sin": problem["sin_cache"], "positions": positions}
        given = {"x": problem[source], "y": problem[target], **tables}
        steps.add(turn, rows, **heads, batch_step=batch_step, sign=sign, **given)
    return steps


rotary_embedding = partial(_turning, source="x", target="y", sign=1.0)
rotary_embedding_grad = partial(_turning, source="dy", target="dx", sign=-1.0)

ORDER: Final = (0, 1, 2)
ROWS: Final = 192  # of a tile of attention's scores
FEWEST_UNITS: Final = 16  # into which attention is cut, if there are keys enough


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
        problem,
        **sizes,
        specs=specs,
        orders=dict.fromkeys(specs, ORDER),
        attributes={"axis": (2,), **PLAIN, **attributes},
    )


def bias_softmax(problem: Problem) -> Program:
    rows, n = row_sizes(problem, "x")
    if not rows * n:
        return Program()
    count = math.prod(problem.specs["bias"].shape) // n
    inner = problem.attributes["is_inner_broadcast"]
    shape = (count, rows // count, n) if inner else (rows // count, count, n)
    return softmax(_as_rows(problem, shape, {"bias": 1 if inner else 0}))


def softmax_dropout_grad(problem: Problem) -> Program:
    """Dropout's mask is that of the gradient's elements, whose scale is that of the result."""
    rows, n = row_sizes(problem, "dy")
    if not rows * n:
        return Program()
    by_rows = _as_rows(problem, (1, rows, n), {}, result_scale=kept_scale(problem.attributes["ratio"]))
    names = {"dy": "dy", "y": "y", "mask": "where", "dx": "dx"}
    specs = {to: by_rows.specs[name] for name, to in names.items()}
    operands = {to: by_rows.operands[name] for name, to in names.items()}
    return softmax_grad(replace(by_rows, specs=specs, operands=operands, orders=dict.fromkeys(specs, ORDER)))


def attention(problem: Problem) -> Program:
    b = AttentionSteps(problem)
    s = b.sizes
    if not s.batch * s.heads * s.queries:
        return b
    sizes = b.with_block(ROWS)
    rows, arguments = sizes.block * b.group, b.summing(sizes)
    arguments["results"] = forward.ForwardResults(b.heads("y"), b.rows("lse"), int(b.given("y")), int(b.given("lse")))
    units, pitch = s.batch * s.kv_heads * -(-s.queries // sizes.block), round_up(s.v_size, b.lanes)
    parts = min(-(-FEWEST_UNITS // units), s.keys // forward.KEYS)
    if parts > 1:  # the keys are cut into parts, so that there are units for threads
        sizes_ = forward.Parts(parts, ceil_div(s.keys, parts), rows)
        y, top, total = (b.workspace.shared(units * parts * rows * size) for size in (pitch, 1, 1))
        arguments |= {"parts": sizes_, "sums": forward.PartSums(y, pitch, top, total)}
        b.add_parts(forward.attend_parts, units * parts, **arguments)
        b.add_parts(forward.join_parts, units, **arguments)
        b.name = "attention_parts"
        return b
    b.add_parts(forward.attend, units, **arguments, sums=b.sums(sizes))
    return b


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
    return b
