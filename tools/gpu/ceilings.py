"""What no kernel can exceed: the copy of 2 GiB of random bytes, an empty launch; and the host's time of small calls."""

import statistics
import time
from collections.abc import Callable

import results
import torch
from target import target

import opgrad
from bench.cuda import Clock

BYTES = 1 << 31
REPEATED, BATCH = 9, 4 if results.is_dry() else 200


class Watch:
    """Medians of times, by the device's clock and by the host's."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def device(self, call: Callable[[], object], times: int) -> float:
        """The device's seconds of a call."""
        call()
        found = []
        for _ in range(REPEATED):
            self.clock.wait()
            self.clock.hold(1e-3)
            begin = self.clock.mark()
            for _ in range(times):
                call()
            end = self.clock.mark()
            self.clock.wait()
            found.append(self.clock.seconds(begin, end) / times)
        return statistics.median(found)

    def host(self, call: Callable[[], object]) -> float:
        """The host's seconds until a call returns."""
        found = []
        for _ in range(REPEATED):
            call()
            self.clock.wait()
            begin = time.perf_counter()
            for _ in range(BATCH):
                call()
            found.append((time.perf_counter() - begin) / BATCH)
            self.clock.wait()
        return statistics.median(found)


def say(what: str, value: float, unit: str) -> None:
    results.append("ceiling", {"name": what, "value": value, "unit": unit})
    print(f"{what}: {value:.4g} {unit}", flush=True)


def memory(watch: Watch, device: str) -> None:
    """What no kernel can exceed."""
    size = (1 << 20 if results.is_dry() else BYTES) // 2
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    destination = torch.empty_like(source)
    say("copy of random bytes", 2 * size / watch.device(lambda: destination.copy_(source), 5) / 1e9, "GB/s")
    source.zero_()
    say("copy of zeros", 2 * size / watch.device(lambda: destination.copy_(source), 5) / 1e9, "GB/s")
    say("writing alone", size / watch.device(lambda: destination.fill_(1), 5) / 1e9, "GB/s")
    one = torch.zeros(1, device=device)
    say("launch of one element, device", 1e6 * watch.device(lambda: one.add_(1), 50), "µs")


def small_calls(device: str) -> dict[str, Callable[[], object]]:
    """Calls of which the host's time is all, each of ours behind PyTorch's."""
    x = torch.randn(1, 1000, device=device)
    y, dy = torch.softmax(x, 1), torch.randn(1, 1000, device=device)
    labels, out = torch.zeros(1, dtype=torch.int64, device=device), torch.empty_like(x)
    indices, slices = torch.arange(100, device=device), torch.randn(100, 16, device=device)
    return {
        "torch.softmax": lambda: torch.softmax(x, 1),
        "opgrad.softmax": lambda: opgrad.softmax(x),
        "opgrad.softmax into out": lambda: opgrad.softmax(x, out=out),
        "torch's softmax backward": lambda: torch.ops.aten._softmax_backward_data(dy, y, 1, torch.float32),
        "opgrad.softmax_grad": lambda: opgrad.softmax_grad(dy, y),
        "torch's cross_entropy": lambda: torch.nn.functional.cross_entropy(x, labels),
        "opgrad's loss and gradient": lambda: opgrad.softmax_cross_entropy_loss_and_grad(x, labels),
        "torch's embedding backward": lambda: torch.ops.aten.embedding_dense_backward(slices, indices, 300, -1, False),
        "opgrad.gather_grad": lambda: opgrad.gather_grad((300, 16), indices, slices),
        "torch.relu": lambda: torch.relu(x),
        "opgrad.relu": lambda: opgrad.relu(x),
    }


def main() -> None:
    device = target().device
    watch = Watch(device.clock)
    memory(watch, device.name)
    for name, call in small_calls(device.name).items():
        say(f"{name}, host", 1e6 * watch.host(call), "µs")


if __name__ == "__main__":
    main()
