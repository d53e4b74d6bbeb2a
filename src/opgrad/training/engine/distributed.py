"""Several processes, started by torchrun, that train one model and communicate over torch.distributed.

PyTorch is only imported if there is such a process group.
"""

import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np

from opgrad.cpu.runtime.threads import get_num_threads, set_num_threads

LOOK = timedelta(seconds=1)  # a process that waits for others looks so often whether one of them has failed
KNOWN = 5.0  # seconds that a failed process gives the others to learn its reason
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets these for the processes it starts


class OtherFailed(RuntimeError):
    """What a process raises because another one has failed, with that one's reason."""

    caller = "train"  # as the text says


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

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """The contiguous arrays of all processes, in their order; they differ in the length of the first axis alone."""
        return [array]

    def from_first(self, array: np.ndarray) -> None:
        """Copy the contiguous array of the first process into that of every process."""

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Run work() on the first process alone and return its result there; None on the others.

        An exception of work() is raised on the first process; the others raise RuntimeError instead of waiting forever.
        """
        return work()

    def check_same(self, what: str, text: str) -> None:
        """Raise ValueError, on every process, unless they all have the same text."""

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Within the `with` block, an exception on one process raises OtherFailed on those that wait for it."""
        yield


class Processes(OneProcess):
    """The processes of a group, whose arrays lie in CPU memory.

    group: of torch.distributed, with gloo or another backend for the CPU; None: the default group.
    """

    is_group = True

    def __init__(self, group: Any = None):
        import torch.distributed

        from opgrad.call.libraries.torch_private import default_store

        if not torch.distributed.is_initialized():
            raise RuntimeError("process_group: torch.distributed is not initialised: call init_process_group first")
        self._torch, self._group = torch, group
        self.rank, self.size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        if self.rank < 0:
            raise ValueError("process_group: this process is not in the group, expected one that it belongs to")
        # What processes that fail tell the others, under a key that no other training of this group has.
        self._store, self._key, self._has_told = default_store(), "", False
        number = np.array([secrets.randbits(62)])
        self.from_first(number)
        self._key = f"opgrad/failed/{number[0]}"

    def add(self, array: np.ndarray) -> None:
        self._communicate(self._torch.distributed.all_reduce, array)

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        lengths = np.zeros(self.size, np.int64)
        lengths[self.rank] = len(array)
        self.add(lengths)
        sent = np.zeros((int(lengths.max()), *array.shape[1:]), array.dtype)  # gloo wants arrays of one length
        sent[: len(array)] = array
        found = np.empty((self.size, *sent.shape), array.dtype)
        if found.size:
            received = list(self._torch.from_numpy(found))
            self._communicate(lambda own, **given: self._torch.distributed.all_gather(received, own, **given), sent)
        return [each[:length] for each, length in zip(found, lengths, strict=True)]

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
                self._tell(error)
        failed = np.array([problem is not None], np.int64)
        self.from_first(failed)
        if problem is not None:
            raise problem
        if failed[0]:
            raise self._failure() or OtherFailed(f"train: the first of {self.size} processes has failed")
        return found

    def _communicate(self, collective: Callable[..., Any], array: np.ndarray, *more: Any) -> None:
        before = time.perf_counter()
        try:
            work = collective(self._torch.from_numpy(array), *more, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._failure() or error from None
        while True:
            was_done = work.is_completed()  # the wait for one that was not may end as it becomes so
            try:
                work.wait(LOOK)
                break
            except RuntimeError as error:
                if problem := self._failure():
                    raise problem from None
                if was_done:
                    raise error
        self.seconds += time.perf_counter() - before

    # --- failures ---

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._has_told:
                self._tell(error)
            if not isinstance(error, OtherFailed):  # wait until all know, but not for long: the store may end with this
                end = time.perf_counter() + KNOWN
                with suppress(RuntimeError):
                    while self._store is not None and time.perf_counter() < end:
                        if self._store.add(f"{self._key}/known", 0) >= self.size:
                            break
                        time.sleep(0.02)
            raise

    def _tell(self, error: Exception) -> None:
        """Leave the reason for others, unless one has failed before; and count this process among those that know."""
        self._has_told = True
        if self._store is not None:
            reason = " ".join(str(error).split()) or type(error).__name__
            text = f"train: process {self.rank} of {self.size} has failed: {reason}"
            with suppress(RuntimeError):  # the store is gone with the process that held it
                self._store.compare_set(self._key, "", text)
                self._store.add(f"{self._key}/known", 1)

    def _failure(self) -> OtherFailed | None:
        """What the first process that failed has told; None if none has."""
        with suppress(RuntimeError):
            if self._store is not None and self._key and self._store.check([self._key]):
                problem = OtherFailed(self._store.get(self._key).decode())
                if not self._has_told:
                    self._has_told = True
                    self._store.add(f"{self._key}/known", 1)
                return problem
        return None

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
