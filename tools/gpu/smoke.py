"""Four calls beside float64. Exits with 1 if all of them fail: then nothing else is worth its time."""

import sys
import time

import numpy as np
import results
from cuda_backend import check
from samples import sample

from opgrad.ops import operators

CALLS = (
    ("softmax", (300, 1000), {}),
    ("softmax_cross_entropy_loss_and_grad", (300, 1001), {}),
    ("gather_grad", (500, 64), {"indices": (3000,)}),
    ("quick_gelu_grad", (1 << 16,), {}),
)
SMALL = {"softmax": (8, 40), "softmax_cross_entropy_loss_and_grad": (8, 41), "gather_grad": (9, 16)}


def main() -> int:
    right = 0
    for name, shape, options in CALLS:
        op, rng = operators()[name], np.random.default_rng(0)
        if results.is_dry():
            shape, options = SMALL.get(name, (512,)), dict.fromkeys(options, (90,))
        for dtype in ("bfloat16",) if results.is_dry() else ("float32", "bfloat16"):
            begin, said = time.perf_counter(), ""
            try:
                check(op, sample(op, shape, dtype, rng, **options))
                right += 1
            except Exception as error:
                said = f"{type(error).__name__}: {error}"[-2000:]
            seconds = round(time.perf_counter() - begin, 2)
            results.append("smoke", {"call": name, "dtype": dtype, "seconds": seconds, "said": said})
            print(name, dtype, f"{seconds} s", said or "right", flush=True)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
