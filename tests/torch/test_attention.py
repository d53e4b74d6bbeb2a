"""scaled_dot_product_attention beside PyTorch's: values, gradients, gradients of gradients, transformations, shards."""

import numpy as np
import pytest

import opgrad

torch = pytest.importorskip("torch")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import opgrad.torch  # noqa: E402

attend = opgrad.torch.scaled_dot_product_attention
EQUAL = [(2, 3, 5, 4)] * 3
# Shapes of query, key and value, the shape of the mask and whether it is bool, and other arguments.
CALLS = {
    "plain": (EQUAL, None, False, {}),
    "causal": (EQUAL, None, False, {"is_causal": True}),
    "bool mask": (EQUAL, (5, 5), True, {}),
    "added mask, scale": (EQUAL, (2, 1, 5, 5), False, {"scale": 0.3}),
    "shared heads": ([(2, 4, 5, 4), (2, 2, 6, 4), (2, 2, 6, 3)], (6,), False, {"enable_gqa": True}),
    "longer keys, causal": ([(1, 2, 3, 4), (1, 2, 7, 4), (1, 2, 7, 4)], None, False, {"is_causal": True}),
    "three axes": ([(3, 5, 4)] * 3, (3, 5, 5), False, {}),
    "two axes": ([(5, 4)] * 3, (5, 5), True, {}),
    "five axes": ([(2, 2, 3, 5, 4)] * 3, (2, 1, 5, 5), False, {}),
    "batches broadcast": ([(2, 3, 5, 4), (1, 3, 5, 4), (2, 3, 5, 4)], None, False, {}),
    "no keys": ([(1, 2, 3, 4), (1, 2, 0, 4), (1, 2, 0, 4)], None, False, {}),
}
OTHER_DTYPES = torch.float64, torch.float16, torch.bfloat16


def arguments(call, dtype=torch.float64):
    torch.manual_seed(0)
    shapes, mask, is_bool, options = CALLS[call]
    tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    found = None if mask is None else torch.rand(mask) > 0.3 if is_bool else torch.randn(mask).to(dtype)
    if is_bool:
        found[..., 0] = True  # PyTorch's rows without a key are NaN in the oldest version that is tested
    return tensors, found, options


def theirs(*given, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*given, **options)


@pytest.mark.parametrize(
    ("call", "dtype"),
    [*((each, torch.float32) for each in CALLS), *(("added mask, scale", each) for each in OTHER_DTYPES)],
    ids=str,
)
def test_values_and_gradients(call, dtype):
    tensors, mask, options = arguments(call, dtype)
    exact = [each.detach().double().requires_grad_() for each in tensors]
    wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
    y, expected = attend(*tensors, mask, **options), theirs(*exact, wide, **options)
    assert y.dtype == dtype
    assert y.shape == expected.shape
    g = torch.randn(expected.shape).to(dtype)
    results = [y, *torch.autograd.grad(y, tensors, g)]
    wanted = [expected, *torch.autograd.grad(expected, exact, g.double())]
    for mine, other in zip(results, wanted, strict=True):
        # Sums of up to eight products of numbers near 1, rounded a few times.
        torch.testing.assert_close(mine.double(), other, rtol=0, atol=64 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("low", ["-1e9", "least"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_from_which_a_low_number_hides_all_keys(dtype, low):
    """They see all of them: the probabilities are those of PyTorch's softmax, and the gradients, too."""
    (query, key, value), _, _ = arguments("plain")
    tensors = [each.detach().to(dtype).requires_grad_() for each in (query, key, value)]
    mask = torch.zeros(5, 5, dtype=dtype)
    mask[2] = mask[3, 2:] = torch.finfo(dtype).min if low == "least" else float(low)
    wide = [each.float() for each in tensors]
    exact = torch.softmax(wide[0] @ wide[1].mT * query.shape[-1] ** -0.5 + mask, -1) @ wide[2]
    expected = torch.autograd.grad(exact.square().sum(), tensors)
    y = attend(*tensors, mask)
    rounding = {} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}
    torch.testing.assert_close(y, exact.to(dtype), **rounding)
    torch.testing.assert_close(torch.autograd.grad(y.float().square().sum(), tensors), expected, **rounding)


def test_dropout():
    """PyTorch's generator decides, and the gradient has the same decisions: y is linear in value."""
    q, k, v = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))
    torch.manual_seed(3)
    y = attend(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(attend(q, k, v, dropout_p=0.5), y)
    assert not torch.equal(attend(q, k, v, dropout_p=0.5), y)
    (dv,) = torch.autograd.grad(y.sum(), v, retain_graph=True)
    torch.testing.assert_close((dv * v).sum(), y.sum(), rtol=1e-4, atol=1e-4)
    (dq,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="a call with dropout is differentiable once"):
        dq.sum().backward()
    assert (attend(q, k, v, dropout_p=1.0) == 0).all()


def test_no_matrix_of_scores_is_kept():
    tensors = [torch.randn(1, 2, 300, 8, requires_grad=True) for _ in range(3)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        attend(*tensors, is_causal=True)
    assert sum(each.numel() for each in kept) == 4 * 2 * 300 * 8 + 2 * 300


def test_tensors_are_read_where_they_lie():
    packed = torch.randn(2, 5, 3, 4, 8)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    assert not q.is_contiguous()
    torch.testing.assert_close(attend(q, k, v), theirs(q, k, v))
    assert torch.equal(attend(q, k, v), attend(*(each.contiguous() for each in (q, k, v))))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # by the exporters
@pytest.mark.parametrize("dynamo", [False, True])
def test_exported(dynamo, tmp_path):
    """As PyTorch's function is, which the differentiator recognizes."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from opgrad.gradients import gradients
    from opgrad.onnxruntime import InferenceSession

    class Attending(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v, is_causal=True)

    given = [torch.randn(2, 4, 6, 8) for _ in range(3)]
    names = {"input_names": ["q", "k", "v"], "output_names": ["y"], **({"verbose": False} if dynamo else {})}
    torch.onnx.export(Attending().eval(), tuple(given), str(tmp_path / "m.onnx"), dynamo=dynamo, **names)
    differentiated = gradients(onnx.load(tmp_path / "m.onnx"), "y", ["q", "k", "v"])
    assert [each.op_type for each in differentiated.graph.node if "Attention" in each.op_type] == [
        "AttentionTraining", "AttentionGrad"
    ]  # fmt: skip
    found = InferenceSession(differentiated.SerializeToString()).run(
        None, dict(zip("qkv", (each.numpy() for each in given), strict=True))
    )
    leaves = [each.clone().requires_grad_() for each in given]
    y = attend(*leaves, is_causal=True)
    for mine, other in zip(found, [y, *torch.autograd.grad(y.sum(), leaves)], strict=True):
        np.testing.assert_allclose(mine, other.detach().numpy(), atol=1e-5)


Q = torch.zeros(1, 4, 3, 8)
REFUSED = [
    ((Q[0, 0, 0], Q, Q), {}, ValueError, "query has 1 dimensions, expected at least 2"),
    ((Q, Q[0], Q), {}, ValueError, "key has 3 dimensions, expected 4, as query has"),
    ((Q, Q[:, :2], Q[:, :2]), {}, ValueError, "key has 2 heads, expected 4, those of query: enable_gqa=True"),
    ((Q, Q, Q, Q[:, :, :, :3]), {"is_causal": True}, ValueError, "attn_mask is given, expected None"),
    ((Q, Q.double(), Q), {}, TypeError, "key has dtype float64, expected float32"),
    ((Q.repeat(1, 1, 1, 38),) * 3, {}, ValueError, "query has heads of 304 numbers, expected 1 to 256"),
]


@pytest.mark.parametrize(("given", "options", "error", "message"), REFUSED, ids=[each[3] for each in REFUSED])
def test_refused(given, options, error, message):
    with pytest.raises(error, match=f"^scaled_dot_product_attention: {message}"):
        attend(*given, **options)
