"""The device that is measured, as the benchmark takes it; in a dry run the CPU, with small arrays."""

import results
from host_clock import HostClock

from bench.cells import Workload
from bench.cuda import Cuda, TimedDevice

DRY_WORKLOADS = {
    "elements": (Workload((1 << 12,)),),
    "rows": (Workload((64, 100)), Workload((2, 30, 4, 4), {"axis": 1})),
    "classes": (Workload((64, 100)),),
    "slices": (Workload((100, 16), indices=300),),
}


class Dry(Cuda):
    def __init__(self):
        super().__init__(TimedDevice("cpu", l2=1 << 16, memory=1 << 22, clock=HostClock()))
        self.workloads = DRY_WORKLOADS

    def describe(self):
        return {"name": "none: a dry run"}


def target() -> Cuda:
    return Dry() if results.is_dry() else Cuda.current()
