"""Layers on tensors: like PyTorch's functions, all their derivatives, compiled, batched, exported, refused."""

from itertools import chain

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import opgrad  # noqa: E402
import opgrad.torch as ours  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # by forward_ad itself

functional = torch.nn.functional
WIDTH = 37
ARGUMENTS = {"x": (4, 3, WIDTH), "up": (4, 3, WIDTH), "weight": (WIDTH,), "bias": (WIDTH,)}
ARGUMENTS |= {"q": (2, 4, 3, 4), "k": (2, 2, 3, 4), "v": (2, 2, 3, 4), "scores": (3, 3)}
ARGUMENTS |= {"heads": (2, 3, 4, 6), "sink": (3,), "tokens": (2, 4, 3, 8), "packed": (2, 4, 12)}
SILU = functional.silu


def turned(x, angles, positions=None, interleaved=False, layout="BHLD"):
    """Rotary embedding in PyTorch's functions; an array of three axes has two heads in the last one."""
    is_packed = x.dim() == 3
    y = x.unflatten(-1, (2, -1)) if is_packed else x if layout == "BLHD" else x.transpose(1, 2)
    angles = angles[..., : y.shape[1], :] if positions is None else angles[positions]
    cos, sin, size = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2), 2 * angles.shape[-1]
    pairs, rest = y[..., :size], y[..., size:]
    a, b = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, -1)
    both = [a * cos - b * sin, a * sin + b * cos]
    pairs = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    y = torch.cat([pairs, rest], -1)
    return y.flatten(-2) if is_packed else y if layout == "BLHD" else y.transpose(1, 2)


def alike(name, *settings, of, **options):
    """A layer of the table that has the name and the arguments of PyTorch's: `settings` stand behind the first."""

    def layer(library):
        return lambda x, *others: getattr(library, name)(x, *settings, *others, **options)

    return layer(ours), layer(functional), of


def attention(*mask, **options):
    """A layer of the table, in which two heads of queries share one of keys."""
    return alike("scaled_dot_product_attention", of=("q", "k", "v", *mask), enable_gqa=True, **options)


def rotary(array, rows, options=None, **more):
    """A layer of the table. more: what the formula reads of the shape."""
    angles = torch.rand(*rows, 2 if more else 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 6
    options = options or {}
    known = {name: each for name, each in options.items() if name in ("interleaved", "layout")}

    def function(x):
        cos, sin = (each.to(x.dtype) for each in (angles.cos(), angles.sin()))
        return opgrad.rotary_embedding(x, cos, sin, **options, **more)

    return function, lambda x: turned(x, angles, options.get("position_ids"), **known), (array,)


# By name ours, PyTorch's, and the arguments.
LAYERS = {
    "gelu": alike("gelu", of=("x",)),
    "gelu by tanh": alike("gelu", of=("x",), approximate="tanh"),
    "swiglu": (ours.swiglu, lambda x, up: SILU(x) * up, ("x", "up")),
    "geglu": (ours.geglu, lambda x, up: functional.gelu(x, approximate="tanh") * up, ("x", "up")),
    "geglu by erf": (lambda x, up: ours.geglu(x, up, "none"), lambda x, up: functional.gelu(x) * up, ("x", "up")),
    "layer_norm": alike("layer_norm", (WIDTH,), of=("x", "weight", "bias")),
    "layer_norm over two axes": alike("layer_norm", (3, WIDTH), of=("x",), eps=1e-3),
    "layer_norm without a bias": alike("layer_norm", (WIDTH,), of=("x", "weight")),
    "rms_norm": alike("rms_norm", (WIDTH,), of=("x", "weight")),
    "rms_norm without a weight": alike("rms_norm", (WIDTH,), of=("x",), eps=1e-2),
    "sink_softmax": (
        ours.sink_softmax,
        lambda x, sink: torch.cat([x, sink.view(-1, 1, 1).expand(*x.shape[:-1], 1)], -1).softmax(-1)[..., :-1],
        ("heads", "sink"),
    ),
    "attention": attention(scale=0.3),
    "attention, causal": attention(is_causal=True),
    "attention with a mask": attention("scores"),
    "rotary embedding": rotary("heads", (4,)),
    "rotary embedding of neighbours": rotary("heads", (2, 4), {"interleaved": True}),
    "rotary embedding of a part": rotary("tokens", (5,), {"layout": "BLHD"}, rotary_embedding_dim=4),
    "rotary embedding by position": rotary(
        "packed", (7,), {"position_ids": torch.tensor([[0, -1, 6, 2], [3, 3, -7, 5]]), "num_heads": 2}
    ),
}
every = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


def given(names, dtype=torch.float64, rows=4):
    """rows: of x and up."""
    generator = torch.Generator().manual_seed(2)
    found = [torch.randn(ARGUMENTS[each], generator=generator, dtype=torch.float64) for each in names]
    pairs = zip(names, found, strict=True)
    return [(x[:rows] if name in ("x", "up") else x).to(dtype).requires_grad_() for name, x in pairs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every
@pytest.mark.one_in(2)
def test_values_and_gradients(layer, dtype):
    function, theirs, names = layer
    arguments = given(names, dtype)
    y = function(*arguments)
    grads = torch.autograd.grad(y.float().sin().sum(), arguments)
    wide = [each.detach().double().requires_grad_() for each in arguments]
    exact = theirs(*wide)
    slopes = torch.autograd.grad(exact, wide, y.detach().double().cos())
    for got, wanted in zip((y, *grads), (exact, *slopes), strict=True):
        assert got.dtype == dtype
        # The slope of the sine is rounded to float32 and then to the dtype; sums are of up to 12 terms.
        assert (got.double() - wanted).abs().max() <= 8 * torch.finfo(dtype).eps * max(1, wanted.abs().max()) + 1e-6


@every
@pytest.mark.one_in(2)
def test_all_derivatives(layer):
    """Along random directions; each gradient by itself is compared with PyTorch's above."""
    function, _, names = layer
    arguments = given(names, rows=1)
    torch.autograd.gradcheck(function, arguments, check_forward_ad=True, fast_mode=True)
    torch.autograd.gradgradcheck(function, arguments, check_fwd_over_rev=True, fast_mode=True)


def test_compiled():
    """All layers in one graph."""
    arguments = [given(names) for _, _, names in LAYERS.values()]

    def run(arguments):
        return [function(*each) for (function, _, _), each in zip(LAYERS.values(), arguments, strict=True)]

    found, flat = torch.compile(run, backend="aot_eager", fullgraph=True)(arguments), [*chain(*arguments)]
    expected = [theirs(*each) for (_, theirs, _), each in zip(LAYERS.values(), arguments, strict=True)]
    torch.testing.assert_close(found, expected)
    slopes = (torch.autograd.grad(sum(y.sum() for y in several), flat) for several in (found, expected))
    torch.testing.assert_close(*slopes)


@every
def test_batched(layer):
    function, theirs, names = layer
    dims = tuple(0 if each in ("x", "up", "q", "k", "v") else None for each in names)
    if any(each is not None for each in dims) and function is not LAYERS["layer_norm over two axes"][0]:
        arguments = given(names)
        torch.testing.assert_close(torch.vmap(function, dims)(*arguments), theirs(*arguments))


def test_sink_softmax_in_batches_with_one_sink():
    x, sink = given(("heads", "sink"))
    batch = torch.stack([x, x.flip(0)])
    expected = torch.stack([ours.sink_softmax(each, sink) for each in batch])
    torch.testing.assert_close(torch.vmap(ours.sink_softmax, (0, None))(batch, sink), expected)


def test_norms_compute_in_the_dtype_of_their_weight():
    x, weight = torch.randn(5, WIDTH).bfloat16(), torch.randn(WIDTH)
    found = ours.rms_norm(x, WIDTH, weight, 1e-6)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, functional.rms_norm(x.float(), (WIDTH,), weight, 1e-6).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_the_epsilon_of_rms_norm_is_that_of_pytorch(dtype):
    for x in (torch.full((2, WIDTH), 1e-4, dtype=dtype), torch.randn(2, WIDTH).mul(1e-4).to(dtype)):
        x.requires_grad_()
        found, exact = ours.rms_norm(x, WIDTH), functional.rms_norm(x, (WIDTH,))
        torch.testing.assert_close(found, exact)
        slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (found, exact)]
        torch.testing.assert_close(*slopes)


def test_dropout():
    x = torch.randn(40, 50, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)
    y = ours.dropout(x, 0.25)
    torch.manual_seed(3)
    assert torch.equal(ours.dropout(x, 0.25), y)
    assert not torch.equal(ours.dropout(x, 0.25), y)
    kept = y != 0
    assert 0.7 < kept.double().mean() < 0.8
    torch.testing.assert_close(y[kept], x[kept] / 0.75)
    torch.testing.assert_close(*torch.autograd.grad((y * y).sum(), x), kept * 2 * y / 0.75)
    assert ours.dropout(x, 0.5, training=False) is x
    assert (ours.dropout(x, 1.0) == 0).all()
    z = torch.ones(100)
    assert ours.dropout(z, 0.5, inplace=True) is z
    assert set(z.tolist()) == {0.0, 2.0}

    def same_decisions(x):
        torch.manual_seed(5)
        return ours.dropout(x, 0.5) ** 2

    small = torch.randn(6, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(same_decisions, small, check_forward_ad=True)
    torch.autograd.gradgradcheck(same_decisions, small)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # by the exporter
def test_exported_as_pytorchs_own(tmp_path):
    import onnx

    class Layers(torch.nn.Module):
        def forward(self, x, up):
            return ours.layer_norm(ours.swiglu(ours.gelu(x), up), WIDTH)

    arguments = tuple(each.detach().float() for each in given(("x", "up")))
    torch.onnx.export(Layers(), arguments, str(tmp_path / "m.onnx"), dynamo=False, opset_version=17)
    kinds = {node.op_type for node in onnx.load(str(tmp_path / "m.onnx")).graph.node}
    assert "LayerNormalization" in kinds
    assert all(node.domain in ("", "ai.onnx") for node in onnx.load(str(tmp_path / "m.onnx")).graph.node)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by the exporter
def test_rotary_embedding_is_exported_as_its_node(tmp_path):
    onnx = pytest.importorskip("onnx")
    from opgrad.onnxruntime import InferenceSession

    class Turned(torch.nn.Module):
        def forward(self, x, cos, sin):
            return opgrad.rotary_embedding(x, cos, sin, rotary_embedding_dim=4)

    arguments = torch.randn(2, 3, 4, 6), torch.rand(4, 2), torch.rand(4, 2)
    torch.onnx.export(Turned(), arguments, str(tmp_path / "turned.onnx"), dynamo=False)
    model = onnx.load(tmp_path / "turned.onnx")
    assert [node.op_type for node in model.graph.node] == ["RotaryEmbeddingTraining"]
    feeds = {value.name: array.numpy() for value, array in zip(model.graph.input, arguments, strict=True)}
    (found,) = InferenceSession(model.SerializeToString()).run(None, feeds)
    np.testing.assert_array_equal(found, opgrad.rotary_embedding(*arguments, rotary_embedding_dim=4))


def test_tables_of_rotary_embedding_have_no_gradient():
    x, cos = torch.zeros(1, 1, 2, 2), torch.zeros(2, 1, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"^rotary_embedding: no gradient with respect to cos_cache"):
        opgrad.rotary_embedding(x, cos, cos.detach()).sum().backward()


REFUSED = [
    (
        lambda: ours.layer_norm(torch.zeros(2, 3), 4),
        "layer_norm: input has shape .2, 3., expected .4,. as its last axes",
    ),
    (
        lambda: ours.rms_norm(torch.zeros(2, 3), 3, torch.zeros(2)),
        r"rms_norm: weight has shape \(2,\), expected \(3,\)",
    ),
    (lambda: ours.swiglu(torch.zeros(2), torch.zeros(3)), r"swiglu: up has shape \(3,\), expected \(2,\)"),
    (
        lambda: ours.gelu(torch.zeros(2), approximate="sigmoid"),
        "gelu: approximate is 'sigmoid', expected 'none' or 'tanh'",
    ),
    (lambda: ours.dropout(torch.zeros(2), 2.0), "dropout: p is 2.0, expected 0 to 1"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[each[1] for each in REFUSED])
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
