"""What every test shares: an empty kernel cache, the operators and dtypes to run over, seeded random numbers."""

import os
import tempfile
import zlib

# Set before opgrad is imported, so that the suite starts cold and its subprocesses share one cache.
_cache = tempfile.TemporaryDirectory(prefix="opgrad-tests-")
os.environ["OPGRAD_CACHE_DIR"] = _cache.name

import numpy as np  # noqa: E402
import pytest  # noqa: E402

import opgrad  # noqa: E402
from opgrad.contract import FLOATS, operators  # noqa: E402


@pytest.fixture(params=operators().values(), ids=lambda op: op.name)
def op(request):
    """Every declared operator."""
    return request.param


@pytest.fixture(params=FLOATS)
def dtype(request):
    """Every floating dtype, by name."""
    return request.param


@pytest.fixture
def rng(request):
    """Random numbers that depend on the test's name alone."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def threads():
    """Leave the number of threads as it was."""
    before = opgrad.get_num_threads()
    yield
    opgrad.set_num_threads(before)
