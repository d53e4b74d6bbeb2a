"""torch.compile: no graph breaks, sizes that change, and fake tensors that are what the real ones will be."""

import pytest
from samples import each_kind, sample, several

import opgrad

torch = pytest.importorskip("torch")

from tensors import on_tensors  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import opgrad.torch  # noqa: E402
from opgrad.torch.operators import OPERATORS  # noqa: E402

LABELS = torch.tensor([3, 1, -100, 0, 2, 2])
INDICES = torch.tensor([[0, 1, -1], [5, 5, 2]])
DY = torch.randn(6, 4)

FUNCTIONS = {
    "softmax": lambda x: opgrad.torch.softmax(x, dim=-1),
    "tanh": opgrad.torch.tanh,
    "quick_gelu": lambda x: opgrad.torch.quick_gelu(x, 1.0),
    "leaky_relu": lambda x: opgrad.torch.leaky_relu(x, negative_slope=0.2),
    "gather": lambda x: opgrad.torch.gather(x, INDICES, 0),
    "embedding": lambda x: opgrad.torch.embedding(INDICES, x, padding_idx=5),
    "cross_entropy": lambda x: opgrad.torch.cross_entropy(x, LABELS),
    "losses": lambda x: opgrad.torch.cross_entropy(x, LABELS, reduction="none"),
    "in place": lambda x: opgrad.torch.cross_entropy(x, LABELS, inplace_backward=True),
    "smoothed": lambda x: opgrad.torch.cross_entropy(x, LABELS, label_smoothing=0.1),
    "half precision": lambda x: opgrad.torch.cross_entropy(x.half(), LABELS),
    "plain": lambda x: opgrad.softmax(x, axis=0),
    "plain gradient": lambda x: opgrad.softmax_grad(DY, x),
    "plain by name": lambda x: opgrad.softmax_grad(y=x, dy=DY, axis=(0, 1)),
    "plain gather_grad": lambda x: opgrad.gather_grad((9, 4), LABELS.clamp(0), x),
    "plain loss": lambda x: opgrad.softmax_cross_entropy_loss_and_grad(
        x, LABELS, ignore_index=-100, out_dtype=(torch.float64, None)
    ),
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def with_gradient(function, x):
    """Results and the gradient of their sum."""
    x = x.detach().clone().requires_grad_()
    results = several(function(x))
    sum(result.sum() for result in results).backward()
    return *(result.detach() for result in results), x.grad


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.one_case
def test_no_graph_breaks(dynamic):
    """All functions in one graph, each on an input of its own."""

    def every(xs):
        results = [function(x) for function, x in zip(FUNCTIONS.values(), xs.unbind(), strict=True)]
        return tuple(each for result in results for each in several(result))

    xs = torch.randn(len(FUNCTIONS), 6, 4)
    compiled = torch.compile(every, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for _ in range(2):
        torch.testing.assert_close(with_gradient(compiled, xs), with_gradient(every, xs))


SIZED = {
    "softmax": lambda x, indices: opgrad.torch.softmax(x),
    "cross_entropy": opgrad.torch.cross_entropy,
    "embedding": lambda x, indices: opgrad.torch.embedding(indices, x),
    "gather_grad": lambda x, indices: opgrad.gather_grad((x.shape[0] + 3, x.shape[1]), indices, x),
    "quick_gelu": lambda x, indices: opgrad.torch.quick_gelu(x),
}


def test_other_sizes_are_not_compiled_anew():
    def every(x, indices):
        return tuple(function(x, indices) for function in SIZED.values())

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(every, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for size in (5, 6, 9, 13):
        x, indices = torch.randn(size, size + 4), torch.randint(0, size, (size,))
        ours = with_gradient(lambda x, indices=indices: compiled(x, indices), x)
        torch.testing.assert_close(ours, with_gradient(lambda x, indices=indices: every(x, indices), x))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1
    assert counts[0] <= 2  # a graph with a floating-point attribute is started over once


def test_a_function_itself_can_be_compiled():
    """Default arguments of what is compiled become symbols, axes and slopes among them."""
    x = torch.randn(3, 5)
    for function in (opgrad.torch.softmax, opgrad.torch.quick_gelu, opgrad.torch.leaky_relu):
        torch.testing.assert_close(torch.compile(function, backend="aot_eager", dynamic=True)(x), function(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_out(dynamic):
    labels = LABELS.clamp(0)

    def into(x, y, loss):
        opgrad.softmax(x * 2, out=y)
        return opgrad.softmax_cross_entropy_loss(x, labels, out=(loss, x))

    compiled = torch.compile(into, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    x, y, loss = torch.randn(6, 4), torch.zeros(6, 4), torch.zeros(())
    logits = x.clone()
    assert compiled(x, y, loss)[1] is x
    torch.testing.assert_close(y, torch.softmax(logits * 2, 1))
    torch.testing.assert_close(x, torch.log_softmax(logits, 1))
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels))


def test_autocast():
    def loss(x):
        with torch.autocast("cpu", torch.bfloat16):
            return opgrad.torch.cross_entropy(x, LABELS)

    x = torch.randn(6, 4).bfloat16()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    ours = with_gradient(compiled, x)
    assert [each.dtype for each in ours] == [torch.float32, torch.bfloat16]
    torch.testing.assert_close(ours, with_gradient(loss, x))


# --- the registered operators ---------------------------------------------------------------------------------------


def tensor_arguments(op, shape, rng, layout=lambda x: x, **options):
    """A sample's arguments as tensors, in the order of the schema."""
    given = on_tensors(sample(op, shape, "float32", rng, axis=1, **options))
    laid_out = {name: layout(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    return OPERATORS[op.name].arguments(laid_out)


def test_schemas():
    schemas = {name: str(operator.overload._schema) for name, operator in OPERATORS.items()}
    assert schemas["softmax_grad"] == "opgrad::softmax_grad(Tensor dy, Tensor y, int[1] axis=[-1]) -> Tensor"
    assert schemas["softmax_cross_entropy_loss_and_grad"] == (
        "opgrad::softmax_cross_entropy_loss_and_grad(Tensor logits, Tensor labels, Tensor? weight=None, "
        'SymInt? ignore_index=None, str reduction="mean", ScalarType? loss_dtype=None, '
        "ScalarType? dlogits_dtype=None, bool check=False) -> (Tensor, Tensor)"
    )
    assert schemas["gather_grad"] == (
        "opgrad::gather_grad(SymInt[] shape, Tensor indices, Tensor dy, SymInt axis=0, bool check=False) -> Tensor"
    )


def test_operators_can_be_called():
    x = torch.randn(3, 4)
    assert torch.equal(torch.ops.opgrad.softmax(x), opgrad.softmax(x))
    assert torch.equal(torch.ops.opgrad.softmax(x, 0), opgrad.softmax(x, 0))
    assert torch.equal(torch.ops.opgrad.softmax(x, [0, 1]), opgrad.softmax(x, (0, 1)))
    y = torch.ops.opgrad.softmax(x.requires_grad_(), axis=0)
    (dx,) = torch.autograd.grad(y, x, torch.ones(3, 4))
    torch.testing.assert_close(dx, torch.zeros(3, 4), atol=1e-6, rtol=0)


@each_kind
def test_opcheck(op, rng):
    """PyTorch's own tests of a registered operator: schema, fake tensors, autograd, compilation.

    All are registered from declarations; fake tensors and derivatives are tested for each of them.
    """
    for optional in (False, True):
        arguments = tensor_arguments(op, (4, 6, 3), rng, optional=optional, reduction="none")
        names = OPERATORS[op.name].names
        for name, value in zip(names, arguments, strict=True):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and name != "weight":
                value.requires_grad_()
        torch.library.opcheck(OPERATORS[op.name].overload, tuple(arguments))


LAYOUTS = {
    "contiguous": lambda x: x,
    "permuted": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "sliced": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape) if x.dim() else x,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_tensors_are_laid_out_as_the_real_ones(op, layout, rng):
    for reduction in ("mean", "none"):
        arguments = tensor_arguments(op, (4, 6, 3), rng, LAYOUTS[layout], reduction=reduction)
        real = OPERATORS[op.name].overload(*arguments)
        with FakeTensorMode() as mode:
            faked = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in arguments]
            fake = OPERATORS[op.name].overload(*faked)
        for ours, theirs in zip(several(fake), several(real), strict=True):
            assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)


def test_fake_tensors_are_checked():
    with FakeTensorMode():
        x = torch.empty(3, 4)
        for error, message, call in [
            (ValueError, "y has shape", lambda: opgrad.softmax_grad(x, torch.empty(3, 3))),
            (TypeError, "x has dtype int32", lambda: opgrad.softmax(x.int())),
            (ValueError, "axis is", lambda: opgrad.softmax(x, 2)),
            (ValueError, "out for y is torch.float32 of", lambda: opgrad.softmax(x, out=torch.empty(3))),
        ]:
            with pytest.raises(error, match=message):
                call()


# --- others who trace -----------------------------------------------------------------------------------------------


def test_make_fx_sees_the_operators():
    def gradient(x):
        return torch.autograd.grad(opgrad.torch.cross_entropy(x, LABELS), x)

    graph = make_fx(gradient)(torch.randn(6, 4, requires_grad=True))
    called = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert {"opgrad.softmax_cross_entropy_loss_and_grad.default", "opgrad.scale.default"} <= called
