"""Peak memory and time of a training step of a linear layer and its loss, opgrad's and PyTorch's.

    python bench/linear_cross_entropy.py memory [TOKENS CLASSES HIDDEN DTYPE]
    python bench/linear_cross_entropy.py time [TOKENS CLASSES HIDDEN DTYPE]

memory: each way in a process of its own; the growth of its peak resident memory beyond what stood before the arguments
were made, over the bytes of the arguments and their gradients. time: all ways in turn in one process, the median.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import opgrad.torch

REPEATS = 3
DEFAULT = ("4096", "128256", "512", "float32")
CHUNKED = torch.nn.LinearCrossEntropyOptions(allow_retain_graph=False)
compiled = torch.compile(lambda x, w, y: functional.cross_entropy(functional.linear(x, w), y))
WAYS: dict[str, Callable[..., Any]] = {
    "opgrad": lambda x, w, y: opgrad.torch.linear_cross_entropy(x, w, y),
    "torch": lambda x, w, y: functional.linear_cross_entropy(x, w, y),
    "torch, chunked": lambda x, w, y: functional.linear_cross_entropy(x, w, y, options=CHUNKED),
    "torch.compile": lambda x, w, y: compiled(x, w, y),
}


def arguments(tokens: int, classes: int, hidden: int, dtype: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    # Filled a block at a time, so that making them takes no more memory than they have.
    x, w = (torch.empty(size, hidden, dtype=kind) for size in (tokens, classes))
    for part in (*x.split(1024), *w.split(1024)):
        part.copy_(torch.randn(part.shape) * 0.05)
    return x.requires_grad_(), w.requires_grad_(), torch.randint(0, classes, (tokens,))


def step(way: str, given: tuple[torch.Tensor, ...]) -> None:
    for each in given[:2]:
        each.grad = None
    WAYS[way](*given).backward()


def resident(field: str) -> int:
    """Bytes of this process's memory, as /proc/self/status has them: VmRSS now, VmHWM at most so far."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


def memory(way: str, sizes: tuple[str, ...]) -> None:
    tokens, classes, hidden = map(int, sizes[:3])
    step(way, arguments(64, 512, hidden, sizes[3]))  # what a first step loads
    before = resident("VmRSS")
    given = arguments(tokens, classes, hidden, sizes[3])
    needed = 2 * sum(each.nbytes for each in given[:2])
    step(way, given)
    grown = resident("VmHWM") - before
    print(f"{way:16s} {grown / 2**20:8.0f} MiB, {grown / needed:5.2f} times arguments and gradients", flush=True)


def timed(sizes: tuple[str, ...]) -> None:
    given = arguments(*map(int, sizes[:3]), sizes[3])
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(REPEATS + 1):
        for way, found in seconds.items():
            start = time.perf_counter()
            step(way, given)
            if turn:
                found.append(time.perf_counter() - start)
    for way, found in seconds.items():
        print(f"{way:16s} {1e3 * statistics.median(found):8.1f} ms", flush=True)


def main() -> None:
    what, *given = sys.argv[1:]
    sizes = (*given, *DEFAULT[len(given) :])
    if what == "time":
        timed(sizes)
    elif what == "memory":
        for way in WAYS:
            subprocess.run([sys.executable, __file__, way, *sizes], check=True)
    else:
        memory(what, sizes)


if __name__ == "__main__":
    main()
