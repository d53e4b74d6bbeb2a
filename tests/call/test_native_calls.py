"""Calls that never meet Python: the same results, the same errors, and nothing lost or kept too long."""

import copy
import functools
import gc
import inspect
import pickle
import pydoc
import sys
import weakref

import numpy as np
import pytest
from callers import call_at_once, check_nothing_is_kept, functions_met, is_native
from planned import softmax_plan
from samples import bits, call, packed, refused, sample
from subprocesses import run_python

import opgrad
from opgrad import Dropout, post_ops
from opgrad.call import calls, entries
from opgrad.cpu import plans
from opgrad.post_ops import PostOp

pytestmark = pytest.mark.skipif(not entries.SUPPORTED, reason="this Python has no native calls")
X = np.linspace(-1, 1, 500).astype("float32").reshape(2, 250)


def test_every_operator(op, rng):
    """The second call and those after it, allocating and into given memory."""
    arguments = sample(op, (2, 502), "float32", rng)  # a shape of no other test
    function = getattr(opgrad, op.name)
    expected = [bits(array) for array in call(op, arguments)]
    assert is_native(function, **arguments)
    for _ in range(3):
        assert [bits(array) for array in call(op, arguments)] == expected
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
            refused((TypeError, ValueError), message, opgrad.relu, X, out=wrong)
    y.flags.writeable = False
    refused(ValueError, "out for y is read-only, expected a writable array", opgrad.relu, X, out=y)
    y.flags.writeable = True
    assert opgrad.relu(X, out=y) is y
    for wrong in ((), (X, X, X)):
        refused(TypeError, r"^relu: ", opgrad.relu, *wrong)
    refused(TypeError, r"^relu: ", opgrad.relu, X, to=y)
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
        refused(TypeError, r"axis is \[0, 1\], expected an int", opgrad.softmax, X, axis=[0, 1])


def test_memory_that_is_shared():
    memory = np.zeros(300, np.float32)
    memory[:200] = X.ravel()[:200]
    x, behind, same = memory[:200], memory[50:250], memory[:200]
    for _ in range(3):
        opgrad.relu(x.copy(), out=np.empty_like(x))
        refused(ValueError, "out for y overlaps x, expected x itself or separate memory", opgrad.relu, x, out=behind)
    expected = np.maximum(x, 0)
    np.testing.assert_array_equal(opgrad.relu(x, out=same), expected)


def test_what_a_kernel_refuses():
    """A wrong label raises as ever, and the working memory is there for the next call."""
    scores, labels = np.zeros((4, 10), np.float32), np.array([0, 1, 2, 3])
    for _ in range(3):
        expected = opgrad.softmax_cross_entropy_loss(scores, labels)
    for _ in range(3):
        labels[2] = 10
        refused(ValueError, r"labels\[2\] is 10, expected 0 to 9", opgrad.softmax_cross_entropy_loss, scores, labels)
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
    check_nothing_is_kept(
        [X, out, dtype, alpha, opgrad.leaky_relu],
        (lambda: opgrad.leaky_relu(X, alpha, out=out), 500_000),
        (lambda: opgrad.leaky_relu(X, alpha), 500_000),
    )
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
    assert str(inspect.signature(function)).startswith("(x, axis=-1, *, out=None, ")
    assert [*inspect.signature(function).parameters] == [*inspect.signature(function.__wrapped__).parameters]
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


SCORES = np.linspace(-1, 1, 480).astype("float32").reshape(2, 4, 60)
ROW, COLUMN, FULL = SCORES[0, 0] + 2, SCORES[:, :1, :1] + 2, SCORES * SCORES + 1
HALF = np.float32(0.5)
# Few forms, since each has a kernel of its own: chains of the same formulas share one.
CALLS = {
    "in a list": lambda: {"post_ops": [post_ops.linear(2.0, 1.0), post_ops.add(ROW)]},
    "in a tuple": lambda: {"post_ops": (post_ops.linear(0.5), post_ops.add(ROW))},
    "row": lambda: {"post_ops": [post_ops.add(ROW)]},
    "x": lambda: {"post_ops": [post_ops.add(SCORES)]},
    "one array twice": lambda: {"post_ops": [post_ops.mul(FULL), post_ops.add(FULL)]},
    "column": lambda: {"post_ops": [post_ops.mul(COLUMN), post_ops.add(2.0)]},
    "numbers": lambda: {"post_ops": [post_ops.mul(HALF), post_ops.add(1)]},
    "select": lambda: {"post_ops": [post_ops.select(ROW > 2, -1.0)]},
    "where by row": lambda: {"where": ROW > 1.5},
    "where by column": lambda: {"where": COLUMN < 9, "logit_scale": 0.5},
    "dropout": lambda: {"dropout": Dropout(0.3, seed=5, offset=2**40)},
    "every one": lambda: {
        "where": ROW > 1.5, "dropout": Dropout(0.3, seed=-5), "out_dtype": "float16",
        "post_ops": [post_ops.linear(2.0, 1.0), post_ops.mul(ROW)],
    },
    "of a gradient": lambda: {"post_ops": [post_ops.mul(ROW), post_ops.relu()], "dropout": Dropout(0.25, seed=3)},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.one_in(2)
def test_the_same_bits_without_python(name):
    function, given = opgrad.softmax, (SCORES,)
    if name == "of a gradient":
        function, given = opgrad.softmax_grad, (SCORES, opgrad.softmax(SCORES))
    expected = bits(function(*given, **CALLS[name]()))
    y = np.empty_like(SCORES, dtype=CALLS[name]().get("out_dtype", "float32"))
    for _ in range(3):
        assert bits(function(*given, **CALLS[name]())) == expected
        y.fill(7)
        assert function(*given, **CALLS[name](), out=y) is y
        assert bits(y) == expected
    for more in ({}, {"out": y}):
        assert functions_met(function, *given, **CALLS[name](), **more) == []


def test_objects_that_change():
    """A changed field, an operand that is written to or replaced, another list: each call reads what stands there."""
    several, bias = [post_ops.linear(2.0, 1.0), post_ops.add(ROW.copy())], ROW.copy()
    y = opgrad.softmax(SCORES)
    for _ in range(4):
        np.testing.assert_allclose(opgrad.softmax(SCORES, post_ops=several), 2 * y + 1 + ROW, rtol=1e-6)
    several[0].alpha = 3
    np.testing.assert_allclose(opgrad.softmax(SCORES, post_ops=several), 3 * y + 1 + ROW, rtol=1e-6)
    several[1].operands = (bias,)
    bias += 1
    for _ in range(3):
        np.testing.assert_allclose(opgrad.softmax(SCORES, post_ops=several), 3 * y + 1 + ROW + 1, rtol=1e-6)
    several[1].name = "mul"
    np.testing.assert_allclose(opgrad.softmax(SCORES, post_ops=several), (3 * y + 1) * bias, rtol=1e-6)
    several[1].operands = (bias[None, None, :].repeat(2, 0),)
    np.testing.assert_allclose(opgrad.softmax(SCORES, post_ops=several), (3 * y + 1) * bias, rtol=1e-6)
    several[1].operands = (bias[:-1],)
    with pytest.raises(ValueError, match=r"post_ops\[1\]'s operand has shape \(59,\), expected one that broadcasts"):
        opgrad.softmax(SCORES, post_ops=several)
    several.pop()
    np.testing.assert_allclose(opgrad.softmax(SCORES, post_ops=several), 3 * y + 1, rtol=1e-6)
    del several[0].beta
    refused(AttributeError, "beta", opgrad.softmax, SCORES, post_ops=several)


def test_shapes_that_repeat_to_the_same_strides():
    """Each is native by itself."""
    for shape in ((60,), (1, 60), (1, 1, 60)):
        for _ in range(3):
            y = opgrad.softmax(SCORES, post_ops=[post_ops.add(ROW.reshape(shape))])
        np.testing.assert_array_max_ulp(y, opgrad.softmax(SCORES) + ROW, 2)  # sums may go in another order
        assert functions_met(opgrad.softmax, SCORES, post_ops=[post_ops.add(ROW.reshape(shape))]) == []


def test_seeds_need_no_plan():
    dropout = Dropout(0.5, seed=1)
    drawn = {}
    for seed in (1, 2, -1, 2**64 - 1, 2**63, -(2**63), 10**12, True + 1):
        for offset in (0, 9, 2**40):
            dropout.seed, dropout.offset = seed, offset
            drawn.setdefault((dropout.seed, dropout.offset), bits(opgrad.softmax(SCORES, dropout=dropout)))
            assert functions_met(opgrad.softmax, SCORES, dropout=dropout) == [] or len(drawn) < 3
            assert (
                bits(opgrad.softmax(SCORES.copy(), dropout=copy.copy(dropout))) == drawn[dropout.seed, dropout.offset]
            )
    assert len(set(drawn.values())) == len(drawn) == 5 * 3
    del dropout.probability
    with pytest.raises(AttributeError):
        opgrad.softmax(SCORES, dropout=dropout)


class OddOp(PostOp):
    pass


def test_what_stays_pythons():
    """Lists in place of arrays, arrays and post-ops of other classes: right, whatever was native before."""
    y = opgrad.softmax(SCORES)
    for _ in range(3):
        opgrad.softmax(SCORES, post_ops=[post_ops.add(ROW)])
    for operand in (ROW.tolist(), ROW.view(np.recarray), memoryview(ROW), ROW[::-1], ROW.astype("float64")):
        found = opgrad.softmax(SCORES, post_ops=[post_ops.add(operand)])
        np.testing.assert_allclose(found, y + np.asarray(operand), rtol=1e-6)
    mask = [True] * 30 + [False] * 30
    for _ in range(3):
        assert not opgrad.softmax(SCORES, where=mask)[..., 30:].any()
    mask[:] = mask[::-1]
    assert not opgrad.softmax(SCORES, where=mask)[..., :30].any()
    np.testing.assert_array_max_ulp(opgrad.softmax(SCORES, post_ops=[OddOp("add", operands=(ROW,))]), y + ROW, 2)


def test_they_are_copied_and_pickled():
    for each in (post_ops.linear(2.0, 1.0), post_ops.add(1.5), Dropout(0.5, seed=2**64 - 1, mask=True)):
        for other in (copy.copy(each), copy.deepcopy(each), pickle.loads(pickle.dumps(each))):
            assert repr(other) == repr(each)
        refused(TypeError, "unhashable", hash, each)


def test_no_attribute_is_lost_or_kept():
    several, dropout = [post_ops.linear(0.1, 0.2), post_ops.mul(ROW)], Dropout(0.5, seed=10**15)
    where, out = ROW > 1.5, np.empty(SCORES.shape, np.float16)
    given = {"post_ops": several, "dropout": dropout, "where": where, "out": out}
    watched = [SCORES, ROW, where, several, *several, dropout, dropout.seed, several[0].alpha, several[1].operands]
    check_nothing_is_kept(watched, (lambda: opgrad.softmax(SCORES, **given), 10_000))


# --- lists of arrays -------------------------------------------------------------------------------------------------


def _lists(count, rng):
    shapes = [(3, 4), (5,), (), (2, 2, 2)]
    return [[rng.random(shapes[i % 4], dtype=np.float32) for i in range(count)] for _ in range(4)]


@pytest.mark.parametrize("count", [1, 3, 64])
def test_lists_of_arrays(count, rng):
    """Allocating, in place, and into other memory; few operands and many."""
    w, g, m, v = _lists(count, rng)
    lr, step = np.float32([0.1]), np.int64([3])
    expected = [[bits(each) for each in group] for group in opgrad.adamw_optimizer(lr, step, w, g, m, v)]
    out = tuple([np.empty_like(each) for each in group] for group in (w, m, v))
    own = tuple([each.copy() for each in group] for group in (w, m, v))
    for _ in range(3):
        found = opgrad.adamw_optimizer(lr, step, w, g, m, v)
        assert [[bits(each) for each in group] for group in found] == expected
        opgrad.adamw_optimizer(lr, step, w, g, m, v, out=out)
        assert [[bits(each) for each in group] for group in out] == expected
        own = tuple([each.copy() for each in group] for group in (w, m, v))
        found = opgrad.adamw_optimizer(lr, step, own[0], g, own[1], own[2], out=own)
        assert [[bits(each) for each in group] for group in own] == expected
        assert all(a is b for one, other in zip(found, own, strict=True) for a, b in zip(one, other, strict=True))
    assert is_native(opgrad.adamw_optimizer, lr, step, w, g, m, v)
    assert is_native(opgrad.adamw_optimizer, lr, step, w, g, m, v, out=out)
    assert is_native(opgrad.adamw_optimizer, lr, step, own[0], g, own[1], own[2], out=own)


def test_lists_that_change(rng):
    w, g, *_ = _lists(12, rng)
    lr = np.float32([0.5])
    for _ in range(3):
        opgrad.sgd_optimizer(lr, w, g)
    for changed in (w[:-1], [*w, w[0]], [*w[:-1], w[0]], [each.astype("float64") for each in w], tuple(w)):
        grads = [np.ones_like(each) for each in changed]
        for new, old in zip(opgrad.sgd_optimizer(lr, changed, grads), changed, strict=True):
            np.testing.assert_allclose(new, old - 0.5, rtol=1e-6)
    w.append(w[0])
    refused(ValueError, "gradients has 12 arrays, expected 13", opgrad.sgd_optimizer, lr, w, g)
    refused((TypeError, ValueError), "sgd_optimizer", opgrad.sgd_optimizer, lr, [*w[:-2], None], g)


@pytest.mark.parametrize("count", [2, 40])
def test_lists_that_share_memory(count):
    memory = np.arange(8.0 * count + 8, dtype=np.float32)
    w = [memory[8 * i : 8 * i + 8] for i in range(count)]
    g, lr = [np.ones(8, np.float32) for _ in w], np.float32([1])
    for _ in range(3):
        opgrad.sgd_optimizer(lr, w, g, out=[np.empty_like(each) for each in w])
        opgrad.sgd_optimizer(lr, w, g, out=[each.copy() for each in w][::-1])
    shifted = [memory[8 * i + 4 : 8 * i + 12] for i in range(count)]
    before = memory.copy()
    refused(ValueError, r"out for new_weights\[\d+\] overlaps", opgrad.sgd_optimizer, lr, w, g, out=shifted)
    refused(ValueError, r"out for new_weights\[\d+\] overlaps", opgrad.sgd_optimizer, lr, w, g, out=w[::-1])
    np.testing.assert_array_equal(memory, before)
    opgrad.sgd_optimizer(lr, w, g, out=list(w))
    np.testing.assert_array_equal(memory[: 8 * count], before[: 8 * count] - 1)


def test_a_value_in_an_array_is_no_operand():
    """An attribute may come in an array, whose value is not part of what is compared."""
    alpha = np.array(0.5)
    for value in (0.5, 0.25, 0.75, 0.5):
        alpha[()] = value
        expected = np.where(X > 0, X, X * np.float32(value))
        for _ in range(3):
            np.testing.assert_array_equal(opgrad.leaky_relu(X, alpha), expected)
    for axis in ((1,), (0, 1), tuple(range(2))):
        for _ in range(3):
            np.testing.assert_allclose(opgrad.softmax(X, axis).sum(axis), 1, rtol=1e-5)


# --- plans -----------------------------------------------------------------------------------------------------------


def test_plans():
    y, bias = np.empty_like(X), np.linspace(0, 1, 250).astype("float32")
    plan = softmax_plan(X.shape, "float32", post_ops=[opgrad.post_ops.add(bias)])
    assert is_native(plan, X, out=y)
    np.testing.assert_array_equal(y, opgrad.softmax(X, post_ops=[opgrad.post_ops.add(bias)]))
    bias[:] = 0
    assert plan(X, out=y) is y
    np.testing.assert_array_equal(y, opgrad.softmax(X, post_ops=[opgrad.post_ops.add(bias)]))
    in_place = opgrad.plan(opgrad.relu, X, out=y)
    np.copyto(y, X)
    for _ in range(3):
        assert in_place(y, out=y) is y
    assert is_native(in_place, y, out=y)
    np.testing.assert_array_equal(y, np.maximum(X, 0))
    kept = weakref.ref(plan)
    del plan
    gc.collect()
    assert kept() is None
