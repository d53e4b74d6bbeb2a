"""How time is taken on a device: by its own clock, from a queue that never runs dry, with buffers that L2 has lost.

A contestant has a call for each copy of the cell's arrays and goes through them in turn. Where a call takes less
time on the device than on the host, the queue is filled while the device is held up. Small cells, where the host
is what counts, are timed by the host's clock instead.
"""

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from bench.measure import Call, Name, take_turns

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
    """

    def __init__(self, calls: Sequence[Call]):
        self.calls = calls
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


def interleaved(
    calls: Mapping[Name, Sequence[Call]], seconds: float, clock: Clock, small: bool
) -> dict[Name, dict[str, float]]:
    """Median and minimum time of each contestant's calls; they take turns for about this many seconds.

    calls: for each contestant, one for each copy of the arrays. small: take the host's time for many calls. `host`
    in the result is the time after which a call returns, whether or not the device is done.
    """
    numbers = itertools.count()  # of calls: all share them, so that each begins with the arrays not used for longest
    turns, hosts = {}, {}
    for name, each in calls.items():
        contestant = Contestant(each)
        copies = len(contestant.calls)
        contestant.run(0, copies)
        expected = _host_seconds(contestant, copies, iter(range(copies)), clock)
        samples = [_host_seconds(contestant, TRIED, numbers, clock, wait=False) for _ in range(REPEATED)]
        hosts[name] = statistics.median(samples)
        if small:
            turns[name] = partial(_turn_on_host, contestant, max(1, math.ceil(TURN / expected)), numbers, clock)
        else:
            turns[name] = partial(_turn_on_device, contestant, expected, hosts[name], numbers, clock)
    times = take_turns(turns, seconds)
    return {name: taken | {"host": hosts[name]} for name, taken in times.items()}


def _taken(numbers: Iterator[int], count: int) -> int:
    """The first of the next so many numbers."""
    first, *_ = itertools.islice(numbers, count)
    return first


def _host_seconds(contestant: Contestant, count: int, numbers: Iterator[int], clock: Clock, wait: bool = True) -> float:
    """Seconds of a call by the host's clock: until it returns, or until the device has done it."""
    first = _taken(numbers, count)
    clock.wait()
    start = time.perf_counter()
    contestant.run(first, count)
    if wait:
        clock.wait()
    return (time.perf_counter() - start) / count


def _turn_on_device(
    contestant: Contestant, expected: float, host: float, numbers: Iterator[int], clock: Clock
) -> list[float]:
    """Seconds of a call on the device, several times."""
    batch = min(QUEUE, math.ceil(SAMPLE / expected))
    batches = max(1, min(QUEUE // batch, math.ceil(TURN / (expected * batch))))
    firsts = [_taken(numbers, batch) for _ in range(batches)]
    clock.wait()
    clock.hold(min(LONGEST_HOLD, SLACK * host * batch * batches))
    marks = [clock.mark()]
    for first in firsts:
        contestant.run(first, batch)
        marks.append(clock.mark())
    clock.wait()
    return [clock.seconds(begin, end) / batch for begin, end in itertools.pairwise(marks)]


def _turn_on_host(contestant: Contestant, count: int, numbers: Iterator[int], clock: Clock) -> list[float]:
    """Seconds of a call, from many calls until the device has done them."""
    return [_host_seconds(contestant, count, numbers, clock)]
