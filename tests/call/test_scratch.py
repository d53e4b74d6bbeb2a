"""Working memory: taken when a call begins, given back when it ends, and bounded whatever a process calls."""

import ctypes
import sys

import numpy as np
import pytest
from callers import call_at_once, is_native
from subprocesses import run_python

import opgrad
from opgrad.call import arrays, entries
from opgrad.cpu.runtime import pool

X = np.linspace(-9, 9, 24_000).astype(np.float16).reshape(2, 12_000)
MANY = 400  # arrays of an operator on lists: their tables are larger than what lies on the stack
GROWTH = """
import numpy as np, opgrad
from opgrad.cpu.runtime import pool

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def call(steps):
    full = lambda *shape: np.full(shape, 0.1, np.float32)
    weights = full(1, 512, 128), full(1, 512, 128)
    state, gates = full(steps, 1, 16, 128), full(steps, 1, 16, 512)
    for _ in range(2):
        opgrad.lstm_grad(full(steps, 16, 128), *weights, state, state, gates, state)

call(1)
before = resident()
for steps in range(1, 81):
    call(steps)
    assert pool.held() <= pool.bound()
opgrad.empty_pool()
assert pool.held() == 0
print((resident() - before) >> 20)
"""


@pytest.fixture
def refused():
    """The system refuses working memory: a list to which sizes are added, which were asked for."""
    asked = []

    def refuse(_, size):
        asked.append(size)
        return 0

    source = pool._source()
    kept, taking = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(refuse), source.take
    source.take = ctypes.cast(kept, ctypes.c_void_p).value or 0
    yield asked
    source.take = taking


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells how much memory there is")
def test_what_is_kept_does_not_grow_with_signatures():
    """80 lengths of sequences kept 500 MiB."""
    assert int(run_python(GROWTH, OPGRAD_POOL_BYTES=str(64 << 20))) < 100


def test_calls_give_back_what_they_take():
    opgrad.empty_pool()
    out = np.empty_like(X)
    runner = arrays.ArrayRunner(*arrays.expanded(opgrad.ops.operators()["softmax"], {"x": X}))
    assert runner.plan.scratch_bytes > 8 * pool.STACK_WORDS  # too large for the stack
    plan = opgrad.plan(opgrad.softmax, X, out=np.empty_like(X))
    for call in (opgrad.softmax, opgrad.softmax.__call__, plan, plan.__call__):
        for _ in range(3):
            call(X, out=out)
        held = pool.held()
        assert 0 < held <= pool.bound()
        for _ in range(10):
            call(X, out=out)
        assert pool.held() == held, "the same memory is taken again"
        opgrad.empty_pool()
        assert pool.held() == 0


def test_nothing_is_kept_where_nothing_shall_be():
    code = "import numpy as np, opgrad\nfrom opgrad.cpu.runtime import pool\nx = np.ones((2, 12000), 'f2')\n"
    code += "for _ in range(4): assert abs(opgrad.softmax(x).sum(dtype='f8') - 2) < 2**-10\nprint(pool.held())"
    assert run_python(code, OPGRAD_POOL_BYTES="0") == "0"


def test_threads_that_share_a_signature():
    """Each has working memory of its own, also where they are inside of one plan."""
    plan = opgrad.plan(opgrad.softmax, X, out=np.empty_like(X))
    inputs = [np.roll(X, 100 * number, 1) for number in range(6)]
    expected = [opgrad.softmax(x) for x in inputs]

    def call(number):
        out = np.empty_like(X)
        for _ in range(200):
            assert plan(inputs[number], out=out) is out
            np.testing.assert_array_equal(out, expected[number])
            np.testing.assert_array_equal(opgrad.softmax(inputs[number]), expected[number])

    call_at_once(len(inputs), call)


@pytest.mark.parametrize("way", ["function", "Python function", "plan", "planned call"])
def test_memory_that_is_refused(way, refused):
    """The documented error, nothing is written, and the next call is as ever."""
    plan, out = opgrad.plan(opgrad.softmax, X, out=np.empty_like(X)), np.full_like(X, 7)
    calls = {"function": opgrad.softmax, "Python function": opgrad.softmax.__call__}
    call = (calls | {"plan": plan, "planned call": plan.__call__})[way]
    for _ in range(3):
        with pytest.raises(MemoryError, match=r"softmax: cannot allocate \d+ bytes of working memory"):
            call(X, out=out)
    assert refused
    assert (out == 7).all()
    pool._source().take = pool.malloc.address
    call(X, out=out)
    np.testing.assert_allclose(out.sum(1, dtype=np.float64), 1, rtol=2**-11)


def test_memory_that_is_refused_for_many_operands(refused):
    """An operator on lists: the tables of its operands do not lie on the stack, but Python's call has its own."""
    w = [np.full(8, number, np.float32) for number in range(MANY)]
    g, lr = [np.ones(8, np.float32) for _ in w], np.float32([1])
    for _ in range(4):
        for old, new in zip(w, opgrad.sgd_optimizer(lr, w, g), strict=True):
            np.testing.assert_array_equal(new, old - 1)
    assert refused or not entries.SUPPORTED
    pool._source().take = pool.malloc.address
    opgrad.sgd_optimizer(lr, w, g)
    assert is_native(opgrad.sgd_optimizer, lr, w, g) or not entries.SUPPORTED


def test_memory_that_is_refused_for_tensors(refused):
    torch = pytest.importorskip("torch")
    import opgrad.torch

    x = torch.from_numpy(X.copy())
    for _ in range(3):
        with pytest.raises(MemoryError, match=r"softmax: cannot allocate \d+ bytes of working memory"):
            opgrad.torch.softmax(x, -1)
    pool._source().take = pool.malloc.address
    torch.testing.assert_close(opgrad.torch.softmax(x, -1), torch.softmax(x, -1))


@pytest.mark.parametrize("outputs", [1, 2])
def test_memory_that_is_refused_for_a_node(outputs, refused):
    """For the plan's working memory, and for a result that the node has no output for."""
    pytest.importorskip("onnxruntime")
    from onnx_models import one_node

    from opgrad.onnxruntime import InferenceSession

    feeds = {"logits": np.zeros((20_000, 30), np.float32), "labels": np.zeros(20_000, np.int64)}
    inputs, results = [("logits", "float32"), ("labels", "int64")], [("loss", "float32"), ("log_prob", "float32")]
    session = InferenceSession(one_node("SparseSoftmaxCrossEntropy", inputs, results[:outputs]))
    with pytest.raises(Exception, match=r"cannot allocate \d+ bytes of working memory"):
        session.run(None, feeds)
    assert (20_000 * 30 * 4 in refused) == (outputs == 1)
    pool._source().take = pool.malloc.address
    np.testing.assert_allclose(session.run(None, feeds)[0], np.log(30), rtol=1e-5)
