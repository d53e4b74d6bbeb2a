"""Adds up the gradients of several processes, piece by piece, while a graph still computes other gradients."""

import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from opgrad.training.engine.distributed import OneProcess
from opgrad.training.engine.flat_tensors import FlatTensors

PIECE = 1 << 20  # numbers of a piece, at least: each exchange takes one to two milliseconds, however few bytes it has
LOOK = 5e-4  # seconds between two looks for gradients that are complete
# A graph announces a complete gradient by writing over these bits, which are those of a NaN that no kernel makes.
PENDING = np.uint32(0x7FC0_A5A5)


def can_overlap(gradients: FlatTensors) -> bool:
    """Whether pieces may travel early: there are several, and stores are seen in the order in which they were made.

    The graph's thread stores gradients before it announces them. Processors other than x86-64 may show another thread
    the announcement first.
    """
    return gradients.flat.size >= 2 * PIECE and platform.machine().lower() in ("x86_64", "amd64")


class Exchange:
    """The sum of the gradients of all processes.

    gradients: the memory, with the number behind it; replaced by the sum.
    announced: by parameter, memory that a run of the graph writes over when the gradient is complete; none for
    gradients without elements. Without any, everything travels at the end, in one piece.

    The pieces go from the end of the memory to its beginning, on every process alike: a backward part begins with the
    last layers.
    """

    def __init__(self, processes: OneProcess, gradients: FlatTensors, announced: Mapping[str, np.ndarray]):
        self._processes, self._memory = processes, gradients.extended
        self._marks = {name: array.reshape(-1)[:1].view(np.uint32) for name, array in announced.items()}
        self._pieces = _pieces(gradients) if announced else [(slice(0, self._memory.size), [])]
        self._is_computed, self._is_over = threading.Event(), False
        self._sent: list[Callable[[], None]] = []
        self._problem: BaseException | None = None

    @contextmanager
    def during(self, prepare: Callable[[slice], Any]) -> Iterator[None]:
        """In the `with` block the last run of a step takes place; behind it everything is added up.

        prepare: makes of the gradients of a piece what is to be added up; called once for each piece, when it is
        complete.
        """
        self._sent = []
        with self._sending(prepare) if self._marks else nullcontext():
            yield
        if not self._marks:
            self._send(prepare)
        self._processes.wait_for(self._sent)

    @contextmanager
    def _sending(self, prepare: Callable[[slice], Any]) -> Iterator[None]:
        """In the `with` block a thread sends the pieces that are complete, and at its end what is left."""
        self._is_computed.clear()
        self._is_over, self._problem = False, None
        for mark in self._marks.values():
            mark[0] = PENDING
        thread = threading.Thread(target=self._send_early, args=(prepare,), name="opgrad-exchange", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            self._is_over = True
            raise
        finally:
            self._is_computed.set()
            thread.join()
        if self._problem is not None:
            raise self._problem

    def _send_early(self, prepare: Callable[[slice], Any]) -> None:
        try:
            self._send(prepare)
        except BaseException as error:  # raised again in the thread that trains
            self._problem = error

    def _send(self, prepare: Callable[[slice], Any]) -> None:
        """Send the pieces, each when its gradients are announced or everything is computed."""
        for piece, names in self._pieces:
            while self._marks and not self._is_computed.is_set() and not self._are_announced(names):
                self._is_computed.wait(LOOK)
            if self._is_over:
                return
            prepare(piece)
            self._sent.append(self._processes.begin_adding(self._memory[piece]))

    def _are_announced(self, names: list[str]) -> bool:
        return all(self._marks[name][0] != PENDING for name in names if name in self._marks)


def _pieces(gradients: FlatTensors) -> list[tuple[slice, list[str]]]:
    """The pieces of the memory, the last one first, each with the names of its gradients."""
    starts = {name: (view.ctypes.data - gradients.flat.ctypes.data) // 4 for name, view in gradients.items()}
    pieces: list[tuple[slice, list[str]]] = []
    end, names = gradients.extended.size, []
    for name in reversed(list(gradients)):
        names.append(name)
        if end - starts[name] >= PIECE:
            pieces.append((slice(starts[name], end), names))
            end, names = starts[name], []
    if names:
        pieces.append((slice(0, end), names))
    return pieces
