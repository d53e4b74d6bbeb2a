"""Models in PyTorch, smaller than published, what is exported of them, and steps in PyTorch beside them.

The models are well-known architectures, layers of the usual kinds, and long sequences. Artifact sets that are chains of
layers have a step in PyTorch, too.
"""

import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional

from bench.steps.generated import TORCH, Subject, thread_counts
from opgrad.training import AdamWRule, ArtifactSet
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts

CLASSES = 10
WORDS, LENGTH = 8192, 64  # of the architectures' sequences


def attended(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of [batch, length, heads, size] by PyTorch's function, heads of keys repeated for queries."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    (batch, heads, length, size), keys = q.shape, k.shape[1]
    if keys < heads:
        wide = (batch, keys, heads // keys, length, size)
        k, v = (each[:, :, None].expand(wide).reshape(batch, heads, length, size) for each in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1)


class Layer(nn.Module):
    """A layer of a transformer.

    first: whether it normalizes before. causal: whether tokens see those before alone. fused: with `attended`.
    """

    def __init__(
        self, width: int, heads: int, first: bool, approximate: str, causal: bool = False, fused: bool = False
    ):
        super().__init__()
        self.width, self.heads, self.first, self.approximate = width, heads, first, approximate
        self.causal, self.fused = causal, fused
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
        parts = [each.reshape(-1, length, self.heads, size) for each in self.packed(x).chunk(3, -1)]
        if self.fused:
            return self.out(attended(*parts))
        query, key, value = (each.transpose(1, 2) for each in parts)
        scores = query @ key.transpose(-1, -2) / size**0.5
        if self.causal:
            places = torch.arange(length)
            scores = scores + torch.zeros(()).masked_fill(places[:, None] < places, -1e4)
        return self.out((torch.softmax(scores, -1) @ value).transpose(1, 2).reshape(-1, length, self.width))

    def _perceptron(self, x: Any) -> Any:
        return self.narrow(functional.gelu(self.wide(x), approximate=self.approximate))


class Tokens(nn.Module):
    """What tokens and their places are embedded as."""

    def __init__(self, width: int):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)

    def forward(self, x: Any) -> Any:
        return self.embed(x) + self.place(torch.arange(LENGTH))


class Patches(nn.Module):
    """An image of 64 x 64 as 16 patches behind a first vector, each with its place."""

    def __init__(self, width: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first, self.place = (nn.Parameter(0.02 * torch.randn(1, size, width)) for size in (1, 17))

    def forward(self, x: Any) -> Any:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(x.shape[0], -1, -1), patches], 1) + self.place


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


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Any], Any]):
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def _normalized(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


def _gpt2() -> nn.Module:
    """GPT-2 with two layers, 256 wide: a score for every word behind every token."""
    layers = [Layer(256, 4, True, "tanh", causal=True) for _ in range(2)]
    return nn.Sequential(Tokens(256), *layers, nn.LayerNorm(256), nn.Linear(256, WORDS, bias=False), nn.Flatten(0, 1))


def _bert() -> nn.Module:
    """BERT with two layers, 256 wide: a class for each sequence."""
    layers = [Layer(256, 4, False, "none") for _ in range(2)]
    pooled = [Apply(lambda x: x[:, 0]), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, CLASSES)]
    return nn.Sequential(Tokens(256), nn.LayerNorm(256), *layers, *pooled)


def _vit() -> nn.Module:
    """ViT-tiny with two layers."""
    layers = [Layer(192, 3, True, "none") for _ in range(2)]
    first = Apply(lambda x: x[:, 0])
    return nn.Sequential(Patches(192), *layers, nn.LayerNorm(192), first, nn.Linear(192, CLASSES))


def _mobile_net() -> nn.Module:
    """MobileNetV2 with its 17 blocks."""
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    layers, width = [*_normalized(3, 32, 3, 2), nn.ReLU6()], 32
    for expansion, outputs, count, stride in stages:
        for place in range(count):
            layers.append(Inverted(width, outputs, stride if place == 0 else 1, expansion))
            width = outputs
    mean = Apply(lambda x: x.mean((2, 3)))
    return nn.Sequential(*layers, *_normalized(width, 1280), nn.ReLU6(), mean, nn.Linear(1280, CLASSES))


def _following(rows: int, words: int = WORDS, length: int = LENGTH) -> tuple[Any, Any]:
    """Tokens, and those that follow."""
    drawn = torch.randint(0, words, (rows, length + 1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].reshape(-1)


def _images(rows: int) -> tuple[Any, Any]:
    """Images of 64 x 64, and their classes."""
    return torch.randn(rows, 3, 64, 64), torch.randint(0, CLASSES, (rows,))


# By name what makes a model, the rows of its batch, and what makes a batch with its labels.
Models = Mapping[str, tuple[Callable[[], nn.Module], int, Callable[[int], tuple[Any, Any]]]]
MODELS: Models = {
    "GPT-2": (_gpt2, 4, _following),
    "BERT": (_bert, 8, lambda rows: (torch.randint(0, WORDS, (rows, LENGTH)), torch.randint(0, CLASSES, (rows,)))),
    "ViT": (_vit, 8, _images),
    "MobileNetV2": (_mobile_net, 8, _images),
}


# --- models with long sequences, whose steps show what attention takes ------------------------------------------------


class Norm(nn.Module):
    """RMS normalization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class LlamaLayer(nn.Module):
    """A layer of Llama: RMS normalization, rotary embedding, attention with fewer heads of keys, SwiGLU."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, width: int, heads: int, keys: int, inner: int) -> None:
        super().__init__()
        self.size = size = width // heads
        self.norms = nn.ModuleList([Norm(width) for _ in range(2)])
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, keys * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        angles = torch.arange(LONG.length)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.cat([angles, angles], -1)[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def _turned(self, x: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin

    def forward(self, x: Any) -> Any:
        y = self.norms[0](x)
        q, k, v = (each(y).reshape(1, LONG.length, -1, self.size) for each in (self.q, self.k, self.v))
        x = x + self.out(attended(self._turned(q), self._turned(k), v))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


@dataclass(frozen=True)
class Long:
    """Sizes of the models with long sequences: so few words that their scores are not most of the memory."""

    length: int = 1024
    blocks: int = 6
    words: int = WORDS
    gpt2: tuple[int, int] = (768, 12)  # width, heads
    llama: tuple[int, int, int, int] = (1024, 16, 4, 2816)  # width, heads, heads of keys, width inside


LONG = Long()


def _language_model(width: int, norm: nn.Module, layer: Callable[[], nn.Module]) -> nn.Module:
    layers = [layer() for _ in range(LONG.blocks)]
    head = nn.Linear(width, LONG.words, bias=False)
    return nn.Sequential(nn.Embedding(LONG.words, width), *layers, norm, head, nn.Flatten(0, 1))


def _long_gpt2() -> nn.Module:
    width, heads = LONG.gpt2
    return _language_model(width, nn.LayerNorm(width), lambda: Layer(width, heads, True, "tanh", True, fused=True))


def _long_llama() -> nn.Module:
    width, *rest = LONG.llama
    return _language_model(width, Norm(width), lambda: LlamaLayer(width, *rest))


LONG_MODELS: Models = {
    name: (make, 1, lambda rows: _following(rows, LONG.words, LONG.length))
    for name, make in (("GPT-2-1024", _long_gpt2), ("Llama-1024", _long_llama))
}


# --- exported ---------------------------------------------------------------------------------------------------------

OPSET = 17
Step = Callable[[], Any]


def architecture(
    name: str, folder: Path
) -> tuple[ArtifactSet, int, dict[str, np.ndarray], Callable[[int], Step], Path]:
    """Make one of the `MODELS` and write its artifact set, with AdamW, into a folder of that name.

    Returns the set, the rows of a batch, the batch by name, what gives torch's step with so many threads, and the
    folder with the same set for onnxruntime-training, which has attention as products and a softmax alone.
    """
    torch.manual_seed(0)
    make, rows, draw = MODELS[name]
    module, place, with_scores = make(), folder / name, folder / f"{name} with scores"
    x, labels = draw(rows)
    model = exported(module, x, 1e-4, training=torch.onnx.TrainingMode.TRAINING)
    trained = [each for each, _ in module.named_parameters()]
    frozen = [each.name for each in model.graph.initializer if each.name in dict(module.named_buffers())]
    kinds: dict[str, Any] = {"loss": LossType.CrossEntropyLoss, "optimizer": OptimType.AdamW}
    # What is an output is computed as it is written: attention whose probabilities are, is not recognized.
    probabilities = [node.output[0] for node in model.graph.node if node.op_type == "Softmax"]
    for target, more in ((with_scores, probabilities), (place, [])):
        target.mkdir()
        made = generate_artifacts(
            model, trained, frozen, artifact_directory=target, batch_norm="train", additional_output_names=more, **kinds
        )
    with_outputs = onnx.load(with_scores / "training_model.onnx")  # what computes them stays
    kept = [each for each in with_outputs.graph.output if each.name not in probabilities]
    del with_outputs.graph.output[:]
    with_outputs.graph.output.extend(kept)
    onnx.save(with_outputs, with_scores / "training_model.onnx")
    batch = dict(zip(made.inputs, (x.numpy(), labels.numpy()), strict=True))

    def step(threads: int) -> Step:
        module.train()
        return torch_step(module, x, labels, threads, torch.optim.AdamW(module.parameters(), lr=0.0))

    return ArtifactSet.load(place), rows, batch, step, with_scores


def subject(name: str) -> Subject:
    """One of all models, with the mean cross-entropy of its scores as its loss, and torch's forward and backward."""
    torch.manual_seed(0)
    make, rows, draw = {**MODELS, **LONG_MODELS}[name]
    module, (x, labels) = make().eval(), draw(rows)
    # The exporter makes normalizations parts of convolutions, unless it is told to preserve the mode.
    model = exported(module, x, 1e-4, training=torch.onnx.TrainingMode.PRESERVE)
    graph = model.graph
    graph.input.append(helper.make_tensor_value_info("labels", TensorProto.INT64, labels.shape))
    graph.node.append(helper.make_node("SoftmaxCrossEntropyLoss", ["scores", "labels"], ["loss"], "loss"))
    graph.output[0].CopyFrom(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    names = {each for each, _ in module.named_parameters()}
    trained = {each.name: numpy_helper.to_array(each) for each in graph.initializer if each.name in names}
    others = {f"{TORCH} {count}": torch_step(module, x, labels, count) for count in thread_counts()}
    return Subject(name, model, trained, {"x": x.numpy(), "labels": labels.numpy()}, others)


def exported(module: nn.Module, x: Any, spread: float, **options: Any) -> onnx.ModelProto:
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
) -> Step:
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


# --- artifact sets that are a chain of layers -----------------------------------------------------------------------

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {"Relu": nn.ReLU, "Tanh": nn.Tanh, "Sigmoid": nn.Sigmoid}
LINEAR = {"transA": 0, "transB": 1, "alpha": 1.0, "beta": 1.0}  # Gemm as torch's linear layer


def chain(graph: onnx.GraphProto, parameters: Mapping[str, torch.Tensor]) -> nn.Module:
    """The linear layers and activations of a graph before a softmax cross-entropy, with these parameters.

    Raises NotImplementedError for any other graph.
    """
    *nodes, loss = graph.node
    tensor, layers = graph.input[0].name, list[nn.Module]()
    for node in nodes:
        given = {item.name: helper.get_node_attr_value(node, item.name) for item in node.attribute}
        linear = node.op_type == "Gemm" and len(node.input) == 3 and given.items() <= LINEAR.items()
        if node.input[0] != tensor or not (node.op_type in ACTIVATIONS or (linear and given.get("transB") == 1)):
            raise NotImplementedError(f"no torch model is built of {node.op_type}")
        if linear:
            weight, bias = (nn.Parameter(parameters[name]) for name in node.input[1:])
            layer = nn.Linear(weight.shape[1], weight.shape[0])
            layer.weight, layer.bias = weight, bias
        layers.append(layer if linear else ACTIVATIONS[node.op_type]())
        tensor = node.output[0]
    if loss.op_type != "SoftmaxCrossEntropyLoss" or loss.input[0] != tensor or loss.attribute[0].s != b"mean":
        raise NotImplementedError(f"no torch model is built with {loss.op_type}")
    return nn.Sequential(*layers)


def chain_step(artifacts: ArtifactSet, data: Mapping[str, np.ndarray], threads: int) -> Step:
    """torch's step of a set with a learning rate of 0. Raises NotImplementedError for what is no chain of layers."""
    parameters = {name: torch.tensor(array) for name, array in {**artifacts.frozen, **artifacts.trainable}.items()}
    model = chain(artifacts.eval_model.graph, parameters)
    rule: Any = artifacts.rule
    optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.0)
    if isinstance(rule, AdamWRule):
        given: dict[str, Any] = {"eps": rule.epsilon, "weight_decay": rule.weight_decay}
        optimizer = partial(torch.optim.AdamW, lr=0.0, betas=(rule.alpha, rule.beta), **given)
    x, labels = (torch.tensor(array) for array in data.values())
    return torch_step(model, x, labels, threads, optimizer(model.parameters()))
