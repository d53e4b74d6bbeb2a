"""Models of language with 1,024 tokens in PyTorch, whose steps show what attention takes: GPT-2's and Llama's blocks.

Each has six blocks of the published kind; there are 8,192 words, so that their scores are not most of the memory.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional

from opgrad.bench.generated import Subject
from opgrad.bench.training_models import LONG, WORDS, exported

LENGTH, BLOCKS = 1024, 6


def _attended(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of [1, length, heads, size], with heads of keys repeated for their queries."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    heads, keys, size = q.shape[1], k.shape[1], q.shape[-1]
    if keys < heads:
        wide = (1, keys, heads // keys, LENGTH, size)
        k, v = (each[:, :, None].expand(wide).reshape(1, heads, LENGTH, size) for each in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, LENGTH, -1)


class GPT2Block(nn.Module):
    """768 wide, 12 heads: layer normalization, attention, layer normalization, GELU between two layers."""

    width, heads = 768, 12

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(self.width) for _ in range(2)])
        self.packed, self.out = nn.Linear(self.width, 3 * self.width), nn.Linear(self.width, self.width)
        self.wide, self.narrow = nn.Linear(self.width, 4 * self.width), nn.Linear(4 * self.width, self.width)

    def forward(self, x: Any) -> Any:
        parts = (each.reshape(1, LENGTH, self.heads, -1) for each in self.packed(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(_attended(*parts))
        return x + self.narrow(functional.gelu(self.wide(self.norms[1](x)), approximate="tanh"))


class Norm(nn.Module):
    """RMS normalization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class LlamaBlock(nn.Module):
    """1,024 wide, 16 heads over 4 of keys: RMS normalization, rotary embedding, attention, SwiGLU 2,816 wide."""

    width, heads, keys, inner = 1024, 16, 4, 2816
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        size = self.width // self.heads
        self.norms = nn.ModuleList([Norm(self.width) for _ in range(2)])
        self.q, self.out = (nn.Linear(self.width, self.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(self.width, self.keys * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(self.width, self.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(self.inner, self.width, bias=False)
        angles = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.cat([angles, angles], -1)[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def _turned(self, x: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin

    def forward(self, x: Any) -> Any:
        y, size = self.norms[0](x), self.width // self.heads
        q, k, v = (each(y).reshape(1, LENGTH, -1, size) for each in (self.q, self.k, self.v))
        x = x + self.out(_attended(self._turned(q), self._turned(k), v))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def _gpt2() -> nn.Module:
    width = GPT2Block.width
    blocks = [GPT2Block() for _ in range(BLOCKS)]
    return nn.Sequential(nn.Embedding(WORDS, width), *blocks, nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False))


def _llama() -> nn.Module:
    width = LlamaBlock.width
    blocks = [LlamaBlock() for _ in range(BLOCKS)]
    return nn.Sequential(nn.Embedding(WORDS, width), *blocks, Norm(width), nn.Linear(width, WORDS, bias=False))


MAKE: Mapping[str, Callable[[], nn.Module]] = dict(zip(LONG, (_gpt2, _llama), strict=True))


def subject(name: str) -> Subject:
    """One of these models, with the mean cross-entropy of the next words as its loss."""
    torch.manual_seed(0)
    module, words = nn.Sequential(MAKE[name](), nn.Flatten(0, 1)), torch.randint(0, WORDS, (1, LENGTH + 1))
    model = exported(module, words[:, :-1], 1e-4)
    graph = model.graph
    graph.input.append(helper.make_tensor_value_info("labels", TensorProto.INT64, [LENGTH]))
    graph.node.append(helper.make_node("SoftmaxCrossEntropyLoss", ["scores", "labels"], ["loss"], "loss"))
    graph.output[0].CopyFrom(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    trained = _trained(module, model)
    feeds: dict[str, np.ndarray] = {"x": words[:, :-1].numpy(), "labels": words[0, 1:].numpy()}
    return Subject(name, model, trained, feeds, {})


def _trained(module: nn.Module, model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The parameters by the names that the exporter gave them: weights of linear layers are transposed."""
    buffers = {name for name, _ in module.named_buffers()}
    floats = (each for each in model.graph.initializer if each.data_type == TensorProto.FLOAT)
    return {each.name: numpy_helper.to_array(each) for each in floats if each.name not in buffers and each.dims}
