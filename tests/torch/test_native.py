"""Calls on tensors that never meet Python, and all that they must not pass by."""

import sys

import pytest
from samples import refused

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from callers import check_nothing_is_kept, functions_met, is_native  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import opgrad  # noqa: E402
import opgrad.torch  # noqa: E402
from opgrad.call import entries  # noqa: E402
from opgrad.call.libraries import torch_calls  # noqa: E402
from opgrad.cpu.runtime import abi  # noqa: E402

torch_calls.prepare()
pytestmark = pytest.mark.skipif(not entries.tensors.address, reason="no native calls on this PyTorch's tensors")
X = torch.linspace(-1, 1, 600).reshape(3, 200)


CALLS = {
    "softmax": (lambda x: opgrad.torch.softmax(x, -1), lambda x: torch.softmax(x, -1)),
    "keywords": (lambda x: opgrad.torch.softmax(dim=0, input=x), lambda x: torch.softmax(x, 0)),
    "log_softmax": (lambda x: opgrad.torch.log_softmax(x, dim=1), lambda x: torch.log_softmax(x, 1)),
    "relu": (opgrad.torch.relu, torch.relu),
    "leaky_relu": (lambda x: opgrad.torch.leaky_relu(x, 0.125), lambda x: F.leaky_relu(x, 0.125)),
    "plain": (opgrad.tanh, torch.tanh),
    "cross_entropy": (lambda x: opgrad.torch.cross_entropy(x, LABELS), lambda x: F.cross_entropy(x, LABELS)),
    "embedding": (lambda x: opgrad.torch.embedding(LABELS, x), lambda x: F.embedding(LABELS, x)),
}
LABELS = torch.tensor([0, 2, 1])


@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_is_native(name):
    ours, theirs = CALLS[name]
    for x in (X, X.t()[:3].contiguous(), torch.nn.Parameter(X, requires_grad=False)):
        for _ in range(3):
            torch.testing.assert_close(ours(x), theirs(x))
        assert is_native(ours, x)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_before_and_after(name):
    """Calls with a gradient and without, in turn, differentiated once and twice."""
    ours, theirs = CALLS[name]
    for turn in range(4):
        x = X.clone().requires_grad_()
        y, expected = ours(x), theirs(x)
        assert y.requires_grad
        dy = torch.ones_like(y) if turn % 2 else torch.rand_like(y)
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=turn == 2)
        (wanted,) = torch.autograd.grad(expected, x, dy, create_graph=turn == 2)
        torch.testing.assert_close(dx, wanted)
        if turn == 2 and name not in ("relu", "embedding", "leaky_relu"):
            torch.testing.assert_close(
                torch.autograd.grad(dx.square().sum(), x), torch.autograd.grad(wanted.square().sum(), x)
            )
        with torch.no_grad():
            assert not ours(x).requires_grad
        with torch.inference_mode():
            assert ours(x).is_inference()
        assert not ours(X).requires_grad
        assert not ours(X).is_inference()
    assert "TensorOperator.__call__" not in functions_met(ours, x)


def test_saved_tensors_are_watched():
    for _ in range(3):
        x = X.clone().requires_grad_()
        y = opgrad.torch.softmax(x, -1)
        y.backward(X)
    y = opgrad.torch.softmax(x, -1)
    y.detach().mul_(2)
    refused(RuntimeError, "modified by an inplace operation", y.backward, X)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        opgrad.torch.softmax(x, -1).backward(X)
    assert len(packed) == 1


def test_nodes_keep_their_hooks():
    for name, (ours, _) in CALLS.items():
        met = []
        x = X.clone().requires_grad_()
        y = ours(x)
        node = y.grad_fn
        node.register_prehook(lambda dy, met=met: met.append("before"))
        node.register_hook(lambda dx, dy, met=met: met.append("behind"))
        y.register_hook(lambda dy, met=met: met.append("result"))
        x.register_hook(lambda dx: 2 * dx)
        dy = torch.rand_like(y)
        (hooked,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        assert met == ["result", "before", "behind"], name
        y.backward(dy)
        torch.testing.assert_close(x.grad, hooked)
        plain = X.clone().requires_grad_()
        torch.testing.assert_close(2 * torch.autograd.grad(ours(plain), plain, dy)[0], hooked)
        refused(RuntimeError, "backward through the graph a second time", y.backward, dy)


def test_a_gradient_that_is_not_there():
    """A node behind hands out None: so does ours."""

    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    for ours, _ in CALLS.values():
        x = X.clone().requires_grad_()
        Stops.apply(ours(x)).sum().backward()
        assert x.grad is None


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_what_watches_is_told():
    softmax, expected = opgrad.torch.softmax, torch.softmax(X, -1)
    for _ in range(3):
        softmax(X, -1)
    with Counting() as mode:
        softmax(X, -1)
    assert "opgrad.softmax.default" in mode.seen
    torch.testing.assert_close(torch.vmap(lambda x: softmax(x, -1))(X), expected)
    torch.testing.assert_close(torch.func.grad(lambda x: softmax(x, -1)[0, 0])(X)[1:], torch.zeros(2, 200))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        assert torch.autograd.forward_ad.unpack_dual(softmax(dual, -1)).tangent is not None
    assert type(softmax(X.as_subclass(Named), -1)) is Named
    assert "softmax" in str(torch.jit.trace(lambda x: softmax(x, -1), X, check_trace=False).graph)
    half = X.to(torch.bfloat16)
    for _ in range(3):
        assert softmax(half, -1).dtype == torch.bfloat16
    with torch.autocast("cpu"):
        assert softmax(half, -1).dtype == torch.float32
    with torch._subclasses.FakeTensorMode() as fake:
        assert type(softmax(fake.from_tensor(X), -1)).__name__ == "FakeTensor"
    with torch.device("meta"):
        assert softmax(X, -1).device.type == "cpu"
    assert is_native(softmax, X, -1)
    torch.testing.assert_close(softmax(torch._neg_view(X), -1), torch.softmax(-X, -1))
    torch.testing.assert_close(softmax(X.t(), 0), expected.t())


class Quiet(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_effects_and_errors_are_as_ever():
    for _ in range(3):
        weight = torch.full((4, 8), 10.0)
        opgrad.torch.embedding(LABELS, weight, max_norm=1.0)
        assert weight[0].norm() < 1.01
    for _ in range(3):
        y = torch.empty_like(X)
        before = y._version
        opgrad.relu(X, out=y)
        assert y._version > before
    for _ in range(3):
        opgrad.torch.cross_entropy(X, LABELS)
    refused(ValueError, r"^cross_entropy: target\[1\] is 200", opgrad.torch.cross_entropy, X, torch.tensor([0, 200, 1]))
    with pytest.raises(ValueError, match=r"^cross_entropy: target\[1\] is 200"):
        opgrad.torch.cross_entropy(X.clone().requires_grad_(), torch.tensor([0, 200, 1]))
    for wrong in (None, [1.0], X.numpy()):
        with pytest.raises(TypeError):
            opgrad.torch.relu(wrong)
    lost = X.clone()
    lost.untyped_storage().resize_(0)
    refused(ValueError, "x has no memory", opgrad.torch.relu, lost)
    with Quiet():
        torch.testing.assert_close(opgrad.torch.relu(X), torch.relu(X))
    assert opgrad.torch.relu(torch.empty(0, 3)).shape == (0, 3)


def test_nothing_is_lost_or_kept():
    x = X.clone().requires_grad_()
    check_nothing_is_kept(
        [X, x, opgrad.torch.softmax],
        (lambda: opgrad.torch.softmax(X, -1), 200_000),
        (lambda: opgrad.torch.softmax(x, -1), 20_000),
    )
    y = opgrad.torch.softmax(X, -1)
    assert sys.getrefcount(y) == 2


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (abi, "WORDS", 2),  # so that the dispatch keys are not found
        (abi, "TORCH_FUNCTIONS", {**abi.TORCH_FUNCTIONS, "delete": ("a_name_of_another_release",)}),
        (abi, "TORCH_FUNCTIONS", {**abi.TORCH_FUNCTIONS, "get_dim": abi.TORCH_FUNCTIONS["get_data"]}),
        (abi, "TORCH_FUNCTIONS", {**abi.TORCH_FUNCTIONS, "get_sizes": abi.TORCH_FUNCTIONS["get_data"]}),
        (torch_calls.torch_private, "forward_state", {}),
        (torch_calls, "_watchers", list),
    ],
)
def test_a_pytorch_of_another_build_is_left_to_python(module, name, value, monkeypatch):
    """One warning, and the results that there are in any case."""
    monkeypatch.setattr(torch_calls, "_is_prepared", False)
    monkeypatch.setattr(entries, "tensors", entries.NoTensors())
    monkeypatch.setattr(module, name, value)
    softmax = torch_calls.native(lambda x: opgrad.torch.softmax(x, -1))
    with pytest.warns(RuntimeWarning, match="opgrad: tensors of PyTorch .* do not lie in memory"):
        softmax(X)
    for _ in range(3):  # a second warning would be an error
        torch.testing.assert_close(softmax(X), torch.softmax(X, -1))
    assert not is_native(softmax, X)
