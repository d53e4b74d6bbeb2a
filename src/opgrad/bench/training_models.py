"""Models in PyTorch: well-known architectures, smaller than published, and layers of the usual kinds.

What the exporter makes of them, the artifact sets that opgrad makes of the architectures, and torch's own steps.
"""

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.nn import functional

from opgrad.training import ArtifactSet
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts

OPSET = 17
CLASSES = 10
WIDTH, LENGTH, WORDS, SIDE = 64, 32, 1000, 16  # of the plain models


class Layer(nn.Module):
    """A layer of a transformer. first: whether it normalizes before; causal: whether tokens see those before alone."""

    def __init__(self, width: int, heads: int, first: bool, approximate: str, causal: bool = False):
        super().__init__()
        self.width, self.heads, self.first, self.approximate, self.causal = width, heads, first, approximate, causal
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.packed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        if self.first:
            x = x + self._attention(self.norms[0](x))
            return x + self._perceptron(self.norms[1](x))
        x = self.norms[0](x + self._attention(x))
        return self.norms[1](x + self._perceptron(x))

    def _attention(self, x: Any) -> Any:
        length, size = x.shape[1], self.width // self.heads
        parts = (each.reshape(-1, length, self.heads, size).transpose(1, 2) for each in self.packed(x).chunk(3, -1))
        query, key, value = parts
        scores = query @ key.transpose(-1, -2) / size**0.5
        if self.causal:
            places = torch.arange(length)
            scores = scores + torch.zeros(()).masked_fill(places[:, None] < places, -1e4)
        return self.out((torch.softmax(scores, -1) @ value).transpose(1, 2).reshape(-1, length, self.width))

    def _perceptron(self, x: Any) -> Any:
        return self.narrow(functional.gelu(self.wide(x), approximate=self.approximate))


class GPT2(nn.Module):
    """GPT-2 with two layers, 256 wide: a score for every word behind every token."""

    words, length, rows = 8192, 64, 4

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(self.words, 256), nn.Embedding(self.length, 256)
        self.layers = nn.Sequential(*(Layer(256, 4, True, "tanh", causal=True) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, self.words, bias=False)

    def forward(self, x: Any) -> Any:
        hidden = self.embed(x) + self.place(torch.arange(self.length))
        return self.head(self.norm(self.layers(hidden))).flatten(0, 1)

    def batch(self) -> tuple[Any, Any]:
        """Tokens, and those that follow."""
        drawn = torch.randint(0, self.words, (self.rows, self.length + 1))
        return drawn[:, :-1].contiguous(), drawn[:, 1:].reshape(-1)


class BERT(nn.Module):
    """BERT with two layers, 256 wide: a class for each sequence."""

    words, length, rows = 8192, 64, 8

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.norm = nn.Embedding(self.words, 256), nn.Embedding(64, 256), nn.LayerNorm(256)
        self.layers = nn.Sequential(*(Layer(256, 4, False, "none") for _ in range(2)))
        self.pool, self.classify = nn.Linear(256, 256), nn.Linear(256, CLASSES)

    def forward(self, x: Any) -> Any:
        hidden = self.layers(self.norm(self.embed(x) + self.place(torch.arange(self.length))))
        return self.classify(torch.tanh(self.pool(hidden[:, 0])))

    def batch(self) -> tuple[Any, Any]:
        """Tokens, and a class for each sequence."""
        return torch.randint(0, self.words, (self.rows, self.length)), torch.randint(0, CLASSES, (self.rows,))


class ViT(nn.Module):
    """ViT-tiny with two layers, for images of 64 x 64."""

    width, rows = 192, 8

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, self.width, 16, 16)
        self.first, self.place = (nn.Parameter(0.02 * torch.randn(1, size, self.width)) for size in (1, 17))
        self.layers = nn.Sequential(*(Layer(self.width, 3, True, "none") for _ in range(2)))
        self.norm, self.classify = nn.LayerNorm(self.width), nn.Linear(self.width, CLASSES)

    def forward(self, x: Any) -> Any:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.first.expand(x.shape[0], -1, -1), patches], 1) + self.place
        return self.classify(self.norm(self.layers(hidden))[:, 0])

    def batch(self) -> tuple[Any, Any]:
        """Images with their classes."""
        return torch.randn(self.rows, 3, 64, 64), torch.randint(0, CLASSES, (self.rows,))


def _normalized(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


class Inverted(nn.Module):
    """A block of MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int):
        super().__init__()
        inner, self.adds = inputs * expansion, stride == 1 and inputs == outputs
        widen = [*_normalized(inputs, inner), nn.ReLU6()] if expansion > 1 else []
        middle = [*_normalized(inner, inner, 3, stride, inner), nn.ReLU6()]
        self.block = nn.Sequential(*widen, *middle, *_normalized(inner, outputs))

    def forward(self, x: Any) -> Any:
        return x + self.block(x) if self.adds else self.block(x)


class MobileNetV2(nn.Module):
    """MobileNetV2 with its 17 blocks, for images of 64 x 64."""

    rows = 8
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self) -> None:
        super().__init__()
        layers, width = [*_normalized(3, 32, 3, 2), nn.ReLU6()], 32
        for expansion, outputs, count, stride in self.stages:
            for place in range(count):
                layers.append(Inverted(width, outputs, stride if place == 0 else 1, expansion))
                width = outputs
        self.features = nn.Sequential(*layers, *_normalized(width, 1280), nn.ReLU6())
        self.classify = nn.Linear(1280, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.classify(self.features(x).mean((2, 3)))

    def batch(self) -> tuple[Any, Any]:
        """Images with their classes."""
        return torch.randn(self.rows, 3, 64, 64), torch.randint(0, CLASSES, (self.rows,))


MODELS: dict[str, Callable[[], Any]] = {"GPT-2": GPT2, "BERT": BERT, "ViT": ViT, "MobileNetV2": MobileNetV2}


# --- plain models ---------------------------------------------------------------------------------------------------


class Mean(nn.Module):
    """The mean over a sequence."""

    def forward(self, x: Any) -> Any:
        return x.mean(1)


def _perceptron() -> nn.Module:
    layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 4 * WIDTH), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(4 * WIDTH, CLASSES))


def _convolutions() -> nn.Module:
    layers: list[Any] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (SIDE // 8) ** 2, CLASSES))


def _transformer() -> nn.Module:
    layers = [Layer(WIDTH, 4, True, "none") for _ in range(2)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.LayerNorm(WIDTH), Mean(), nn.Linear(WIDTH, CLASSES))


# By name what makes a model, and what makes a batch of so many rows for it.
PLAIN: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "perceptron": (_perceptron, lambda rows: torch.randn(rows, WIDTH)),
    "convolutions": (_convolutions, lambda rows: torch.randn(rows, 3, SIDE, SIDE)),
    "transformer": (_transformer, lambda rows: torch.randint(0, WORDS, (rows, LENGTH))),
}


# --- what is made of them -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """A model to be trained. artifacts: its set; rows: of the batch; batch: by name; step: torch's, given threads."""

    artifacts: ArtifactSet
    rows: int
    batch: dict[str, np.ndarray]
    step: Callable[[int], Callable[[], Any]]


def architecture(name: str, folder: Path) -> Architecture:
    """Make one of the `MODELS` and write its artifact set, with AdamW, into a folder of that name."""
    torch.manual_seed(0)
    module = MODELS[name]()
    x, labels = module.batch()
    place = folder / name
    place.mkdir()
    model = _exported(module, x, 1e-4, training=torch.onnx.TrainingMode.TRAINING)
    trained = [each for each, _ in module.named_parameters()]
    frozen = [each.name for each in model.graph.initializer if each.name in dict(module.named_buffers())]
    kinds: dict[str, Any] = {"loss": LossType.CrossEntropyLoss, "optimizer": OptimType.AdamW}
    made = generate_artifacts(model, trained, frozen, artifact_directory=place, batch_norm="train", **kinds)
    batch = dict(zip(made.inputs, (x.numpy(), labels.numpy()), strict=True))

    def step(threads: int) -> Callable[[], Any]:
        module.train()
        return torch_step(module, x, labels, threads, torch.optim.AdamW(module.parameters(), lr=0.0))

    return Architecture(ArtifactSet.load(place), module.rows, batch, step)


def with_loss(module: nn.Module, x: Any) -> onnx.ModelProto:
    """The module with a cross-entropy behind it: inputs x and labels, output loss; any number of rows."""
    rows = {"x": {0: "rows"}, "scores": {0: "rows"}}
    model = _exported(module, x, 0.05, dynamic_axes=rows)
    graph = model.graph
    graph.input.append(helper.make_tensor_value_info("labels", TensorProto.INT64, ["rows"]))
    graph.node.append(helper.make_node("SoftmaxCrossEntropyLoss", ["scores", "labels"], ["loss"], "loss"))
    graph.output[0].CopyFrom(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    return model


def _exported(module: nn.Module, x: Any, spread: float, **options: Any) -> onnx.ModelProto:
    """The module with input x and output scores, all weights as initializers.

    spread: of the random numbers that are added to the weights, of which the exporter would write equal ones once.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    file: Any = io.BytesIO()  # torch declares no files
    options |= {"input_names": ["x"], "output_names": ["scores"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (x,), file, opset_version=OPSET, dynamo=False, do_constant_folding=False, **options)
    return onnx.load_from_string(file.getvalue())


def torch_step(
    module: nn.Module, x: Any, labels: Any, threads: int, optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], Any]:
    """Forward and backward in torch as a user would write it, and the optimizer's step; returns the loss."""

    def step() -> Any:
        torch.set_num_threads(threads)
        (optimizer or module).zero_grad()
        loss = functional.cross_entropy(module(x), labels)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    return step
