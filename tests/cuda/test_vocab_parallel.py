"""The CUDA kernels of cross-entropy over shards, on their examples and on rows of every regime."""

import dataclasses

import numpy as np
import pytest
from cuda_backend import ON_GPU, call, forget, program
from graph_cases import check_close

from opgrad.cli.examples import examples, expected
from opgrad.contract import FLOATS
from opgrad.cuda import regimes
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
def limits(request, monkeypatch):
    monkeypatch.setattr(regimes, "LIMITS", dataclasses.replace(regimes.RegisterLimits(), **LIMITS[request.param]))
    forget()
    yield request.param
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_against_the_reference(op, limits):
    for place, example in enumerate(examples(op, "float32")):
        for dtype in FLOATS[place % 4 : place % 4 + 1]:
            given = {**example.arguments, "logits": example.arguments["logits"].astype(np.dtype(dtype_of(dtype)))}
            check_close(call(op, given), expected(op, given), example.terms)


def dtype_of(name):
    from opgrad.contract import DTYPES

    return DTYPES[name]


def test_every_regime_is_there(limits):
    op, example = OPERATORS[0], examples(OPERATORS[0], "float32")[-1]
    found = program(op, example.arguments).regime
    assert found == ("long rows" if limits == "long rows" else "one row" if found == "one row" else "short rows")


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_labels_of_shards_far_away(op):
    """Columns are counted in 32 bits: labels are not."""
    example = examples(op, "float32")[0]
    given = example.arguments | {"labels": example.arguments["labels"].astype(np.int64) + (1 << 32)}
    check_close(call(op, given), expected(op, given), example.terms)
