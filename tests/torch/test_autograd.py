"""Gradients of tensors: of every operator, of their gradients, in mixed precision, and what is kept for them."""

import functools
import gc
import weakref

import pytest
from samples import for_operators, sample, with_reductions

import opgrad

torch = pytest.importorskip("torch")
functional = torch.nn.functional

from tensors import on_tensors  # noqa: E402

import opgrad.torch  # noqa: E402
from opgrad.torch.losses import cross_entropy  # noqa: E402

# Along random directions: each entry of a Jacobian by itself takes a call more for each element.
gradcheck, gradgradcheck = (
    functools.partial(check, fast_mode=True) for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck)
)
WITHOUT_GRADIENT = {"weight"}  # of the classes: torch's loss has none either


def differentiable_call(op, arguments):
    """The operator as a function of those arguments that have a gradient, and tensors to call it with.

    relu and leaky_relu jump at 0, and so do their gradients' second arguments.
    """
    given = on_tensors(arguments)
    names = [name for name in op.inputs if name in given and given[name].is_floating_point()]
    names = [name for name in names if name not in WITHOUT_GRADIENT]
    values = [_away_from_zero(given[name]).requires_grad_() for name in names]

    def function(*tensors):
        return getattr(opgrad, op.name)(**{**given, **dict(zip(names, tensors, strict=True))})

    return function, values


def _away_from_zero(x):
    return torch.where(x.abs() < 0.1, 0.1, x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # by forward_ad itself
@with_reductions
@pytest.mark.one_in(2)
def test_every_operator_is_differentiable_twice(op, reduction, rng):
    """In both modes, and either after the other, with optional inputs and without."""
    options = {"axis": 1, "reduction": reduction, "ignore_index": 1, "indices": (2, 3)}
    calls = [sample(op, (2, 3, 2), "float64", rng, optional=optional, **options) for optional in (False, True)]
    for arguments in calls[calls[0].keys() == calls[1].keys() :]:
        function, values = differentiable_call(op, arguments)
        assert gradcheck(function, values, check_forward_ad=True)
        assert gradgradcheck(function, values, check_fwd_over_rev=True, check_rev_over_rev=True)


INDICES, LABELS = torch.tensor([[0, 2, 2], [-1, 1, 2]]), torch.tensor([[0, 3], [-100, 1], [2, 2]])
PROBABILITIES, WEIGHT = torch.rand(3, 4, 2, dtype=torch.float64), torch.rand(4, dtype=torch.float64) + 0.5
# Functions of x [3, 4, 2] with options that the samples of operators do not have.
TWICE = {f"leaky_relu {alpha}": lambda x, alpha=alpha: opgrad.torch.leaky_relu(x, alpha) for alpha in (-0.5, 0.0, 0.3)}
TWICE |= {f"embedding {row}": lambda x, row=row: opgrad.torch.embedding(INDICES, x, row) for row in (None, 2, -1)}
for target in (LABELS, PROBABILITIES):
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "none"}, {"reduction": "none", "label_smoothing": 0.1}):
        TWICE[f"{target.dtype} {options}"] = functools.partial(
            opgrad.torch.cross_entropy, target=target, weight=WEIGHT, **options
        )
TWICE["scale down"] = lambda x: opgrad.scale(x, x[0, 0, 0], scale_down=True)
TWICE["overwrite"] = lambda x: opgrad.in_place_accumulator(x, x.sin(), overwrite=True)
TWICE["probabilities"] = lambda q: opgrad.torch.cross_entropy(PROBABILITIES.log(), q)  # a target gets a gradient, too


@pytest.mark.parametrize("name", TWICE)
def test_differentiable_twice(name):
    x = _away_from_zero(torch.randn(3, 4, 2, dtype=torch.float64)).requires_grad_()
    if not name.startswith("embedding"):  # the row of the padding has no gradient
        assert gradcheck(TWICE[name], x)
    assert gradgradcheck(TWICE[name], x)


@for_operators(lambda op: "weight" in op.inputs)
def test_weights_of_classes_have_no_gradient(op, rng):
    arguments = sample(op, (3, 4), "float32", rng, reduction="sum")
    given = on_tensors(arguments)
    given["weight"].requires_grad_()
    results = getattr(opgrad, op.name)(**given)
    with pytest.raises(NotImplementedError, match=f"{op.name}: no gradient with respect to weight; detach it"):
        (results[0] if isinstance(results, tuple) else results).sum().backward()


# --- mixed precision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"inplace_backward": True}], ids=str)
def test_scaled_losses(options, reduction, half):
    """Gradients that float16 cannot hold before a GradScaler's factor, which float16 cannot hold itself."""
    factor = 65536.0 * 4
    x = torch.randn(4096, 50).to(half).requires_grad_()
    exact = x.detach().float().requires_grad_()
    labels = torch.randint(0, 50, (4096,))
    smoothing = {name: value for name, value in options.items() if name == "label_smoothing"}
    with torch.autocast("cpu", half):
        loss = opgrad.torch.cross_entropy(x, labels, reduction=reduction, **options)
    expected = functional.cross_entropy(exact, labels, reduction=reduction, **smoothing)
    if reduction != "mean":
        factor /= 4096
    (loss.mean() * factor).backward()
    (expected.mean() * factor).backward()
    torch.testing.assert_close(x.grad.float(), exact.grad, rtol=2e-2 if half is torch.bfloat16 else 2e-3, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_double_backward_in_half_precision(reduction):
    x = torch.randn(6, 5).bfloat16().requires_grad_()
    exact = x.detach().float().requires_grad_()
    labels = torch.randint(0, 5, (6,))
    for logits, function in [(x, opgrad.torch.cross_entropy), (exact, functional.cross_entropy)]:
        (dx,) = torch.autograd.grad(function(logits, labels, reduction=reduction).sum(), logits, create_graph=True)
        dx.float().square().sum().backward()
    assert x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad.float(), exact.grad, rtol=5e-2, atol=5e-2)


def test_results_of_other_dtypes():
    """Every gradient has the dtype of what it is the gradient of."""
    x = torch.randn(3, 4).half().requires_grad_()
    labels = torch.tensor([0, 1, 3])
    loss, log_prob = opgrad.softmax_cross_entropy_loss(x, labels, out_dtype=torch.float64)
    (loss + log_prob.sum()).backward()
    exact = x.detach().double().requires_grad_()
    expected = functional.log_softmax(exact, 1)
    (functional.nll_loss(expected, labels) + expected.sum()).backward()
    torch.testing.assert_close(x.grad, exact.grad.half())
    buffer, value = torch.zeros(3, requires_grad=True), torch.ones(3, dtype=torch.float64, requires_grad=True)
    opgrad.in_place_accumulator(buffer, value).sum().backward()
    assert (buffer.grad.dtype, value.grad.dtype) == (torch.float32, torch.float64)


# --- what is kept ---------------------------------------------------------------------------------------------------


def saved_sizes(loss):
    """The bytes of each tensor that the backward pass keeps."""
    nodes, sizes, pending = set(), {}, [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        for each in getattr(node, "saved_tensors", ()):
            if each is not None:
                sizes[each.data_ptr()] = each.nbytes
        pending += [following for following, _ in node.next_functions]
    return sizes


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_loss_keeps_its_gradient_alone(dtype, in_place):
    logits = torch.randn(64, 100, requires_grad=True)
    x = logits.to(dtype) * 1  # a tensor of its own, which nothing else needs
    gone = weakref.ref(x)
    loss = opgrad.torch.cross_entropy(x, torch.randint(0, 100, (64,)), inplace_backward=in_place)
    large = [size for size in saved_sizes(loss).values() if size >= x.nbytes]
    assert large == [x.nbytes]
    del x
    gc.collect()
    assert gone() is None
    loss.backward()
    assert logits.grad.abs().sum() > 0


def test_no_gradient_is_computed_unless_needed(monkeypatch):
    x, labels = torch.randn(3, 4, requires_grad=True), torch.tensor([0, 1, 2])
    monkeypatch.setattr(cross_entropy, "_loss_and_grad", None)
    with torch.no_grad():
        opgrad.torch.cross_entropy(x, labels)
    opgrad.torch.cross_entropy(x.detach(), labels)
    with pytest.raises(TypeError):
        opgrad.torch.cross_entropy(x, labels)


def test_inplace_backward():
    x, labels = torch.randn(3, 4, requires_grad=True), torch.tensor([0, 1, 2])
    for reduction in ("mean", "sum", "none"):
        expected = opgrad.torch.cross_entropy(x, labels, reduction=reduction)
        loss = opgrad.torch.cross_entropy(x, labels, reduction=reduction, inplace_backward=True)
        dloss = torch.randn(loss.shape)
        (kept,) = loss.grad_fn.saved_tensors
        (dx,) = torch.autograd.grad(loss, x, dloss, retain_graph=True)
        assert dx.data_ptr() == kept.data_ptr()
        torch.testing.assert_close(dx, torch.autograd.grad(expected, x, dloss)[0])
        with pytest.raises(RuntimeError, match="inplace_backward=True allows no second backward pass"):
            loss.backward(dloss)
    with pytest.raises(RuntimeError, match="inplace_backward=True allows no gradient of the gradient"):
        torch.autograd.grad(opgrad.torch.cross_entropy(x, labels, inplace_backward=True), x, create_graph=True)


def test_checkpoint():
    from torch.utils.checkpoint import checkpoint

    x, labels = torch.randn(3, 4, requires_grad=True), torch.tensor([0, 1, 2])
    for in_place in (False, True):

        def loss(x, in_place=in_place):
            return opgrad.torch.cross_entropy(opgrad.torch.tanh(x), labels, inplace_backward=in_place)

        (dx,) = torch.autograd.grad(checkpoint(loss, x, use_reentrant=False), x)
        torch.testing.assert_close(dx, torch.autograd.grad(loss(x), x)[0])
