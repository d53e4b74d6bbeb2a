"""What the gates of compiled kernels share; each file says which kinds of calls it compiles (see cuda_gate)."""

import pytest
from cuda_gate import compile_all


@pytest.fixture(scope="module")
def kinds(request, tmp_path_factory):
    """The kinds of calls of a test file, compiled."""
    pytest.importorskip("triton", reason="needs Triton")
    return compile_all(str(request.path), tmp_path_factory.mktemp("compiled"))
