"""Results of a benchmark that nobody measured."""


def made_up_result(ratios):
    """A result with these ratios to the only peer, which only makes new memory, and one cell without a peer."""
    taken = [({"opgrad": 1e-3, "torch": ratio * 1e-3}, 1e-3) for ratio in ratios]
    taken.append(({"opgrad": 1e-3}, 5e-4))
    cells = [
        {
            "operator": "softmax",
            "workload": f"{number}x7",
            "dtype": "float32",
            "headline": number == 0,
            "bytes": 10**7,
            "copied_bytes": 10**7,
            "error_ulp": 0.5,
            "copy": summarized(copy),
            "ways": {
                "new": {"times": {name: summarized(t) for name, t in times.items()}, "notes": {}},
                "given": {"times": {"opgrad": summarized(2e-3)}, "notes": {"torch": "has no such way"}},
            },
        }
        for number, (times, copy) in enumerate(taken)
    ]
    machine = {"cpu": "A CPU", "llvm_cpu": "a", "vector_bits": 256, "caches": {"L1": 1 << 15}}
    versions = {"python": "3.11", "torch": None}
    return {
        "format": 2, "date": "2026-01-01", "machine": machine, "versions": versions, "threads": 2, "cells": cells
    }  # fmt: skip


def summarized(seconds):
    """The times of calls that all took as long."""
    return {"median": seconds, "minimum": seconds, "samples": 1}
