"""JAX arrays: the same numbers as NumPy's, in JAX arrays beside the arguments, without copies; clear refusals."""

import functools
import threading
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
from accuracy import assert_close
from primitive_attributes import SHARED, every_attribute, same_as_numpys, typed_call
from samples import bits, call, cast, fails, packed, sample, several

import opgrad
from opgrad import post_ops
from opgrad.call.arrays import public_function
from opgrad.contract import FLOATS
from opgrad.ops.reference.primitive import TYPES

jax = pytest.importorskip("jax")
jax.config.update("jax_num_cpu_devices", 2)

import jax.numpy as jnp  # noqa: E402

from opgrad.call.libraries import jax_arrays as front_end  # noqa: E402

FLOAT_NAMES = ", ".join(FLOATS)
LARGE = (130, 300)  # results of 64 KiB and more in every dtype


@pytest.fixture(autouse=True)
def _x64():
    """JAX with float64, which it has only when asked."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def on_jax(arguments, device=None):
    """The arguments with JAX arrays for NumPy's; committed if a device is named."""
    return {
        name: jax.device_put(value.copy(), device) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }


def on_host(results):
    return tuple(np.asarray(result) for result in results)


def check(op, arguments):
    """Call with JAX arrays, and compare bit for bit with the call with NumPy arrays."""
    given = on_jax(arguments)
    before = {name: bits(np.asarray(value)) for name, value in given.items() if isinstance(value, jax.Array)}
    results = call(op, given)
    assert all(isinstance(result, jax.Array) for result in results)
    for ours, numpys in zip(on_host(results), call(op, arguments), strict=True):
        assert ours.dtype == numpys.dtype
        assert bits(ours) == bits(numpys)
    assert {name: bits(np.asarray(given[name])) for name in before} == before


# --- values ---------------------------------------------------------------------------------------------------------


def test_values(op, dtype, rng):
    for place, shape in enumerate([(5, 33), (2, 4, 3), (0, 4), LARGE]):
        integer = ("int32", "int64")[place % 2]
        check(op, sample(op, shape, dtype, rng, axis=1, integer=integer, optional=place % 2 == 0))
    fewest = {"elements": (), "rows": (7,), "classes": (5, 3), "slices": (7,)}[op.kind]
    check(op, sample(op, fewest, dtype, rng, axis=0))


def test_out_dtype(rng):
    logits, labels = jnp.asarray(rng.normal(size=(4, 9)), jnp.bfloat16), jnp.asarray([0, 3, 8, 1])
    for asked in [jnp.float32, "float32", np.dtype("float32")]:
        loss, log_prob = opgrad.softmax_cross_entropy_loss(logits, labels, out_dtype=asked)
        assert (loss.dtype, log_prob.dtype) == (jnp.float32, jnp.float32)
    loss, dlogits = opgrad.softmax_cross_entropy_loss_and_grad(logits, labels, out_dtype=(jnp.float64, jnp.bfloat16))
    assert (loss.dtype, dlogits.dtype) == (jnp.float64, jnp.bfloat16)


def test_attributes_as_jax_arrays(rng):
    dy = jnp.asarray(rng.normal(size=(3, 4)))
    indices = jnp.asarray([1, 0, 1])
    expected = opgrad.gather_grad((5, 4), indices, dy)
    for shape in [[5, 4], jnp.asarray([5, 4]), np.array([5, 4])]:
        assert bits(np.asarray(opgrad.gather_grad(shape, indices, dy))) == bits(np.asarray(expected))
    assert bits(np.asarray(opgrad.leaky_relu(dy, jnp.asarray(0.5)))) == bits(np.asarray(opgrad.leaky_relu(dy, 0.5)))


def test_results_have_a_strong_dtype():
    weak = jnp.asarray(2.0)
    assert weak.weak_type
    assert not opgrad.tanh(weak).weak_type


def test_other_layouts(op, dtype, rng):
    layout = pytest.importorskip("jax.experimental.layout")
    if not hasattr(layout, "Format"):
        pytest.skip("this release of JAX names layouts differently")
    arguments = sample(op, LARGE, dtype, rng)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    turned = {
        name: jax.device_put(value, layout.Format(layout.Layout((1, 0)), place))
        for name, value in on_jax(arguments).items()
        if isinstance(value, jax.Array) and value.ndim == 2
    }
    assert_close(op, arguments, on_host(call(op, on_jax(arguments) | turned)))


# --- calls with attributes -------------------------------------------------------------------------------------------


check_attributes = functools.partial(same_as_numpys, jax.Array, jnp.asarray, np.asarray)


def test_attributes(rng):
    x = cast(rng.normal(size=SHARED), "float32")
    check_attributes("softmax", x, **every_attribute(rng))
    chain = [post_ops.mul(rng.normal(size=(4, 1))), post_ops.add(2)]
    check_attributes("log_softmax_grad", x, x, post_ops=chain, post_op_grads=True)


def test_every_dtype_of_a_general_call(rng):
    """The kernels' numbers are tested with NumPy arrays: here JAX's arrays of these dtypes reach them and come back."""
    for number in range(len(TYPES)):
        x, given = typed_call(number, rng)
        check_attributes("softmax", x, **given)


def test_attributes_without_float64(rng):
    jax.config.update("jax_enable_x64", False)
    x = jnp.asarray(rng.normal(size=(4, 33)), "float32")
    found = opgrad.softmax(x, post_ops=[post_ops.mul(0.1)], out_dtype=jnp.float32)
    assert bits(np.asarray(found)) == bits(opgrad.softmax(np.asarray(x), post_ops=[post_ops.mul(0.1)]))
    remedy = 'is float64, which JAX has once jax_enable_x64 is set: jax.config.update("jax_enable_x64", True)'
    fails(TypeError, f"softmax: out_dtype {remedy}", opgrad.softmax, x, out_dtype="float64")


def test_attributes_carried(rng, carrier):
    check_attributes("softmax", cast(rng.normal(size=SHARED), "float32"), **every_attribute(rng))
    x, given = typed_call(TYPES.index("float8_e5m2"), rng)
    check_attributes("softmax", x, **given)
    assert all(ours == theirs for ours, theirs in carrier.addresses if theirs)
    assert len(carrier.addresses) == 8  # x, where and operands, which are not spread out first


def test_attributes_refused(rng):
    x, mask = jnp.ones((3, 4)), np.ones(4, bool)
    message = "softmax: where is a NumPy array, expected a JAX array, as x is"
    fails(TypeError, message, opgrad.softmax, x, where=mask)
    message = "softmax: x is a NumPy array, expected a JAX array, as post_ops[0]'s operand is"
    fails(TypeError, message, opgrad.softmax, np.ones(3), post_ops=[post_ops.add(x)])
    immutable = "softmax: JAX arrays are immutable and take no out=: leave it away and use the result"
    fails(TypeError, immutable, opgrad.softmax, x, stats=True, out=(x, x))
    second = jax.device_put(jnp.ones(4, bool), jax.devices("cpu")[1])
    with pytest.raises(ValueError, match=r"softmax: where is on .*, the device of x: move it with jax.device_put"):
        opgrad.softmax(x, where=second)
    fails(
        ValueError, "softmax: where has shape (3,), expected one that broadcasts to (3, 4)",
        opgrad.softmax, x, where=jnp.ones(3, bool),
    )  # fmt: skip


# --- memory and devices ---------------------------------------------------------------------------------------------


def test_nothing_is_copied(op, dtype, rng, monkeypatch):
    given = on_jax(sample(op, LARGE, dtype, rng))
    addresses = {}

    def watched(function):
        def compute(*positional, **seen):
            results = function(*positional, **seen)
            of_numpy = {**seen, **dict(zip(op.results, several(results), strict=True))}
            addresses.update({name: a.ctypes.data for name, a in of_numpy.items() if isinstance(a, np.ndarray)})
            return results

        return compute

    call(op, given)
    monkeypatch.setattr(front_end, "public_function", lambda name: watched(public_function(name)))
    results = dict(zip(op.results, call(op, given), strict=True))
    for name, array in (given | results).items():
        if isinstance(array, jax.Array) and (name in op.inputs or array.nbytes >= 1 << 16):
            assert array.unsafe_buffer_pointer() == addresses[name], name


def test_device_of_the_results(op, rng):
    arguments = sample(op, (5, 33), "float32", rng)
    first, second = jax.devices("cpu")
    for result in call(op, on_jax(arguments)):
        assert result.devices() == {first}
        assert not result.committed
    for result in call(op, on_jax(arguments, second)):
        assert result.devices() == {second}
        assert result.committed
    with jax.default_device(second):
        given = on_jax(arguments)
    for result in call(op, given):
        assert result.devices() == {second}
        assert not result.committed


def test_arguments_can_be_donated_afterwards():
    x = jnp.ones((100, 100))
    opgrad.softmax(x)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert x.is_deleted()


def test_constants_in_a_compiled_function():
    table = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
    found = jax.jit(lambda x: x + opgrad.softmax(table))(jnp.zeros((2, 2)))
    np.testing.assert_allclose(found, jax.nn.softmax(table), rtol=1e-12)


# --- refusals -------------------------------------------------------------------------------------------------------


TRACED = (
    "is traced by jit, grad or vmap and holds no number yet: expected a value that is known when the function is "
    "traced, such as one of jit's static_argnums"
)


def test_traced_attribute():
    x = jnp.ones(3)
    fails(TypeError, f"leaky_relu: alpha {TRACED}", jax.jit(lambda alpha: opgrad.leaky_relu(x, alpha)), 0.5)
    shape = jax.jit(lambda shape: opgrad.gather_grad(shape, jnp.asarray([0]), jnp.ones((1, 2))))
    fails(TypeError, f"gather_grad: shape {TRACED}", shape, jnp.asarray([3, 2]))


def test_forward_mode():
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(opgrad.tanh, (jnp.ones(3),), (jnp.ones(3),))


def test_out(op, rng):
    message = f"{op.name}: JAX arrays are immutable and take no out=: leave it away and use the result"
    arguments = sample(op, (5, 33), "float32", rng)
    results = call(op, arguments)
    for given in [arguments, on_jax(arguments)]:
        out = packed(tuple(map(jnp.asarray, results)))
        fails(TypeError, message, call, op, given, out=out)
    fails(TypeError, message, call, op, on_jax(arguments), out=packed(results))


def test_libraries_are_not_mixed():
    x, y = np.ones(3), jnp.ones(3)
    fails(TypeError, "tanh_grad: y is a NumPy array, expected a JAX array, as dy is", opgrad.tanh_grad, y, x)
    fails(TypeError, "tanh_grad: dy is a NumPy array, expected a JAX array, as y is", opgrad.tanh_grad, x, y)


def test_what_is_no_array():
    for value, kind in [(jax.ShapeDtypeStruct((3,), jnp.float32), "ShapeDtypeStruct"), (jax.devices()[0], None)]:
        message = f"relu: x is a {kind or type(value).__name__}, expected a JAX array"
        fails(TypeError, message, opgrad.relu, value)


def test_dtypes():
    for array in [jax.random.key(0), jnp.ones(3, jnp.int4), jnp.ones(3, jnp.complex64), jnp.ones(3, "float8_e5m2")]:
        message = f"relu: x has dtype {array.dtype.name}, expected one of {FLOAT_NAMES}"
        fails(TypeError, message, opgrad.relu, array)
    fails(TypeError, f"relu: x has dtype int32, expected one of {FLOAT_NAMES}", opgrad.relu, jnp.ones(3, "int32"))


def test_float64_must_be_enabled():
    x, labels = jnp.ones((2, 3)), jnp.zeros(2, "int32")
    single = x.astype("float32")
    jax.config.update("jax_enable_x64", False)
    remedy = 'is float64, which JAX has once jax_enable_x64 is set: jax.config.update("jax_enable_x64", True)'
    fails(TypeError, f"softmax: x {remedy}", opgrad.softmax, x)
    loss = opgrad.softmax_cross_entropy_loss
    for asked in [jnp.float64, "float64", ("float32", "float64")]:
        fails(TypeError, f"softmax_cross_entropy_loss: out_dtype {remedy}", loss, single, labels, out_dtype=asked)
    assert opgrad.softmax(single).dtype == jnp.float32


def test_devices():
    first, second = jax.devices("cpu")
    dy, y = jax.device_put(jnp.ones((2, 4)), first), jax.device_put(jnp.ones((2, 4)), second)
    message = (
        f"softmax_grad: y is on {second}, expected {first}, the device of dy: move it with jax.device_put(y, dy.device)"
    )
    fails(ValueError, message, opgrad.softmax_grad, dy, y)


def test_devices_without_kernels(monkeypatch):
    class Device:
        platform = "tpu"
        device = property(lambda self: self)  # an array as well, as far as its device is asked for

        def devices(self):
            return {self}

        def __str__(self):
            return "tpu:0"

    x = jnp.ones(3)
    monkeypatch.setattr(front_end, "check", lambda op, given, library: {"x": Device()})
    message = (
        'relu: x is on tpu:0, expected a CPU or a CUDA device: move it with jax.device_put(x, jax.devices("cpu")[0])'
    )
    fails(NotImplementedError, message, opgrad.relu, x)


def test_the_operators_own_errors(op, rng):
    arguments = sample(op, (5, 33), "float32", rng)
    for name in op.inputs:
        if op.inputs[name].shape is not None and name in arguments:
            wrong = arguments | {name: np.concatenate([arguments[name].ravel(), arguments[name].ravel()])}
            with pytest.raises(ValueError, match=f"^{op.name}: {name} has ") as caught:
                call(op, wrong)
            fails(ValueError, str(caught.value), call, op, on_jax(wrong))


# --- through another library, as on CUDA ----------------------------------------------------------------------------


class _Watched:
    """A carrier on the CPU that tells what it borrowed and waits when asked to."""

    def __init__(self):
        self.torch = pytest.importorskip("torch")
        self.carrier, self.kind, self.NAME = front_end._Torch(), self.torch.Tensor, "PyTorch"
        self.borrowed, self.addresses, self.finished = [], [], threading.Event()
        self.finished.set()

    def borrow(self, array):
        tensor = self.carrier.borrow(array)
        self.addresses.append((array.unsafe_buffer_pointer(), tensor.data_ptr()))
        self.borrowed.append(weakref.ref(tensor))
        return tensor

    def packed(self, array):
        return self.carrier.packed(array)

    def device(self, array):
        return nullcontext()

    def finish(self):
        return self.finished.wait


@pytest.fixture
def carrier(monkeypatch):
    """A carrier for JAX arrays that are taken for a GPU's."""
    watched = _Watched()
    monkeypatch.setattr(front_end, "_is_host", lambda device: False)
    monkeypatch.setattr(front_end, "_carrier", lambda: watched)
    return watched


def test_carried(op, dtype, rng, carrier):
    for shape in [(5, 33), (0, 4), (4, 3, 2)]:
        check(op, sample(op, shape, dtype, rng, axis=1))
    assert all(ours == theirs for ours, theirs in carrier.addresses if theirs)


def test_memory_is_kept_until_the_device_is_done(carrier):
    carrier.finished.clear()
    opgrad.tanh(jnp.ones(1000))
    front_end._keeper.submit(carrier.finished.wait)  # A place in the queue behind what is kept.
    assert carrier.borrowed[0]() is not None
    carrier.finished.set()
    front_end._keeper.submit(int).result()
    assert carrier.borrowed[0]() is None


def test_no_carrier(monkeypatch):
    monkeypatch.setattr(front_end, "_is_host", lambda device: False)
    monkeypatch.setattr(front_end, "_carrier", lambda: None)
    message = (
        "relu: JAX arrays on CUDA reach the kernels through PyTorch or CuPy, and neither is installed: "
        "pip install torch, or the CuPy for your release of CUDA"
    )
    fails(ImportError, message, opgrad.relu, jnp.ones(3))


def test_what_a_carrier_cannot_take(carrier, monkeypatch):
    def borrow(array):
        raise BufferError("no such numbers")

    monkeypatch.setattr(carrier, "borrow", borrow)
    x = jnp.ones(3, jnp.bfloat16)
    message = f"relu: PyTorch cannot take x, bfloat16 on {x.device}, from JAX: no such numbers"
    fails(NotImplementedError, message, opgrad.relu, x)


@pytest.mark.parametrize(("cuda", "cupy", "chosen"), [(True, True, "PyTorch"), (False, False, None)])
def test_choice_of_the_carrier(monkeypatch, cuda, cupy, chosen):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    found = front_end.importlib.util.find_spec
    monkeypatch.setattr(
        front_end.importlib.util, "find_spec", lambda name: (cupy or None) if name == "cupy" else found(name)
    )
    front_end._carrier.cache_clear()
    carrier = front_end._carrier()
    front_end._carrier.cache_clear()
    assert (carrier and carrier.NAME) == chosen


@pytest.fixture
def gpu():
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("JAX has no GPU here")


@pytest.mark.gpu
def test_on_a_gpu(op, dtype, rng, gpu):
    for shape in [(5, 33), LARGE]:
        arguments = sample(op, shape, dtype, rng, axis=1)
        results = call(op, on_jax(arguments, gpu))
        assert all(result.devices() == {gpu} for result in results)
        assert_close(op, arguments, on_host(results))


@pytest.mark.gpu
def test_streams_wait_for_each_other(gpu):
    x = jax.device_put(jnp.ones((4096, 4096), "float32"), gpu)
    double = jax.jit(lambda x: x * 2)
    for _ in range(20):  # Arguments that nobody else holds, results that are used at once.
        y = double(opgrad.leaky_relu(double(x), 0.5))
        assert float(y.min()) == float(y.max()) == 4.0
