"""The headline kernels in other regimes than opgrad.cuda.regimes chooses.

    python tools/gpu/regimes.py [--seconds N] [--cells NAME,…]

All variants are compiled ahead by all cores, then timed cell by cell until the time is over; a line of results each,
and for each cell the fastest beside what is chosen. A variant that spills registers is left out. A dry run compiles one
variant of each regime.
"""

import argparse
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import results

from opgrad.contract import DTYPES, Spec
from opgrad.contract.signature import prepare
from opgrad.cuda import cross_entropy, execute, inspect, regimes, softmax
from opgrad.cuda.execute import Program
from opgrad.cuda.regimes import STAGES_WITHOUT_BUFFER, Regime, power_of_2
from opgrad.ops import operators

LOSS = "softmax_cross_entropy_loss_and_grad"
OPERATORS = ("softmax", "softmax_grad", LOSS)
SHAPES = {
    "16384x32768": (16384, 32768),
    "10672x50257": (10672, 50257),
    "4096x131072": (4096, 131072),
    "524288x1024": (524288, 1024),
    "131072x4096": (131072, 4096),
    "16x1000x56x56": (16, 1000, 56, 56),
}  # in the order of what is to be learned; axis 1 is reduced
SPILLED = 512  # bytes of a thread; what spills a little may be fastest all the same
SHARED = 227 << 10  # bytes of a program, at most
REPEATED = 7
ERROR = 0.01  # of the largest element, in bfloat16
STEPS = ((4096, 4), (4096, 8), (4096, 16), (8192, 8), (8192, 16), (16384, 16))  # elements, warps


@dataclass(frozen=True)
class Variant:
    """options: of a Regime; none for what is chosen."""

    operator: str
    shape: tuple[int, ...]
    dtype: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def program(self) -> Program:
        own = Regime(**self.options) if self.options else None
        for module in (softmax, cross_entropy):
            vars(module)["choose"] = lambda *given, **named: own or regimes.choose(*given, **named)
        op, array = operators()[self.operator], Spec(self.shape, DTYPES[self.dtype])
        labels = Spec((self.shape[0], *self.shape[2:]), DTYPES["int64"])
        arrays: dict[str, list[Spec | None]] = {
            "softmax": [array],
            "softmax_grad": [array, array],
            LOSS: [array, labels, None],
        }
        axis = {} if self.operator == LOSS else {"axis": 1}
        return op.kernel("opgrad.cuda")(prepare(op, arrays[self.operator], axis, any_stride=True))


def variants(operator: str, shape: tuple[int, ...], dtype: str) -> Iterator[Variant]:
    """What is tried for a cell, the chosen regime first."""
    yield Variant(operator, shape, dtype)
    streams, item, length = 1 + (operator == "softmax_grad"), DTYPES[dtype].itemsize, shape[1]
    block = power_of_2(length)
    for options in _of_columns(block) if len(shape) > 2 else _of_rows(length, streams, item):
        tile = options["rows"] * options["block"] * streams // options.get("ctas", 1)
        if 8 <= tile // (32 * options["warps"]) <= 128:
            yield Variant(operator, shape, dtype, options)


def _of_columns(block: int) -> Iterator[dict[str, Any]]:
    for rows, warps in itertools.product((8, 16, 32, 64), (4, 8, 16, 32)):
        yield {"name": "columns", "rows": rows, "block": block, "warps": warps}
    for rows, step, warps in itertools.product((32, 64, 128), (32, 64, 128), (4, 8, 16)):
        yield {"name": "long columns", "rows": rows, "block": step, "warps": warps}


def _of_rows(length: int, streams: int, item: int) -> Iterator[dict[str, Any]]:
    block = power_of_2(length)
    for rows, warps in itertools.product((1, 2, 4, 8) if length < 2048 else (1,), (2, 4, 8, 16, 32)):
        yield {"name": "short rows" if rows > 1 else "one row", "rows": rows, "block": block, "warps": warps}
    if length <= 4096:
        return
    for ctas, warps in itertools.product((2, 4, 8, 16) if regimes.clusters() else (), (4, 8, 16)):
        yield {"name": "cluster", "rows": 1, "block": block, "warps": warps, "ctas": ctas}
    for (step, warps), ahead in itertools.product(STEPS, (0, 1, 2, 3, 4)):
        if step * item * streams * ahead <= SHARED:
            stages = ahead + STAGES_WITHOUT_BUFFER if ahead else 1
            yield {"name": "long rows", "rows": 1, "block": step, "warps": warps, "stages": stages}


def compiled(variant: Variant) -> str:
    """Compile a variant for sm_90, into Triton's cache; why it is left out, or "" if it is not."""
    try:
        reports = inspect.compiled(variant.program())
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    if variant.options and (spilled := max(report.spilled for report in reports)) > SPILLED:
        return f"{spilled} bytes spilled"
    return "too much shared memory" if max(report.shared for report in reports) > SHARED else ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--cells", type=lambda text: text.split(","), default=list(SHAPES))
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    wanted = itertools.product(options.cells, OPERATORS, ("bfloat16", "float32"))
    cells = [list(variants(op, SHAPES[name], dtype)) for name, op, dtype in wanted]
    print(f"{sum(map(len, cells))} variants", flush=True)
    if results.is_dry():
        return _compile_one_of_each_regime(list(itertools.chain(*cells)))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        ahead = [[pool.submit(compiled, variant) for variant in cell] for cell in cells]
        for cell, compilations in zip(cells, ahead, strict=True):
            problems = [each.result() for each in compilations]
            if time.monotonic() > end:
                pool.shutdown(cancel_futures=True)
                return 0
            _measure([variant for variant, problem in zip(cell, problems, strict=True) if not problem])
    return 0


def _compile_one_of_each_regime(every: list[Variant]) -> int:
    failed = False
    for variant in {each.options.get("name"): each for each in reversed(every)}.values():
        problem = compiled(variant)
        results.append("variant", asdict(variant) | {"problem": problem})
        print(variant, problem or "compiles", flush=True)
        failed |= bool(problem)
    return int(failed)


def _measure(cell: list[Variant]) -> None:
    import torch  # not in the processes that compile

    operator, shape, kind = cell[0].operator, cell[0].shape, getattr(torch, cell[0].dtype)
    x = torch.randn(shape, device="cuda", dtype=torch.float32).to(kind)
    out, loss = torch.empty_like(x), torch.empty(1, device="cuda", dtype=kind)
    arrays: list[torch.Tensor | None] = [x, out]
    some = slice(0, 64 if len(shape) == 2 else 1)
    wide = x[some].float()
    expected = torch.softmax(wide, 1)
    if operator == "softmax_grad":
        y = torch.softmax(x, 1)
        arrays = [x, y, out]
        p = y[some].float()
        expected = p * (wide - (p * wide).sum(1, keepdim=True))
    elif operator == LOSS:
        labels = torch.randint(shape[1], (shape[0], *shape[2:]), device="cuda")
        arrays = [x, labels, None, loss, out]
        expected -= torch.nn.functional.one_hot(labels[some], shape[1]).movedim(-1, 1)
        expected /= math.prod(shape) // shape[1]
    traffic = sum(each.nbytes for each in arrays if each is not None)
    source = torch.empty(traffic // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = _seconds(lambda: target.copy_(source))
    found: list[tuple[float, Variant]] = []
    addresses = [0 if each is None else each.data_ptr() for each in arrays]
    for variant in cell:
        program = variant.program()
        scratch = torch.empty(program.scratch_bytes + 16, dtype=torch.uint8, device="cuda")
        run = execute.Compiled(program, addresses, scratch.data_ptr()).run
        stream = torch.cuda.current_stream().cuda_stream
        out.fill_(7)
        run(addresses, scratch.data_ptr(), stream)
        error = float((out[some].float() - expected).abs().max() / expected.abs().max())
        seconds = _seconds(lambda: run(addresses, scratch.data_ptr(), stream))  # noqa: B023
        measured = {"us": 1e6 * seconds, "share": copy / seconds, "error": error}
        results.append("variant", measured | {"regime": program.regime} | asdict(variant))
        if error < ERROR:
            found.append((seconds, variant))
    for what, (seconds, variant) in (("chosen", found[0]), ("fastest", min(found, key=lambda each: each[0]))):
        print(
            f"{operator} {shape} {variant.dtype} {what}: {1e6 * seconds:.0f} µs, {copy / seconds:.1%} of copy", end=" "
        )
        print(dict(variant.options), flush=True)


def _seconds(call: Callable[[], object]) -> float:
    """Median of the device's seconds of a call."""
    import torch

    call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATED + 1)]
    torch.cuda._sleep(1_000_000)
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / 1e3


if __name__ == "__main__":
    sys.exit(main())
