"""The CUDA kernels of cross-entropy over shards, on their examples and on rows of every regime."""

import numpy as np
import pytest
from cuda_backend import ON_GPU, call, limits, program
from graph_cases import check_close

from opgrad.cli.examples import examples, expected
from opgrad.contract import DTYPES, FLOATS
from opgrad.ops import graph_operators

pytest.importorskip("triton", reason="needs Triton")
if ON_GPU:
    pytest.skip("the public functions of these operators take NumPy's arrays alone", allow_module_level=True)

OPERATORS = [graph_operators()[name] for name in ("cross_entropy_shard", "cross_entropy_shard_grad")]
LIMITS = {
    "as they are": {},
    # Rows in steps, with their unaligned ends apart.
    "long rows": {"row": 32, "tile": 64, "step": 32, "peel": 16},
}


@pytest.fixture(params=LIMITS)
def regime(request):
    with limits(**LIMITS[request.param]):
        yield request.param


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_against_the_reference(op, regime):
    for place, example in enumerate(examples(op, "float32")):
        for dtype in FLOATS[place % 4 : place % 4 + 1]:
            given = {**example.arguments, "logits": example.arguments["logits"].astype(DTYPES[dtype])}
            check_close(call(op, given), expected(op, given), example.terms)


def test_every_regime_is_there(regime):
    op, example = OPERATORS[0], examples(OPERATORS[0], "float32")[-1]
    found = program(op, example.arguments).regime
    assert found in (["long rows"] if regime == "long rows" else ["one row", "short rows"])


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_labels_of_shards_far_away(op):
    """Columns are counted in 32 bits: labels are not."""
    example = examples(op, "float32")[0]
    given = example.arguments | {"labels": example.arguments["labels"].astype(np.int64) + (1 << 32)}
    check_close(call(op, given), expected(op, given), example.terms)
