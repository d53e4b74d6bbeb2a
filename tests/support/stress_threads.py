"""Several threads call mixed operators while another sets the number of threads and the first one forks.

python tests/support/stress_threads.py SECONDS prints the numbers of calls and of forked children; one wrong bit fails.
"""

import os
import signal
import sys
import threading
import time
import warnings

import numpy as np

import opgrad
from opgrad.base.limits import MOST_THREADS

COUNTS = [1, 2] * 8 + [3, 8, 1, 5, 2, MOST_THREADS]
CALLERS = 3
CHILD_SECONDS = 600  # a child that takes longer hangs


def cases(rng):
    """Calls as functions of `out`, and arrays that they write to: parts of equal size, sorting, slots, splits."""
    x = rng.normal(size=1_000_000).astype("float32")
    indices, dy = rng.integers(0, 1000, 50_000), rng.normal(size=(50_000, 8)).astype("float32")
    rows, long = rng.normal(size=(64, 5000)).astype("float32"), rng.normal(size=(1, 300_000)).astype("float32")
    labels = rng.integers(0, 5000, 64)
    loss = np.empty((), "float32")
    return [
        (lambda out: opgrad.relu(x, out=out), (np.empty_like(x),)),
        (lambda out: opgrad.gather_grad((1000, 8), indices, dy, out=out), (np.empty((1000, 8), "float32"),)),
        (lambda out: opgrad.softmax(rows, out=out), (np.empty_like(rows),)),
        (lambda out: opgrad.softmax(rows, 0, out=out), (np.empty_like(rows),)),
        (lambda out: opgrad.softmax(long, out=out), (np.empty_like(long),)),
        (lambda out: opgrad.softmax_cross_entropy_loss_and_grad(rows, labels, out=out), (loss, np.empty_like(rows))),
    ]


def result(call, outputs):
    """The bytes that a call writes over NaN."""
    for array in outputs:
        array.fill(np.nan)
    call(outputs if len(outputs) > 1 else outputs[0])
    return [array.tobytes() for array in outputs]


class Stress:
    """The cases with their results in one thread."""

    def __init__(self, seconds):
        opgrad.set_num_threads(1)
        self.expected = [result(*case) for case in self.cases()]
        self.wrong, self.calls, self.children = [], 0, 0
        self.end = time.monotonic() + seconds

    def cases(self):
        """The same cases for every thread, each with arrays of its own."""
        return cases(np.random.default_rng(0))

    def check(self, mine, number):
        if result(*mine[number]) != self.expected[number]:
            self.wrong.append(number)
        self.calls += 1

    def call(self, seed):
        mine, rng = self.cases(), np.random.default_rng(seed)
        while time.monotonic() < self.end:
            self.check(mine, rng.integers(len(mine)))

    def toggle(self):
        while time.monotonic() < self.end:
            for count in COUNTS:
                opgrad.set_num_threads(count)
                time.sleep(0.0005)

    def fork(self):
        """A child does every case, on workers of its own."""
        child = os.fork()
        if child == 0:
            signal.alarm(CHILD_SECONDS)
            opgrad.set_num_threads(3)
            self.wrong = []
            mine = self.cases()
            for number in range(len(mine)):
                self.check(mine, number)
            os._exit(bool(self.wrong))
        if os.waitpid(child, 0)[1]:
            self.wrong.append("child")
        self.children += 1

    def run(self):
        threads = [threading.Thread(target=self.call, args=(seed,)) for seed in range(CALLERS)]
        threads.append(threading.Thread(target=self.toggle))
        for thread in threads:
            thread.start()
        while time.monotonic() < self.end:
            time.sleep(0.1)
            if hasattr(os, "fork"):
                self.fork()
        for thread in threads:
            thread.join()


def main(seconds):
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
    stress = Stress(seconds)
    stress.run()
    print(f"{stress.calls} calls, {stress.children} children, wrong: {stress.wrong}")
    return bool(stress.wrong)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
