"""The CUDA device as a target of the benchmark: one cell measured, into what a result file holds of it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench.cells import Cell
from bench.cpu_target import Target
from bench.cuda import cells, peers
from bench.cuda.case import TensorCase
from bench.cuda.measure import TimedDevice, interleaved
from bench.measure import WAYS, finite, raced
from bench.peers import reason
from opgrad.cli import machine

ROTATED = 2  # times the L2 cache: one round through the copies of a cell's arrays moves more
SMALL = 1 << 20  # bytes below which it is not the device that takes the time
MOST_COPIED = 1 << 31  # bytes moved: more of them are not faster, and take memory


class Cuda(Target):
    """PyTorch's current CUDA device."""

    seconds, quick_seconds = 0.6, 0.2  # a cell, by default
    packages: Sequence[str] = ("liger-kernel", "quack-kernels")

    def __init__(self, device: TimedDevice):
        self.device = device
        self.workloads = cells.workloads(device.memory)

    @classmethod
    def current(cls) -> "Cuda":
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return cls(TimedDevice("cuda", found.L2_cache_size, found.total_memory))

    def installed(self) -> list[str]:
        return peers.installed()

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
        return {
            "headline": cell.workload.headline,
            "copies": len(cases),
            "clock": "host" if traffic < SMALL else "device",
            "regime": case.regime(),
            "bytes": traffic,
            "copied_bytes": 2 * _half(copied),
            "error_ulp": finite(error),
            **raced(
                {way: [each.call(way) for each in cases] for way in WAYS},
                lambda way: peers.calls(cases, names, way, clock.wait),
                partial(interleaved, seconds=seconds, clock=clock, small=traffic < SMALL),
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
