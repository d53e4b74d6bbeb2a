"""Softmax with attributes on tensors: the bits of NumPy's results, its dtypes and `out`, gradients, and refusals.

A call's form and dtypes have a kernel of their own: most are those of operators/test_attributes, or of other tests
here.
"""

import functools

import numpy as np
import pytest
from primitive_attributes import SHARED, every_attribute, moved, operands_of_many_kinds, same_as_numpys, typed_call
from samples import bits, cast, several

import opgrad
from opgrad import Dropout, post_ops
from opgrad.contract import FLOAT8
from opgrad.ops.reference.primitive import TYPES

torch = pytest.importorskip("torch")

from tensors import array, tensor  # noqa: E402

import opgrad.torch  # noqa: E402
from opgrad.call.libraries import torch_tensors as tensors  # noqa: E402

SHAPE = (3, 4, 5)
gradcheck = functools.partial(torch.autograd.gradcheck, fast_mode=True)  # along random directions


def same(name, *args, **options):
    """Twice: as a new signature, and a known one."""
    for _ in range(2):
        found = same_as_numpys(torch.Tensor, tensor, array, name, *args, **options)
    return found


ATTRIBUTES = {
    "where": lambda rng: {"where": rng.random(33) < 0.6, "logit_scale": 2.0, "stats": True},
    "scales": lambda rng: {"result_scale": 3, "out_scale": 0.5, "accumulation": "any"},
    "dropout": lambda rng: {"dropout": Dropout(0.4, 2**63 + 5, -7, mask=True)},
    "post-op": lambda rng: {"post_ops": [post_ops.add(cast(rng.normal(size=33), "float32"))]},
    "save": lambda rng: {"stats": True, "save": True, "axis": (1, 2)},
    "everything": every_attribute,
}


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "attributes"), [*(("softmax", each) for each in ATTRIBUTES), ("log_softmax", "where")]
)
def test_attributes_give_the_bits_of_arrays(name, attributes, rng):
    same(name, cast(rng.normal(size=SHARED), "float32"), **ATTRIBUTES[attributes](rng))


@pytest.mark.parametrize("number", range(len(TYPES)))
def test_dtypes(number, rng):
    x, given = typed_call(number, rng)
    found = same("softmax", x, **given)
    again = opgrad.softmax(tensor(x), **given | {"out_dtype": getattr(torch, given["out_dtype"])})
    assert bits(array(again)) == bits(array(found[0]))


def test_gradients_give_the_bits_of_arrays(rng):
    dy, y = cast(rng.normal(size=SHARED), "float32"), cast(rng.uniform(-1, 1, SHARED), "float32")
    for name in ("softmax_grad", "log_softmax_grad"):
        same(name, dy, y, where=rng.random(33) < 0.6, logit_scale=2.0, dropout=Dropout(0.3, 1))
    given = {"post_ops": operands_of_many_kinds(rng, "float16"), "post_op_grads": True, "out_dtype": "float32"}
    found = same("softmax_grad", cast(dy, "float8_e5m2"), cast(y, "float8_e4m3fn"), **given, axis=1)
    assert [(tuple(each.shape), each.dtype) for each in found[1:]] == [
        ((4, 1), torch.float16), (SHARED, torch.bfloat16), ((), torch.float64), ((33,), torch.float16),
    ]  # fmt: skip


def test_layouts(rng):
    """Nothing is copied: strides of any kind, an operand that repeats, a result that lies as x does."""
    x = torch.from_numpy(rng.normal(size=(5, 3, 8)))[:, :, ::2].permute(1, 2, 0)
    operand = torch.from_numpy(rng.normal(size=(3, 1, 5))).expand(3, 4, 5)
    found = opgrad.softmax(x, 1, post_ops=[post_ops.mul(operand)], stats=True)
    expected = opgrad.softmax(x.numpy(), 1, post_ops=[post_ops.mul(operand.numpy())], stats=True)
    assert [bits(array(each)) for each in found] == [bits(each) for each in expected]
    assert found[0].stride() == torch.empty_like(x).stride()
    assert found[1].stride() == (5, 5, 1)


def test_empty_tensors():
    for shape in [(0, 3), (2, 0)]:
        same("softmax", np.zeros(shape, "float32"), out_dtype="uint8")


def test_one_plan_for_each_form(rng):
    """Calls that differ in one attribute alone do not share a plan; those that differ in numbers do."""
    x = torch.from_numpy(rng.normal(size=(2, 33)).astype("float32"))
    tensors._host.kept.values.clear()
    for _ in range(2):
        for mask in (False, True):
            for seed in (1, 2):
                results = several(opgrad.softmax(x, dropout=Dropout(0.5, seed, mask=mask)))
                assert len(results) == 1 + mask
                expected = several(opgrad.softmax(x.numpy(), dropout=Dropout(0.5, seed, mask=mask)))
                assert [bits(array(each)) for each in results] == [bits(each) for each in expected]
    assert len(tensors._host.kept.values) == 2
    for bias in (1.0, 2.0):
        found = opgrad.softmax(x, post_ops=[post_ops.mul(bias)])
        torch.testing.assert_close(found, torch.softmax(x, -1) * bias)
    assert len(tensors._host.kept.values) == 3


# --- out= -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"), [("float32", "float32"), ("float32", "bfloat16"), ("float8_e5m2", "uint8")]
)
def test_out(source, target, rng):
    x = cast(rng.normal(size=(4, 33)), source)
    out = torch.empty((4, 33), dtype=getattr(torch, target))
    assert opgrad.softmax(tensor(x), out=out, result_scale=100.0) is out
    assert bits(array(out)) == bits(opgrad.softmax(x, out_dtype=target, result_scale=100.0))


def test_several_results_in_out(rng):
    x = tensor(cast(rng.normal(size=SHARED), "float32"))
    expected = opgrad.softmax(x, dropout=Dropout(0.5, mask=True))
    out = tuple(torch.empty_like(each) for each in expected)
    assert opgrad.softmax(x, dropout=Dropout(0.5, mask=True), out=out) is out
    assert all(map(torch.equal, out, expected))
    assert opgrad.softmax(x, out=x, result_scale=2.0) is x


def test_out_refused(rng):
    x, memory = torch.randn(3, 4), torch.zeros(5, 4)
    with pytest.raises(TypeError, match="softmax: out is a PyTorch tensor, expected a tuple of 2 arrays"):
        opgrad.softmax(x, stats=True, out=x)
    with pytest.raises(ValueError, match="softmax: out for y overlaps x, expected x itself or separate memory"):
        opgrad.softmax(memory[:3], result_scale=2.0, out=memory[1:4])
    with pytest.raises(ValueError, match=r"overlaps post_ops\[0\]'s operand, expected separate memory"):
        opgrad.softmax(x, post_ops=[post_ops.add(memory[:3])], out=memory[:3])
    with pytest.raises(RuntimeError, match="x requires grad, and a call with out= is not differentiated"):
        opgrad.softmax(x.clone().requires_grad_(), result_scale=2.0, out=x)
    with torch.no_grad():
        assert opgrad.softmax(x.clone().requires_grad_(), result_scale=2.0, out=x) is x


# --- autograd -------------------------------------------------------------------------------------------------------


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "axis"), [("softmax", 1), ("log_softmax", (1, 2))])
def test_gradients_of_x_and_operands(name, axis):
    """With every attribute that a gradient depends on; log-probabilities of what does not count are infinite."""
    condition, where = torch.tensor([True, False, True, True, False]), torch.tensor([[True], [True], [False], [True]])
    given = {"logit_scale": 0.5, "result_scale": 2.0, "dropout": Dropout(0.3, 7), "out_scale": 3.0, "axis": axis}
    given |= {"where": where} if name == "softmax" else {}

    def function(x, factor, bias, other):
        chain = [post_ops.mul(factor), post_ops.add(bias), post_ops.select(condition, other), post_ops.swish(1.0)]
        return getattr(opgrad, name)(x, post_ops=chain, **given)

    assert gradcheck(function, (double(*SHAPE), double(4, 1), double(*SHAPE), double(5)))
    x, factor, other = torch.ones(SHAPE).double(), torch.ones(4, 1).double(), torch.ones(5).double()
    assert gradcheck(lambda bias: function(x, factor, bias, other), double(*SHAPE))


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_gradients_of_the_saved_result_and_of_the_log_sum_exp(name):
    """Log-probabilities of what does not count are infinite, so they are compared as probabilities."""
    x, where = double(3, 5), torch.tensor([True, True, False, True, True])
    given = {"logit_scale": 0.5, "result_scale": 2.0, "where": where, "save": True, "stats": True}
    numbers = torch.exp if name == "log_softmax" else torch.clone

    def function(x):
        y, _, saved = getattr(opgrad, name)(x, **given)
        return numbers(y), numbers(saved)

    assert gradcheck(function, x)
    y, stats, saved = getattr(opgrad, name)(x, **given)
    z = torch.where(where, x * 0.5, -torch.inf)
    lse = z.logsumexp(-1, keepdim=True)
    torch.testing.assert_close((numbers(saved), stats.double()), (z.softmax(-1), lse))
    found, expected = (each.square().sum() + 3 * numbers(y).sum() for each in (stats, lse))
    torch.testing.assert_close(*(torch.autograd.grad(each, x, retain_graph=True)[0] for each in (found, expected)))


def test_forward_with_gradient_is_the_forward_without():
    x, gate, row = torch.rand(4, 6), torch.rand(4, 6), torch.rand(6)
    options = {"where": torch.rand(4, 6) < 0.8, "post_ops": [post_ops.mul(gate), post_ops.mul(row)], "stats": True}
    options["dropout"] = Dropout(0.25, seed=3, mask=True)
    expected = opgrad.softmax(x, **options)
    found = opgrad.softmax(x.clone().requires_grad_(), **options)
    assert [each.requires_grad for each in found] == [True, True, False]
    assert all(map(torch.equal, found, expected))
    x = torch.randn(4, 33).requires_grad_()
    rough = x.detach().to(torch.float8_e5m2).requires_grad_()
    assert not opgrad.softmax(rough, out_dtype="uint8", result_scale=100.0).requires_grad
    with torch.no_grad():
        assert not opgrad.softmax(x, result_scale=100.0)[0].requires_grad


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_dtypes_of_gradients(dtype):
    """Each gradient has the dtype of its tensor, whatever that of the result."""
    x = torch.randn(SHAPE).to(getattr(torch, dtype)).requires_grad_()
    bias = torch.randn(5, dtype=torch.float16, requires_grad=True)
    y = opgrad.softmax(x, out_dtype="float32", post_ops=[post_ops.mul(bias)])
    dx, dbias = torch.autograd.grad(y.square().sum(), (x, bias))
    assert (dx.dtype, dbias.dtype) == (x.dtype, bias.dtype)
    exact, exact_bias = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    expected = torch.autograd.grad((torch.softmax(exact, -1) * exact_bias).square().sum(), (exact, exact_bias))
    rough = dtype in FLOAT8
    tolerance = {"rtol": 0.2, "atol": 0.1} if rough else {"rtol": 2e-2, "atol": 1e-2}
    for found, wanted in zip((dx, dbias), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, **tolerance)


def test_a_bias_is_summed_in_float64():
    """As the gradient operator sums it: bit for bit what it gives for the same arrays."""
    x, bias = torch.randn(4096, 8), torch.randn(8).half().requires_grad_()
    y = opgrad.softmax(x, post_ops=[post_ops.mul(bias)])
    dy = torch.randn(4096, 8)
    saved = opgrad.softmax(x)
    operand = post_ops.mul(bias.detach())
    _, expected = opgrad.softmax_grad(dy, saved, post_ops=[operand], post_op_grads=True)
    assert torch.equal(torch.autograd.grad(y, bias, dy)[0], expected)


def test_seeds_may_change_before_backward():
    x, dropout = torch.randn(20, 30, requires_grad=True), Dropout(0.5, 1)
    y = opgrad.softmax(x, dropout=dropout)
    dropout.seed = 2
    _, saved = opgrad.softmax(x.detach(), dropout=Dropout(0.5, 1), save=True)  # the probabilities of the same call
    expected = opgrad.softmax_grad(torch.ones(20, 30), saved, dropout=Dropout(0.5, 1))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_changed_operands_are_noticed():
    x, factor = torch.randn(4096, 8, requires_grad=True), torch.randn(8).half()
    y = opgrad.softmax(x, post_ops=[post_ops.mul(factor)])
    factor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_has_no_gradient():
    x = torch.randn(3, 4, requires_grad=True)
    y = opgrad.softmax(x, post_ops=[post_ops.round()])
    with pytest.raises(ValueError, match=r"softmax_grad: post_ops\[0\] is round, which has no gradient"):
        y.sum().backward()
    with pytest.raises(NotImplementedError, match=r"softmax: a call with attributes.* is differentiable once, without"):
        torch.autograd.grad(opgrad.softmax(x, dropout=Dropout(0.5, 1)).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"softmax_grad: a call with attributes.* has no gradient: detach"):
        opgrad.softmax_grad(x, x, dropout=Dropout(0.5, 1))
    with torch.no_grad():
        opgrad.softmax_grad(x, x, dropout=Dropout(0.5, 1))


# --- refusals -------------------------------------------------------------------------------------------------------


def test_libraries_are_not_mixed():
    x, mask = torch.randn(3, 4), np.ones(4, bool)
    chains = [post_ops.exp(), post_ops.add(np.ones(4))], [post_ops.add([1.0, 2.0, 3.0, 4.0])], [post_ops.add(x)]
    for given, options, message in [
        (x, {"where": mask}, "where is a NumPy array, expected a PyTorch tensor, as x is"),
        (x, {"post_ops": chains[0]}, r"post_ops\[1\]'s operand is a NumPy array, expected a PyTorch tensor"),
        (x, {"post_ops": chains[1]}, r"post_ops\[0\]'s operand is list, expected a PyTorch tensor"),
        (x.numpy(), {"post_ops": chains[2]}, r"x is a NumPy array, expected a PyTorch tensor, as post_ops\[0\]'s"),
    ]:
        with pytest.raises(TypeError, match=f"^softmax: {message}"):
            opgrad.softmax(given, **options)


def test_errors_are_numpys(rng):
    x = np.zeros((3, 4), "float32")
    for options in [
        {"where": np.ones(3, bool)},
        {"where": np.ones(4, "uint8")},
        {"post_ops": [post_ops.add(np.ones((3, 4, 1)))]},
        {"post_ops": [post_ops.add(np.ones(4, "int64"))]},
        {"post_ops": post_ops.exp()},
        {"dropout": 0.5},
        {"logit_scale": float("inf")},
        {"out_dtype": "int32"},
        {"stats": 1},
        {"axis": 5, "save": True},
    ]:
        with pytest.raises((TypeError, ValueError)) as expected:
            opgrad.softmax(x, **options)
        with pytest.raises((TypeError, ValueError)) as found:
            opgrad.softmax(tensor(x), **moved(options, tensor))
        assert (found.type, str(found.value)) == (expected.type, str(expected.value))


def test_tensor_subclasses():
    class Tagged(torch.Tensor):
        pass

    with pytest.raises(NotImplementedError, match="tensor subclasses"):
        opgrad.softmax(torch.randn(3, 4).as_subclass(Tagged), stats=True)


def test_compile():
    """The compiler leaves the call to the interpreter; where it must not, it says why."""

    def function(x):
        return opgrad.softmax(x * 2, result_scale=2.0) + 1

    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.compile(function, backend="aot_eager")(x), function(x))
    torch._dynamo.reset()
    with pytest.raises((NotImplementedError, torch._dynamo.exc.Unsupported), match="result_scale is given under"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(x)
