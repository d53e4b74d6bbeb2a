"""Models in PyTorch, and the ONNX models that its exporter makes of them."""

import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

CLASSES, WIDTH, LENGTH, WORDS, SIDE = 10, 64, 32, 1000, 16
OPSET = 17


def modules() -> dict[str, Callable[[], tuple[Any, Callable[[int], Any]]]]:
    """Functions that give a module, and one that makes a batch of so many rows. Raises ImportError without torch."""
    import torch  # noqa: F401

    return {"perceptron": _perceptron, "convolutions": _convolutions, "transformer": _transformer}


def _perceptron() -> tuple[Any, Callable[[int], Any]]:
    import torch
    from torch import nn

    layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 4 * WIDTH), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(4 * WIDTH, CLASSES)), lambda rows: torch.randn(rows, WIDTH)


def _convolutions() -> tuple[Any, Callable[[int], Any]]:
    import torch
    from torch import nn

    layers: list[Any] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    last = nn.Linear(64 * (SIDE // 8) ** 2, CLASSES)
    return nn.Sequential(*layers, nn.Flatten(), last), lambda rows: torch.randn(rows, 3, SIDE, SIDE)


def _transformer() -> tuple[Any, Callable[[int], Any]]:
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self, heads: int = 4):
            super().__init__()
            self.heads = heads
            self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            split = [each.view(-1, LENGTH, self.heads, WIDTH // self.heads) for each in self._parts(x)]
            q, k, v = (each.transpose(1, 2) for each in split)
            weights = torch.softmax(q @ k.transpose(-1, -2) / (WIDTH // self.heads) ** 0.5, -1)
            x = x + self.out((weights @ v).transpose(1, 2).reshape(-1, LENGTH, WIDTH))
            return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))

        def _parts(self, x: Any) -> Any:
            return self.qkv(self.norms[0](x)).chunk(3, -1)

    class Mean(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.mean(1)

    layers = [nn.Embedding(WORDS, WIDTH), Layer(), Layer(), nn.LayerNorm(WIDTH), Mean(), nn.Linear(WIDTH, CLASSES)]
    return nn.Sequential(*layers), lambda rows: torch.randint(0, WORDS, (rows, LENGTH))


def exported(module: Any, x: Any) -> onnx.ModelProto:
    """The module with a cross-entropy behind it: inputs x and labels, output loss; any number of rows."""
    import torch

    with torch.no_grad():
        for parameter in module.parameters():  # of equal ones the exporter would write only the first
            parameter.add_(0.05 * torch.randn_like(parameter))
    content: Any = io.BytesIO()  # torch declares no files
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (x,), content, opset_version=OPSET, dynamo=False, do_constant_folding=False,
            input_names=["x"], output_names=["scores"], dynamic_axes={"x": {0: "rows"}, "scores": {0: "rows"}},
        )  # fmt: skip
    model = onnx.load_from_string(content.getvalue())
    graph = model.graph
    graph.input.append(helper.make_tensor_value_info("labels", TensorProto.INT64, ["rows"]))
    graph.node.append(helper.make_node("SoftmaxCrossEntropyLoss", ["scores", "labels"], ["loss"], "loss"))
    graph.output[0].CopyFrom(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    return model


def eager(module: Any, x: Any, labels: np.ndarray, threads: int) -> Callable[[], Any]:
    """Forward and backward in torch as a user would write it; returns the loss."""
    import torch

    targets = torch.tensor(labels)

    def step() -> Any:
        torch.set_num_threads(threads)
        module.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(x), targets)
        loss.backward()
        return loss.detach()

    return step
