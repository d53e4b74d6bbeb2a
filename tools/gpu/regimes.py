"""The headline kernels in other regimes than opgrad.cuda.regimes chooses, and in ways of going over rows that it lacks.

    python tools/gpu/regimes.py [--seconds N] [--lengths N,…]

All variants are compiled ahead by all cores, then timed cell by cell until the time is over; a line of results each,
and for each cell the fastest of each way beside what is chosen. A variant that spills registers is left out. A dry run
compiles one variant of each way.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import candidates
import results

from opgrad.contract import DTYPES, Spec, operators
from opgrad.contract.problem import Operand
from opgrad.contract.signature import prepare
from opgrad.cuda import cross_entropy, execute, inspect, regimes, softmax
from opgrad.cuda.execute import Launch, Program
from opgrad.cuda.regimes import Regime, power_of_2

LOSS = "softmax_cross_entropy_loss_and_grad"
ELEMENTS = 1 << 29
LENGTHS = (32768, 50257, 131072, 1024, 4096)  # in the order of what is to be learned
SPILLED = 64  # bytes
SHARED = 227 << 10  # bytes of a program, at most
REPEATED = 7
STEPS = ((4096, 4), (4096, 8), (4096, 16), (8192, 8), (8192, 16), (16384, 16))  # elements, warps


@dataclass(frozen=True)
class Variant:
    """way: "chosen", "regime" with a Regime's fields in `options`, or the name of a candidate with its constants."""

    operator: str
    length: int
    dtype: str
    way: str
    warps: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return ELEMENTS // (50304 if self.length == 50257 else self.length)

    def program(self) -> Program:
        if self.way not in ("chosen", "regime"):
            return self._candidate()
        own = Regime(**self.options) if self.options else None
        for module in (softmax, cross_entropy):
            module.choose = lambda *given, **named: own or regimes.choose(*given, **named)
        op, array = operators()[self.operator], Spec((self.rows, self.length), DTYPES[self.dtype])
        arrays = {"softmax": [array], "softmax_grad": [array, array]}
        labelled = [array, Spec((self.rows,), DTYPES["int64"]), None]
        return op.kernel("cuda")(prepare(op, arrays.get(self.operator, labelled), {}, any_stride=True).problem)

    def _candidate(self) -> Program:
        kernel = getattr(candidates, f"{self.operator}_{self.way}")
        arrays = ("dy", "y", "dx") if self.operator == "softmax_grad" else ("x", "y")
        arguments = {name: Operand(number, self.dtype) for number, name in enumerate(arrays)}
        arguments |= {"rows": self.rows, "N": self.length, **self.options}
        programs = arguments.pop("PROGRAMS", self.rows)
        return Program([Launch(kernel, (programs,), arguments, self.warps)])


def variants(operator: str, length: int, dtype: str) -> Iterator[Variant]:
    """What is tried for a cell; `chosen` comes first."""
    streams, item, block = 1 + (operator == "softmax_grad"), DTYPES[dtype].itemsize, power_of_2(length)
    cell = operator, length, dtype
    yield Variant(*cell, "chosen")
    if length <= 4096:
        for rows, warps in itertools.product((1, 2, 4, 8), (2, 4, 8, 16)):
            if 16 <= rows * block * streams // (32 * warps) <= 64 and (rows == 1 or length == 1024):
                yield _regime(*cell, name="short rows", rows=rows, block=block, warps=warps)
    else:
        for ctas, warps in itertools.product((2, 4, 8, 16) if regimes.clusters() else (), (4, 8, 16)):
            if 8 <= block * streams // ctas // (32 * warps) <= 64:
                yield _regime(*cell, name="cluster", rows=1, block=block, warps=warps, ctas=ctas)
        for (step, warps), ahead in itertools.product(STEPS, (0, 1, 2, 4)):
            if step * item * streams * ahead <= SHARED and step * streams // (32 * warps) <= 64:
                yield _regime(
                    *cell, name="long rows", rows=1, block=step, warps=warps, stages=ahead + 2 if ahead else 1
                )
    if operator != LOSS and length % 16 == 0:
        yield from _others(cell, streams, item, block)


def _regime(operator: str, length: int, dtype: str, **options: Any) -> Variant:
    return Variant(operator, length, dtype, "regime", options["warps"], options)


def _others(cell: tuple[str, int, str], streams: int, item: int, block: int) -> Iterator[Variant]:
    """The candidates; a short exp is for results of 16 bits, and no gradient has one."""
    length = cell[1]
    shorts = (False, True) if streams == 1 and item == 2 else (False,)
    if 4096 <= length <= 32768:
        for warps, stages, each in itertools.product((4, 8, 16, 32), (2, 3, 4), (1, 2, 4)):
            memory, registers = length * item * streams * max(stages - 2, 1), block * streams // (32 * warps)
            if memory * each <= SHARED and 8 <= registers <= 64 and 2 * registers * 32 * warps * each <= 1 << 16:
                for short in shorts:
                    options = {"BLOCK": block, "STAGES": stages, "SHORT": short, "HINT": 0, "PROGRAMS": 132 * each}
                    yield Variant(*cell, "persistent", warps, options)
    if length >= 32768:
        kepts = (0, 8192, 16384, 32768 // streams) if length > 32768 else (0,)
        for kept, (step, warps), stages, short in itertools.product(kepts, STEPS[1:5], (1, 4, 6), shorts):
            for hint in (0, 1, 2, 3) if stages == 4 and step == 4096 else (0,):
                options = {"KEPT": kept, "BLOCK": step, "STAGES": stages, "SHORT": short, "HINT": hint}
                if step * item * streams * (stages - 2) <= SHARED:
                    yield Variant(*cell, "kept", warps, options)


def compiled(variant: Variant) -> str:
    """Compile a variant for sm_90, into Triton's cache; why it is left out, or "" if it is not."""
    try:
        reports = inspect.compiled(variant.program())
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    if (spilled := max(report.spilled for report in reports)) > SPILLED:
        return f"{spilled} bytes spilled"
    return "too much shared memory" if max(report.shared for report in reports) > SHARED else ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=LENGTHS)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    wanted = itertools.product(options.lengths, ("softmax", "softmax_grad", LOSS), ("bfloat16", "float32"))
    cells = {(op, length, dtype): list(variants(op, length, dtype)) for length, op, dtype in wanted}
    print(f"{sum(map(len, cells.values()))} variants", flush=True)
    if results.is_dry():
        return _compile_one_of_each_way(list(itertools.chain(*cells.values())))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        ahead = {cell: [pool.submit(compiled, variant) for variant in own] for cell, own in cells.items()}
        for cell, own in cells.items():
            problems = [each.result() for each in ahead[cell]]
            if time.monotonic() > end:
                pool.shutdown(cancel_futures=True)
                return 0
            _measure(cell, [variant for variant, problem in zip(own, problems, strict=True) if not problem])
    return 0


def _compile_one_of_each_way(every: list[Variant]) -> int:
    failed = False
    for variant in {(each.operator, each.way): each for each in reversed(every)}.values():
        problem = compiled(variant)
        results.append("variant", asdict(variant) | {"problem": problem})
        print(variant, problem or "compiles", flush=True)
        failed |= bool(problem)
    return int(failed)


def _measure(cell: tuple[str, int, str], own: list[Variant]) -> None:
    import torch  # not in the processes that compile

    operator, length, dtype = cell
    kind, rows = getattr(torch, dtype), own[0].rows
    x = torch.randn(rows, length, device="cuda", dtype=torch.float32).to(kind)
    out, loss = torch.empty_like(x), torch.empty(1, device="cuda", dtype=kind)
    arrays, some = [x, out], slice(0, 64)
    wide = x[some].float()
    expected = torch.softmax(wide, 1)
    if operator == "softmax_grad":
        y = torch.softmax(x, 1)
        arrays, p = [x, y, out], y[some].float()
        expected = p * (wide - (p * wide).sum(1, keepdim=True))
    elif operator == LOSS:
        labels = torch.randint(length, (rows,), device="cuda")
        arrays = [x, labels, None, loss, out]
        expected[torch.arange(64), labels[some]] -= 1
        expected /= rows
    traffic = sum(each.nbytes for each in arrays if each is not None)
    source = torch.empty(traffic // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = _seconds(lambda: target.copy_(source))
    fastest: dict[str, tuple[float, Variant]] = {}
    addresses = [0 if each is None else each.data_ptr() for each in arrays]
    for variant in own:
        program = variant.program()
        scratch = torch.empty(program.scratch_bytes + 16, dtype=torch.uint8, device="cuda")
        run = execute.Compiled(program, addresses, scratch.data_ptr()).run
        stream = torch.cuda.current_stream().cuda_stream
        out.fill_(7)
        run(addresses, scratch.data_ptr(), stream)
        error = float((out[some].float() - expected).abs().max() / expected.abs().max())
        seconds = _seconds(lambda: run(addresses, scratch.data_ptr(), stream))  # noqa: B023
        found = {"us": 1e6 * seconds, "share": copy / seconds, "error": error, **asdict(variant)}
        results.append("variant", found)
        if error < 0.01:
            fastest[variant.way] = min(
                fastest.get(variant.way, (seconds, variant)), (seconds, variant), key=lambda e: e[0]
            )
    for way, (seconds, variant) in fastest.items():
        print(f"{operator} {length} {dtype} {way}: {1e6 * seconds:.0f} µs, {copy / seconds:.1%} of copy", end=" ")
        print(variant.warps, dict(variant.options), flush=True)


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
