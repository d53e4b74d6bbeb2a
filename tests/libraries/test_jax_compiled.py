"""Operators and losses that XLA calls by itself: in jit, grad, vmap, pmap and shard_map, on two devices, in threads."""

import ctypes
import functools
import warnings

import numpy as np
import pytest
from callers import call_at_once
from primitive_attributes import SHARED, every_attribute
from samples import cast, sample, several
from subprocesses import run_python

import opgrad
from opgrad.cpu.runtime import pool
from opgrad.ops import operators
from opgrad.post_ops import PostOp

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
jax.config.update("jax_num_cpu_devices", 2)

import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from tensors import loss_of  # noqa: E402

import opgrad.jax  # noqa: E402
from opgrad.jax import calls  # noqa: E402

MESSAGE = r"cross_entropy: labels\[1\] is 3, expected 0 to 2 or ignore_index -100"
RAISED = (ValueError, jax.errors.JaxRuntimeError)  # by XLA: the second in a compiled function's first call


@pytest.fixture(autouse=True)
def _x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(autouse=True)
def _no_callback(monkeypatch):
    """Calls that go through Python fail."""

    def refused(*_, **__):
        raise AssertionError("through Python")

    monkeypatch.setattr(jax, "pure_callback", refused)


def close(found, expected, dtype="float64", atol=0.0):
    """Equal structures of arrays, as far as sums of a few hundred terms in this dtype are."""
    eps = float(jnp.finfo(dtype).eps)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        ours, theirs = np.asarray(ours, "float64"), np.asarray(theirs, "float64")
        np.testing.assert_allclose(ours, theirs, rtol=512 * eps, atol=max(atol, 64 * eps))


# --- operators ------------------------------------------------------------------------------------------------------


def jitted(op, arguments):
    """The call in a compiled function: all arrays are its arguments."""
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    rest = {name: value for name, value in arguments.items() if name not in arrays}
    public = getattr(opgrad, op.name)
    found = jax.jit(lambda arrays: public(**arrays, **rest))({name: jnp.asarray(a) for name, a in arrays.items()})
    return several(found)


def test_same_bits_as_with_numpy(op, dtype, rng):
    for shape in [(5, 33), (2, 4, 3), (130, 300)]:
        arguments = sample(op, shape, dtype, rng, axis=1)
        for ours, numpys in zip(jitted(op, arguments), several(getattr(opgrad, op.name)(**arguments)), strict=True):
            assert ours.dtype == numpys.dtype
            assert np.asarray(ours).tobytes() == numpys.tobytes()


FUNCTIONS = {
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "leaky_relu": lambda x: jax.nn.leaky_relu(x, 0.01),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_first_and_second_derivatives(name, rng):
    def both(function):
        first = jax.grad(lambda x: (function(x) ** 3).sum())
        return first, jax.jit(lambda x: (first(x), jax.grad(lambda x: (first(x) ** 2).sum())(x)))

    (slope, ours), (_, theirs) = map(both, (getattr(opgrad, name), FUNCTIONS[name]))
    x = jnp.asarray(rng.normal(size=(4, 7)))
    found, expected = ours(x), theirs(x)
    close((slope(x), found[0]), (expected[0], expected[0]))
    close(found[1], expected[1], atol=1e-9)


def test_derivatives_of_the_losses(rng):
    logits, labels = jnp.asarray(rng.normal(size=(6, 5))), jnp.asarray([0, 1, -1, 4, 2, 2])
    weight = jnp.asarray(rng.random(5) + 0.5)

    def plain(logits, weight):
        picked = jnp.where(labels < 0, 0, weight[labels])
        return -(picked * jax.nn.log_softmax(logits)[jnp.arange(6), labels]).sum() / picked.sum()

    expected = jax.jit(jax.grad(plain, argnums=(0, 1)))(logits, weight)
    functions = {
        "softmax_cross_entropy_loss": lambda x, w: opgrad.softmax_cross_entropy_loss(x, labels, w, ignore_index=-1)[0],
        "_only": lambda x, w: opgrad.softmax_cross_entropy_loss_only(x, labels, w, ignore_index=-1),
        "_and_grad": lambda x, w: opgrad.softmax_cross_entropy_loss_and_grad(x, labels, w, ignore_index=-1)[0],
    }
    for function in functions.values():
        close(jax.jit(jax.grad(function, argnums=(0, 1)))(logits, weight), expected)
    both = jax.grad(lambda x: opgrad.softmax_cross_entropy_loss(x, labels, ignore_index=-1)[1][:, 0].sum())(logits)
    close(both, jax.grad(lambda x: jax.nn.log_softmax(x)[:, 0].sum())(logits))


def test_derivatives_of_gather_and_accumulation(rng):
    table, indices = jnp.asarray(rng.normal(size=(5, 3))), jnp.asarray([[0, 2], [2, 4]])
    grad = jax.jit(jax.grad(lambda x: (opgrad.gather(x, indices) ** 2).sum()))(table)
    close(grad, jax.grad(lambda x: (x[indices] ** 2).sum())(table))
    given = jnp.asarray(rng.normal(size=(3, 4))), jnp.asarray(rng.normal(size=(3, 4)))
    found = jax.jit(jax.grad(lambda a, b: (opgrad.in_place_accumulator(a, b) ** 2).sum(), argnums=(0, 1)))(*given)
    close(found, jax.grad(lambda a, b: ((a + b) ** 2).sum(), argnums=(0, 1))(*given))
    found = jax.jit(jax.grad(lambda x, f: (opgrad.scale(x, f) ** 2).sum(), argnums=(0, 1)))(given[0], jnp.asarray(3.0))
    close(found, jax.grad(lambda x, f: ((x * f) ** 2).sum(), argnums=(0, 1))(given[0], jnp.asarray(3.0)))


def test_attributes(rng):
    x, options = cast(rng.normal(size=SHARED), "float32"), every_attribute(rng)
    mask, chain = options.pop("where"), options.pop("post_ops")

    def call(x, mask, operands):
        given = iter(operands)
        ops = [PostOp(op.name, op.alpha, op.beta, tuple(next(given) for _ in op.operands)) for op in chain]
        return opgrad.softmax(x, where=mask, post_ops=ops, **options)

    given = x, mask, [each for op in chain for each in op.operands]
    for ours, numpys in zip(jax.jit(call)(*jax.tree.map(jnp.asarray, given)), call(*given), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), numpys)
    jax.config.update("jax_enable_x64", False)
    small = jax.jit(lambda x: opgrad.softmax(x, dropout=opgrad.Dropout(0.4, 1 << 40)))(jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(small), opgrad.softmax(x, dropout=opgrad.Dropout(0.4, 1 << 40)))
    with pytest.raises(NotImplementedError, match=r"^softmax: no gradient of a call with these attributes"):
        jax.grad(lambda x: opgrad.softmax(x, where=jnp.asarray(mask)).sum())(jnp.asarray(x))


@pytest.mark.parametrize("name", ["softmax", "tanh", "softmax_grad"])
def test_vmap_is_one_call(name, rng):
    op = operators()[name]
    arguments = {each: jnp.asarray(rng.normal(size=(4, 3, 5))) for each in op.arrays}
    public = getattr(opgrad, name)
    text = str(jax.make_jaxpr(jax.vmap(lambda arrays: public(**arrays)))(arguments))
    assert text.count("ffi_call[") == 1
    assert "scan" not in text
    close(jax.vmap(lambda arrays: public(**arrays))(arguments), public(**arguments))


def test_vmap_with_arrays_without_the_axis(rng):
    dy, y = jnp.asarray(rng.normal(size=(4, 3, 5))), jnp.asarray(rng.normal(size=(4, 5)))
    found = jax.vmap(lambda dy, y: opgrad.softmax_grad(dy, y, axis=0), in_axes=(1, None), out_axes=1)(dy, y)
    close(found, jnp.stack([opgrad.softmax_grad(dy[:, i], y, axis=0) for i in range(3)], 1))
    x, labels = jnp.asarray(rng.normal(size=(3, 4, 5, 2))), jnp.asarray(rng.integers(0, 5, (3, 4, 2)))
    for options in ({}, {"reduction": "none"}, {"reduction": "mean"}):

        def loss(x, labels, options=options):
            return opgrad.softmax_cross_entropy_loss_only(x, labels, **options)

        close(jax.jit(jax.vmap(loss))(x, labels), jnp.stack([loss(*pair) for pair in zip(x, labels, strict=True)]))


def test_donated_arguments_are_written_over(rng):
    x = jnp.asarray(rng.normal(size=(100, 100)))
    expected, address = jax.nn.softmax(x), x.unsafe_buffer_pointer()
    found = jax.jit(opgrad.softmax, donate_argnums=0)(x)
    assert x.is_deleted()
    assert found.unsafe_buffer_pointer() == address
    close(found, expected)
    kept = jnp.asarray(rng.normal(size=(100, 100)))
    before = np.array(kept)
    jax.jit(opgrad.softmax)(kept)  # which is somebody else's, and copied
    np.testing.assert_array_equal(kept, before)
    both = jax.jit(lambda x: (opgrad.softmax(x * 2), x * 2))(kept)
    close(both, (jax.nn.softmax(kept * 2), kept * 2))


# --- losses -----------------------------------------------------------------------------------------------------------


def slopes(function, *arguments):
    """The value of a function of tensors, and its gradients with respect to those of floats, in float64."""
    tensors = [torch.from_numpy(np.array(each, "float64" if is_float(each) else "int64")) for each in arguments]
    wanted = [each.requires_grad_() for each in tensors if each.is_floating_point()]
    value = function(*tensors)
    return value.detach(), torch.autograd.grad(value, wanted)


def is_float(array):
    return jnp.issubdtype(array.dtype, jnp.floating)


OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"num_items": 3.0},
    {"label_smoothing": 0.1, "lse_square_scale": 0.01, "softcap": 5.0, "temperature": 0.8, "num_items": 7},
    {"label_smoothing": 0.1, "lse_square_scale": 0.01, "softcap": 5.0, "temperature": 0.8, "reduction": "none"},
]


def check(ours, theirs, *arguments, at_once):
    """Values with and without gradients, of the sum of squares, so that losses of samples have several slopes.

    at_once: also without a compiler.
    """
    places = tuple(place for place, each in enumerate(arguments) if is_float(each))
    expected = slopes(lambda *a: (theirs(*a) ** 2).sum(), *arguments)
    square = lambda *a: (ours(*a).astype("float64") ** 2).sum()  # noqa: E731
    made = jax.value_and_grad(square, argnums=places)
    close(jax.jit(lambda *a: (made(*a), square(*a)))(*arguments), (expected, expected[0]))
    if at_once:
        close(made(*arguments), expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.one_in(2)
def test_losses_of_labels_and_of_probabilities(options, rng):
    """Those of probabilities, and of classes along an axis with others behind it, without options and with most; with
    most without a compiler, too."""
    ours, theirs = (functools.partial(function, **options) for function in (opgrad.jax.cross_entropy, loss_of))
    whole = options in (OPTIONS[0], OPTIONS[-1])
    for shape in [(6, 5), (3, 5, 4)][: 1 + whole]:
        logits, weight = jnp.asarray(rng.normal(size=shape)), jnp.asarray(rng.random(5) + 0.5)
        labels = jnp.asarray(rng.integers(0, 5, shape[:1] + shape[2:])).at[1].set(-100)
        check(ours, theirs, logits, labels, weight, at_once=options is OPTIONS[-1] and len(shape) == 3)
    if whole:
        probabilities = jax.nn.softmax(jnp.asarray(rng.normal(size=shape)), 1)
        check(ours, theirs, logits, probabilities, weight, at_once=options is OPTIONS[-1])


@pytest.mark.parametrize("options", [OPTIONS[place] for place in (0, 3, -1)], ids=str)
@pytest.mark.parametrize("chunk", [None, 2 * 5 * 8])
def test_loss_of_a_linear_layer(options, chunk, rng, monkeypatch):
    if chunk:
        monkeypatch.setattr(opgrad.jax.loss, "CHUNK", chunk)
    labels = [0, 1, -100, 4, 2]
    arrays = [jnp.asarray(rng.normal(size=shape)) for shape in [(5, 3), (5, 3), (5,)]]
    check(
        lambda x, w, b, weight: opgrad.jax.linear_cross_entropy(x, w, jnp.asarray(labels), b, weight, **options),
        lambda x, w, b, weight: loss_of(x @ w.T + b, torch.tensor(labels), weight, **options),
        *arrays,
        jnp.asarray(rng.random(5) + 0.5),
        at_once=not options,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_precisions(dtype, rng):
    jax.config.update("jax_enable_x64", False)
    logits, labels = jnp.asarray(rng.normal(size=(9, 7)), dtype), jnp.asarray(rng.integers(0, 7, 9))
    loss, dlogits = jax.jit(jax.value_and_grad(lambda x: opgrad.jax.cross_entropy(x, labels)))(logits)
    assert (loss.dtype, dlogits.dtype) == (jnp.float32, jnp.dtype(dtype))
    close((loss, dlogits), slopes(loss_of, logits, labels), dtype)


@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
def test_numbers_in_arrays_compile_once_and_are_differentiated(function, rng):
    logits, labels, traced = jnp.asarray(rng.normal(size=(6, 5))), jnp.asarray([0, 1, 2, -100, 4, 0]), []

    def ours(x, number, temperature, square):
        traced.append(1)
        options = {"num_items": number, "temperature": temperature, "lse_square_scale": square}
        if function == "cross_entropy":
            return opgrad.jax.cross_entropy(x, labels, **options)
        return opgrad.jax.linear_cross_entropy(x, jnp.eye(5), labels, **options)

    def theirs(x, number, temperature, square):
        y = torch.tensor(labels.tolist())
        return loss_of(x, y, num_items=number, temperature=temperature, lse_square_scale=square)

    step = jax.jit(jax.value_and_grad(ours, argnums=(0, 1, 2, 3)))
    for count in (3.0, 5.0, 11.0):
        given = logits, jnp.asarray(count), jnp.asarray(count / 4), jnp.asarray(count / 100)
        close(step(*given), slopes(theirs, *given))
    assert len(traced) == 1
    counts = jax.jit(lambda x, n: opgrad.jax.cross_entropy(x, labels, num_items=n))  # as a batch has it, whole
    close(counts(logits, (labels != -100).sum()), slopes(loss_of, logits, labels)[0])


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_labels_of_any_integer_dtype(dtype, rng):
    logits, labels = jnp.asarray(rng.normal(size=(4, 5))), np.asarray([0, 4, 2, 1])
    expected = opgrad.softmax_cross_entropy_loss_only(np.asarray(logits), labels)
    for call in (opgrad.jax.cross_entropy, jax.jit(opgrad.jax.cross_entropy)):
        close(call(logits, jnp.asarray(labels, dtype)), expected)
    wrong = jnp.asarray([0, 4, 100, 1], dtype)
    with pytest.raises(ValueError, match=r"cross_entropy: labels\[2\] is 100, expected 0 to 4"):
        opgrad.jax.cross_entropy(logits, wrong)


def test_shift(rng):
    logits, labels = jnp.asarray(rng.normal(size=(2, 5, 4))), jnp.asarray(rng.integers(0, 5, (2, 4)))
    moved = jnp.concatenate([labels[:, 1:], jnp.full((2, 1), -100)], 1)
    found = jax.jit(lambda x: opgrad.jax.cross_entropy(x, labels, shift=1))(logits)
    close(found, opgrad.jax.cross_entropy(logits, moved))


def test_where_nothing_counts():
    logits, labels = jnp.ones((3, 4)), jnp.full(3, -100)
    for call in (opgrad.jax.cross_entropy, lambda x, y: opgrad.jax.linear_cross_entropy(x, jnp.eye(4), y)):
        loss, slope = jax.jit(jax.value_and_grad(call))(logits, labels)
        assert loss == 0
        assert not slope.any()


# --- errors -----------------------------------------------------------------------------------------------------------


def test_wrong_labels():
    logits, labels = jnp.zeros((2, 3)), jnp.asarray([0, 3])
    with pytest.raises(ValueError, match=f"^{MESSAGE}"):
        opgrad.jax.cross_entropy(logits, labels)
    with pytest.raises(ValueError, match=f"^{MESSAGE}"):
        jax.grad(opgrad.jax.cross_entropy)(logits, labels)
    step = jax.jit(jax.value_and_grad(opgrad.jax.cross_entropy))
    for _ in range(2):
        with pytest.raises(RAISED, match=MESSAGE):
            jax.block_until_ready(step(logits, labels))
        assert jnp.isfinite(step(logits, jnp.asarray([0, 2]))[0])  # the function goes on
    with pytest.raises(RAISED, match=r"gather: indices\[1\] is 5, expected"):
        jax.block_until_ready(jax.jit(opgrad.jax.embedding)(jnp.asarray([0, 5]), jnp.ones((3, 2))))


REFUSED = [
    (ValueError, "reduction is 'all', expected one of", {"reduction": "all"}),
    (ValueError, r"num_items has shape \(2,\), expected one number", {"num_items": np.ones(2)}),
    (ValueError, "temperature is -1.0, expected a finite number above 0", {"temperature": -1.0}),
    (ValueError, "shift is -1, expected an int of at least 0", {"shift": -1}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "options"), REFUSED)
def test_refused_options(error, message, options):
    logits, labels = jnp.zeros((2, 3)), jnp.asarray([0, 1])
    for call in (opgrad.jax.cross_entropy, jax.jit(lambda *a: opgrad.jax.cross_entropy(*a, **options))):
        with pytest.raises(error, match=f"^cross_entropy: {message}"):
            call(logits, labels, **(options if call is opgrad.jax.cross_entropy else {}))


def test_refused_arrays():
    logits, labels, loss = jnp.zeros((2, 3)), jnp.asarray([0, 1]), jax.jit(opgrad.jax.cross_entropy)
    for arguments, error, message in [
        ((logits, labels > 0), TypeError, "cross_entropy: labels has dtype bool, expected integers or probabilities"),
        ((logits, labels[:1]), ValueError, "cross_entropy: labels has shape (1,), expected (2,)"),
        ((logits, jnp.zeros((2, 4))), ValueError, "cross_entropy: labels has shape (2, 4), expected (2, 3)"),
        ((logits, labels, jnp.ones(2)), ValueError, "cross_entropy: weight has shape (2,), expected (3,)"),
        ((logits, labels, jnp.ones(())), ValueError, "cross_entropy: weight has shape (), expected (3,)"),
        ((logits, labels, jnp.ones((1, 3))), ValueError, "cross_entropy: weight has shape (1, 3), expected (3,)"),
        ((logits.astype(int), labels), TypeError, "cross_entropy: logits has dtype int64, expected one of"),
    ]:
        for call in (loss, opgrad.jax.cross_entropy):
            with pytest.raises(error) as caught:
                call(*arguments)
            assert str(caught.value).startswith(message)
    with pytest.raises(ValueError, match=r"^cross_entropy: ignore_index is 1, expected none for class probabilities"):
        opgrad.jax.cross_entropy(logits, logits, ignore_index=1)
    linear = opgrad.jax.linear_cross_entropy
    with pytest.raises(ValueError, match=r"^linear_cross_entropy: x has shape \(2, 3\) and linear_weight \(4, 2\)"):
        linear(logits, jnp.ones((4, 2)), labels)
    with pytest.raises(TypeError, match=r"^linear_cross_entropy: linear_weight has dtype float32, expected float64"):
        linear(logits, jnp.ones((4, 3), "float32"), labels)


# --- devices and threads ----------------------------------------------------------------------------------------------


def mesh_of(kind):
    return jax.make_mesh((2,), ("d",), axis_types=(kind,))


KINDS = [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit] if hasattr(jax.sharding, "AxisType") else []


def given(rng):
    labels = jnp.asarray([0, 1, -100, 4, 2, 2, 0, 3])
    return jnp.asarray(rng.normal(size=(8, 5))), labels, jnp.asarray(rng.random(5) + 0.5)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "lse_square_scale": 0.1, "reduction": "none"}], ids=str
)
def test_sharded_arrays(kind, options, rng):
    logits, labels, weight = given(rng)
    mesh = mesh_of(kind)
    rows, everywhere = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    spread = jax.device_put(logits, rows), jax.device_put(labels, rows), jax.device_put(weight, everywhere)

    ours, theirs = (
        lambda x, y, w, of=function: (of(x, y, w, **options) ** 2).sum()
        for function in (opgrad.jax.cross_entropy, loss_of)
    )
    with jax.set_mesh(mesh):
        close(opgrad.softmax(spread[0]), jax.nn.softmax(logits))
        close(jax.jit(jax.grad(lambda x: (opgrad.softmax(x) ** 2).sum()))(spread[0]),
              jax.grad(lambda x: (jax.nn.softmax(x) ** 2).sum())(logits))  # fmt: skip
        found = jax.jit(jax.value_and_grad(ours, argnums=(0, 2)))(*spread)
        close(found, slopes(theirs, logits, labels, weight))
        with pytest.raises(ValueError, match=r"^cross_entropy: labels\[3\] is 9, expected 0 to 4 or ignore_index -100"):
            opgrad.jax.cross_entropy(spread[0], jax.device_put(labels.at[3].set(9), rows))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("checked", [True, False])
def test_shard_map(kind, checked, rng):
    logits, labels, weight = given(rng)
    mesh = mesh_of(kind)
    rows = NamedSharding(mesh, P("d"))
    spread = (
        jax.device_put(logits, rows),
        jax.device_put(labels, rows),
        jax.device_put(weight, NamedSharding(mesh, P())),
    )

    def both(function, options):
        def mine(x, y, w):
            number = jax.lax.psum((y != -100).sum(), "d")
            return jax.lax.psum(function(x, y, w, num_items=number, **options), "d")

        specs = {"in_specs": (P("d"), P("d"), P()), "out_specs": P(), "check_vma": checked}
        whole = jax.shard_map(mine, mesh=mesh, **specs)
        found = jax.jit(jax.value_and_grad(whole, argnums=(0, 2)))(*spread)
        alone = lambda x, y, w: function(x, y, w, num_items=(y != -100).sum(), **options)  # noqa: E731
        close(found, jax.jit(jax.value_and_grad(alone, argnums=(0, 2)))(logits, labels, weight))

    options = {"label_smoothing": 0.1, "lse_square_scale": 0.1, "temperature": jnp.asarray(2.0)}
    both(opgrad.jax.cross_entropy, options)
    eye = jnp.eye(5)
    both(lambda x, y, w, **o: opgrad.jax.linear_cross_entropy(x, eye, y, None, w, **o), {})
    spec = {"mesh": mesh, "in_specs": P("d"), "out_specs": P("d"), "check_vma": checked}
    slope = jax.jit(jax.grad(lambda x: (jax.shard_map(opgrad.softmax, **spec)(x) ** 2).sum()))
    close(slope(spread[0]), jax.grad(lambda x: (jax.nn.softmax(x) ** 2).sum())(logits))


def test_wrong_labels_where_other_devices_would_wait():
    """NaN in place of an error, after which XLA waits in collectives until it ends the process."""
    logits, labels = jnp.ones((8, 5)), jnp.zeros(8, "int32").at[1].set(9)
    mesh = mesh_of(KINDS[0])
    rows = NamedSharding(mesh, P("d"))
    spread = jax.device_put(logits, rows), jax.device_put(labels, rows)
    for checked in (True, False):
        specs = {"in_specs": (P("d"), P("d")), "out_specs": (P(), P("d")), "check_vma": checked}

        def mine(x, y):
            loss, slope = jax.value_and_grad(opgrad.jax.cross_entropy)(x, y)
            return jax.lax.psum(loss, "d"), slope

        loss, slope = jax.jit(jax.shard_map(mine, mesh=mesh, **specs))(*spread)
        assert jnp.isnan(loss)
        assert jnp.isnan(slope[:4]).all()
        assert jnp.isfinite(slope[4:]).all()
    found = jax.pmap(opgrad.jax.embedding, in_axes=(0, None))(labels.reshape(2, 4), logits)
    assert jnp.isnan(found[0]).all()
    assert (found[1] == 1).all()
    for _ in range(2):
        with pytest.raises(RAISED, match=r"cross_entropy: labels\[1\] is 9, expected 0 to 4"):
            jax.block_until_ready(jax.jit(opgrad.jax.cross_entropy)(*spread))


def test_pmap(rng):
    logits, labels, _ = given(rng)
    given_to_each = logits.reshape(2, 4, 5), labels.reshape(2, 4)
    found = jax.pmap(jax.grad(opgrad.jax.cross_entropy))(*given_to_each)
    close(list(found), [slopes(loss_of, *pair)[1] for pair in zip(*given_to_each, strict=True)])


def test_steps_in_threads_do_not_wait_for_each_other(rng):
    logits = [jax.device_put(jnp.asarray(rng.normal(size=(64, 1000)), "float32"), each) for each in jax.devices("cpu")]
    labels = jnp.asarray(rng.integers(0, 1000, 64))
    step = jax.jit(lambda x, y: x - jax.grad(opgrad.jax.cross_entropy)(x * 1.5, y))

    def work(number):
        x = logits[number % 2]
        y = jax.device_put(labels, x.device)
        for _ in range(20):
            x = step(x, y)
        jax.block_until_ready(x)

    call_at_once(6, work)


# --- the handler ------------------------------------------------------------------------------------------------------


def test_compiled_functions_are_kept_on_disk(tmp_path):
    """A second process finds what the first one has compiled, at addresses of its own."""
    code = """
import jax, jax.numpy as jnp, opgrad.jax
jax.config.update("jax_compilation_cache_dir", {folder!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
step = jax.jit(jax.value_and_grad(opgrad.jax.cross_entropy))
print(float(step(jnp.zeros((3, 4)), jnp.asarray([0, 1, -100]))[0]))
"""
    text = code.format(folder=str(tmp_path))
    runs = []
    for _ in range(2):
        runs.append((run_python(text), sorted(each.name for each in tmp_path.iterdir() if "atime" not in each.name)))
    assert runs[0] == runs[1]
    assert abs(float(runs[0][0]) - np.log(4)) < 1e-6
    assert runs[0][1]


def test_a_function_that_was_not_traced_here(rng):
    x, called = jnp.asarray(rng.normal(size=(3, 17))), dict(calls._called)
    compiled = jax.jit(lambda x: opgrad.softmax(x, 0)).lower(x).compile()
    try:
        calls._called.clear()
        with pytest.raises(RAISED, match="compiled in another process and not traced in this one: trace it again"):
            jax.block_until_ready(compiled(x))
    finally:
        calls._called.update(called)


def test_working_memory_that_is_not_there(rng, monkeypatch):
    """A plan whose working memory cannot be had raises, and the function goes on."""
    x, indices = jnp.asarray(rng.normal(size=(3, 4))), jnp.asarray([0, 1, 2])
    step = jax.jit(lambda i, x: opgrad.gather_grad((4000, 4), i, x))
    expected = np.asarray(step(indices, x))
    source, function = pool._source(), ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    refused = function(lambda pool, size: 0)
    kept = source.take
    source.take = ctypes.cast(refused, ctypes.c_void_p).value
    try:
        with pytest.raises((*RAISED, MemoryError), match=r"gather_grad: cannot allocate \d+ bytes of working memory"):
            jax.block_until_ready(step(indices, x))
    finally:
        source.take = kept
    np.testing.assert_array_equal(np.asarray(step(indices, x)), expected)


def test_through_python_where_structures_are_unknown(monkeypatch, rng):
    monkeypatch.undo()
    monkeypatch.setattr(calls, "_native", [])
    monkeypatch.setattr(calls, "_trial", lambda: False)
    x, labels = jnp.asarray(rng.normal(size=(4, 5))), jnp.asarray([0, 1, -100, 2])
    with pytest.warns(RuntimeWarning, match="call opgrad through Python, because the structures of jaxlib"):
        found = jax.jit(jax.value_and_grad(opgrad.jax.cross_entropy))(x, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(found, slopes(loss_of, x, labels))
        close(jax.jit(jax.vmap(opgrad.softmax))(x), jax.nn.softmax(x))


def test_a_trial_that_gives_other_numbers(monkeypatch):
    assert calls._trial()
    assert not calls._reason_against()
    monkeypatch.setattr(np, "array_equal", lambda *_: False)
    assert "structures" in calls._reason_against()


def test_what_is_traced_where_there_is_a_gpu(monkeypatch):
    """XLA chooses by where the function runs: the handler on the CPU, Python elsewhere."""
    monkeypatch.undo()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x = jnp.ones((3, 4), "float32")
    traced = str(jax.make_jaxpr(opgrad.softmax)(x))
    assert "ffi_call[" in traced
    assert "pure_callback[" in traced
    slope = jax.jit(jax.grad(lambda x: opgrad.softmax(x)[0, 0]))
    close(slope(x), jax.grad(lambda x: jax.nn.softmax(x)[0, 0])(x), "float32")
    assert "callback" not in slope.lower(x).as_text()
