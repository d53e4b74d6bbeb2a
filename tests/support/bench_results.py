"""Results of a benchmark that nobody measured."""


def made_up_result(ratios):
    """A result with these ratios to the only peer, and one cell without a peer."""
    taken = [{"opgrad": 1e-3, "copy": 1e-3, "torch": ratio * 1e-3} for ratio in ratios]
    taken.append({"opgrad": 1e-3, "copy": 5e-4})
    cells = [
        {
            "operator": "softmax",
            "workload": f"{number}x7",
            "dtype": "float32",
            "headline": number == 0,
            "bytes": 10**7,
            "copied_bytes": 10**7,
            "error_ulp": 0.5,
            "times": {name: {"median": t, "minimum": t, "samples": 1} for name, t in times.items()},
        }
        for number, times in enumerate(taken)
    ]
    machine = {"cpu": "A CPU", "llvm_cpu": "a", "vector_bits": 256, "caches": {"L1": 1 << 15}}
    versions = {"python": "3.11", "torch": None}
    return {
        "format": 1, "date": "2026-01-01", "machine": machine, "versions": versions, "threads": 2, "cells": cells
    }  # fmt: skip
