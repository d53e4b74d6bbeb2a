"""Divergences of two linear layers on tensors: against formulas in float64, differentiated, in chunks, refused."""

import math

import pytest

torch = pytest.importorskip("torch")

import opgrad.torch  # noqa: E402
from opgrad.cli.examples.arguments import tolerance  # noqa: E402
from opgrad.torch.losses import distillation, statistics  # noqa: E402

N, H, K, C = 40, 12, 20, 70
CALLS = [
    {},
    {"beta": 0.0},
    {"beta": 1.0, "temperature": 2.0},
    {"beta": 0.1, "temperature": 0.5, "reduction": "sum"},
    {"reduction": "none"},
    {"beta": 0.0, "reduction": "none", "temperature": 3.0},
    {"num_items": 17.0},
]


def layers(dtype=torch.float64, bias=True, seed=0):
    """x, w, b of the student, which want gradients, and those of the teacher."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (N, H), (C, H), (C,), (N, K), (C, K), (C,)
    found = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    student = [each.requires_grad_() for each in found[:3]]
    return (student if bias else [*student[:2], None]), (found[3:] if bias else [*found[3:5], None])


def call(student, teacher, labels=None, **options):
    x, w, b = student
    y, v, c = teacher
    return opgrad.torch.linear_jsd(x, w, y, v, labels, student_bias=b, teacher_bias=c, **options)


def formula(student, teacher, labels=None, beta=0.5, temperature=1.0, reduction="mean", num_items=None):
    """As Liger writes it, torch.nn.functional.kl_div of log-probabilities, for beta strictly between 0 and 1."""
    kl_div = torch.nn.functional.kl_div
    log_q, log_p = ((torch.nn.functional.linear(*each) / temperature).log_softmax(-1) for each in (student, teacher))
    if beta == 0:
        each = kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    elif beta == 1:
        each = kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    else:
        log_m = torch.logsumexp(torch.stack([log_p + math.log(beta), log_q + math.log(1 - beta)]), 0)
        parts = (kl_div(log_m, each, reduction="none", log_target=True).sum(-1) for each in (log_p, log_q))
        each = sum(share * part for share, part in zip((beta, 1 - beta), parts, strict=True))
    counts = torch.ones(len(each), dtype=torch.bool) if labels is None else labels != -100
    each = torch.where(counts, each, 0)
    if reduction == "none":
        return each
    return each.sum() / (1 if reduction == "sum" else num_items or counts.sum().clamp(min=1))


def some_ignored():
    labels = torch.arange(N) % 7
    return torch.where(labels == 3, -100, labels)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_labels", [False, True])
@pytest.mark.parametrize("options", CALLS, ids=str)
def test_values_and_gradients(options, with_labels, dtype):
    student, teacher = layers(dtype)
    labels = some_ignored() if with_labels else None
    found = call(student, teacher, labels, **options)
    upstream = torch.linspace(0.5, 2, found.numel(), dtype=torch.float64).reshape(found.shape)
    grads = torch.autograd.grad(found, student, upstream.to(found.dtype))
    wide = [[each.detach().double().requires_grad_() for each in layer] for layer in (student, teacher)]
    exact = formula(*wide, labels, **options)
    expected = torch.autograd.grad(exact, wide[0], upstream.to(found.dtype).double())
    name = str(dtype).removeprefix("torch.")
    unit = torch.finfo(dtype).eps * tolerance(name, N * C)
    for got, wanted in zip((found, *grads), (exact, *expected), strict=True):
        assert got.dtype == dtype
        # Logits of half precision are rounded to it, by a unit of at most 40, where a processor has products in it.
        half = torch.finfo(dtype).bits == 16
        of_logits = 0.05 * torch.finfo(dtype).eps / torch.finfo(torch.bfloat16).eps if half else 0.0
        rounded = (of_logits + unit) * max(1, wanted.abs().max())
        assert (got.double() - wanted).abs().max() <= rounded


def test_kl_div_is_the_divergence_from_the_teacher():
    student, teacher = layers(bias=False)
    found = opgrad.torch.linear_kl_div(student[0], student[1], teacher[0], teacher[1], temperature=2.0)
    torch.testing.assert_close(found, formula(student[:2], teacher[:2], beta=0, temperature=2.0))


def test_chunks_change_nothing(monkeypatch):
    results = []
    for least in (1 << 25, 1):
        monkeypatch.setattr(statistics, "LEAST_BUFFER", least)
        monkeypatch.setattr(statistics, "FEWEST_ROWS", 1 if least == 1 else 64)
        monkeypatch.setattr(statistics, "SHARE_OF_BUFFER", 0.0 if least == 1 else 0.11)
        student, teacher = layers()
        found = call(student, teacher, some_ignored())
        results.append((found, *torch.autograd.grad(found, student)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_differentiable_twice(reduction):
    student, teacher = layers()

    def of(*given):
        return call(given, teacher, reduction=reduction)

    small = [each.detach()[:3].requires_grad_() if each is student[0] else each for each in student]
    teacher = [teacher[0][:3], *teacher[1:]]
    torch.autograd.gradcheck(of, small, fast_mode=True)
    torch.autograd.gradgradcheck(of, small, fast_mode=True)


def test_a_second_backward_pass_and_no_gradient():
    student, teacher = layers()
    found = call(student, teacher)
    first = torch.autograd.grad(found, student, retain_graph=True)
    second = torch.autograd.grad(found, student)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(call(student, teacher), found)
    frozen = call([student[0], student[1].detach(), None], [*teacher[:2], None])
    (dx,) = torch.autograd.grad(frozen, student[:1])
    assert dx.shape == student[0].shape


def test_the_teacher_gets_no_gradient():
    student, teacher = layers()
    teacher = [each.requires_grad_() for each in teacher]
    call(student, teacher).backward()
    assert all(each.grad is not None for each in student)
    assert all(each.grad is None for each in teacher)


def test_shapes_shift_and_nothing():
    student, teacher = layers()
    shaped = [student[0].reshape(4, 10, H), *student[1:]], [teacher[0].reshape(4, 10, K), *teacher[1:]]
    labels = some_ignored().reshape(4, 10)
    each = call(*shaped, labels, reduction="none")
    assert each.shape == (4, 10)
    torch.testing.assert_close(each, formula(student, teacher, labels.flatten(), reduction="none").reshape(4, 10))
    moved = call(*shaped, labels, reduction="none", shift=1)
    assert (moved[:, -1] == 0).all()
    assert torch.equal(moved[:, :-1] == 0, labels[:, 1:] == -100)
    assert call(student, teacher, torch.full((N,), -100)) == 0
    none = call([student[0][:0], *student[1:]], [teacher[0][:0], *teacher[1:]])
    assert none == 0


def test_masked_classes_and_nan():
    student, teacher = layers()
    with torch.no_grad():
        teacher[2][:5] = -torch.inf
    found = call(student, teacher, beta=0.3)
    assert all(each.isfinite().all() for each in (found, *torch.autograd.grad(found, student)))
    with torch.no_grad():
        teacher[0][3, 0] = torch.nan
    each = call(student, teacher, reduction="none")
    assert each[3].isnan()
    assert each[[*range(3), *range(4, N)]].isfinite().all()


def test_transformed_compiled_and_on_other_devices():
    student, teacher = layers()
    expected = formula(student, teacher)
    grads = torch.func.grad(lambda x: call([x, *student[1:]], teacher))(student[0])
    torch.testing.assert_close(grads, *torch.autograd.grad(expected, student[:1], retain_graph=True))
    rows = torch.vmap(lambda x, y: call([x[None], *student[1:]], [y[None], *teacher[1:]]))(student[0], teacher[0])
    torch.testing.assert_close(rows.mean(), expected)
    compiled = torch.compile(lambda *given: call(given[:3], given[3:]), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*student, *teacher), expected)
    logits = [torch.nn.functional.linear(*each).detach() for each in (student, teacher)]
    out, slope = torch.empty(N, dtype=torch.float64), torch.linspace(1, 2, N, dtype=torch.float64)
    by_torch = distillation._by_autograd(*logits, slope, out, 0.5, 2.0)
    arrays = [each.numpy() for each in (*logits, slope)]
    loss, by_kernel = map(torch.from_numpy, opgrad.softmax_divergence_and_grad(*arrays, 0.5, 2.0))
    torch.testing.assert_close(out, loss)
    torch.testing.assert_close(by_torch, by_kernel)


X, W = torch.zeros(3, 4), torch.zeros(6, 4)
REFUSED = [
    ((X, W, X, torch.zeros(5, 4)), {}, ValueError, r"teacher_weight has shape \(5, 4\), expected \(6, 4\)"),
    ((X, W, X[:2], W), {}, ValueError, r"teacher_input has shape \(2, 4\), expected \(3, 4\)"),
    ((X, W.double(), X, W), {}, TypeError, "student_weight has dtype torch.float64, expected torch.float32"),
    ((X, W, X, W, torch.zeros(2, dtype=torch.int64)), {}, ValueError, r"labels has shape \(2,\), expected \(3,\)"),
    ((X, W, X, W, torch.zeros(3)), {}, TypeError, "labels has dtype torch.float32, expected int32, int64 or uint8"),
    ((X, W, X, W), {"beta": 1.5}, ValueError, "beta is 1.5, expected a number from 0 to 1"),
    ((X, W, X, W), {"temperature": 0}, ValueError, "temperature is 0, expected a finite number above 0"),
    ((X, W, X, None), {}, TypeError, "teacher_weight is NoneType, expected a PyTorch tensor"),
    ((X.int(), W.int(), X, W), {}, TypeError, "student_input has dtype torch.int32, expected a float"),
]


@pytest.mark.parametrize(("given", "options", "error", "message"), REFUSED, ids=[each[3] for each in REFUSED])
def test_refused(given, options, error, message):
    with pytest.raises(error, match=f"^linear_jsd: {message}"):
        opgrad.torch.linear_jsd(*given, **options)
