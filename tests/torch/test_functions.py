"""Tensors: the same bits as from NumPy arrays, torch's values, strides and conventions, and clear refusals."""

import importlib.util
import sys

import numpy as np
import pytest
from accuracy import assert_close
from samples import bits, call, for_operators, refused, sample

import opgrad
from opgrad.contract import FLOATS
from opgrad.ops import tensor_operators

torch = pytest.importorskip("torch")
functional = torch.nn.functional

from tensors import array, on_tensors, tensor  # noqa: E402

import opgrad.torch  # noqa: E402
from opgrad.call import arrays  # noqa: E402
from opgrad.call.libraries import device  # noqa: E402
from opgrad.call.libraries import torch_tensors as tensors  # noqa: E402
from opgrad.call.owners import library_of  # noqa: E402
from opgrad.torch.operators import OPERATORS  # noqa: E402

LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "sliced": lambda x: torch.stack([x, x], -1)[..., 1],
    "rows apart": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "expanded": lambda x: x[:1].expand(x.shape),
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


# --- the plain functions --------------------------------------------------------------------------------------------


def test_tensors_give_the_bits_of_arrays(op, dtype, rng):
    for shape in [(3, 5), (2, 6, 35), (2, 5, 3, 4), (1, 1), (0, 3), (2, 3, 0)]:
        integer = ("int32", "int64")[len(shape) % 2]
        arguments = sample(op, shape, dtype, rng, axis=1, reduction="none", integer=integer)
        expected = call(op, arguments)
        for again in range(2):
            results = call(op, on_tensors(arguments))
            assert all(type(result) is torch.Tensor for result in results)
            assert [array(result).shape for result in results] == [result.shape for result in expected]
            assert [bits(array(result)) for result in results] == [bits(result) for result in expected], (shape, again)


@for_operators(lambda op: op.kind in ("rows", "elements", "classes"))
def test_layouts(op, layout, rng):
    arguments = sample(op, (4, 6, 5), "float32", rng, axis=1)
    laid_out = {
        name: layout(tensor(value)) if value.ndim == 3 else tensor(value)
        for name, value in arguments.items()
        if isinstance(value, np.ndarray)
    }
    as_arrays = {name: array(value) for name, value in laid_out.items()}
    attributes = {name: value for name, value in arguments.items() if name not in laid_out}
    results = call(op, laid_out | attributes)
    assert_close(op, as_arrays | attributes, [array(result) for result in results])
    for name, result in zip(op.results, results, strict=True):
        model = arrays.model_of(op, name)
        like = torch.empty(result.shape) if model is None else torch.empty_like(laid_out[model])
        assert result.stride() == like.stride(), name


def test_shapes_for_gather_grad():
    indices, dy = torch.tensor([0, 2, 2]), torch.ones(3, 4)
    expected = opgrad.gather_grad((3, 4), indices, dy)
    for shape in [torch.Size([3, 4]), [3, 4], torch.tensor([3, 4]), torch.tensor([3, 4], dtype=torch.int32)]:
        assert torch.equal(opgrad.gather_grad(shape, indices, dy), expected)
    assert torch.equal(opgrad.gather_grad(np.array([3, 4]), indices, dy), expected)
    assert np.array_equal(opgrad.gather_grad(torch.tensor([3, 4]), indices.numpy(), dy.numpy()), expected.numpy())
    changed = torch.tensor([3, 4])
    opgrad.gather_grad(changed, indices, dy)
    changed[0] = 5
    assert opgrad.gather_grad(changed, indices, dy).shape == (5, 4)


@pytest.mark.parametrize("out_dtype", [torch.float64, "float64", np.float64, np.dtype("float64")])
def test_out_dtype(out_dtype):
    logits, labels = torch.randn(3, 4), torch.tensor([0, 1, 2])
    for x in (logits, logits.clone().requires_grad_()):
        results = opgrad.softmax_cross_entropy_loss(x, labels, out_dtype=out_dtype)
        assert [result.dtype for result in results] == [torch.float64] * 2
        loss, dlogits = opgrad.softmax_cross_entropy_loss_and_grad(x, labels, out_dtype=(out_dtype, None))
        assert (loss.dtype, dlogits.dtype) == (torch.float64, torch.float32)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nothing_is_copied(monkeypatch, dtype):
    """No argument on its way to the kernels, nor a result on its way back."""
    x, given = torch.randn(3, 4).to(getattr(torch, dtype)), []
    monkeypatch.setattr(arrays.HostRunner, "execute", lambda self, *given_: given.append(self.addresses(given_[0])))
    y = opgrad.relu(x)
    assert given == [[x.data_ptr(), y.data_ptr()]]


def test_negative_views_and_parameters():
    z = torch.randn(5, dtype=torch.complex64)
    assert torch.equal(opgrad.relu(z.conj().imag), torch.relu(-z.imag))
    assert torch.equal(opgrad.relu(torch.nn.Parameter(z.real.clone())).detach(), torch.relu(z.real))


# --- out= -----------------------------------------------------------------------------------------------------------


def test_out_is_written_and_returned(op, dtype, rng):
    arguments = sample(op, (5, 33), dtype, rng)
    expected = call(op, on_tensors(arguments))
    outputs = tuple(torch.empty_like(result) for result in expected)
    given = on_tensors(arguments)
    out = outputs if len(outputs) > 1 else outputs[0]
    places = [output.data_ptr() for output in outputs]
    for _ in range(2):
        assert getattr(opgrad, op.name)(**given, out=out) is out
    assert [output.data_ptr() for output in outputs] == places
    assert [bits(array(output)) for output in outputs] == [bits(array(result)) for result in expected]


@for_operators(lambda op: op.in_place)
def test_in_place(op, rng):
    arguments = sample(op, (5, 33), "float32", rng)
    expected = call(op, on_tensors(arguments))
    for result, names in op.in_place.items():
        for name in names:
            given = on_tensors(arguments)
            outputs = [
                given[name] if key == result else torch.empty_like(each)
                for key, each in zip(op.results, expected, strict=True)
            ]
            getattr(opgrad, op.name)(**given, out=tuple(outputs) if len(outputs) > 1 else outputs[0])
            assert [bits(array(output)) for output in outputs] == [bits(array(each)) for each in expected]


def test_out_refused():
    x, memory = torch.randn(3, 4), torch.zeros(5, 4)
    with pytest.raises(ValueError, match="softmax: out for y overlaps x, expected x itself or separate memory"):
        opgrad.softmax(memory[:3], out=memory[1:4])
    with pytest.raises(ValueError, match=r"softmax: out for y repeats elements \(stride 0\)"):
        opgrad.softmax(x, out=torch.zeros(4).expand(3, 4))
    refused(TypeError, "relu: out for y has dtype float64, expected float32", opgrad.relu, x, out=x.double())
    with pytest.raises(TypeError, match="softmax: out for y is a NumPy array, expected a PyTorch tensor, as x is"):
        opgrad.softmax(x, out=x.numpy())
    with pytest.raises(TypeError, match="loss: out is a PyTorch tensor, expected a tuple of 2 arrays"):
        opgrad.softmax_cross_entropy_loss(x, torch.zeros(3, dtype=torch.int64), out=x)
    for given, out in [(x.clone().requires_grad_(), x), (x, x.clone().requires_grad_())]:
        with pytest.raises(RuntimeError, match="requires grad, and a call with out= is not differentiated"):
            opgrad.softmax(given, out=out)
        with torch.no_grad():
            assert opgrad.softmax(given, out=out) is out


# --- the functions of opgrad.torch ----------------------------------------------------------------------------------


def quick_gelu(x, alpha):
    return x * torch.sigmoid(alpha * x)


PAIRS = {
    "softmax": (lambda x: opgrad.torch.softmax(x, 1), lambda x: functional.softmax(x, 1)),
    "softmax of two axes": (
        lambda x: opgrad.torch.softmax(x, dim=(1, 2)),
        lambda x: functional.softmax(x.flatten(1), 1).view(x.shape),
    ),
    "log_softmax": (lambda x: opgrad.torch.log_softmax(x), lambda x: functional.log_softmax(x, -1)),
    "relu": (opgrad.torch.relu, functional.relu),
    "sigmoid": (opgrad.torch.sigmoid, torch.sigmoid),
    "tanh": (opgrad.torch.tanh, torch.tanh),
    "quick_gelu": (opgrad.torch.quick_gelu, lambda x: quick_gelu(x, 1.702)),
    "silu": (lambda x: opgrad.torch.quick_gelu(x, 1), functional.silu),
    "leaky_relu": (lambda x: opgrad.torch.leaky_relu(x, 0.3), lambda x: functional.leaky_relu(x, 0.3)),
    "negative slope": (
        lambda x: opgrad.torch.leaky_relu(x, negative_slope=-0.5),
        lambda x: functional.leaky_relu(x, -0.5),
    ),
}


# Each layout, and each dtype: together they would compile every kernel for every dtype.
ARRANGED = pytest.mark.parametrize(
    ("arranged", "dtype"), [*((each, "float32") for each in LAYOUTS), *(("contiguous", each) for each in FLOATS[1:])]
)
DEVICES = pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
@ARRANGED
@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_are_torchs(name, dtype, arranged, on):
    torch.manual_seed(0)
    (ours, theirs), layout = PAIRS[name], LAYOUTS[arranged]
    x = layout(2 * torch.randn(4, 6, 5, dtype=torch.float64, device=on).to(getattr(torch, dtype))).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, expected = ours(x), theirs(exact)
    assert (y.device, y.dtype, y.stride()) == (x.device, x.dtype, torch.empty_like(x).stride())
    torch.testing.assert_close(y, expected.to(y.dtype))
    dy = torch.randn_like(expected).to(y.dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    (dx_expected,) = torch.autograd.grad(expected, exact, dy.double())
    torch.testing.assert_close(dx, dx_expected.to(dx.dtype), **tolerances(dtype))


def tolerances(dtype):
    """What a gradient that is made from a rounded result may be off; the defaults where that is not half precision."""
    return {"bfloat16": {"rtol": 2e-2, "atol": 2e-2}, "float16": {"rtol": 2e-3, "atol": 2e-3}}.get(dtype, {})


def test_dtype_converts_first():
    x = torch.randn(3, 4).half()
    assert torch.equal(opgrad.torch.softmax(x, dtype=torch.float32), opgrad.torch.softmax(x.float()))
    assert opgrad.torch.log_softmax(x, dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather(axis, dtype):
    x = torch.randn(4, 6, 5).to(getattr(torch, dtype))
    indices = torch.tensor([[0, -1, 2], [3, 3, 1]])
    expected = x.movedim(axis, 0)[indices].movedim((0, 1), (axis % 3, axis % 3 + 1))
    assert torch.equal(opgrad.torch.gather(x, indices, axis), expected)


def test_embedding_ignores_what_padding_receives():
    weight = torch.ones(4, 2, requires_grad=True)
    y = opgrad.torch.embedding(torch.tensor([1, 3, -1]), weight, padding_idx=3)
    y.backward(torch.tensor([[1.0, 1.0], [torch.nan, torch.inf], [torch.nan, 1.0]]))
    assert torch.equal(weight.grad, torch.tensor([[0.0, 0.0], [1, 1], [0, 0], [0, 0]]))
    with pytest.raises(ValueError, match="embedding: padding_idx is 4, expected -4 to 3"):
        opgrad.torch.embedding(torch.tensor([1]), weight, padding_idx=4)


# --- cross-entropy --------------------------------------------------------------------------------------------------


def labels_for(shape, ignore_index=None):
    classes = shape[min(len(shape) - 1, 1)]
    labels = torch.randint(0, classes, shape[:1] + shape[2:] if len(shape) > 1 else ())
    if ignore_index is not None and labels.numel() > 1:
        labels.view(-1)[::3] = ignore_index
    return labels


@DEVICES
@ARRANGED
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_dtypes_and_layouts(reduction, dtype, arranged, on):
    torch.manual_seed(0)
    x = LAYOUTS[arranged](torch.randn(4, 6, 5, device=on).to(getattr(torch, dtype))).requires_grad_()
    exact = x.detach().double().requires_grad_()
    labels = labels_for((4, 6, 5), -100).to(on)
    expected = functional.cross_entropy(exact, labels, reduction=reduction)
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    for in_place in (False, True):
        loss = opgrad.torch.cross_entropy(x, labels, reduction=reduction, inplace_backward=in_place)
        assert loss.dtype == x.dtype
        torch.testing.assert_close(loss, expected.to(loss.dtype))
        (dx,) = torch.autograd.grad(loss.sum(), x)
        torch.testing.assert_close(dx, slope.to(x.dtype), **tolerances(dtype))


@pytest.mark.parametrize("integer", [torch.int32, torch.uint8])
def test_other_integers_as_target(integer):
    x, labels = torch.randn(5, 7), torch.tensor([0, 1, 6, 255, 3])
    expected = functional.cross_entropy(x, labels, ignore_index=255)
    torch.testing.assert_close(opgrad.torch.cross_entropy(x, labels.to(integer), ignore_index=255), expected)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("size", [0, 3])
def test_mean_over_nothing_is_zero(size, label_smoothing):
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(size, 4).to(dtype).requires_grad_()
        labels = torch.full((size,), -100)
        loss = opgrad.torch.cross_entropy(x, labels, label_smoothing=label_smoothing)
        loss.backward()
        assert loss == 0
        assert torch.equal(x.grad, torch.zeros_like(x))


def test_cross_entropy_refuses():
    x, labels, ones = torch.randn(3, 4), torch.tensor([0, 1, 2]), torch.ones(4)
    cross_entropy = opgrad.torch.cross_entropy
    for error, message, arguments in [
        (ValueError, r"target has shape \(2,\), expected \(3,\), input's shape without the classes", (x, labels[:2])),
        (ValueError, r"target has shape \(3, 1\), expected \(3, 4\), input's shape for class prob", (x, x[:, :1])),
        (ValueError, r"weight has shape \(3,\), expected \(4,\), the classes", (x, labels, ones[:3])),
        (ValueError, "input has 0 dimensions, expected at least 1", (x[0, 0], labels[0])),
        (TypeError, "target is ndarray, expected a PyTorch tensor", (x, labels.numpy())),
        (NotImplementedError, "weight requires grad", (x, labels, ones.clone().requires_grad_())),
    ]:
        for logits in (arguments[0], arguments[0].clone().requires_grad_()):
            refused(error, message, cross_entropy, logits, *arguments[1:])
    with pytest.raises(ValueError, match="reduction is 'max', expected one of none, mean, sum"):
        cross_entropy(x, labels, reduction="max")
    with pytest.raises(ValueError, match="label_smoothing is 2, expected a number from 0 to 1"):
        cross_entropy(x, labels, label_smoothing=2)
    refused(ValueError, "ignore_index is 1, expected none for class probabilities", cross_entropy, x, x, ignore_index=1)
    with pytest.raises(TypeError, match=r"^cross_entropy: size_average is -100, expected a bool or None; ignore_index"):
        cross_entropy(x, labels, None, -100)


# --- autocast -------------------------------------------------------------------------------------------------------


def close_to_torchs(found, expected):
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


IDS = torch.tensor([[1, 0, 3]])
# PyTorch's function of each public function's arguments; those of two dtypes get any two.
IN_TORCH = {
    "dropout": lambda x: (opgrad.torch.dropout(x, 0.0), functional.dropout(x, 0.0)),
    "embedding": lambda x: (opgrad.torch.embedding(IDS % 3, x), functional.embedding(IDS % 3, x)),
    "gather": lambda x: (opgrad.torch.gather(x, IDS[0] % 3), x[IDS[0] % 3]),
    "gelu": lambda x: (opgrad.torch.gelu(x), functional.gelu(x)),
    "relu": lambda x: (opgrad.torch.relu(x), functional.relu(x)),
    "leaky_relu": lambda x: (opgrad.torch.leaky_relu(x), functional.leaky_relu(x)),
    "sigmoid": lambda x: (opgrad.torch.sigmoid(x), torch.sigmoid(x)),
    "tanh": lambda x: (opgrad.torch.tanh(x), torch.tanh(x)),
    "quick_gelu": lambda x: (opgrad.torch.quick_gelu(x), x * torch.sigmoid(1.702 * x)),
    # The CUDA list's class: float32.
    "softmax": lambda x: (opgrad.torch.softmax(x), functional.softmax(x.float(), -1)),
    "log_softmax": lambda x: (opgrad.torch.log_softmax(x), functional.log_softmax(x.float(), -1)),
    "cross_entropy": lambda x: (opgrad.torch.cross_entropy(x, IDS[0]), functional.cross_entropy(x.float(), IDS[0])),
    "swiglu": lambda x, y: (opgrad.torch.swiglu(x, y), functional.silu(x) * y),
    "geglu": lambda x, y: (opgrad.torch.geglu(x, y), functional.gelu(x, approximate="tanh") * y),
    "rms_norm": lambda x, y: (
        opgrad.torch.rms_norm(x, (6,), y[0], 1e-6),
        functional.rms_norm(x.float(), (6,), y[0].float(), 1e-6).to(x.dtype),
    ),
    "layer_norm": lambda x, y: (
        opgrad.torch.layer_norm(x, (6,), y[0], y[0].float()),
        functional.layer_norm(x.float(), (6,), y[0].float(), y[0].float()).to(x.dtype),
    ),
    "scaled_dot_product_attention": lambda x, y: (
        opgrad.torch.scaled_dot_product_attention(x[None], x[None], y[None], y[:, :3]),
        functional.scaled_dot_product_attention(x[None], x[None], y[None], y[:, :3]),
    ),
    "linear_cross_entropy": lambda x, y: (
        opgrad.torch.linear_cross_entropy(x, y, IDS[0] % 3),
        functional.cross_entropy(functional.linear(x, y).float(), IDS[0] % 3),
    ),
    "linear_log_prob": lambda x, y: (
        opgrad.torch.linear_log_prob(x, y, IDS[0] % 3),
        -functional.cross_entropy(functional.linear(x, y).float(), IDS[0] % 3, reduction="none"),
    ),
    "linear_kl_div": lambda x, y: (
        opgrad.torch.linear_kl_div(x, y, -x, y),
        functional.kl_div(
            functional.linear(x, y).float().log_softmax(-1), functional.linear(-x, y).detach().float().log_softmax(-1),
            log_target=True, reduction="batchmean",
        ),
    ),
    "linear_jsd": lambda x, y: (
        opgrad.torch.linear_jsd(x, y, -x, y),
        divergence(functional.linear(x, y).float().softmax(-1), functional.linear(-x, y).detach().float().softmax(-1)),
    ),
    "sink_softmax": lambda x, y: (
        opgrad.torch.sink_softmax(x[None, None], y[0, :1]),
        torch.cat([x, y[0, :1].expand(3, 1)], 1).float().softmax(-1)[None, None, :, :-1],
    ),
    "vocab_parallel_cross_entropy": lambda x: (
        opgrad.torch.vocab_parallel_cross_entropy(x, IDS[0]),
        functional.cross_entropy(x.float(), IDS[0]),
    ),
    "vocab_parallel_linear_cross_entropy": lambda x, y: (
        opgrad.torch.vocab_parallel_linear_cross_entropy(x, y, IDS[0] % 3),
        functional.cross_entropy(functional.linear(x, y).float(), IDS[0] % 3),
    ),
}  # fmt: skip
OTHERS = {"CrossEntropyLoss", "CrossEntropyOutput", "LinearCrossEntropyLoss", "patch", "unpatch"}  # classes and models


def divergence(student, teacher):
    """That of Jensen and Shannon, the mean over the rows."""
    between = (student + teacher) / 2
    parts = [functional.kl_div(between.log(), each, reduction="batchmean") for each in (student, teacher)]
    return sum(parts) / 2


@pytest.fixture(scope="module")
def _group():
    """A group of this process alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()


def test_every_public_function_has_a_class_under_autocast():
    assert set(opgrad.torch.__all__) == IN_TORCH.keys() | OTHERS


@pytest.mark.parametrize("second", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", IN_TORCH)
@pytest.mark.usefixtures("_group")
def test_classes_under_autocast(name, first, second):
    """Lower precision, float32 or the widest dtype, as PyTorch's functions, after a call outside as well."""
    torch.manual_seed(0)
    x = torch.randn(3, 6).to(first).requires_grad_()
    y = torch.randn(3, 6).to(second).requires_grad_()
    given = (x, y)[: IN_TORCH[name].__code__.co_argcount]
    if first == second == torch.float32:
        close_to_torchs(*IN_TORCH[name](*given))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = IN_TORCH[name](*given)
        close_to_torchs(found, expected)
        for mine, other in zip(*(torch.autograd.grad(each.sum(), given) for each in (found, expected)), strict=True):
            close_to_torchs(mine, other)


# --- errors ---------------------------------------------------------------------------------------------------------


def test_unsupported_tensors():
    x = torch.randn(3, 4)
    for error, message, wrong in [
        (NotImplementedError, "x is on meta, expected cpu or cuda: move it with", x.to("meta")),
        (NotImplementedError, "x has layout torch.sparse_coo, expected a dense one: use", x.to_sparse()),
        (TypeError, "x has dtype int8, expected one of float32, float64, float16, bfloat16", x.to(torch.int8)),
        (TypeError, "x has dtype complex64, expected one of", x.to(torch.complex64)),
        (TypeError, "x has dtype float8_e5m2, expected one of", x.to(torch.float8_e5m2)),
        (TypeError, "x has dtype bool, expected one of", x > 0),
    ]:
        for function in (opgrad.relu, opgrad.torch.relu):
            refused(error, f"^relu: {message}", function, wrong)


def test_mixtures_are_refused():
    x = torch.randn(3, 4)
    for arguments in [(x, x.numpy()), (x.numpy(), x), (x, [[1.0]])]:
        with pytest.raises(TypeError, match=r"^softmax_grad: (dy|y) is .*, expected a PyTorch tensor, as (dy|y) is"):
            opgrad.softmax_grad(*arguments)
    with pytest.raises(ValueError, match=r"y is on meta, expected cpu, the device of dy: move it with .to\('cpu'\)"):
        opgrad.softmax_grad(x, x.to("meta"))
    for function in (opgrad.torch.softmax, opgrad.torch.relu):
        refused(TypeError, r"^(softmax|relu): x is a NumPy array, expected a PyTorch tensor$", function, x.numpy())


def test_the_contracts_messages():
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"^softmax_grad: y has shape \(3, 3\), expected \(3, 4\), the shape of dy$"):
        opgrad.softmax_grad(x, x[:, :3])
    refused(TypeError, r"^softmax: got an unexpected keyword argument 'dim'$", opgrad.softmax, x, dim=1)
    with pytest.raises(TypeError, match=r"^gather_grad: shape has dtype torch.float32, expected int32 or int64$"):
        opgrad.gather_grad(torch.tensor([3.0, 4.0]), torch.tensor([1, 1, 1]), x)


def test_every_operator_takes_tensors():
    assert set(OPERATORS) == set(tensor_operators())
    assert all(torch.Tag.pt2_compliant_tag in operator.overload.tags for operator in OPERATORS.values())
    assert library_of(torch.Tensor) is library_of(torch.nn.Parameter)
    assert library_of(torch.Tensor).__name__ == "opgrad.torch.door"


# --- the way of CUDA tensors, on tensors in host memory and in Triton's interpreter ---------------------------------


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Let tensors on the CPU go the way of those on CUDA."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("a GPU is at hand: test_gpu.py runs the same on it")

    class Memory(tensors._TensorMemory):
        def stream(self, like):
            return None

    monkeypatch.setattr(tensors, "_host", device.Runners(Memory(), tensors._settle))
    with np.errstate(all="ignore"):
        yield


def test_device_gradients(as_on_cuda):
    ours, theirs = (torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in "12")
    labels = labels_for((3, 5, 4), -100)
    opgrad.torch.cross_entropy(ours, labels).backward()
    functional.cross_entropy(theirs, labels).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_device_warm_calls(as_on_cuda, monkeypatch):
    """A call whose signature is known goes straight to its runner, unless somebody has to know of it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from opgrad.call import owners

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen = getattr(self, "seen", 0) + 1
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(tensors, "_cuda", tensors._host)
    monkeypatch.setattr(tensors, "is_here", lambda tensor: True)
    long_way, run = [], owners.run
    monkeypatch.setattr(owners, "run", lambda *given: long_way.append(given) or run(*given))

    def taken(call):
        """Whether a call takes the long way, and its result."""
        before = len(long_way)
        return call(), len(long_way) > before

    x, indices = torch.randn(3, 7, 5), torch.tensor([2, 0, 2])
    for made, expected in [
        (lambda: opgrad.softmax(x), lambda: torch.softmax(x, -1)),
        (lambda: opgrad.softmax(x, axis=1), lambda: torch.softmax(x, 1)),
        (lambda: opgrad.softmax(x=x, axis=1), lambda: torch.softmax(x, 1)),
        (lambda: opgrad.softmax(x[:, 1:], 1), lambda: torch.softmax(x[:, 1:], 1)),
        (lambda: opgrad.gather(x, indices, 1), lambda: x.index_select(1, indices)),
    ]:
        assert taken(made)[1]
        for _ in range(2):
            x.normal_()
            result, long = taken(made)
            assert not long
            torch.testing.assert_close(result, expected())
    out = torch.empty_like(x)
    assert taken(lambda: opgrad.softmax(x, out=out))[1]
    versions = out._version
    assert taken(lambda: opgrad.softmax(x.normal_(), out=out)) == (out, False)
    torch.testing.assert_close(out, torch.softmax(x, -1))
    assert out._version == versions + 1
    apart, memory = torch.empty(8), torch.empty(16)
    assert taken(lambda: opgrad.softmax(memory[:8], out=apart))[1]
    refused(ValueError, "softmax: out for y overlaps x", opgrad.softmax, memory[:8], out=memory[4:12])
    assert taken(lambda: opgrad.softmax(x.requires_grad_()))[0].requires_grad
    with torch.no_grad():
        assert not taken(lambda: opgrad.softmax(x))[1]
    with Mode() as mode:
        opgrad.softmax(x.detach())
    assert mode.seen
    torch.testing.assert_close(torch.func.vmap(opgrad.softmax)(x.detach()), torch.softmax(x.detach(), -1))
    refused(ValueError, "axis", opgrad.softmax, x.detach(), 3)


def test_device_check(as_on_cuda):
    x, labels = torch.randn(3, 4), torch.tensor([0, 7, 1])
    assert opgrad.torch.cross_entropy(x, labels).isnan()
    for logits in (x, x.clone().requires_grad_()):
        with pytest.raises(ValueError, match=r"^cross_entropy: target\[1\] is 7, expected 0 to 3 or ignore_index -100"):
            opgrad.torch.cross_entropy(logits, labels, check=True)
    refused(ValueError, r"^embedding: input\[1\] is 7, expected -3 to 2", opgrad.torch.embedding, labels, x, check=True)
    labels[1] = 3
    torch.testing.assert_close(opgrad.torch.cross_entropy(x, labels, check=True), functional.cross_entropy(x, labels))


def test_without_triton(as_on_cuda, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert importlib.util.find_spec("triton") is None
    with pytest.raises(ImportError, match=r'relu: CUDA kernels need Triton, .*: pip install "opgrad\[cuda\]"'):
        opgrad.relu(torch.randn(3))


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_compiled_on_cuda():
    def loss(x, labels):
        return opgrad.torch.cross_entropy(opgrad.torch.quick_gelu(x), labels)

    x, labels = torch.randn(6, 40, device="cuda", requires_grad=True), labels_for((6, 40)).cuda()
    compiled = torch.compile(loss, fullgraph=True)(x, labels)
    torch.testing.assert_close(compiled, loss(x, labels))
    torch.testing.assert_close(torch.autograd.grad(compiled, x), torch.autograd.grad(loss(x, labels), x))


@pytest.mark.gpu
def test_devices_are_not_mixed():
    x = torch.randn(3, 4, device="cuda")
    with pytest.raises(ValueError, match=r"y is on cpu, expected cuda:0, the device of dy: move it with"):
        opgrad.softmax_grad(x, x.cpu())
    with pytest.raises(ValueError, match="shape is a tensor on cuda:0, expected one in CPU memory or a tuple"):
        opgrad.gather_grad(torch.tensor([3, 4], device="cuda"), torch.tensor([0, 1, 2], device="cuda"), x)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current():
    x = torch.randn(3, 4, device="cuda:1")
    torch.testing.assert_close(opgrad.softmax(x), torch.softmax(x, -1))
    assert torch.cuda.current_device() == 0


def test_gather_of_a_single_number():
    """As torch.index_select has it."""
    x = torch.tensor(5.0, requires_grad=True)
    for indices in (torch.tensor(0), torch.tensor([0]), torch.tensor([[-1]], dtype=torch.int32)):
        y = opgrad.torch.gather(x, indices)
        assert y.shape == ()
        assert torch.autograd.grad(y, x) == (torch.tensor(1.0),)
    assert torch.index_select(x, 0, torch.tensor([0])).shape == ()
    for wrong, message in ((torch.tensor([0, 0]), "expected one index for a single number"), (torch.tensor(1), "is 1")):
        refused(ValueError, message, opgrad.torch.gather, x, wrong)
