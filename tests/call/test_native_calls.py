"""Calls that never meet Python: the same results, the same errors, and nothing lost or kept too long."""

import copy
import functools
import gc
import inspect
import os
import pickle
import pydoc
import sys
import weakref

import numpy as np
import pytest
from callers import call_at_once, is_native
from outputs import packed
from samples import bits, call, sample
from subprocesses import run_python

import opgrad
from opgrad.call import calls, entries
from opgrad.cpu import plans

pytestmark = pytest.mark.skipif(not entries.SUPPORTED, reason="this Python has no native calls")
X = np.linspace(-1, 1, 500).astype("float32").reshape(2, 250)


def test_every_operator(op, rng):
    """The second call and those after it, allocating and into given memory."""
    arguments = sample(op, (2, 500), "float32", rng)
    function = getattr(opgrad, op.name)
    expected = [bits(array) for array in call(op, arguments)]
    for _ in range(3):
        assert [bits(array) for array in call(op, arguments)] == expected
    assert is_native(function, **arguments)
    out = packed([np.empty_like(array) for array in call(op, arguments)])
    for _ in range(3):
        assert function(**arguments, out=out) is out
        assert [bits(array) for array in (out if isinstance(out, tuple) else (out,))] == expected
    assert is_native(function, **arguments, out=out)


@pytest.mark.parametrize(
    "arguments",
    [
        lambda x, y: ((x,), {}),
        lambda x, y: ((), {"x": x}),
        lambda x, y: ((x, -1), {}),
        lambda x, y: ((x,), {"axis": -1}),
        lambda x, y: ((x,), {"axis": 1, "out": y}),
        lambda x, y: ((x,), {"out": y, "axis": 1}),
        lambda x, y: ((x, (0, 1)), {"out": y}),
        lambda x, y: ((), {"axis": 0, "out": None, "x": x}),
    ],
)
def test_ways_to_write_a_call(arguments):
    y = np.empty_like(X)
    args, kwargs = arguments(X, y)
    axis = kwargs.get("axis", args[1] if len(args) > 1 else -1)
    expected = np.exp(X) / np.exp(X).sum(axis, keepdims=True)
    for _ in range(3):
        np.testing.assert_allclose(opgrad.softmax(*args, **kwargs), expected, rtol=1e-5)
    assert is_native(opgrad.softmax, *args, **kwargs)


def test_values_that_look_alike():
    """Numbers of one value and several types; equal numbers in other objects; floats of other values."""
    for alpha in (1, 1.0, True, np.float32(1), np.int64(1), 0.1, 0.0, -0.0, 0.25, float("0.25"), 10**3, int("1000")):
        outcomes = []
        for _ in range(3):
            try:
                outcomes.append(bits(opgrad.leaky_relu(X, alpha)))
            except TypeError as error:
                outcomes.append(str(error))
        assert outcomes == outcomes[:1] * 3, alpha
        if not isinstance(alpha, bool):
            np.testing.assert_array_equal(opgrad.leaky_relu(X, alpha), np.where(X > 0, X, X * np.float32(alpha)))


class Odd(np.ndarray):
    pass


def test_other_arguments_than_before():
    y = np.empty_like(X)
    for _ in range(3):
        opgrad.relu(X, out=y)
    expected = np.maximum(X, 0)
    for other in (X.tolist(), X.view(Odd), X.astype("float64"), X[:, ::-1], X[:1], X.T, memoryview(X), X[0, 0]):
        np.testing.assert_array_equal(opgrad.relu(other), np.maximum(np.asarray(other), 0))
    for wrong, message in (
        (y.tolist(), "out for y is list, expected a NumPy array"),
        (y.astype("float64"), "out for y has dtype float64, expected float32"),
        (y[:1], "out for y has shape"),
        (X.view(), None),
    ):
        if message:
            with pytest.raises((TypeError, ValueError), match=message):
                opgrad.relu(X, out=wrong)
    y.flags.writeable = False
    with pytest.raises(ValueError, match="out for y is read-only, expected a writable array"):
        opgrad.relu(X, out=y)
    y.flags.writeable = True
    assert opgrad.relu(X, out=y) is y
    for wrong in ((), (X, X, X)):
        with pytest.raises(TypeError, match=r"^relu: "):
            opgrad.relu(*wrong)
    with pytest.raises(TypeError, match=r"^relu: "):
        opgrad.relu(X, to=y)
    np.testing.assert_array_equal(opgrad.relu(X), expected)


class OddFloat(float):
    pass


class OddTuple(tuple):
    __slots__ = ()


def test_other_values_than_before():
    """Subclasses of numbers and tuples, and names that are not interned."""
    for _ in range(3):
        scaled, summed = opgrad.leaky_relu(X, 0.25), opgrad.softmax(X, axis=(0, 1))
    for alpha in (OddFloat(0.25), np.float64(0.25)):
        assert bits(opgrad.leaky_relu(X, alpha)) == bits(scaled)
    for axes in (OddTuple((0, 1)), (np.int64(0), np.int64(1))):
        assert bits(opgrad.softmax(X, axis=axes)) == bits(summed)
    name = "".join(["ax", "is"])
    assert bits(opgrad.softmax(X, **{name: (0, 1)})) == bits(summed)
    for _ in range(3):
        with pytest.raises(TypeError, match=r"axis is \[0, 1\], expected an int"):
            opgrad.softmax(X, axis=[0, 1])


def test_memory_that_is_shared():
    memory = np.zeros(300, np.float32)
    memory[:200] = X.ravel()[:200]
    x, behind, same = memory[:200], memory[50:250], memory[:200]
    for _ in range(3):
        opgrad.relu(x.copy(), out=np.empty_like(x))
        with pytest.raises(ValueError, match="out for y overlaps x, expected x itself or separate memory"):
            opgrad.relu(x, out=behind)
    expected = np.maximum(x, 0)
    np.testing.assert_array_equal(opgrad.relu(x, out=same), expected)


def test_what_a_kernel_refuses():
    """A wrong label raises as ever, and the working memory is there for the next call."""
    scores, labels = np.zeros((4, 10), np.float32), np.array([0, 1, 2, 3])
    for _ in range(3):
        expected = opgrad.softmax_cross_entropy_loss(scores, labels)
    for _ in range(3):
        labels[2] = 10
        with pytest.raises(ValueError, match=r"labels\[2\] is 10, expected 0 to 9"):
            opgrad.softmax_cross_entropy_loss(scores, labels)
        labels[2] = 2
        assert [bits(a) for a in opgrad.softmax_cross_entropy_loss(scores, labels)] == [bits(a) for a in expected]
    assert is_native(opgrad.softmax_cross_entropy_loss, scores, labels)


def test_more_signatures_than_places():
    every = [np.arange(-n, n, dtype=np.float32) for n in range(1, 2 * calls.SLOTS)]
    for _ in range(4):
        for x in every:
            np.testing.assert_array_equal(opgrad.relu(x), np.maximum(x, 0))
    opgrad.relu(every[0])
    assert is_native(opgrad.relu, every[0])


def test_nothing_is_lost_or_kept():
    """A million calls: counts of references, objects and memory stay."""
    out, dtype = np.empty_like(X), X.dtype
    alpha = 0.1 + float(X[0, 0])
    watched = [X, out, dtype, alpha, opgrad.leaky_relu, None, np.ndarray, (X, out)]
    for _ in range(3):
        opgrad.leaky_relu(X, alpha, out=out), opgrad.leaky_relu(X, alpha)
    gc.collect()
    before, blocks = [sys.getrefcount(each) for each in watched[:5]], sys.getallocatedblocks()
    for _ in range(500_000):
        opgrad.leaky_relu(X, alpha, out=out)
        opgrad.leaky_relu(X, alpha)
    gc.collect()
    assert [sys.getrefcount(each) for each in watched[:5]] == before
    assert sys.getallocatedblocks() - blocks < 10_000  # other tests' threads take and return some; a leak, a million
    results = opgrad.softmax_cross_entropy_loss(np.zeros((4, 10), np.float32), np.array([0, 1, 2, 3]))
    for _ in range(3):
        results = opgrad.softmax_cross_entropy_loss(np.zeros((4, 10), np.float32), np.array([0, 1, 2, 3]))
    alone = (object(), object())  # the tuple's, and those of `each` and of the argument, where a Python counts them
    assert [sys.getrefcount(each) for each in results] == [sys.getrefcount(each) for each in alone]
    kept = weakref.ref(opgrad.relu(X))
    assert kept() is None


def test_a_dtype_that_is_compared_is_kept(monkeypatch):
    """Its address is: after its plan has gone, another dtype might lie there."""
    monkeypatch.setattr(inspect.getclosurevars(opgrad.gather._python).nonlocals["runners"], "most", 1)
    monkeypatch.setattr(plans.PLANS, "most", 1)
    dtype, x = np.dtype("int64", metadata={"of": "indices alone"}), np.ones((3, 8), np.float32)
    before, indices = sys.getrefcount(dtype), np.zeros(2, dtype)
    for _ in range(3):
        opgrad.gather(x, indices)
    del indices
    opgrad.gather(x, np.zeros(3, np.int64))
    assert sys.getrefcount(dtype) > before


def test_results_are_their_own():
    for _ in range(3):
        y = opgrad.relu(X)
    assert (y.flags.owndata, y.flags.writeable, y.flags.c_contiguous, y.base) == (True, True, True, None)
    assert (type(y), y.dtype) == (np.ndarray, X.dtype)
    other = opgrad.relu(X)
    assert not np.shares_memory(y, other)
    y.resize(3)


def test_threads_with_many_signatures():
    """Entries are replaced while others use them, large calls give up the lock of the interpreter."""
    sizes = [10, 3_000, 70_000, *range(100, 100 + calls.SLOTS)]
    cases = [np.random.default_rng(n).normal(size=n).astype("float32") for n in sizes]
    expected = [bits(np.maximum(x, 0)) for x in cases]
    wrong = []

    def hammer(first):
        for turn in range(1500):
            which = (first + turn * (first + 1)) % len(cases)
            if bits(opgrad.relu(cases[which])) != expected[which]:
                wrong.append(which)

    call_at_once(4, hammer)
    assert wrong == []


FORK = """
import os, warnings
warnings.simplefilter("ignore")
import numpy as np, opgrad
opgrad.set_num_threads(2)
x = np.random.default_rng(0).normal(size=(64, 20000)).astype("float32")
small = x[:1, :100].copy()
for _ in range(3): expected, little = opgrad.softmax(x), opgrad.softmax(small)
child = os.fork()
if not child:
    same = all(np.array_equal(opgrad.softmax(x), expected) for _ in range(3))
    os._exit(not (same and all(np.array_equal(opgrad.softmax(small), little) for _ in range(3))))
print(os.waitpid(child, 0)[1] == 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_fork():
    assert run_python(FORK) == "True"


NO_MEMORY = """
import resource
import numpy as np, opgrad
x = np.ones(10_000_000, np.float32)
for _ in range(3): opgrad.relu(x, out=np.empty_like(x)); opgrad.relu(x)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20), resource.RLIM_INFINITY))
for _ in range(3):
    try: opgrad.relu(x)
    except MemoryError: print("refused")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux's")
def test_results_for_which_there_is_no_memory():
    assert run_python(NO_MEMORY, OPGRAD_NUM_THREADS="1", OPGRAD_POOL_BYTES="0").split() == ["refused"] * 3


def test_it_stays_a_function():
    function = opgrad.softmax
    assert inspect.isroutine(function)
    assert (function.__name__, function.__qualname__) == ("softmax", "softmax")
    assert inspect.signature(function) == inspect.signature(function.__wrapped__)
    assert "Softmax" in function.__doc__ or "softmax" in function.__doc__
    assert "".join(pydoc.plain(pydoc.render_doc(function)).split()).split("softmax(", 1)[1].startswith("x")
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.copy(function) is copy.deepcopy(function) is function
    assert weakref.ref(function)() is function
    assert repr(function).startswith("<function softmax at 0x")
    for _ in range(3):
        expected = bits(function(X, axis=0))
        assert bits(functools.partial(function, axis=0)(X)) == expected
        assert bits(function.__call__(X, axis=0)) == expected

    class Layer:
        apply = function

        def __init__(self):
            self.own = function

    layer = Layer()
    assert bits(layer.own(X, axis=0)) == expected
    assert inspect.ismethod(layer.apply)
    assert bits(Layer.apply(X, axis=0)) == expected


SIGNALS = """
import os, signal, threading, time
import numpy as np, opgrad
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may ignore it
x = np.ones((4000, 4000), np.float32); y = np.empty_like(x); small = x[:1, :100].copy()
for _ in range(3): opgrad.softmax(x, out=y); opgrad.softmax(small)
met = []
def later():
    for _ in range(20):
        time.sleep(0.02); os.kill(os.getpid(), signal.SIGINT)
        if met: return
threading.Thread(target=later, daemon=True).start()
try:
    while True: opgrad.softmax(x, out=y); opgrad.softmax(small); opgrad.softmax(x)
except KeyboardInterrupt: met.append(1)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(len(met), bool(np.allclose(opgrad.softmax(x)[0], 1 / 4000)))
"""


def test_an_interrupt_is_met():
    """Python's handler has its turn between calls, also in what allocates large results."""
    assert run_python(SIGNALS) == "1 True"
