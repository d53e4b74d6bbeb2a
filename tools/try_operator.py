"""One operator in a few seconds, once its kernels are compiled: `make try OP=softmax_grad`, or

    python tools/try_operator.py NAME

Against the float64 reference: its examples and rows around the blocks of vectors in all dtypes, other memory, results
in memory that is given; with the same bits in one thread and in several; under its names in the stock onnxruntime; a
small array with every access of the kernel checked. A line each with its seconds; exits with 1 at the first that is
wrong.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = ROOT / "tests" / "support"
sys.path.insert(0, str(SUPPORT))
os.environ.setdefault("OPGRAD_CACHE_DIR", str(ROOT / "build" / "kernels"))  # as the tests'

import numpy as np  # noqa: E402
import onnx_cases  # noqa: E402
from accuracy import check  # noqa: E402
from guards import Placed  # noqa: E402
from relayouts import OTHER_LOOPS, SAME_LOOPS, relaid  # noqa: E402
from samples import bits, call, packed, sample  # noqa: E402

import opgrad  # noqa: E402
from opgrad.cli.check import check_operator  # noqa: E402
from opgrad.contract import FLOATS, Operator  # noqa: E402
from opgrad.ops import operators  # noqa: E402

SHAPES = [(3, 1), (3, 17), (3, 67), (2, 1001), (40, 33), (2, 67, 4)]
LARGE = [(300, 65), (1, 131072)]  # rows, and a row, for several threads
CHECKED = """
import sys
sys.path[:0] = sys.argv[1:3]
import interpret
import numpy as np
from accuracy import check
from samples import sample
from opgrad.ops import operators
op = operators()[sys.argv[3]]
check(op, sample(op, (3, 11), "float32", np.random.default_rng(0)))
"""


def examples(op: Operator) -> None:
    for dtype in FLOATS:
        if problem := check_operator(op, dtype)["problem"]:
            raise AssertionError(f"{dtype}: {problem}")


def rows(op: Operator) -> None:
    for dtype in FLOATS:
        for shape in SHAPES:
            check(op, sample(op, shape, dtype, np.random.default_rng(0)), f"{dtype} {shape}")


def memory(op: Operator) -> None:
    for change in (*SAME_LOOPS, *OTHER_LOOPS):
        arguments = sample(op, (6, 10), "float32", np.random.default_rng(0), indices=(3, 2))
        check(op, relaid(arguments, change, list(arguments)), change.__name__)


def given(op: Operator) -> None:
    for dtype in FLOATS:
        arguments = sample(op, (5, 33), dtype, np.random.default_rng(0))
        expected = call(op, arguments)
        guards = [Placed(result.shape, result.dtype, offset=1) for result in expected]
        call(op, arguments, out=packed([guard.array for guard in guards]))
        for guard, plain in zip(guards, expected, strict=True):
            assert guard.untouched(), f"{dtype}: memory around the result was written"
            assert bits(guard.array) == bits(plain), f"{dtype}: out= has other bits than a new result"


def threads(op: Operator) -> None:
    for shape in LARGE:
        arguments, found = sample(op, shape, "float32", np.random.default_rng(0)), []
        for count in (1, 4):
            opgrad.set_num_threads(count)
            found.append([bits(result) for result in call(op, arguments)])
        assert found[0] == found[1], f"{shape}: other bits in other threads"
        check(op, arguments, f"{shape}")


def sessions(op: Operator) -> None:
    for overload in onnx_cases.UNMIXED:
        if overload.operator is op:
            defaults = onnx_cases.reference_defaults(overload)
            onnx_cases.check(overload, onnx_cases.samples(op.name), reference_attributes=defaults)


def accesses(op: Operator) -> None:
    command = [sys.executable, "-c", CHECKED, str(SUPPORT), str(ROOT / "tools"), op.name]
    subprocess.run(command, check=True)


STEPS: dict[str, Callable[[Operator], None]] = {
    "examples, all dtypes": examples,
    "rows around blocks": rows,
    "other memory": memory,
    "out=": given,
    "threads": threads,
    "in onnxruntime": sessions,
    "every access checked": accesses,
}


def main() -> int:
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    op = operators().get(name)
    if op is None:
        print(f"expected the name of an operator: {', '.join(operators())}", file=sys.stderr)
        return 2
    for title, step in STEPS.items():
        begin = time.perf_counter()
        try:
            step(op)
        except (AssertionError, subprocess.CalledProcessError) as error:
            print(f"{title}: {error}", file=sys.stderr)
            return 1
        print(f"{title:22} {time.perf_counter() - begin:5.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
