"""Several processes, started by torchrun, that train one model and communicate over torch.distributed.

PyTorch is only imported if there is such a process group.
"""

import os
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from opgrad.native.threads import get_num_threads, set_num_threads

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets these for the processes it starts


class OneProcess:
    """A process that trains alone: a group of one, which communicates with nobody.

    is_group: whether there is a process group. rank, size: the number of this process, and how many there are.
    seconds: the time that was spent in communication, waiting for others included.
    """

    is_group = False
    rank, size, seconds = 0, 1, 0.0

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.rank == 0

    def add(self, array: np.ndarray) -> None:
        """Replace a contiguous array by its sum over all processes, which has the same bits on each of them."""

    def from_first(self, array: np.ndarray) -> None:
        """Copy the contiguous array of the first process into that of every process."""

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Run work() on the first process alone and return its result there; None on the others.

        An exception of work() is raised on the first process; the others raise RuntimeError instead of waiting forever.
        """
        return work()

    def check_same(self, what: str, text: str) -> None:
        """Raise ValueError, on every process, unless they all have the same text."""


class Processes(OneProcess):
    """The processes of a group, whose arrays lie in CPU memory.

    group: of torch.distributed, with gloo or another backend for the CPU; None: the default group.
    """

    is_group = True

    def __init__(self, group: Any = None):
        import torch.distributed

        if not torch.distributed.is_initialized():
            raise RuntimeError("process_group: torch.distributed is not initialised: call init_process_group first")
        self._torch, self._group = torch, group
        self.rank, self.size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        if self.rank < 0:
            raise ValueError("process_group: this process is not in the group, expected one that it belongs to")

    def add(self, array: np.ndarray) -> None:
        self._communicate(self._torch.distributed.all_reduce, array)

    def from_first(self, array: np.ndarray) -> None:
        first = 0 if self._group is None else self._torch.distributed.get_global_rank(self._group, 0)
        self._communicate(self._torch.distributed.broadcast, array.reshape(-1).view(np.uint8), first)

    def on_first(self, work: Callable[[], Any]) -> Any:
        found, problem = None, None
        if self.is_first:
            try:
                found = work()
            except Exception as error:
                problem = error
        failed = np.array([problem is not None], np.int64)
        self.from_first(failed)
        if problem is not None:
            raise problem
        if failed[0]:
            raise RuntimeError(f"train: the first of {self.size} processes has failed, whose message says why")
        return found

    def _communicate(self, collective: Callable[..., Any], array: np.ndarray, *more: Any) -> None:
        before = time.perf_counter()
        collective(self._torch.from_numpy(array), *more, group=self._group)
        self.seconds += time.perf_counter() - before

    def check_same(self, what: str, text: str) -> None:
        digest = zlib.crc32(text.encode())
        first = np.array([digest])
        self.from_first(first)
        others = np.array([first[0] != digest], np.int64)
        self.add(others)
        if others[0]:
            raise ValueError(f"train: the {what} of {others[0]} of {self.size} processes differ from the first's")


def begin() -> OneProcess:
    """The processes that torchrun has started together with this one; `OneProcess` if torchrun has not started it.

    The processes on one machine divide its cores, unless OPGRAD_NUM_THREADS gives the threads of each process.
    """
    if not all(name in os.environ for name in LAUNCHED):
        return OneProcess()
    import torch.distributed

    distributed: Any = torch.distributed
    if not distributed.is_initialized():
        # torchrun may keep its store when it restarts processes; under the same keys they would find the entries of
        # the lost ones.
        store, rank, size = next(iter(distributed.rendezvous("env://")))
        own = distributed.PrefixStore(f"opgrad/{restarts()}", store)
        distributed.init_process_group("gloo", store=own, rank=rank, world_size=size)
    if "OPGRAD_NUM_THREADS" not in os.environ:
        set_num_threads(max(1, get_num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    return Processes()


def restarts() -> int:
    """How many times torchrun has restarted the processes because one of them was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
