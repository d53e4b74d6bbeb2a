"""Rotary embedding on tensors: autograd twice, forward mode, vmap, torch.compile, export and DTensor's rule."""

import numpy as np
import pytest

import opgrad

torch = pytest.importorskip("torch")

import opgrad.torch  # noqa: E402
from opgrad.torch.operators import OPERATORS  # noqa: E402

FORMS = {
    "halves": ((2, 3, 4, 6), (4,), {}),
    "neighbours": ((2, 3, 4, 6), (2, 4), {"interleaved": True}),
    "partial by token": ((2, 4, 3, 8), (5,), {"rotary_embedding_dim": 4, "layout": "BLHD"}),
    "positions": ((2, 4, 12), (7,), {"num_heads": 2, "position_ids": True}),
}
each_form = pytest.mark.parametrize("form", FORMS)


def call_of(form, dtype=torch.float64):
    """The function of x alone, and x."""
    shape, rows, options = FORMS[form]
    size = shape[-1] // options.get("num_heads", 1)
    angles = torch.rand(*rows, options.get("rotary_embedding_dim", size) // 2, dtype=dtype) * 6
    options = dict(options)
    if options.pop("position_ids", False):
        options["position_ids"] = torch.randint(-rows[0], rows[0], (2, 4))
    return lambda x: opgrad.rotary_embedding(x, angles.cos(), angles.sin(), **options), torch.randn(shape, dtype=dtype)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # by forward_ad itself
@each_form
def test_differentiable_twice_in_both_modes(form):
    function, x = call_of(form)
    x.requires_grad_()
    assert torch.autograd.gradcheck(function, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, x, check_fwd_over_rev=True, check_rev_over_rev=True)


@each_form
def test_as_numpy(form):
    _, x = call_of(form, torch.float32)
    shape, _, options = FORMS[form]
    cos, sin = torch.rand(2, 9, shape[-1] // options.get("num_heads", 1) // 2)
    options = {key: value for key, value in options.items() if key not in ("position_ids", "rotary_embedding_dim")}
    found = opgrad.rotary_embedding(x, cos, sin, **options)
    expected = opgrad.rotary_embedding(x.numpy(), cos.numpy(), sin.numpy(), **options)
    assert found.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("batched", [(0, None, None), (0, 0, 0), (2, 1, 0), (None, 0, 0), (1, None, 0)], ids=str)
@each_form
def test_vmap_is_a_loop(form, batched):
    shape, rows, options = FORMS[form]
    size = shape[-1] // options.get("num_heads", 1)
    tables = torch.rand(2, 3, *rows, options.get("rotary_embedding_dim", size) // 2)
    options = dict(options)
    if options.pop("position_ids", False):
        options["position_ids"] = torch.randint(-rows[0], rows[0], (2, 4))
    every = [torch.randn(3, *shape), *tables]
    given = [each[0] if place is None else each.movedim(0, place) for each, place in zip(every, batched, strict=True)]
    found = torch.vmap(lambda *arrays: opgrad.rotary_embedding(*arrays, **options), in_dims=batched)(*given)
    for call in range(3):
        arrays = [each[0 if place is None else call] for each, place in zip(every, batched, strict=True)]
        assert torch.allclose(found[call], opgrad.rotary_embedding(*arrays, **options), atol=1e-6)


@each_form
def test_compiled_without_graph_breaks(form):
    function, x = call_of(form, torch.float32)
    x.requires_grad_()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    (found,) = torch.autograd.grad(compiled(x).square().sum(), x)
    (expected,) = torch.autograd.grad(function(x).square().sum(), x)
    assert torch.equal(found, expected)


def test_tables_have_no_gradient():
    x, cos = torch.zeros(1, 1, 2, 2), torch.zeros(2, 1, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"^rotary_embedding: no gradient with respect to cos_cache"):
        opgrad.rotary_embedding(x, cos, cos.detach()).sum().backward()


@pytest.mark.parametrize("name", ["rotary_embedding", "rotary_embedding_grad"])
def test_the_rule_of_shards_holds_for_parts(name):
    """Every placement that DTensor may choose gives the parts of the whole result."""
    from torch.distributed.tensor import Shard

    from opgrad.torch.sharding import FAMILIES

    operator = OPERATORS[name]
    for form, (shape, rows, options) in FORMS.items():
        size = shape[-1] // options.get("num_heads", 1)
        given = {operator.names[0]: torch.randn(shape)}
        tables = torch.rand(2, *rows, options.get("rotary_embedding_dim", size) // 2)
        given |= {"cos_cache": tables[0], "sin_cache": tables[1], **operator.op.attributes, **options}
        if given.pop("position_ids", False):
            given["position_ids"] = torch.randint(0, rows[0], (2, 4))
        shapes = {key: tuple(value.shape) for key, value in given.items() if isinstance(value, torch.Tensor)}
        whole = operator(*operator.arguments(given))
        for placements in FAMILIES["rotary"](operator.op, shapes, given):
            (result,) = (placements[each].dim for each in operator.op.results)
            assert all(isinstance(each, Shard) for each in placements.values())
            for part in range(2):
                own = {
                    key: value.chunk(2, placements[key].dim)[part] if key in placements else value
                    for key, value in given.items()
                }
                assert torch.equal(operator(*operator.arguments(own)), whole.chunk(2, result)[part]), (form, placements)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by the exporter
def test_exported_as_its_node(tmp_path):
    onnx = pytest.importorskip("onnx")
    from opgrad.onnxruntime import InferenceSession

    class Turned(torch.nn.Module):
        def forward(self, x, cos, sin):
            return opgrad.rotary_embedding(x, cos, sin, rotary_embedding_dim=4)

    given = torch.randn(2, 3, 4, 6), torch.rand(4, 2), torch.rand(4, 2)
    torch.onnx.export(Turned(), given, str(tmp_path / "turned.onnx"), dynamo=False)
    model = onnx.load(tmp_path / "turned.onnx")
    assert [node.op_type for node in model.graph.node] == ["RotaryEmbeddingTraining"]
    feeds = {value.name: array.numpy() for value, array in zip(model.graph.input, given, strict=True)}
    (found,) = InferenceSession(model.SerializeToString()).run(None, feeds)
    np.testing.assert_array_equal(found, opgrad.rotary_embedding(*given, rotary_embedding_dim=4))
