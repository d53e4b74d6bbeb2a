"""Losses with options on tensors, of logits and of a linear layer, against float64 compositions of PyTorch's."""

import inspect

import pytest

torch = pytest.importorskip("torch")
functional, checkpoint = torch.nn.functional, pytest.importorskip("torch.utils.checkpoint")

from tensors import loss_of  # noqa: E402

import opgrad.torch  # noqa: E402
from opgrad.torch.losses import statistics as linear_chunks  # noqa: E402

ALL = {"label_smoothing": 0.1, "lse_square_scale": 0.05, "softcap": 4.0, "temperature": 1.5}
OPTIONS = [{}, {"label_smoothing": 0.1}, {"lse_square_scale": 0.1}, {"softcap": 3.0}, ALL]
EXTRAS = ("z_loss", "lse", "log_prob", "entropy")
RETURNED = {f"return_{name}": True for name in (*EXTRAS, "token_accuracy", "predicted_tokens")}
CHUNKS = {"whole": {}, "rows": {"LEAST_BUFFER": 2000, "FEWEST_ROWS": 0}, "classes": {"LEAST_BUFFER": 2000}}


def slopes(loss, arguments, dy):
    return torch.autograd.grad(loss, arguments, dy, retain_graph=True)


@pytest.mark.parametrize("dense", [False, True], ids=["classes", "probabilities"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.one_in(2)
def test_cross_entropy(options, dense):
    torch.manual_seed(0)
    for shape, weighted, reduction in [((6, 9), True, "mean"), ((3, 9, 4), False, "none"), ((6, 9), False, "sum")]:
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        target = torch.randint(0, 9, (shape[0], *shape[2:]))
        target[0] = -100
        target = torch.rand(shape, dtype=torch.float64) if dense else target
        weight = torch.rand(9, dtype=torch.float64) + 0.5 if weighted else None
        loss = opgrad.torch.cross_entropy(x, target, weight, reduction=reduction, **options)
        expected = loss_of(x, target, weight, reduction=reduction, **options)
        torch.testing.assert_close(loss, expected)
        dy = torch.randn_like(loss)
        torch.testing.assert_close(slopes(loss, x, dy), slopes(expected, x, dy))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_derivatives_of_all_results(reduction):
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, 2, -100, 4])

    def results(x):
        found = opgrad.torch.cross_entropy(x, target, reduction=reduction, **ALL, **RETURNED)
        return tuple(getattr(found, name) for name in ("loss", *EXTRAS))

    assert torch.autograd.gradcheck(results, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(results, x, fast_mode=True)
    alone = lambda x: opgrad.torch.cross_entropy(x, target, reduction=reduction, **ALL)  # noqa: E731
    assert torch.autograd.gradgradcheck(alone, x, fast_mode=True)
    torch.testing.assert_close(alone(x), results(x)[0])


def test_what_is_returned():
    x, target = torch.randn(5, 7), torch.tensor([0, 1, 2, -100, 4])
    found = opgrad.torch.cross_entropy(x, target, **RETURNED)
    log_p = x.log_softmax(1)
    kept = target != -100
    torch.testing.assert_close(found.log_prob[kept], log_p[kept, target[kept]])
    torch.testing.assert_close(found.entropy[kept], -(log_p.exp() * log_p).sum(1)[kept])
    torch.testing.assert_close(found.lse[kept], x.logsumexp(1)[kept])
    assert found.predicted_tokens.tolist() == torch.where(kept, x.argmax(1), -1).tolist()
    assert found.token_accuracy == (x.argmax(1) == target)[kept].float().mean()
    assert opgrad.torch.cross_entropy(x, target, return_lse=True).entropy is None


def test_shift_and_num_items():
    x, target = torch.randn(6, 7), torch.randint(0, 7, (6,))
    for shift in (1, 2, 9):
        found = opgrad.torch.cross_entropy(x, target, shift=shift)
        moved = functional.pad(target[shift:], (0, min(shift, 6)), value=-100)
        torch.testing.assert_close(found, opgrad.torch.cross_entropy(x, moved))
    x, eye, exact = x.double().requires_grad_(), torch.eye(7).double(), {"rtol": 1e-14, "atol": 1e-16}
    expected = functional.cross_entropy(x, target, reduction="sum") / 13
    assert opgrad.torch.cross_entropy(x, target, num_items=torch.tensor(0)) == 0
    for items in (13, torch.tensor(13)):
        found = opgrad.torch.cross_entropy(x, target, num_items=items)
        torch.testing.assert_close(found, expected, **exact)
        torch.testing.assert_close(slopes(found, x, None), slopes(expected, x, None), **exact)
        found = opgrad.torch.linear_cross_entropy(x, eye, target, num_items=items, lse_square_scale=0.1)
        torch.testing.assert_close(found, loss_of(x, target, num_items=13, lse_square_scale=0.1))


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_linear_cross_entropy(chunks, monkeypatch):
    for name, value in {**chunks, "SHARE_OF_BUFFER": 0}.items():
        monkeypatch.setattr(linear_chunks, name, value)
    torch.manual_seed(0)
    x, w, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((13, 4), (50, 4), (50,)))
    target, weight = torch.randint(0, 50, (13,)), torch.rand(50, dtype=torch.float64) + 0.5
    target[::3] = -100
    for options in ({}, {"weight": weight}, ALL | {"weight": weight}):
        for reduction in ("mean", "sum", "none"):
            logits = functional.linear(x, w, b)
            expected = opgrad.torch.cross_entropy(logits, target, reduction=reduction, **RETURNED, **options)
            dy = torch.randn_like(expected.loss)
            wanted = slopes(expected.loss, (x, w, b), dy)
            call = {"linear_bias": b, "reduction": reduction, **options}
            loss = opgrad.torch.linear_cross_entropy(x, w, target, **call)
            torch.testing.assert_close(loss, expected.loss)
            torch.testing.assert_close(slopes(loss, (x, w, b), dy), wanted)
            found = opgrad.torch.linear_cross_entropy(x, w, target, **call, **RETURNED)
            torch.testing.assert_close(tuple(found), tuple(expected))
            several = [getattr(found, name) for name in ("loss", *EXTRAS)]
            others = [getattr(expected, name) for name in ("loss", *EXTRAS)]
            dys = [torch.randn_like(each) for each in several]
            logits_slopes = torch.autograd.grad(others, (x, w, b), dys)
            torch.testing.assert_close(torch.autograd.grad(several, (x, w, b), dys), logits_slopes)


@pytest.mark.parametrize("is_slow", [False, True], ids=["as it is", "converted"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_cross_entropy_in_half_precision(dtype, is_slow, monkeypatch):
    """Gradients over chunks are as near to the exact ones as those of stored logits, where the CPU multiplies numbers
    of the dtype and where they are converted, some rows at a time."""
    for name, value in {"SHARE_OF_BUFFER": 0, "PART": 4096, "_is_slow": lambda of: is_slow and of == dtype}.items():
        monkeypatch.setattr(linear_chunks, name, value)
    torch.manual_seed(0)
    x, w, target = torch.randn(64, 16), torch.randn(300, 16) / 4, torch.randint(0, 300, (64,))
    b = torch.randn(300)
    exact = [each.to(dtype).double().requires_grad_() for each in (x, w, b)]
    wanted = slopes(functional.cross_entropy(functional.linear(*exact), target), exact, torch.tensor(1.0))
    half = [each.to(dtype).requires_grad_() for each in (x, w, b)]
    theirs = functional.cross_entropy(functional.linear(*half).float(), target)
    theirs = slopes(theirs, half, torch.tensor(1.0))
    for chunks in CHUNKS.values():
        for name, value in {"LEAST_BUFFER": 32 << 20, "FEWEST_ROWS": 64, **chunks}.items():
            monkeypatch.setattr(linear_chunks, name, value * 4 if name == "LEAST_BUFFER" else value)
        loss = opgrad.torch.linear_cross_entropy(half[0], half[1], target, linear_bias=half[2])
        assert loss.dtype == dtype
        mine = slopes(loss, half, torch.tensor(1.0, dtype=dtype))
        for ours, other, true in zip(mine, theirs, wanted, strict=True):
            assert (ours.double() - true).norm() <= 1.5 * (other.double() - true).norm()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_linear_under_transformations():
    x, w, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (6, 3), (6,)))
    target = torch.tensor([1, -100, 5, 0])

    def ours(x, w, b):
        return opgrad.torch.linear_cross_entropy(x, w, target, linear_bias=b, **ALL)

    def theirs(x, w, b):
        return loss_of(functional.linear(x, w, b), target, **ALL)

    assert torch.autograd.gradgradcheck(ours, (x, w, b), fast_mode=True)
    places = (0, 1, 2)
    torch.testing.assert_close(torch.func.grad(ours, places)(x, w, b), torch.func.grad(theirs, places)(x, w, b))
    torch.testing.assert_close(torch.func.hessian(ours)(x, w, b), torch.func.hessian(theirs)(x, w, b))
    expected = torch.autograd.grad(theirs(x, w, b), (x, w, b))
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    checkpointed = checkpoint.checkpoint(ours, x, w, b, use_reentrant=False)
    for loss in (compiled(x, w, b), checkpointed):
        torch.testing.assert_close(torch.autograd.grad(loss, (x, w, b)), expected)
    loss = ours(x, w, b)
    for retain in (True, False):  # the second pass computes the gradients that the first has handed out
        torch.testing.assert_close(torch.autograd.grad(loss, (x, w, b), retain_graph=retain), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert opgrad.torch.linear_cross_entropy(x.float(), w.float(), target).dtype == torch.float32


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_jacobians_of_a_linear_loss(reduction):
    x, w, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (6, 3), (6,)))
    target, places = torch.tensor([1, -100, 5, 0]), (0, 1, 2)

    def ours(x, w, b):
        return opgrad.torch.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction, **ALL)

    expected = torch.autograd.functional.jacobian(ours, (x, w, b))
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(jacobian(ours, places)(x, w, b), expected)
    torch.testing.assert_close(torch.autograd.functional.jacobian(ours, (x, w, b), vectorize=True), expected)
    twice = torch.func.jacrev(torch.func.jacrev(ours, places), places)(x, w, b)
    torch.testing.assert_close(twice, torch.func.jacfwd(torch.func.jacrev(ours, places), places)(x, w, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [None, 8], ids=["whole", "chunks"])
def test_nothing_counts(rows, dtype):
    """A batch of padding, whose loss and gradients are 0 however they are computed."""
    x, w, b = (torch.randn(*s).to(dtype).requires_grad_() for s in ((40, 3), (60, 3), (60,)))
    target = torch.full((40,), -100)
    options = rows and type("Options", (), {"batch_chunk_size": rows})()

    def loss(x, w, b, given):
        found = opgrad.torch.linear_cross_entropy(x, w, target, linear_bias=b, options=options, **given)
        return found if isinstance(found, torch.Tensor) else found.loss.sum() + found.lse.sum()

    cases = [{}, RETURNED, {"label_smoothing": 0.1, "lse_square_scale": 0.1}]
    cases = [{"reduction": reduction, **more} for reduction in ("mean", "sum", "none") for more in cases]
    compiled = [{"reduction": "mean", **RETURNED}, {"num_items": torch.tensor(0)}] if dtype == torch.float32 else []
    for given in (*cases, {"num_items": torch.tensor(0)}):
        torch.compiler.reset()
        for call in (loss, torch.compile(loss, backend="aot_eager")) if given in compiled else (loss,):
            found = call(x, w, b, given)
            grads = torch.autograd.grad(found.sum(), (x, w, b))
            for each in (found, *grads):
                assert torch.equal(each, torch.zeros_like(each)), given


@pytest.mark.parametrize("logit", [float("-inf"), float("inf"), float("nan")])
def test_rows_without_a_softmax(logit):
    x, w, target = torch.ones(2, 1), torch.full((5, 1), logit), torch.tensor([1, -100])
    found = opgrad.torch.linear_cross_entropy(x, w, target, reduction="none", **RETURNED)
    expected = opgrad.torch.cross_entropy(x @ w.t(), target, reduction="none", **RETURNED)
    torch.testing.assert_close(tuple(found), tuple(expected), equal_nan=True)


@pytest.mark.parametrize("given", [{}, {"reduction": "none"}, {"return_lse": True}], ids=str)
def test_products_are_counted(given):
    """Those of the linear layer, and the logits once more for the gradients."""
    from torch.utils.flop_counter import FlopCounterMode

    x, w, target = torch.randn(8, 5, requires_grad=True), torch.randn(30, 5, requires_grad=True), torch.arange(8)

    def step(call):
        with FlopCounterMode(display=False) as forward:
            found = call(x, w)
        with FlopCounterMode(display=False) as backward:
            (found if isinstance(found, torch.Tensor) else found.loss).sum().backward()
        return forward.get_total_flops(), backward.get_total_flops()

    def loss(x, w):
        return opgrad.torch.linear_cross_entropy(x, w, target, **given)

    product = 2 * 8 * 5 * 30
    torch.compiler.reset()
    for call in (loss, torch.compile(loss, backend="aot_eager")):
        assert step(call) == (product, 3 * product)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_second_derivatives_of_soft_targets(options):
    """Of targets that require grad, too, some of which are 0."""
    logits, target = (torch.rand(3, 5, dtype=torch.float64) for _ in "12")
    target[0, 1] = 0
    given = (logits.requires_grad_(), target.requires_grad_())

    def loss(logits, target):
        return opgrad.torch.cross_entropy(logits, target, **options)

    assert torch.autograd.gradcheck(loss, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, given, fast_mode=True)
    torch.testing.assert_close(torch.func.grad(loss, (0, 1))(*given), torch.autograd.grad(loss(*given), given))


@pytest.mark.parametrize("name", ["sample_losses", "sample_losses_and_grad"])
def test_registered_operators(name):
    x, target = torch.randn(4, 5, requires_grad=True), torch.tensor([1, 2, -100, 4])
    given = (None,) * (7 if name.endswith("grad") else 2)
    operator = getattr(torch.ops.opgrad, name).default
    torch.library.opcheck(operator, (x, target, *given, -100, 0.1, 2.0, 1.3, False))


@pytest.mark.parametrize("name", ["nn.functional.cross_entropy", "nn.functional.linear_cross_entropy"])
def test_samples_of_pytorch(name):
    """The cases of PyTorch's own tests."""
    testing = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    info = next((each for each in testing.op_db if each.name == name), None)
    if info is None:
        pytest.skip("this PyTorch has no cases of it")
    ours = getattr(opgrad.torch, name.rpartition(".")[2])
    theirs = getattr(functional, name.rpartition(".")[2])
    for case in info.sample_inputs("cpu", torch.float64, requires_grad=True):
        if case.kwargs.get("weight") is not None:
            case.kwargs["weight"] = case.kwargs["weight"].detach()
        expected = theirs(case.input, *case.args, **case.kwargs)
        found = ours(case.input, *case.args, **case.kwargs)
        torch.testing.assert_close(found, torch.nan_to_num(expected, 0.0))  # the mean over nothing is 0 here
        dy = torch.ones_like(found)
        torch.testing.assert_close(slopes(found, case.input, dy), slopes(expected, case.input, dy))


def test_modules():
    x, target = torch.randn(5, 4), torch.randint(0, 7, (5,))
    layer = torch.nn.Linear(4, 7)
    module = opgrad.torch.LinearCrossEntropyLoss(linear=layer, label_smoothing=0.1)
    expected = functional.cross_entropy(layer(x), target, label_smoothing=0.1)
    torch.testing.assert_close(module(x, target), expected)
    torch.testing.assert_close(opgrad.torch.CrossEntropyLoss(label_smoothing=0.1)(layer(x), target), expected)
    assert opgrad.torch.LinearCrossEntropyLoss(4, 7)(x, target).dim() == 0
    assert "label_smoothing=0.1" in repr(module)
    assert "ignore_index=0, reduction='mean'" in repr(opgrad.torch.CrossEntropyLoss(ignore_index=0))
    with pytest.raises(TypeError, match="LinearCrossEntropyLoss: margin is no option, expected one of reduction"):
        opgrad.torch.LinearCrossEntropyLoss(4, 7, margin=1)
    with pytest.raises(ValueError, match=r"weight has shape \(3,\), expected \(7,\)"):
        opgrad.torch.LinearCrossEntropyLoss(4, 7, weight=torch.ones(3))


@pytest.mark.filterwarnings("ignore:size_average")
def test_modules_are_as_those_of_pytorch():
    """Positional arguments, and attributes that may be changed afterwards."""
    x, target, weight = torch.randn(5, 7), torch.tensor([0, 1, 2, 3, 3]), torch.rand(7)
    for arguments in [(), (weight,), (weight, None, 3), (weight, None, 3, None, "sum", 0.1), (None, False, 3, True)]:
        ours, theirs = opgrad.torch.CrossEntropyLoss(*arguments), torch.nn.CrossEntropyLoss(*arguments)
        assert isinstance(ours, torch.nn.CrossEntropyLoss)
        torch.testing.assert_close(ours(x, target), theirs(x, target))
        for name in ("reduction", "ignore_index", "label_smoothing"):
            assert getattr(ours, name) == getattr(theirs, name)
        ours.reduction, theirs.reduction = "none", "none"
        torch.testing.assert_close(ours(x, target), theirs(x, target))
        assert ours.state_dict().keys() == theirs.state_dict().keys()
    module = opgrad.torch.CrossEntropyLoss(softcap=3.0, return_lse=True)
    assert (module.softcap, module.return_lse, module.shift) == (3.0, True, 0)
    assert module(x, target).lse is not None
    linear = opgrad.torch.LinearCrossEntropyLoss(4, 7, out_features=(2,), ignore_index=3)
    options = (linear.num_classes, linear.out_features, linear.reduction, linear.ignore_index, linear.label_smoothing)
    assert options == (7, (2,), "mean", 3, 0.0)
    assert linear.options is None
    with pytest.raises(TypeError, match="CrossEntropyLoss: margin is no option, expected one of lse_square_scale"):
        opgrad.torch.CrossEntropyLoss(margin=1.0)
    for wrong in ({"reduction": "average"}, {"label_smoothing": 2.0}, {"softcap": -1.0}):
        with pytest.raises(ValueError, match="CrossEntropyLoss: "):
            opgrad.torch.CrossEntropyLoss(**wrong)


def test_refuses():
    x, w, target = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([0, 1, 2])
    linear = opgrad.torch.linear_cross_entropy
    for error, message, call in [
        (ValueError, "softcap is 0, expected a finite number above 0", lambda: linear(x, w, target, softcap=0)),
        (ValueError, "num_items is 3 with reduction 'sum'", lambda: linear(x, w, target, reduction="sum", num_items=3)),
        (ValueError, "input has 4 features, expected 5", lambda: linear(x, torch.randn(7, 5), target)),
        (
            ValueError,
            r"target\[1\] is 7, expected 0 to 6 or ignore_index -100",
            lambda: linear(x, w, target + 6 * (target == 1)),
        ),
        (
            TypeError,
            "linear_weight has dtype torch.float64, expected torch.float32",
            lambda: linear(x, w.double(), target),
        ),
        (TypeError, "target is list, expected a PyTorch tensor", lambda: linear(x, w, [0, 1, 2])),
        (ValueError, "shift is -1", lambda: linear(x, w, target, shift=-1)),
        (TypeError, "options is dict, expected torch.nn.Linear", lambda: linear(x, w, target, options={"rows": 2})),
    ]:
        with pytest.raises(error, match=message):
            call()


# --- labels that are ignored ------------------------------------------------------------------------------------------

BEYOND = (2**32, 1 - 2**32, 2**31, 256)  # the lower 32 or 8 bits are a class
LOSSES_OF_LABELS = {
    "logits": lambda x, target, **given: opgrad.torch.cross_entropy(x @ W.T, target, **given),
    "options": lambda x, target, **given: opgrad.torch.cross_entropy(x @ W.T, target, softcap=3.0, **given),
    "layer": lambda x, target, **given: opgrad.torch.linear_cross_entropy(x, W, target, **given),
    "log_prob": lambda x, target, **given: opgrad.torch.linear_log_prob(x, W, target, **given).sum(),
    "divergence": lambda x, target, **given: opgrad.torch.linear_kl_div(x, W, x.detach(), 2 * W, target, **given),
}
W = torch.linspace(-1, 1, 40).reshape(5, 8).sin()


@pytest.mark.parametrize("ignore_index", BEYOND)
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("loss", LOSSES_OF_LABELS)
def test_a_label_beyond_its_dtype_is_no_class(loss, dtype, ignore_index):
    x, target = torch.linspace(-2, 2, 48).reshape(6, 8).cos(), torch.tensor([0, 1, 0, 2, 3, 4])
    for given in ({}, {"shift": 1}):
        given, small = {**given, "ignore_index": ignore_index}, target.to(dtype)

        def of(x, small=small, given=given):
            return LOSSES_OF_LABELS[loss](x, small, **given)

        def exact(x, given=given):
            return LOSSES_OF_LABELS[loss](x, target, **given)

        torch.testing.assert_close(of(x), exact(x), rtol=0, atol=0)
        torch.testing.assert_close(torch.func.grad(of)(x), torch.func.grad(exact)(x))
        torch.testing.assert_close(torch.autograd.functional.hvp(of, x, x), torch.autograd.functional.hvp(exact, x, x))


def test_no_class_is_ignored_by_the_operators():
    x, target = torch.randn(4, 3), torch.tensor([0, 1, 0, 2])
    found, exact = (
        torch.autograd.functional.hvp(
            lambda x, t=t: opgrad.softmax_cross_entropy_loss_and_grad(x, t, ignore_index=2**32)[0], x, x
        )[1]
        for t in (target.int(), target)
    )
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("loss", LOSSES_OF_LABELS)
def test_a_label_beyond_64_bits_is_refused(loss):
    with pytest.raises(ValueError, match=r": ignore_index is 18446744073709551616, expected a 64-bit integer$"):
        LOSSES_OF_LABELS[loss](torch.ones(6, 8), torch.tensor([0, 1, 0, 2, 3, 4]), ignore_index=2**64)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"return_lse": True}], ids=str)
def test_predicted_tokens_are_those_of_argmax(options, chunk, monkeypatch):
    for name, value in CHUNKS[chunk].items():
        monkeypatch.setattr(linear_chunks, name, value)
    x = torch.randn(6, 300)
    x[1, 200], x[1, 250], x[2], x[3, 7], x[3, 290], x[4] = torch.nan, torch.nan, -torch.inf, torch.inf, torch.nan, 0
    target = torch.tensor([0, 200, 1, -100, 0, 5])
    w = x.nan_to_num(torch.nan, 50.0, -50.0)
    wanted = {"return_predicted_tokens": True, "return_token_accuracy": True, **options}
    for found, logits in (
        (opgrad.torch.cross_entropy(x, target, **wanted), x),
        (opgrad.torch.cross_entropy(x.clone().requires_grad_(), target, **wanted), x),
        (opgrad.torch.cross_entropy(x.T.reshape(1, 300, 6), target[None], **wanted), x),
        (opgrad.torch.linear_cross_entropy(torch.eye(6), w.T, target, **wanted), torch.eye(6) @ w),
    ):
        expected = torch.where(target == -100, -1, logits.argmax(1))
        assert torch.equal(found.predicted_tokens.flatten(), expected)
        assert found.token_accuracy == (expected == target).float().sum() / 5


def test_every_loss_ignores_the_same_class_by_default():
    """PyTorch's -100, and of a linear layer also by its None."""
    losses = ("cross_entropy", "linear_cross_entropy", "linear_log_prob", "linear_jsd", "linear_kl_div")
    parallel = ("vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy")
    for name in (*losses, *parallel):
        assert inspect.signature(getattr(opgrad.torch, name)).parameters["ignore_index"].default == -100
    modules = opgrad.torch.CrossEntropyLoss(), opgrad.torch.LinearCrossEntropyLoss(8, 5)
    assert [module.ignore_index for module in modules] == [-100, -100]
    x, target = torch.randn(6, 8), torch.tensor([0, -100, 3, 4, -100, 1])
    exact = opgrad.torch.cross_entropy(x @ W.T, target)
    torch.testing.assert_close(opgrad.torch.linear_cross_entropy(x, W, target, ignore_index=None), exact)
    shares = torch.rand(6, 5)
    assert opgrad.torch.linear_cross_entropy(x, W, shares, ignore_index=-100).isfinite()
    with pytest.raises(ValueError, match=r"^linear_cross_entropy: ignore_index is 1, expected none for class prob"):
        opgrad.torch.linear_cross_entropy(x, W, shares, ignore_index=1)
