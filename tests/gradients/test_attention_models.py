"""Blocks of GPT-2 and Llama from PyTorch's exporters: attention is found, and training steps stay what they were."""

import warnings

import numpy as np
import onnx
import pytest

from opgrad.gradients import gradients
from opgrad.onnx.gradients.differentiation import outlook
from opgrad.onnxruntime import InferenceSession

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
from torch import nn  # noqa: E402

architectures = pytest.importorskip("architectures")
WORDS, WIDTH, HEADS, LENGTH = 13, 32, 4, 6  # words and length are GPT2's


def turned(x, cos, sin):
    """Rotary embedding, as Llama writes it."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class LlamaAttention(nn.Module):
    """With rotary embedding, heads that queries share, an added mask, and softmax in float32."""

    def __init__(self, keys=2):
        super().__init__()
        self.keys, size = keys, WIDTH // HEADS
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, keys * size, bias=False) for _ in range(2))

    def forward(self, x, cos, sin, mask):
        n, length, _ = x.shape
        q, k, v = (each(x).view(n, length, -1, WIDTH // HEADS).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = (
            each[:, :, None]
            .expand(n, self.keys, HEADS // self.keys, length, WIDTH // HEADS)
            .reshape(n, HEADS, length, -1)
            for each in (k, v)
        )
        scores = q @ k.transpose(2, 3) * (WIDTH // HEADS) ** -0.5 + mask
        y = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v
        return self.out(y.transpose(1, 2).reshape(n, length, -1))


class Norm(nn.Module):
    """RMS normalization."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Llama(nn.Module):
    """A block of Llama."""

    def __init__(self):
        super().__init__()
        self.words, self.attend = nn.Embedding(WORDS, WIDTH), LlamaAttention()
        self.norms, self.head = nn.ModuleList([Norm(), Norm()]), nn.Linear(WIDTH, WORDS, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 48, bias=False), nn.Linear(WIDTH, 48, bias=False)
        self.down = nn.Linear(48, WIDTH, bias=False)

    def forward(self, words):
        x, length, size = self.words(words), words.shape[1], WIDTH // HEADS
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.cat([angles, angles], -1)[None, None]
        mask = torch.full((length, length), torch.finfo(x.dtype).min).triu(1)[None, None]
        x = x + self.attend(self.norms[0](x), angles.cos(), angles.sin(), mask)
        y = self.norms[1](x)
        return self.head(x + self.down(nn.functional.silu(self.gate(y)) * self.up(y)))


def exported(model, dynamo, path):
    torch.manual_seed(1)
    made = model().eval()
    words = torch.randint(0, WORDS, (2, LENGTH))
    axes = {0: "batch", 1: "length"}
    options = {"dynamic_shapes": [axes], "verbose": False} if dynamo else {"dynamic_axes": {"words": axes}}
    opset = {"opset_version": 18 if dynamo else 17}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            made, (words,), path, dynamo=dynamo, input_names=["words"], output_names=["logits"], **opset, **options
        )
    return onnx.load(path), words.numpy()


def with_loss(model):
    model.graph.input.append(onnx.helper.make_tensor_value_info("labels", onnx.TensorProto.INT64, ["batch", "length"]))
    model.graph.node.extend(
        [
            onnx.helper.make_node("Transpose", ["logits"], ["classes"], perm=[0, 2, 1]),
            onnx.helper.make_node("SoftmaxCrossEntropyLoss", ["classes", "labels"], ["loss"], reduction="mean"),
        ]
    )
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    weights = [each.name for each in model.graph.initializer if each.data_type == onnx.TensorProto.FLOAT]
    return model, [name for name in weights if name.count(".") or "MatMul" in name]


@pytest.mark.parametrize("dynamo", [False, True], ids=["TorchScript", "dynamo"])
@pytest.mark.parametrize("model", [architectures.GPT2, Llama], ids=lambda model: model.__name__)
def test_a_training_step_is_what_it_was(model, dynamo, tmp_path):
    found, words = exported(model, dynamo, str(tmp_path / "model.onnx"))
    found, weights = with_loss(found)
    assert [each.reason for each in outlook(found, ["loss"], weights)[1]] == [""]
    fused, plain = gradients(found, "loss", weights), gradients(found, "loss", weights, plain=True)
    (node,) = (node for node in fused.graph.node if node.op_type == "AttentionTraining")
    given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    assert (given["causal"], len(node.input)) == (b"top_left", 3)
    assert not any(node.op_type == "Softmax" for node in fused.graph.node)
    feeds = {"words": words, "labels": np.roll(words, -1, 1)}
    results, expected = (InferenceSession(each.SerializeToString()).run(None, feeds) for each in (fused, plain))
    assert results[0] == pytest.approx(expected[0], rel=1e-6)
    for name, mine, other in zip(weights, results[1:], expected[1:], strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=2e-5 * max(1, np.abs(other).max()), err_msg=name)
