"""gather and gather_grad on CUDA: bits, wrong indices, sums in chunks with the limits lowered; sorts of many keys."""

import itertools

import numpy as np
import pytest
from cuda_backend import call, check, forget, program, some

pytest.importorskip("triton", reason="needs Triton")

from opgrad.contract import DTYPES, FLOATS
from opgrad.contract.signature import Operand
from opgrad.cuda import indexing
from opgrad.cuda.execute import Space
from opgrad.ops import operators

GATHER, GATHER_GRAD = operators()["gather"], operators()["gather_grad"]
SIZE = 9  # of the axis that indices point into


@pytest.fixture(params=[indexing.NARROW_BITS, 0], ids=["narrow keys", "wide keys"])
def lowered(request, monkeypatch):
    """Lower the limits, so that few indices take several passes and several levels of chunks."""
    limits = {"FEW": 0, "CHUNK": 4, "PARTS": 4, "OWN": 4, "OTHERS": 4, "SEARCHES": 16, "NARROW_BITS": request.param}
    for name, value in {**limits, "PASSES": ((100, 8, 4), (1 << 63, 4, 2))}.items():
        monkeypatch.setattr(indexing, name, value)
    forget()
    yield
    monkeypatch.undo()
    forget()


def zipf(rng, count):
    return np.minimum(rng.zipf(1.5, count), SIZE) - 1


INDICES = {
    "random": lambda rng, count: rng.integers(-SIZE, SIZE, count),
    "all equal": lambda rng, count: np.full(count, 4),
    "a few hot ones": zipf,
    "sorted": lambda rng, count: np.sort(rng.integers(0, SIZE, count)),
}


@pytest.mark.parametrize("indices", INDICES)
@pytest.mark.parametrize("post", [1, 3, 20])
def test_sums_in_chunks(indices, post, rng, lowered):
    cases = [(4, 2), (17, 2), (70, 1)] if indices in ("random", "all equal") else [(1, 1), (17, 1)]
    for dtype, (count, pre) in itertools.product(some(FLOATS, indices, 4, post), cases):
        arguments = {
            "shape": (pre, SIZE, post),
            "indices": INDICES[indices](rng, count),
            "dy": rng.normal(0, 1, (pre, count, post)).astype(DTYPES[dtype]),
            "axis": 1,
        }
        check(GATHER_GRAD, arguments, f"{dtype}, {count} indices, {pre} before")


def test_chunks_run(lowered, rng):
    """What the test above means to reach is reached."""
    arguments = {"shape": (SIZE, 3), "indices": np.full(70, 4), "dy": np.ones((70, 3), np.float32)}
    made = program(GATHER_GRAD, arguments)
    names = [launch.kernel.fn.__name__ for launch in made.launches]
    assert made.regime == "merged runs"
    assert names.count("merge_runs") == 2
    assert names.count("sum_chunks") > 1
    assert names.count("sum_parts") == 1


@pytest.mark.parametrize("dtype", some(FLOATS, "wrong indices", 4))
def test_wrong_indices_among_many(lowered, dtype, rng):
    """Wrong indices contribute nothing, wherever they stand in the sorted order."""
    indices = rng.integers(-SIZE, SIZE, 70)
    wild = indices.copy()
    places = rng.choice(70, 20, replace=False)
    wild[places] = rng.choice([SIZE, -SIZE - 1, 2**40, -(2**40), np.iinfo(np.int64).max, np.iinfo(np.int64).min], 20)
    dy = rng.normal(0, 1, (70, 5)).astype(DTYPES[dtype])
    kept = np.delete(np.arange(70), places)
    (got,) = call(GATHER_GRAD, {"shape": (SIZE, 5), "indices": wild, "dy": dy})
    exact = np.zeros((SIZE, 5))
    np.add.at(exact, indices[kept], dy[kept].astype(np.float64))
    tolerance = {"float64": 1e-14, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(got.astype(np.float64), exact, rtol=tolerance, atol=tolerance)


def test_gather_copies_bits(dtype, rng):
    """NaN payloads and negative zeros too; a wrong index gives NaN."""
    kind = DTYPES[dtype]
    words = np.dtype(f"u{kind.itemsize}")
    bits = rng.integers(0, np.iinfo(words).max, (SIZE, 33), words, endpoint=True)
    indices = rng.integers(-SIZE, SIZE, 50)
    (got,) = call(GATHER, {"x": bits.view(kind), "indices": indices})
    np.testing.assert_array_equal(got.view(words), bits[indices])

    indices[[3, 40]] = SIZE, -SIZE - 1
    (got,) = call(GATHER, {"x": bits.view(kind), "indices": indices})
    assert np.isnan(got[[3, 40]].astype(np.float64)).all()


# --- sorts, as they are planned ---------------------------------------------------------------------------------------

INDICES_OF = Operand(0, "int64")


@pytest.mark.parametrize(
    ("count", "passes"),
    [(1024, 0), (1025, 1), (1 << 14, 1), ((1 << 14) + 1, 2), (1 << 16, 2), ((1 << 16) + 1, 5), (1 << 24, 8)],
)
def test_passes(count, passes):
    """A run of 1,024 needs no merging; beyond, one pass merges up to 16 runs."""
    assert indexing.sort("gather_grad", INDICES_OF, count, 1 << 20, Space()).passes == passes


def test_keys_are_as_narrow_as_they_may_be():
    for count, size, dtype in [(1 << 14, 128256, "int32"), ((1 << 14) + 1, 128256, "int64"), (1, 1 << 31, "int64")]:
        assert indexing.sort("gather_grad", INDICES_OF, count, size, Space()).keys.dtype == dtype
    with pytest.raises(NotImplementedError, match=r"^gather_grad: .* need keys of 71 bits, on CUDA they have 63"):
        indexing.sort("gather_grad", INDICES_OF, 1 << 30, 1 << 40, Space())
