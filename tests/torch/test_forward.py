"""Forward mode, torch.func and torch.vmap: every operator, on every road, against PyTorch and against single calls."""

import itertools

import pytest
from samples import sample, several, with_reductions

import opgrad
from opgrad.contract import REDUCTIONS

torch = pytest.importorskip("torch")
functional = torch.nn.functional
from tensors import on_tensors  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

import opgrad.torch  # noqa: E402

func = torch.func
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # by forward_ad itself

generator = torch.Generator().manual_seed(0)
X, T = (torch.randn(3, 4, dtype=torch.float64, generator=generator) for _ in range(2))
XS, TS = torch.stack([X, T]), torch.stack([T, X])
LABELS, INDICES = torch.tensor([0, 3, 1]), torch.tensor([[0, 2], [2, 1]])
WEIGHT = torch.tensor([0.5, 1, 2, 0.1], dtype=torch.float64)


def padded(x):
    """torch's own forward mode gives the padding row a tangent; its backward pass gives it no gradient."""
    y = functional.embedding(INDICES, x)
    return torch.where((INDICES == 2)[..., None], y.detach(), y)


def losses(ours=None, **options):
    """A loss and PyTorch's. ours: options that the first alone has."""
    return (
        lambda x: opgrad.torch.cross_entropy(x, LABELS, **options, **ours or {}),
        lambda x: functional.cross_entropy(x, LABELS, **options),
    )


FUNCTIONS = {
    "softmax": (opgrad.torch.softmax, lambda x: torch.softmax(x, -1)),
    "registered tanh": (torch.ops.opgrad.tanh, torch.tanh),
    "plain log_softmax": (lambda x: opgrad.log_softmax(x, axis=0), lambda x: torch.log_softmax(x, 0)),
    "quick_gelu": (lambda x: opgrad.torch.quick_gelu(x, 1.0), functional.silu),
    "cross_entropy": losses({"inplace_backward": True}),
    "losses": losses(weight=WEIGHT, reduction="none", ignore_index=3),
    "smoothed": losses(label_smoothing=0.1),
    "embedding": (lambda x: opgrad.torch.embedding(INDICES, x, 2), padded),
    "gather": (lambda x: opgrad.torch.gather(x, INDICES, 1).sin(), lambda x: x[:, INDICES].sin()),
    "softmax_grad": (
        lambda x: opgrad.softmax_grad(x, x.sin()),
        lambda x: x.sin() * (x - (x * x.sin()).sum(-1, keepdim=True)),
    ),
}


def squared(f):
    return lambda x: f(x).square().sum()


def dual(f, x, t):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent


def forward_over_reverse(f):
    x = X.clone().requires_grad_()
    with forward_ad.dual_level():
        y = squared(f)(forward_ad.make_dual(x, T))
        return forward_ad.unpack_dual(torch.autograd.grad(y, x, create_graph=True)[0]).tangent


ROADS = {
    "jvp": lambda f: func.jvp(f, (X,), (T,))[1],
    "dual_level": lambda f: dual(f, X, T),
    "dual_level, reverse": forward_over_reverse,
    "jacfwd": lambda f: func.jacfwd(f)(X),
    "jacrev": lambda f: func.jacrev(f)(X),
    "hessian": lambda f: func.hessian(squared(f))(X),
    "jacrev of jacfwd": lambda f: func.jacrev(func.jacfwd(squared(f)))(X),
    "jacfwd of jacfwd": lambda f: func.jacfwd(func.jacfwd(squared(f)))(X),
    "grad of jvp": lambda f: func.grad(lambda x: func.jvp(squared(f), (x,), (T,))[1])(X),
    "batch of tangents": lambda f: torch.autograd.functional.jacobian(f, X, vectorize=True, strategy="forward-mode"),
    "vmap": lambda f: torch.vmap(f)(XS),
    "vmap of another axis": lambda f: torch.vmap(f, in_dims=-1)(XS.permute(1, 2, 0)),
    "vmap of vmap": lambda f: torch.vmap(torch.vmap(f, 2))(torch.stack([XS, TS]).permute(0, 2, 3, 1)),
    "a gradient for each sample": lambda f: torch.vmap(func.grad(squared(f)))(XS),
    "vmap of jvp": lambda f: torch.vmap(lambda x, t: func.jvp(f, (x,), (t,))[1])(XS, TS),
    "jvp of vmap": lambda f: func.jvp(torch.vmap(f), (XS,), (TS,))[1],
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_roads(name, road):
    ours, theirs = FUNCTIONS[name]
    if (name, road) == ("gather", "batch of tangents"):
        theirs = ours
    torch.testing.assert_close(ROADS[road](ours), ROADS[road](theirs))


COMPILED = {
    "jvp": lambda f, compiled: compiled(lambda x, t: func.jvp(f, (x,), (t,))[1])(X, T),
    "dual_level": lambda f, compiled: compiled(lambda x, t: dual(f, x, t))(X, T),
    "hessian": lambda f, compiled: compiled(func.hessian(squared(f)))(X),
    "vmap": lambda f, compiled: compiled(torch.vmap(f))(XS),
    "a gradient for each sample": lambda f, compiled: compiled(torch.vmap(func.grad(squared(f))))(XS),
    "jvp outside": lambda f, compiled: func.jvp(compiled(f), (X,), (T,))[1],
    "dual_level outside": lambda f, compiled: dual(compiled(f), X, T),
    "vmap outside": lambda f, compiled: torch.vmap(compiled(f))(XS),
}
NOT_WHOLE = ("jvp outside", "vmap outside")  # PyTorch does not compile what it transforms afterwards


@pytest.mark.parametrize("road", COMPILED)
@pytest.mark.parametrize("name", ["softmax", "cross_entropy", "embedding"])
def test_compiled_roads(name, road):
    ours, theirs = FUNCTIONS[name]
    torch._dynamo.reset()
    found = COMPILED[road](ours, lambda f: torch.compile(f, backend="aot_eager", fullgraph=road not in NOT_WHOLE))
    torch.testing.assert_close(found, COMPILED[road](theirs, lambda f: f))


def test_compiled_code_that_is_not_traced_again():
    """Here the registered operator itself meets the dual tensor, in a level that forward_ad does not know of."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, t: dual(torch.ops.opgrad.tanh, x, t), backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X, T), dual(torch.tanh, X, T))


def test_gradients_in_batches():
    x = X.clone().requires_grad_()
    for ours, theirs in FUNCTIONS.values():
        if ours is not FUNCTIONS["cross_entropy"][0]:
            dy = torch.randn(5, *theirs(X).shape, dtype=torch.float64)
            found = [torch.autograd.grad(f(x), x, dy, is_grads_batched=True)[0] for f in (ours, theirs)]
            torch.testing.assert_close(*found)
            y = ours(x)
            each = torch.vmap(lambda dy, y=y: torch.autograd.grad(y, x, dy, retain_graph=True)[0])(dy)
            torch.testing.assert_close(each, found[1])
    loss = opgrad.torch.cross_entropy(x, LABELS, inplace_backward=True)
    with pytest.raises(RuntimeError, match="inplace_backward=True allows no batch of gradients"):
        torch.autograd.grad(loss, x, torch.ones(5).double(), is_grads_batched=True)


# --- every operator -------------------------------------------------------------------------------------------------


def stacked(each, dim):
    """A batch of tensors, and where its axis is."""
    dim = dim if dim < 1 or each[0].dim() else 0
    return torch.stack(each, dim), dim


@with_reductions
def test_vmap_is_a_loop(op, reduction, rng):
    """Whether one argument has the axis of the batch, all but one or all have it, and wherever it is."""
    for shape, optional in [((3, 4), False), ((2, 4, 3), True)]:
        options = {"axis": 1, "reduction": reduction, "ignore_index": 1, "optional": optional, "indices": (2, 3)}
        samples = [on_tensors(sample(op, shape, "float64", rng, **options)) for _ in range(3)]
        names = [name for name in op.inputs if name in samples[0]]
        counts = {1, len(names) - 1, len(names)} - {0}
        subsets = itertools.chain.from_iterable(itertools.combinations(names, count) for count in sorted(counts))
        for number, batched in enumerate(subsets):
            rest = {name: value for name, value in samples[0].items() if name not in batched}

            def function(*values, batched=batched, rest=rest):
                return several(getattr(opgrad, op.name)(**rest, **dict(zip(batched, values, strict=True))))

            pairs = [stacked([given[name] for given in samples], (0, 1, -1)[number % 3]) for name in batched]
            values, dims = zip(*pairs, strict=True)
            single = [function(*[given[name] for name in batched]) for given in samples]
            found = torch.vmap(function, in_dims=dims)(*values)
            torch.testing.assert_close(found, tuple(map(torch.stack, zip(*single, strict=True))))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_half_precision(reduction, half):
    """Results, gradients and tangents have the dtypes of single calls, and are sums in float32."""
    x, t, labels = torch.randn(2, 64, 9).to(half), torch.randn(2, 64, 9).to(half), torch.randint(0, 9, (2, 64))

    def loss(x, labels):
        return opgrad.torch.cross_entropy(x, labels, reduction=reduction)

    def exact(x, labels):
        return functional.cross_entropy(x, labels, reduction=reduction)

    def with_tangent(loss):
        return torch.vmap(lambda x, t, labels: func.jvp(lambda x: loss(x, labels), (x,), (t,)))

    eps = torch.finfo(half).eps
    found = with_tangent(loss)(x, t, labels)
    expected = with_tangent(exact)(x.float(), t.float(), labels)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == half
        torch.testing.assert_close(ours.float(), theirs, rtol=eps, atol=eps)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_errors_are_those_of_a_single_call():
    labels, indices = torch.tensor([[0, 1, 2], [3, 4, 1]]), torch.tensor([[0, 2], [-5, 1]])
    cases = [
        (lambda x, n: opgrad.torch.cross_entropy(x, n), labels, r"cross_entropy: target\[1\] is 4, expected 0 to 3"),
        (lambda x, n: opgrad.torch.gather(x, n, 1), indices, r"indices\[0\] is -5, expected -4 to 3"),
        (lambda x, n: opgrad.softmax(x, axis=2), labels, "axis is 2, expected -2 to 1 for an array of 2 dimensions"),
        (lambda x, n: opgrad.softmax_grad(x, x[0]), labels, r"y has shape \(4,\), expected \(3, 4\), the shape of dy"),
    ]
    for function, numbers, message in cases:
        with pytest.raises(ValueError, match=message):
            torch.vmap(function)(XS, numbers)


REFUSED = {
    "jvp": lambda f: func.jvp(f, (X,), (T,)),
    "vmap": lambda f: torch.vmap(f)(XS),
    "dual_level": lambda f: dual(f, X, T),
    "compiled jvp": lambda f: torch.compile(lambda x: func.jvp(f, (x,), (x,)), backend="aot_eager")(X),
    "compiled vmap": lambda f: torch.compile(torch.vmap(f), backend="aot_eager")(XS),
    "compiled dual_level": lambda f: torch.compile(lambda x: dual(f, x, x), backend="aot_eager")(X),
}


@pytest.mark.parametrize("road", REFUSED)
@pytest.mark.parametrize("what", ["attributes", "out"])
def test_what_stays_impossible_raises(what, road):
    def function(x):
        return opgrad.softmax(x, result_scale=2.0) if what == "attributes" else opgrad.softmax(x, out=torch.empty(3, 4))

    torch._dynamo.reset()
    message = {
        "attributes": "softmax: a call with attributes.* not open to",
        "out": "softmax: a call with out= is not open",
    }
    with pytest.raises((NotImplementedError, RuntimeError), match=message[what]):
        REFUSED[road](function)


def test_gradients_of_calls_with_attributes_are_not_transformed():
    x = X.clone().requires_grad_()
    y = opgrad.softmax(x, result_scale=2.0)

    def gradient(dy, **options):
        return torch.autograd.grad(y, x, dy, retain_graph=True, **options)[0]

    for call in (
        lambda: torch.vmap(gradient)(TS),
        lambda: gradient(TS, is_grads_batched=True),
        lambda: dual(gradient, X, T),
    ):
        with pytest.raises(NotImplementedError, match=r"softmax: the gradient of a call with attributes.* not open to"):
            call()


@pytest.mark.parametrize("road", ["jvp", "dual_level"])
def test_weights_of_classes_have_no_tangent(road):
    def loss(weight):
        return opgrad.torch.cross_entropy(X, LABELS, weight)

    with pytest.raises(NotImplementedError, match="no gradient with respect to weight; detach it"):
        func.jvp(loss, (WEIGHT,), (WEIGHT,)) if road == "jvp" else dual(loss, WEIGHT, WEIGHT)
