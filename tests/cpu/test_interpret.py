"""Every family's kernels run in Python, one vector at a time, with each access checked (tools/interpret.py)."""

import re
from pathlib import Path

import pytest
from subprocesses import run_python

SUPPORT = Path(__file__).parents[1] / "support"
TOOLS = Path(__file__).parents[2] / "tools"

# Small examples of every operator, and shapes that take each layout of softmax.
FAMILIES = """
import math
import sys
sys.path.insert(0, {support!r})
from graph_cases import call, check_close
from opgrad.ops import public_operators
from opgrad.cli.examples.arguments import arguments, options_of
from opgrad.cli.examples import Example, examples, expected, own_examples

SMALL = 3000
def small(op, dtype):  # making a large one takes long, too: an operator computes what its gradient is given
    if own_examples(op) is not None:
        return examples(op, dtype)
    chosen = [(shape, options) for shape, options in options_of(op) if math.prod(shape) < SMALL]
    return [
        Example(arguments(op, shape, dtype, **options), max(math.prod(shape), *options.get("indices", (1,))))
        for shape, options in chosen
    ]

def size(values):
    return sum(map(size, values)) if isinstance(values, list) else getattr(values, "size", 0)

large = []
for place, op in enumerate(public_operators().values()):
    dtype = ("float32", "float64", "bfloat16")[(place + {first}) % 3]
    found = [(size(list(each.arguments.values())), each) for each in small(op, dtype)]
    found = sorted((pair for pair in found if pair[0] < SMALL), key=lambda pair: pair[0])
    large += [] if found else [op.name]
    found = found[: (len(found) + 1) // 2][::-1]  # the middle ones: the largest take a minute
    if found:
        _, each = found[{first} % len(found)]
        check_close(call(op, each.arguments), expected(op, each.arguments), each.terms)
assert large == ["sgd_optimizer"], large
"""
LAYOUTS = """
import sys
sys.path.insert(0, {support!r})
import numpy as np
from accuracy import check
from opgrad import post_ops
from opgrad.ops import operators
from primitive_cases import check_forward
from samples import sample

rng = np.random.default_rng(0)
shapes = [(2, 300), (40, 7), (64, 16), (3, 50, 37), (1, 5000), (20, 3), (1, 64, 1024), (9, 5, 2)]
for shape, axis in [*((shape, 1) for shape in shapes), ((9, 4, 2), (1, 2))]:
    for name in ("softmax", "softmax_grad", "log_softmax"):
        check(operators()[name], sample(operators()[name], shape, "float32", rng, axis=axis))
    x, chain = rng.standard_normal(shape).astype(np.float32), [post_ops.add(np.ones(shape[-1], "f4")), post_ops.relu()]
    check_forward("softmax", x, axis, logit_scale=0.5, post_ops=chain, where=x > -2)
"""
# Attention beyond its examples: keys in parts, blocks of more than one tile, options together.
ATTENTION = """
import sys
sys.path.insert(0, {support!r})
import numpy as np
from attention_cases import check_gradient

rng = np.random.default_rng(0)
def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)

options = {"dropout": 0.2, "softcap": 2.0, "window": (9, 3), "causal": "bottom_right"}
options |= {"mask": normal(9, 1), "sink": normal(4)}
for (b, h, kv, n, m, d, e), more in [
    ((1, 2, 2, 3, 800, 4, 6), {}),
    ((1, 1, 1, 100, 100, 2, 2), {"mask": rng.random((100, 100)) > 0.5}),
    ((2, 4, 2, 9, 70, 9, 35), options),
]:
    given = {"q": normal(b, h, n, d), "k": normal(b, kv, m, d), "v": normal(b, kv, m, e)}
    check_gradient(given | more, normal(b, h, n, e))
"""
# The losses with options, by rows and by columns, and the optimizers whose examples are large.
LOSSES = """
import sys
sys.path.insert(0, {support!r})
import numpy as np
import opgrad
from opgrad.call.arrays import public_function
from sample_losses import LOSSES, OPTIONS, WITH_GRADIENT, arguments, check, of

rng = np.random.default_rng(0)
for shape in ((3, 70), (2, 5, 9)):
    for options in OPTIONS.values():
        given = arguments(shape, "float32", rng, **options)
        for op in (LOSSES, WITH_GRADIENT):
            own = of(op, given)
            check(op, own, public_function(op.name)(**own))
lr, (weights, gradients) = np.float32([0.1]), ([rng.normal(size=n).astype("f4") for n in (5, 70)] for _ in range(2))
for new, p, g in zip(opgrad.sgd_optimizer(lr, weights, gradients), weights, gradients, strict=True):
    np.testing.assert_allclose(new, p - 0.1 * g, rtol=1e-5)
"""
OUTSIDE = """
import numpy as np
import opgrad
from interpret import CheckedPointer

x = np.zeros(100, np.float32)
read = CheckedPointer.read
CheckedPointer.read = lambda self, i, count: read(self, i + 1000, count)
try:
    opgrad.relu(x)
except IndexError as error:
    assert str(error).startswith("a kernel touches ") and "which has 400" in str(error), error
else:
    raise AssertionError("a kernel read behind x")
CheckedPointer.read = read
assert opgrad.relu(x).shape == (100,)  # the next call is not concerned
"""
TRACED = """
import sys
import numpy as np
import opgrad

seen = set()
def trace(frame, event, argument):
    if "opgrad/cpu/kernels/softmax" in frame.f_code.co_filename.replace(chr(92), "/"):
        seen.add(frame.f_code.co_name)
    return None
sys.settrace(trace)
opgrad.softmax(np.zeros((2, 300), np.float32))
sys.settrace(None)
assert seen - {"softmax"}, seen  # a debugger stops inside of kernels
"""


def run_interpreted(script):
    script = script.replace("{support!r}", repr(str(SUPPORT)))
    run_python(f"import sys\nsys.path.insert(0, {str(TOOLS)!r})\nimport interpret\n{script}")


@pytest.mark.one_case
@pytest.mark.parametrize("first", range(3))
def test_every_familys_kernels_agree_with_the_reference(first):
    """An example of each operator in one of three dtypes, the next operator's in the next."""
    run_interpreted(FAMILIES.replace("{first}", str(first)))


@pytest.mark.parametrize("script", [LAYOUTS, ATTENTION, LOSSES], ids=["layouts", "attention", "losses"])
def test_kernels_beyond_examples_are_interpreted(script):
    run_interpreted(script)


def test_an_access_outside_of_what_was_given_raises_and_a_debugger_sees_the_lines_of_kernels():
    run_interpreted(OUTSIDE + TRACED)


def test_contributing_stops_a_debugger_between_the_passes_over_a_row():
    root = Path(__file__).parents[2]
    number = re.search(r"softmax/rows\.py:(\d+)", (root / "CONTRIBUTING.md").read_text())[1]
    rows = (root / "src/opgrad/cpu/kernels/softmax/rows.py").read_text().splitlines()
    assert "m = subtracted(xs, largest)" in rows[int(number) - 2]
