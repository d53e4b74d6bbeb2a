"""The CUDA device as a target of the benchmark, with PyTorch's tensors as arrays far beyond the L2 cache.

Time is taken by the device's own clock, from a queue that never runs dry, with buffers that L2 has lost: a contestant
has a call for each copy of the cell's arrays and goes through them in turn. Where a call takes less time on the device
than on the host, the queue is filled while the device is held up. Small cells, where the host is what counts, are timed
by the host's clock instead.

Peers are torch, torch.compile, and where installed Liger-Kernel. A setup gets the copies of a case and the
way in which to work, and returns a call for each. PyTorch's eager calls are those of the CPU, in either way; the other
peers return what they compute, in new memory alone.
"""

import copy
import importlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from bench import peers
from bench.case import Case, signature
from bench.cells import Cell, Workload, Workloads
from bench.cpu_target import Target
from bench.measure import NEW, WAYS, Call, Name, NoSuchWay, finite, only, raced, take_turns
from bench.peers import COMPILE, EXPRESSIONS, compiled_for, reason, tried
from bench.torch_operators import Torch, with_grad
from opgrad.call.libraries.torch_tensors import TORCH_DTYPES, download, spec
from opgrad.cli import machine
from opgrad.cli.examples.arguments import ArraySource
from opgrad.contract import Array, Shape
from opgrad.contract.signature import Problem, prepare

FASTEST_CLOCK = 2.1e9  # cycles a second: no multiprocessor runs faster for long
TURN = 0.005  # seconds of calls in a turn
SAMPLE = 200e-6  # seconds between two marks: their resolution is half a microsecond
QUEUE = 64  # calls in a turn at most: the queue holds about 1,000 kernels, and some peers launch a dozen a call
LONGEST_HOLD = 0.02  # seconds
SLACK = 1.5  # the device is held up for so many times the time that the host is expected to need
TRIED, REPEATED = 4, 5  # calls of which the host's time is taken at once, and how often


class Clock:
    """The device's clock. Work is queued and done later; marks in the queue are given the time when it gets there."""

    def mark(self) -> Any:
        """Queue a mark."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """The time between two marks that the device has passed."""
        return float(begin.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        """Wait until the device has done all work."""
        torch.cuda.synchronize()

    def hold(self, seconds: float) -> None:
        """Queue work that takes at least so long and touches no memory."""
        torch.cuda._sleep(int(seconds * FASTEST_CLOCK))


@dataclass(frozen=True)
class TimedDevice:
    """`name` as PyTorch calls it, bytes of its L2 cache and memory, its clock."""

    name: str
    l2: int
    memory: int
    clock: Clock = field(default_factory=Clock)


class Contestant:
    """The calls of one contestant, one for each copy of the arrays.

    What a call returns is kept until its turn comes again, so that the memory of results goes round too.
    numbers: of calls; all contestants share them, so that each begins with the arrays that were not used for longest.
    """

    def __init__(self, calls: Sequence[Call], numbers: Iterator[int], clock: Clock):
        self.calls, self.numbers, self.clock = calls, numbers, clock
        self.results: list[Any] = [None] * len(calls)

    def run(self, first: int, count: int) -> None:
        """Calls with the numbers from `first` on."""
        calls, results, copies = self.calls, self.results, len(self.calls)
        if copies == 1:
            call = calls[0]
            for _ in range(count):
                call()
            return
        for number in range(first, first + count):
            place = number % copies
            results[place] = calls[place]()

    def taken(self, count: int) -> int:
        """The first of the next so many numbers."""
        first, *_ = itertools.islice(self.numbers, count)
        return first

    def host_seconds(self, count: int, wait: bool = True) -> float:
        """Seconds of a call by the host's clock: until it returns, or until the device has done it."""
        first = self.taken(count)
        self.clock.wait()
        start = time.perf_counter()
        self.run(first, count)
        if wait:
            self.clock.wait()
        return (time.perf_counter() - start) / count

    def turn_on_device(self, expected: float, host: float) -> list[float]:
        """Seconds of a call on the device, several times."""
        clock, batch = self.clock, min(QUEUE, math.ceil(SAMPLE / expected))
        batches = max(1, min(QUEUE // batch, math.ceil(TURN / (expected * batch))))
        firsts = [self.taken(batch) for _ in range(batches)]
        clock.wait()
        clock.hold(min(LONGEST_HOLD, SLACK * host * batch * batches))
        marks = [clock.mark()]
        for first in firsts:
            self.run(first, batch)
            marks.append(clock.mark())
        clock.wait()
        return [clock.seconds(begin, end) / batch for begin, end in itertools.pairwise(marks)]


def interleaved(
    calls: Mapping[Name, Sequence[Call]], seconds: float, clock: Clock, small: bool
) -> dict[Name, dict[str, float]]:
    """Median and minimum time of each contestant's calls; they take turns for about this many seconds.

    calls: for each contestant, one for each copy of the arrays. small: take the host's time for many calls. `host`
    in the result is the time after which a call returns, whether or not the device is done.
    """
    numbers = itertools.count()
    turns, hosts = {}, {}
    for name, each in calls.items():
        contestant = Contestant(each, numbers, clock)
        contestant.run(0, len(each))
        expected = contestant.host_seconds(len(each))
        host = hosts[name] = statistics.median(contestant.host_seconds(TRIED, wait=False) for _ in range(REPEATED))
        if small:
            count = max(1, math.ceil(TURN / expected))
            turns[name] = partial(lambda each, count: [each.host_seconds(count)], contestant, count)
        else:
            turns[name] = partial(contestant.turn_on_device, expected, host)
    return {name: taken | {"host": hosts[name]} for name, taken in take_turns(turns, seconds).items()}


REFERENCE_ELEMENTS = 1 << 26  # of a loss's logits that are widened to float64 at once


class Random:
    """Random tensors on a device."""

    def __init__(self, device: str, seed: int):
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)

    def integers(self, high: int, shape: Shape) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device)

    def normal(self, shape: Shape, dtype: str) -> torch.Tensor:
        return self._empty(shape, dtype).normal_(generator=self.generator)

    def factors(self, shape: Shape, dtype: str) -> torch.Tensor:
        return self._empty(shape, dtype).uniform_(0.5, 1.5, generator=self.generator)

    def _empty(self, shape: Shape, dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)


class TensorCase(Case):
    """A cell with its memory on a device."""

    def __init__(self, cell: Cell, device: str):
        self.device = device
        super().__init__(cell)

    def source(self, seed: int) -> ArraySource:
        return Random(self.device, seed)

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> torch.Tensor:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=self.device)

    def placed(self, value: Any) -> Any:
        return value

    def prepared(self) -> Problem:
        return prepare(self.op, *signature(self.op, self.values, spec))

    def numpy(self, array: torch.Tensor) -> Array:
        return download(array)

    def regime(self) -> str:
        """The name of the regime that the kernel runs in."""
        out = list(map(spec, self.results.values()))
        checked = prepare(self.op, *signature(self.op, self.values, spec), out, any_stride=True)
        return str(self.op.kernel("opgrad.cuda")(checked).regime)

    def copies(self, count: int) -> list["TensorCase"]:
        """This case and others like it, each in memory of its own."""
        return [self, *(self._copy() for _ in range(count - 1))]

    def _copy(self) -> "TensorCase":
        made = copy.copy(self)
        made.values = made.written = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in self.values.items()
        }
        made.results = {name: torch.empty_like(value) for name, value in self.results.items()}
        return made

    def _mean_loss(self) -> Array:
        """The mean over all samples by PyTorch in float64, on the device: the host would take seconds for it."""
        logits, labels = self.values["logits"], self.values["labels"]
        samples = max(1, REFERENCE_ELEMENTS * len(logits) // math.prod(logits.shape))
        total = 0.0
        for some, theirs in zip(logits.split(samples), labels.split(samples), strict=True):
            total += torch.nn.functional.cross_entropy(some.double(), theirs, reduction="sum").item()
        return np.array(total / labels.numel())


PEERS = {"torch": ["torch"], COMPILE: ["torch"], "liger": ["liger_kernel"]}


def calls(
    cases: Sequence[Case], names: Sequence[str], way: str, wait: Callable[[], None]
) -> tuple[dict[str, list[Call]], dict[str, str]]:
    """The calls of those peers that compute this case in this way, and for others what keeps them from it.

    wait: waits for the device.
    """
    made: dict[str, list[Call]] = {}

    def setup(name: str) -> Call | None:
        made[name] = SETUPS[name](cases, way)
        return (lambda: [call() for call in made[name]]) if made[name] else None

    found, notes = tried(names, setup, {}, wait)
    return {name: made[name] for name in found}, notes


def _torch(cases: Sequence[Case], way: str) -> list[Call]:
    return [call for case in cases if (call := peers.SETUPS["torch"](case, way))]


def _compiled(cases: Sequence[Case], way: str) -> list[Call]:
    """The operator compiled for this shape alone; of the fused loss, what autograd makes of it."""
    if cases[0].op.name not in EXPRESSIONS:
        return []
    only(NEW, way)
    return compiled_for([Torch(case, way) for case in cases])


def _liger(cases: Sequence[Case], way: str) -> list[Call]:
    """Liger-Kernel's softmax and loss, of the rows of matrices.

    The loss writes the gradient over the logits, which are therefore copies. Raises NoSuchWay for other shapes.
    """
    case = cases[0]
    if case.op.name not in LIGER:
        return []
    only(NEW, way)
    if len(case.shape) != 2 or (case.op.kind == "rows" and case.axis % 2 != 1):
        raise NoSuchWay("takes matrices alone, whose rows it reduces")
    library: Any = importlib.import_module("liger_kernel.transformers.functional")
    every = [Torch(each) for each in cases]
    for t in every:
        t.values |= {"logits": t["logits"].clone()} if "logits" in t.values else {}
    return [LIGER[case.op.name](library, t) for t in every]


def _backward(function: Callable[[Any], Any], t: Torch) -> Call:
    """A gradient by autograd, of a forward call made beforehand, whose result is y again."""
    x = t["y"].log().requires_grad_()
    return partial(torch.autograd.grad, function(x), x, t["dy"], retain_graph=True)


LIGER: Mapping[str, Callable[[Any, Torch], Call]] = {
    "softmax": lambda library, t: partial(library.liger_softmax, t["x"]),
    "softmax_grad": lambda library, t: _backward(library.liger_softmax, t),
    "softmax_cross_entropy_loss_only": lambda library, t: partial(
        library.liger_cross_entropy, t["logits"], t["labels"]
    ),
    "softmax_cross_entropy_loss_and_grad": lambda library, t: with_grad(library.liger_cross_entropy, t),
}
SETUPS: Mapping[str, Callable[[Sequence[Case], str], list[Call]]] = {
    "torch": _torch,
    COMPILE: _compiled,
    "liger": _liger,
}


LARGEST = 1 << 29  # elements of an array: 1 GiB in bfloat16, which an H200 softmaxes in half a millisecond
AT_ONCE = 64  # bytes of memory for each of them: 8 arrays of float64, as a cell and its peers keep at once
ELEMENTWISE = 1 << 28
LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
NEIGHBOURS = {1000: 1024, 1001: 1024, 50256: 50304, 50257: 50304, 50304: 50304}  # as many rows as the latter has
HEADLINES = (1024, 4096, 32768, 131072, 50257)
QUICK = 4096
COLUMNS = (Workload((16, 1000, 56, 56), {"axis": 1}, headline=True), Workload((16, 21, 512, 512), {"axis": 1}))
SHAPES = ((1_000_000, 10), (16, 128_256), (100, 10), (1, 1000))  # short rows, few rows, small calls
VOCABULARY, TABLE = (128_256, 4096), (1000, 256)
# Tokens of a language model, then a small table whose rows are asked for many times.
SLICES = (
    Workload(VOCABULARY, indices=16384, headline=True),
    Workload(VOCABULARY, indices=16384, equal=True),
    Workload(TABLE, indices=65536, headline=True, quick=True),
    Workload(TABLE, indices=65536, equal=True),
)


def workloads(memory: int) -> Workloads:
    """The workloads of each kind of operator for a device with so many bytes of memory."""
    size = min(LARGEST, 1 << max(0, (memory // AT_ONCE).bit_length() - 1))
    shapes = [(max(1, size // NEIGHBOURS.get(length, length)), length) for length in sorted({*LENGTHS, *NEIGHBOURS})]
    rows = [Workload(each, headline=each[1] in HEADLINES, quick=each[1] == QUICK) for each in shapes]
    rows += map(Workload, SHAPES)
    return {
        "elements": (Workload((min(size, ELEMENTWISE),), headline=True, quick=True), Workload((1000,))),
        "rows": (*rows, *COLUMNS),
        "classes": (*rows, *(Workload(each.shape, headline=each.headline) for each in COLUMNS)),
        "slices": SLICES,
    }


ROTATED = 2  # times the L2 cache: one round through the copies of a cell's arrays moves more
SMALL = 1 << 20  # bytes below which it is not the device that takes the time
MOST_COPIED = 1 << 31  # bytes moved: more of them are not faster, and take memory


class Cuda(Target):
    """PyTorch's current CUDA device."""

    seconds, quick_seconds = 0.6, 0.2  # a cell, by default
    packages: Sequence[str] = ("liger-kernel",)

    def __init__(self, device: TimedDevice):
        self.device = device
        self.workloads = workloads(device.memory)

    @classmethod
    def current(cls) -> "Cuda":
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return cls(TimedDevice("cuda", found.L2_cache_size, found.total_memory))

    def installed(self) -> list[str]:
        return peers.installed(PEERS)

    def describe(self) -> dict[str, Any] | None:
        return machine.cuda_device()

    def measure(self, cell: Cell, names: Sequence[str], seconds: float) -> dict[str, Any]:
        """The same, or under `left_out` why there are no times."""
        try:
            return cell.known | self._measure(cell, names, seconds)
        except Exception as error:  # too large for this device, no kernel: the other cells are still worth measuring
            return cell.known | {"left_out": reason(error)}
        finally:
            torch.cuda.empty_cache()

    def _measure(self, cell: Cell, names: Sequence[str], seconds: float) -> dict[str, Any]:
        clock = self.device.clock
        case = TensorCase(cell, self.device.name)
        case.call()()
        clock.wait()
        error, traffic = case.error(), case.traffic
        cases = case.copies(self.copies(traffic))
        copied = min(traffic, MOST_COPIED)
        small = traffic < SMALL
        known = {"headline": cell.workload.headline, "copies": len(cases), "clock": "host" if small else "device"}
        known |= {"regime": case.regime(), "bytes": traffic, "copied_bytes": 2 * _half(copied)}
        return {
            **known,
            "error_ulp": finite(error),
            **raced(
                {way: [each.call(way) for each in cases] for way in WAYS},
                lambda way: calls(cases, names, way, clock.wait),
                partial(interleaved, seconds=seconds, clock=clock, small=small),
                [self._copy(copied) for _ in cases],
            ),
        }

    def copies(self, traffic: int) -> int:
        """How many copies of its arrays a cell needs, so that L2 has lost each when its turn comes again."""
        return 1 if traffic < SMALL else ROTATED * self.device.l2 // traffic + 1

    def _copy(self, traffic: int) -> Callable[[], object]:
        """PyTorch's copy of so many bytes, half of them read, half written; random ones, as zeros are copied faster."""
        source = torch.empty(_half(traffic), dtype=torch.uint8, device=self.device.name).random_()
        target = torch.empty_like(source)
        return lambda: target.copy_(source)


def _half(traffic: int) -> int:
    return max(1, traffic // 2)
