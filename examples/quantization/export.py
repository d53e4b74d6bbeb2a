"""Write transformer.onnx with PyTorch's exporter: python export.py. Training does not need this, nor PyTorch."""

from pathlib import Path

import onnx
import torch
from torch import nn

TOKENS, WIDTH, HEADS, LENGTH = 8, 16, 2, 16


class Layer(nn.Module):
    """A layer of a transformer, with the normalization in front of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.packed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, LENGTH, WIDTH]; so is the result."""
        parts = self.packed(self.first(x)).reshape(-1, LENGTH, 3, HEADS, WIDTH // HEADS)
        q, k, v = (parts[:, :, each].transpose(1, 2) for each in range(3))
        p = torch.softmax(q @ k.transpose(2, 3) / (WIDTH // HEADS) ** 0.5, -1)
        x = x + self.out((p @ v).transpose(1, 2).reshape(-1, LENGTH, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Two layers, and for each token the scores of how often it occurs in its row."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.last, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LENGTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 [batch, LENGTH]. Returns scores, [batch, LENGTH, LENGTH]."""
        return self.scores(self.last(self.layers(self.tokens(tokens))))


torch.manual_seed(0)
program = torch.onnx.export(
    Transformer().eval(),
    (torch.zeros(2, LENGTH, dtype=torch.int64),),
    dynamo=True,
    opset_version=20,
    input_names=["tokens"],
    output_names=["scores"],
    dynamic_shapes=({0: torch.export.Dim("batch")},),
    optimize=False,  # else constants of other names take the places of the parameters
)
exported = program.model_proto
for part in (exported, exported.graph, *exported.graph.node, *exported.graph.value_info):
    del part.metadata_props[:]  # where in this file each node comes from
onnx.save(exported, Path(__file__).with_name("transformer.onnx"))
