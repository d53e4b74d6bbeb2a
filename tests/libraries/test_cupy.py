"""CuPy arrays: on a GPU as they are; without one, a stand-in for CuPy in the host's memory and Triton's interpreter."""

import functools
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from accuracy import assert_close
from guards import c_order, every_second, laid_out, some_backwards
from primitive_attributes import SHARED, every_attribute, moved, same_as_numpys
from samples import bits, call, fails, sample

import opgrad
from opgrad import post_ops
from opgrad.call import arrays, owners
from opgrad.contract import DTYPES
from opgrad.cpu import plans

pytest.importorskip("triton")

from cuda_backend import ON_GPU, address, for_kernels

in_the_interpreter = pytest.mark.skipif(ON_GPU, reason="kernels on a GPU cannot use the stand-in's memory")
SHAPES = [(5, 33), (2, 4, 3), (0, 4)]
STREAM = 7


# --- the stand-in ---------------------------------------------------------------------------------------------------


def _made(name):
    """A method of NumPy's arrays that makes another one."""
    return lambda self, *args: Ndarray(getattr(self.host, name)(*args), self.device_id)


class Ndarray:
    """As much of cupy.ndarray as opgrad and these tests use, with its memory on the host."""

    __module__ = "cupy"

    def __init__(self, host, device=None):
        self.host = host
        self.device_id = Runtime.current if device is None else device

    shape = property(lambda self: self.host.shape)
    ndim = property(lambda self: self.host.ndim)
    strides = property(lambda self: self.host.strides)
    dtype = property(lambda self: self.host.dtype)
    flags = property(lambda self: SimpleNamespace(c_contiguous=self.host.flags.c_contiguous))
    device = property(lambda self: on_device(self.device_id))
    data = property(lambda self: SimpleNamespace(ptr=address(self.host), device_id=self.device_id))

    transpose, view, reshape, astype = map(_made, ("transpose", "view", "reshape", "astype"))

    def sum(self, axes, dtype):
        return Ndarray(np.asarray(self.host.sum(axes, dtype=dtype)), self.device_id)

    def get(self):
        return self.host.copy()

    def __getitem__(self, index):
        return Ndarray(self.host[index], self.device_id)

    def __setitem__(self, index, value):
        self.host[index] = value.host

    def __dlpack__(self, **options):
        return self.host.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.host.__dlpack_device__()


class Runtime:
    """cupy.cuda.runtime: the current device, and every change of it."""

    current = 0
    changes: list[int] = []  # noqa: RUF012

    @staticmethod
    def getDevice():
        return Runtime.current

    @staticmethod
    def setDevice(device):
        Runtime.current = device
        Runtime.changes.append(device)


@contextmanager
def on_device(device):
    """`with array.device`."""
    before, Runtime.current = Runtime.current, device
    yield
    Runtime.current = before


def event(block):
    """cupy.cuda.Event."""
    assert block
    return SimpleNamespace(record=lambda: None, synchronize=lambda: None)


class DistributedArray(Ndarray):
    """A subclass without memory of its own."""

    data = property(lambda self: SimpleNamespace(ptr=0, device_id=self.device_id))


def stand_in():
    """The module."""
    module = ModuleType("cupy")
    stream = SimpleNamespace(ptr=STREAM)
    module.__version__ = "14.0.0"
    module.ndarray = Ndarray
    module.cuda = SimpleNamespace(runtime=Runtime, get_current_stream=lambda: stream, Event=event)
    module.empty = lambda shape, dtype: Ndarray(np.empty(shape, dtype))
    module.ascontiguousarray = lambda array: Ndarray(np.ascontiguousarray(array.host), array.device_id)
    module.array = lambda value, dtype: Ndarray(np.array(value, dtype))
    module.broadcast_to = lambda array, shape: Ndarray(np.broadcast_to(array.host, shape), array.device_id)
    module.from_dlpack = lambda array: Ndarray(np.asarray(array).copy())
    return module


@pytest.fixture(scope="module")
def module():
    """The stand-in in CuPy's place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", stand_in())
        patch.setattr(owners, "known", {})
        before = sys.modules.pop("opgrad.call.libraries.cupy", None)
        yield sys.modules["cupy"]
        del sys.modules["opgrad.call.libraries.cupy"]
        if before is not None:
            sys.modules["opgrad.call.libraries.cupy"] = before


@pytest.fixture
def cupy(module):
    """The stand-in with the first device as the current one; the interpreter warns of lanes that do not count."""
    Runtime.current, Runtime.changes[:] = 0, []
    with np.errstate(all="ignore"):
        yield module


def front_end():
    return owners.library_of(Ndarray)


def on_cupy(arguments, device=0):
    return {
        name: Ndarray(value, device) if isinstance(value, np.ndarray) else value for name, value in arguments.items()
    }


def run(op, arguments, **more):
    """The results of a call with CuPy arrays, as NumPy arrays."""
    results = call(op, on_cupy(arguments), **more)
    assert all(type(result) is Ndarray for result in results)
    return tuple(result.host for result in results)


# --- values and memory ----------------------------------------------------------------------------------------------


@in_the_interpreter
@pytest.mark.parametrize("layout", [c_order, some_backwards, every_second])
@for_kernels()
def test_results(op, dtype, layout, rng, cupy):
    """New ones, and those that are written to `out`; no argument is changed."""

    def arrange(array):
        return laid_out(array, layout, array.itemsize * (layout is every_second))

    for shape in SHAPES if layout is c_order else SHAPES[:1]:
        arguments = sample(op, shape, dtype, rng, axis=1)
        arranged = {n: arrange(value) if isinstance(value, np.ndarray) else value for n, value in arguments.items()}
        before = {name: value.copy() for name, value in arranged.items() if isinstance(value, np.ndarray)}
        results = run(op, arranged)
        assert_close(op, arguments, results)
        out = tuple(Ndarray(arrange(result)) for result in results)
        for each in out:
            each.host[...] = 1
        given = call(op, on_cupy(arranged), out=out if len(out) > 1 else out[0])
        assert all(result is each for result, each in zip(given, out, strict=True))
        assert_close(op, arguments, tuple(each.host for each in out))
        assert all(np.array_equal(arranged[name], array) for name, array in before.items())


@in_the_interpreter
def test_results_lie_as_the_first_argument_does(rng, cupy):
    x = np.asfortranarray(rng.normal(size=(6, 9)))
    assert opgrad.tanh(Ndarray(x)).strides == x.strides
    assert opgrad.softmax(Ndarray(x)).strides == x.strides
    assert opgrad.tanh(Ndarray(np.ascontiguousarray(x))).strides == (72, 8)


@in_the_interpreter
def test_in_place(rng, cupy):
    y = opgrad.softmax(rng.normal(size=(4, 9)))
    dy = Ndarray(rng.normal(size=(4, 9)))
    expected = opgrad.softmax_grad(dy.host, y)
    assert opgrad.softmax_grad(dy, Ndarray(y), out=dy) is dy
    np.testing.assert_allclose(dy.host, expected, atol=1e-15)


@in_the_interpreter
def test_elements_across_words(cupy):
    """A device can neither read nor copy them: their address is refused before any kernel is compiled."""
    x = Ndarray(np.zeros(41, np.uint8)[1:].view(np.float32))
    message = "begins at an address that is no multiple of 4 bytes, the size of its elements, expected an aligned array"
    fails(ValueError, f"tanh: x {message}", opgrad.tanh, x)
    fails(ValueError, f"tanh: out for y {message}", opgrad.tanh, Ndarray(np.zeros(10, np.float32)), out=x)


@in_the_interpreter
def test_overlap(rng, cupy):
    memory = rng.normal(size=20)
    message = "tanh: out for y overlaps x, expected x itself or separate memory"
    fails(ValueError, message, opgrad.tanh, Ndarray(memory[:10]), out=Ndarray(memory[1:11]))


@in_the_interpreter
def test_wrong_labels_are_told_when_asked(rng, cupy):
    logits, labels = Ndarray(rng.normal(size=(3, 4))), Ndarray(np.array([0, 9, 1]))
    loss, _ = opgrad.softmax_cross_entropy_loss(logits, labels)
    assert np.isnan(loss.host)
    with pytest.raises(ValueError, match=r"^softmax_cross_entropy_loss: labels\[1\] is 9, "):
        opgrad.softmax_cross_entropy_loss(logits, labels, check=True)


# --- calls with attributes -------------------------------------------------------------------------------------------


class OnHost:
    """A plan that computes with the CPU's kernels."""

    def __init__(self, memory, op, given):
        self.op, self.given = op, {name: self.host(value) for name, value in given.items()}
        self.runner = arrays.ArrayRunner(op, self.given)

    @staticmethod
    def host(value):
        if isinstance(value, tuple) and value and isinstance(value[0], Ndarray):
            return tuple(each.host for each in value)
        return value.host if isinstance(value, Ndarray) else value

    def run(self, given):
        assert {value.device_id for value in given.values() if isinstance(value, Ndarray)} == {Runtime.current}
        out = given.get("out")
        results = [out] if isinstance(out, Ndarray) else out
        if results is None:
            results = [Ndarray(make()) for make in self.runner.makers]
        inputs = [self.host(given.get(name)) for name in self.op.inputs]
        self.runner.computed(inputs, tuple(each.host for each in results))
        return (self.op.finish or arrays.one_or_tuple)(tuple(results))


@pytest.fixture
def on_the_host(cupy, monkeypatch):
    """Calls with CuPy arrays as far as the kernels, and those of the CPU."""
    monkeypatch.setattr(front_end()._runners, "make", OnHost)
    monkeypatch.setattr(front_end()._runners, "kept", plans.Kept(8))
    return front_end()


@in_the_interpreter
@pytest.mark.parametrize("device", [0, 1])
def test_attributes(device, rng, on_the_host):
    x = rng.normal(size=SHARED).astype("float32")
    gradient = {"post_ops": [post_ops.mul(rng.normal(size=(4, 1))), post_ops.add(2)], "post_op_grads": True}
    check = functools.partial(same_as_numpys, Ndarray, lambda each: Ndarray(each, device), Ndarray.get)
    for _ in range(2):
        for found in (check("softmax", x, **every_attribute(rng)), check("log_softmax_grad", x, x, **gradient)):
            assert {each.device_id for each in found} == {device}
    assert len(on_the_host._runners.kept.values) == 2


@in_the_interpreter
def test_attributes_in_the_kernels(rng, cupy):
    x = rng.normal(size=(3, 8)).astype("float32")
    options = {"where": x > -1, "dropout": opgrad.Dropout(0.5, 3, mask=True), "post_ops": [post_ops.mul(x[:1])]}
    y, kept = opgrad.softmax(Ndarray(x), **moved(options, Ndarray))
    expected, expected_kept = opgrad.softmax(x, **options)
    np.testing.assert_allclose(y.host, expected, rtol=1e-5)
    np.testing.assert_array_equal(kept.host, expected_kept)


@in_the_interpreter
def test_attributes_with_out(rng, on_the_host):
    x, out = rng.normal(size=(4, 6)).astype("float32"), np.empty((4, 6), "uint8")
    held = Ndarray(out)
    assert opgrad.softmax(Ndarray(x), out=held, out_scale=1 / 255) is held
    assert bits(out) == bits(opgrad.softmax(x, out_dtype="uint8", out_scale=1 / 255))


@in_the_interpreter
def test_attributes_refused(rng, on_the_host):
    x, mask = Ndarray(np.ones((3, 4))), np.ones(4, bool)
    message = "softmax: where is a NumPy array, expected a CuPy array, as x is"
    fails(TypeError, message, opgrad.softmax, x, where=mask)
    message = "softmax: x is a NumPy array, expected a CuPy array, as where is"
    fails(TypeError, message, opgrad.softmax, x.host, where=Ndarray(mask))
    message = "softmax: where has shape (3,), expected one that broadcasts to (3, 4)"
    fails(ValueError, message, opgrad.softmax, x, where=Ndarray(mask[:3]))
    message = (
        "softmax: post_ops[0]'s operand is on device 1, expected 0, the device of x: "
        "copy it with cupy.array(post_ops[0]'s operand) inside of `with x.device`"
    )
    fails(ValueError, message, opgrad.softmax, x, post_ops=[post_ops.add(Ndarray(np.ones(4), 1))])


def test_float8_in_cupy(cupy, monkeypatch):
    def empty(shape, dtype):
        raise ValueError("Unsupported dtype")

    monkeypatch.setattr(cupy, "empty", empty)
    message = "softmax: out_dtype is float8_e5m2, which CuPy 14.0.0 has not: use PyTorch tensors"
    fails(NotImplementedError, message, opgrad.softmax, Ndarray(np.ones(3)), out_dtype="float8_e5m2")


# --- devices and streams --------------------------------------------------------------------------------------------


@in_the_interpreter
def test_device_and_stream(rng, cupy, monkeypatch):
    from opgrad.cuda.execute import Compiled

    seen, launch = [], Compiled.run

    def watched(self, addresses, scratch, stream):
        seen.append((Runtime.current, stream))
        launch(self, addresses, scratch, stream)

    monkeypatch.setattr(Compiled, "run", watched)
    x = rng.normal(size=(3, 5))
    assert opgrad.tanh(Ndarray(x, 0)).device_id == 0
    assert opgrad.tanh(Ndarray(x, 1)).device_id == 1
    assert opgrad.tanh(Ndarray(x, 1)).device_id == 1
    assert seen == [(0, STREAM), (1, STREAM), (1, STREAM)]
    assert Runtime.changes == [1, 0, 1, 0]
    with pytest.raises(ValueError, match=r"^softmax: axis is 7"):
        opgrad.softmax(Ndarray(x, 1), axis=7)
    assert Runtime.current == 0


# --- refusals -------------------------------------------------------------------------------------------------------


def test_several_devices(cupy):
    dy, y = Ndarray(np.ones((2, 3)), 0), Ndarray(np.ones((2, 3)), 1)
    message = (
        "softmax_grad: y is on device 1, expected 0, the device of dy: "
        "copy it with cupy.array(y) inside of `with dy.device`"
    )
    fails(ValueError, message, opgrad.softmax_grad, dy, y)


def test_libraries_are_not_mixed(cupy):
    x, y = np.ones(3), Ndarray(np.ones(3))
    fails(TypeError, "tanh_grad: y is a NumPy array, expected a CuPy array, as dy is", opgrad.tanh_grad, y, x)
    fails(TypeError, "tanh_grad: dy is a NumPy array, expected a CuPy array, as y is", opgrad.tanh_grad, x, y)
    out = "tanh: out for y is a NumPy array, expected a CuPy array, as x is"
    fails(TypeError, out, opgrad.tanh, y, out=x)


def test_what_has_no_memory(cupy):
    opgrad.relu(Ndarray(np.ones(0)))  # A plan for arrays like the next one, but for its type.
    spread_out = DistributedArray(np.ones(0))
    fails(TypeError, "relu: x is a DistributedArray, expected a CuPy array", opgrad.relu, spread_out)
    stream = type("Stream", (), {"__module__": "cupy.cuda.stream"})()
    fails(TypeError, "relu: x is a Stream, expected a CuPy array", opgrad.relu, stream)


def test_dtypes(cupy):
    message = "relu: x has dtype complex64, expected one of float32, float64, float16, bfloat16"
    fails(TypeError, message, opgrad.relu, Ndarray(np.ones(3, "complex64")))


def test_cupy_without_bfloat16(cupy, monkeypatch, rng):
    def empty(shape, dtype):
        if dtype == DTYPES["bfloat16"]:
            raise ValueError("Unsupported dtype bfloat16")
        return Ndarray(np.empty(shape, dtype))

    monkeypatch.setattr(cupy, "empty", empty)
    monkeypatch.setattr(cupy, "__version__", "13.6.0")
    logits, labels = Ndarray(rng.normal(size=(3, 4))), Ndarray(np.array([0, 1, 2]))
    message = "softmax_cross_entropy_loss: out_dtype is bfloat16, which CuPy 13.6.0 has not: use CuPy 14 or newer"
    for asked in ["bfloat16", (None, "bfloat16")]:
        fails(NotImplementedError, message, opgrad.softmax_cross_entropy_loss, logits, labels, out_dtype=asked)


@pytest.fixture
def driver(monkeypatch):
    """Set what Triton needs to find a GPU: its release, whether PyTorch is installed or imported, and sees one."""
    import triton

    module = front_end()
    found, reaches_gpu = module.importlib.util.find_spec, module._reaches_gpu.__wrapped__  # what is kept stays

    def settle(release, torch, cuda=False):
        imported = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: cuda), __version__="2.11.0")
        monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
        monkeypatch.setattr(triton, "__version__", release)
        monkeypatch.setattr(
            module.importlib.util,
            "find_spec",
            lambda name: (torch != "missing" or None) if name == "torch" else found(name),
        )
        if torch == "imported":
            monkeypatch.setitem(sys.modules, "torch", imported)
        else:
            monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.setattr(module, "_reaches_gpu", reaches_gpu)

        def own():
            """Triton's driver, which imports PyTorch where it is installed."""
            monkeypatch.setitem(sys.modules, "torch", imported)

        monkeypatch.setitem(triton.backends.backends, "nvidia", SimpleNamespace(driver=own))
        monkeypatch.setattr(triton.runtime.driver, "set_active", lambda driver: None)

    return settle


def check_driver():
    from opgrad.ops import operators

    front_end()._check_driver(operators()["relu"])


DRIVERS = [  # Triton's release, whether PyTorch is installed or imported, whether it sees a GPU, and the remedy
    ("3.8.0", "missing", False, ""),
    ("3.10.1", "installed", False, ""),
    ("3.6.0", "imported", True, ""),
    ("3.9.0", "imported", True, ""),
    ("3.7.1", "missing", False, "which is not installed: install PyTorch for CUDA beside it, or Triton 3.8 or newer"),
    (
        "3.7.1",
        "imported",
        False,
        "which sees none: install PyTorch for CUDA, or Triton 3.8 or newer, which does without",
    ),
    ("3.9.0", "imported", False, "which sees none: install PyTorch for CUDA, or do not import it"),
]


@pytest.mark.parametrize(("release", "torch", "cuda", "remedy"), DRIVERS)
def test_how_triton_finds_the_gpu(cupy, driver, release, torch, cuda, remedy):
    driver(release, torch, cuda)
    if not remedy:
        check_driver()
        return
    through = "PyTorch" if torch == "missing" else "PyTorch 2.11.0"
    fails(ImportError, f"relu: Triton {release} finds the GPU through {through}, {remedy}", check_driver)


# --- JAX arrays that CuPy carries -----------------------------------------------------------------------------------


@pytest.fixture
def carried(cupy, monkeypatch):
    """JAX arrays are taken for a GPU's, and CuPy carries them."""
    pytest.importorskip("jax")
    from opgrad.call.libraries import jax_arrays as jax_front_end

    carrier = jax_front_end._Cupy()
    monkeypatch.setattr(jax_front_end, "_is_host", lambda device: False)
    monkeypatch.setattr(jax_front_end, "_carrier", lambda: carrier)


@in_the_interpreter
@for_kernels(dtypes=("float32", "float16"))  # NumPy's DLPack, on which the stand-in rests, has these
def test_jax_arrays(op, dtype, rng, carried):
    import jax

    arguments = sample(op, (5, 33), dtype, rng, integer="int32")
    given = {
        name: jax.numpy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()
    }
    results = call(op, given)
    assert all(isinstance(result, jax.Array) for result in results)
    assert_close(op, arguments, tuple(map(np.asarray, results)))


def test_jax_bfloat16_needs_cupy_14(cupy, carried, monkeypatch):
    import jax

    monkeypatch.setattr(cupy, "__version__", "13.4.1")
    x = jax.numpy.ones(3, "bfloat16")
    message = f"relu: CuPy cannot take x, bfloat16 on {x.device}, from JAX: CuPy has bfloat16 from release 14 on"
    fails(NotImplementedError, message, opgrad.relu, x)


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@for_kernels()
def test_on_a_gpu(op, dtype, rng):
    real = pytest.importorskip("cupy")
    for shape in SHAPES:
        arguments = sample(op, shape, dtype, rng, axis=1)
        with real.cuda.Stream():
            given = {  # CuPy below 14 moves no bfloat16, but its bits
                name: real.asarray(value.view(f"u{value.itemsize}")).view(value.dtype)
                if isinstance(value, np.ndarray)
                else value
                for name, value in arguments.items()
            }
            results = call(op, given)
            assert all(type(result) is real.ndarray for result in results)
            found = (each.view(np.dtype(f"u{each.dtype.itemsize}")).get().view(each.dtype) for each in results)
            assert_close(op, arguments, tuple(found))
