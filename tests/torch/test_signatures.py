"""opgrad.torch takes what torch.nn.functional takes, by position and by name, and fails in the caller's words."""

import inspect

import pytest
from samples import fails, refused

import opgrad

torch = pytest.importorskip("torch")
functional = torch.nn.functional

import opgrad.torch  # noqa: E402

# gather is ONNX's and has another name there; quick_gelu is com.microsoft's.
BOTH = sorted(name for name in opgrad.torch.__all__ if hasattr(functional, name))
LABELS = torch.tensor([0, 3, 1])


def arguments(name):
    if name == "embedding":
        return [torch.tensor([[0, 2], [2, 1]]), torch.randn(3, 4)]
    if name == "scaled_dot_product_attention":
        return [torch.randn(2, 3, size, 4) for size in (5, 6, 6)]
    if name == "linear_cross_entropy":
        return [torch.randn(3, 5), torch.randn(4, 5), LABELS]
    if name in ("layer_norm", "rms_norm"):
        return [torch.randn(3, 4), [4]]
    if name == "dropout":
        return [torch.randn(3, 4), 0.5, False]  # what training drops is random
    return [torch.randn(3, 4), LABELS] if name == "cross_entropy" else [torch.randn(3, 4)]


def signature(name):
    """Of PyTorch's function; one that is not written in Python has it in the schema of its operator."""
    if not inspect.isbuiltin(getattr(functional, name)):
        return inspect.signature(getattr(functional, name))
    schema = getattr(torch.ops.aten, name).default._schema
    kinds = {False: inspect.Parameter.POSITIONAL_OR_KEYWORD, True: inspect.Parameter.KEYWORD_ONLY}
    return inspect.Signature(
        [
            inspect.Parameter(
                {"self": "input"}.get(each.name, each.name),
                kinds[each.kwarg_only],
                default=each.default_value if each.has_default_value() else inspect.Parameter.empty,
            )
            for each in schema.arguments
        ]
    )


def theirs(name):
    """The parameters of PyTorch's function, with defaults that say what they mean."""
    parameters = dict(signature(name).parameters)
    return {each: {"dim": 1}.get(each, parameter.default) for each, parameter in parameters.items()}


def test_every_function_is_compared():
    assert [
        *("cross_entropy", "dropout", "embedding", "gelu", "layer_norm", "leaky_relu", "linear_cross_entropy"),
        *("log_softmax", "relu", "rms_norm", "scaled_dot_product_attention", "sigmoid", "softmax", "tanh"),
    ] == BOTH


@pytest.mark.parametrize("name", BOTH)
def test_parameters_stand_where_pytorch_has_them(name):
    ours = list(inspect.signature(getattr(opgrad.torch, name)).parameters.values())
    expected = list(signature(name).parameters.values())
    assert [each.name for each in ours[: len(expected)]] == [each.name for each in expected]
    assert [each.kind for each in ours[: len(expected)]] == [each.kind for each in expected]
    assert all(each.kind is each.KEYWORD_ONLY for each in ours[len(expected) :])
    for mine, other in zip(ours, expected, strict=False):
        if other.default is not other.empty:
            meant = -100 if other.name == "ignore_index" else other.default  # None means so, too
            assert mine.default == meant


@pytest.mark.parametrize("name", BOTH)
def test_calls_by_position_and_by_name(name):
    given, parameters = arguments(name), theirs(name)
    values = given + list(parameters.values())[len(given) :]
    named = list(zip(parameters, values, strict=True))
    kinds = [each.kind for each in signature(name).parameters.values()]
    positional = len(kinds) - kinds.count(inspect.Parameter.KEYWORD_ONLY)
    expected = getattr(functional, name)(*values[:positional], **dict(named[positional:]))
    function = getattr(opgrad.torch, name)
    torch.testing.assert_close(function(**dict(named)), expected)
    for count in range(len(given), positional + 1):
        torch.testing.assert_close(function(*values[:count], **dict(named[count:])), expected)


# --- softmax of a single number -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("value", [3.0, -1e30, float("nan"), float("inf"), -float("inf")])
def test_single_numbers(name, value):
    for dim in (0, -1):
        ours, theirs = (torch.tensor(value, requires_grad=True) for _ in "12")
        y, expected = getattr(opgrad.torch, name)(ours, dim), getattr(functional, name)(theirs, dim)
        torch.testing.assert_close(y, expected, equal_nan=True)
        found = torch.autograd.grad(y, ours)
        torch.testing.assert_close(found, torch.autograd.grad(expected, theirs), equal_nan=True)
    with pytest.raises(ValueError, match=r"axis is 1, expected -1 to 0"):
        getattr(opgrad.torch, name)(torch.tensor(value), 1)


# --- in place -------------------------------------------------------------------------------------------------------

INPLACE = {
    "relu": (opgrad.torch.relu, functional.relu, ()),
    "leaky_relu": (opgrad.torch.leaky_relu, functional.leaky_relu, (0.25,)),
}


@pytest.fixture(params=INPLACE)
def in_place(request):
    return INPLACE[request.param]


def test_in_place(in_place):
    ours, theirs, options = in_place
    for layout in (lambda x: x, lambda x: x.t(), lambda x: x[:, ::2]):
        x = layout(torch.randn(4, 6))
        y, version = x.clone(), x._version
        assert ours(x, *options, inplace=True) is x
        assert torch.equal(x, theirs(y, *options))
        assert x._version == version + 1
    for scope in (torch.no_grad, torch.inference_mode):
        with scope():
            x = torch.randn(3)
            expected = theirs(x, *options)
            assert ours(x, *options, True) is x
            assert torch.equal(x, expected)
    with pytest.raises(ValueError, match="repeats elements"):
        ours(torch.randn(1, 3).expand(2, 3), *options, inplace=True)
    with pytest.raises(TypeError, match="x has dtype int64"):
        ours(LABELS.clone(), *options, inplace=True)


def test_gradients_in_place(in_place):
    ours, theirs, options = in_place
    x = torch.randn(4, 6, dtype=torch.float64)
    found = []
    for function in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = leaf * 1
        version = y._version
        assert function(y, *options, inplace=True) is y
        assert y._version == version + 1
        (dx,) = torch.autograd.grad((y * y).sum(), leaf, create_graph=True)
        found.append((y, dx, *torch.autograd.grad(dx.sum(), leaf)))
        parts = leaf * 1
        function(parts[:, 1:3], *options, inplace=True)
        found[-1] += (parts, *torch.autograd.grad((parts * x).sum(), leaf))
    torch.testing.assert_close(found[0], found[1])
    leaf = x.clone().requires_grad_()
    for function in (ours, theirs):
        for view in (leaf, leaf[1:]):
            with pytest.raises(RuntimeError, match="leaf"):
                function(view, *options, inplace=True)
    assert torch.equal(leaf, x)
    saved = leaf.exp()
    ours(saved, *options, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
    assert torch.autograd.gradcheck(lambda x: ours(x * 1, *options, inplace=True), leaf)


def test_in_place_where_the_result_does_not_tell_the_sign():
    x = torch.randn(5)
    expected = functional.leaky_relu(x, -0.5)
    assert torch.equal(opgrad.torch.leaky_relu(x.clone(), -0.5, inplace=True), expected)
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(opgrad.torch.leaky_relu(leaf * 1, -0.5, inplace=True).sum(), leaf)
    assert torch.equal(dx, torch.where(x > 0, 1.0, -0.5))


def test_in_place_under_a_compiler(in_place):
    ours, theirs, options = in_place
    compiled = torch.compile(lambda x: ours(x * 2, *options, inplace=True), backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 4, requires_grad=True)
    y, expected = compiled(x), theirs(x * 2, *options)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x))


# --- cross-entropy and embedding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", [None, True, False])
@pytest.mark.parametrize("reduce", [None, True, False])
def test_what_reduction_was_before(average, reduce):
    x = torch.randn(3, 4)
    if average is reduce is None:
        assert torch.equal(
            opgrad.torch.cross_entropy(x, LABELS, None, None, 3, None),
            opgrad.torch.cross_entropy(x, LABELS, ignore_index=3),
        )
        return
    with pytest.warns(UserWarning, match="size_average and reduce"):
        expected = functional.cross_entropy(x, LABELS, None, average, -100, reduce)
    with pytest.warns(UserWarning, match="cross_entropy: size_average and reduce are deprecated, use reduction='"):
        found = opgrad.torch.cross_entropy(x, LABELS, None, average, -100, reduce)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_target", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_weight", [None, torch.float32, torch.float64])
@pytest.mark.one_in(2)
def test_probabilities_promote_as_pytorchs(dtype, of_target, of_weight):
    x, target = torch.randn(3, 4).to(dtype), torch.softmax(torch.randn(3, 4), 1).to(of_target)
    weight = None if of_weight is None else torch.rand(4).to(of_weight)
    for reduction in ("none", "mean", "sum"):
        for smoothing in (0.0, 0.1):
            ours, theirs = (x.clone().requires_grad_() for _ in "12")
            options = {"reduction": reduction, "label_smoothing": smoothing}
            loss = opgrad.torch.cross_entropy(ours, target, weight, **options)
            expected = functional.cross_entropy(theirs, target, weight, **options)
            assert loss.dtype == expected.dtype
            coarse = torch.finfo(torch.promote_types(dtype, of_target)).eps
            coarse = max(coarse, torch.finfo(dtype).eps, torch.finfo(of_target).eps) * 16
            torch.testing.assert_close(loss, expected, rtol=coarse, atol=coarse)
            loss.sum().backward()
            expected.sum().backward()
            assert ours.grad.dtype == dtype
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=coarse, atol=coarse)


def test_rows_are_scaled_down_to_a_norm():
    indices = torch.tensor([0, 2, 2])
    for norm in (1.0, 2.0):
        ours, theirs = (torch.arange(12.0).view(4, 3).requires_grad_() for _ in "12")
        y = opgrad.torch.embedding(indices, ours, None, 2.5, norm)
        torch.testing.assert_close(y, functional.embedding(indices, theirs, None, 2.5, norm))
        torch.testing.assert_close(ours, theirs)
        y.sum().backward()
    with pytest.raises(NotImplementedError, match=r"^embedding: scale_grad_by_freq is True, expected False"):
        opgrad.torch.embedding(indices, ours, scale_grad_by_freq=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
def test_sparse_gradients_of_rows(dtype, padding_idx):
    indices = torch.randint(-50, 50, (6, 7))
    indices[0, :2] = 3
    sparse, dense = (torch.ones(50, 4, 3, dtype=dtype, requires_grad=True) for _ in "12")
    y = opgrad.torch.embedding(indices, sparse, padding_idx, sparse=True)
    dy = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, sparse, dy)
    opgrad.torch.embedding(indices, dense, padding_idx).backward(dy)
    assert found.is_coalesced()
    assert torch.equal(found.to_dense(), dense.grad)
    kept = indices.remainder(50) if padding_idx is None else indices[(indices - padding_idx) % 50 != 0].remainder(50)
    assert torch.equal(found.indices()[0], kept.unique())


def test_where_gradients_cannot_be_sparse():
    table = torch.ones(3, 2, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"^embedding: sparse is True, expected False under"):
        torch.func.grad(lambda w: opgrad.torch.embedding(torch.tensor([1]), w, sparse=True).sum())(table)
    with pytest.raises(ValueError, match=r"^embedding: padding_idx is 3, expected -3 to 2$"):
        opgrad.torch.embedding(torch.tensor([1]), table, 3, sparse=True)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"reduction": "none"}, {"inplace_backward": True}])
@pytest.mark.parametrize("gradient", [False, True])
def test_wrong_labels_are_named_as_the_caller_does(options, gradient):
    x = torch.randn(3, 4).requires_grad_(gradient)
    call = opgrad.torch.cross_entropy
    with pytest.raises(ValueError, match=r"^cross_entropy: target\[2\] is 4, expected 0 to 3 or ignore_index -100$"):
        call(x, torch.tensor([0, -100, 4]), **options)
    with pytest.raises(ValueError, match=r"^cross_entropy: target\[0, 1\] is -1, expected 0 to 2 or ignore_index 7$"):
        call(x[None], torch.tensor([[0, -1, 7, 7]]), ignore_index=7, **options)
    with pytest.raises(ValueError, match=r"^cross_entropy: target is 9, expected 0 to 3 or ignore_index -100$"):
        call(x[0], torch.tensor(9), **options)
    with pytest.raises(TypeError, match=r"^cross_entropy: target has dtype int16, expected one of int32, int64$"):
        call(x, torch.tensor([0, 1, 2], dtype=torch.int16), **options)


@pytest.mark.parametrize("gradient", [False, True])
def test_wrong_indices_are_named_as_the_caller_does(gradient):
    weight, embedding = torch.randn(3, 4).requires_grad_(gradient), opgrad.torch.embedding
    for padding in (None, 1):
        message = "embedding: input[1, 0] is 3, expected -3 to 2"
        fails(ValueError, message, embedding, torch.tensor([[0], [3]]), weight, padding)
    message = "embedding: input has dtype float32, expected one of int32, int64"
    fails(TypeError, message, embedding, torch.ones(2), weight)
    message = "^embedding: weight has dtype int64, expected one of float32, "
    refused(TypeError, message, embedding, torch.tensor([0]), LABELS[:, None])
    for gather in (opgrad.torch.gather, torch.ops.opgrad.gather):
        fails(ValueError, "gather: indices[0] is 3, expected -3 to 2", gather, weight, torch.tensor([3]))


def test_wrong_labels_of_registered_operators_have_their_names():
    x = torch.randn(3, 4, requires_grad=True)
    for name in ("softmax_cross_entropy_loss", "softmax_cross_entropy_loss_only"):
        for gradient in (False, True):
            with pytest.raises(ValueError, match=rf"^{name}: labels\[0\] is 4, expected 0 to 3$"):
                getattr(torch.ops.opgrad, name)(x.requires_grad_(gradient), torch.tensor([4, 0, 0]))
    with pytest.raises(ValueError, match=r"^gather_grad: indices\[0\] is 4, expected -3 to 2$"):
        opgrad.gather_grad((3, 4), torch.tensor([4]), torch.ones(1, 4))
