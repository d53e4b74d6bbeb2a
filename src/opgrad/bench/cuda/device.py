"""The CUDA device as the benchmark sees it: its caches and memory, its clock, its queue of work."""

from dataclasses import dataclass, field
from typing import Any

import torch

FASTEST_CLOCK = 2.1e9  # cycles a second: no multiprocessor runs faster for long


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
class Device:
    """`name` as PyTorch calls it, bytes of its L2 cache and memory, its clock."""

    name: str
    l2: int
    memory: int
    clock: Clock = field(default_factory=Clock)
