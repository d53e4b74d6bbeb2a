"""Training of the benchmark's models in PyTorch, and of artifact sets that are chains of layers.

What the exporter makes of them, the artifact sets that opgrad makes of the architectures, and torch's own steps.
"""

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional

from bench.steps import models
from bench.steps.generated import TORCH, Subject, thread_counts
from opgrad.training import AdamWRule, ArtifactSet
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts

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
    make, rows, draw = models.MODELS[name]
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
    _without_outputs(with_scores / "training_model.onnx", probabilities)
    batch = dict(zip(made.inputs, (x.numpy(), labels.numpy()), strict=True))

    def step(threads: int) -> Step:
        module.train()
        return torch_step(module, x, labels, threads, torch.optim.AdamW(module.parameters(), lr=0.0))

    return ArtifactSet.load(place), rows, batch, step, with_scores


def _without_outputs(file: Path, names: Sequence[str]) -> None:
    """Take outputs from a model; what computes them stays."""
    model = onnx.load(file)
    kept = [each for each in model.graph.output if each.name not in names]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    onnx.save(model, file)


def subject(name: str) -> Subject:
    """One of all models, with the mean cross-entropy of its scores as its loss, and torch's forward and backward."""
    torch.manual_seed(0)
    make, rows, draw = {**models.MODELS, **models.LONG_MODELS}[name]
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


def chain(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes of a graph of linear layers and activations before a softmax cross-entropy.

    Raises NotImplementedError for any other graph.
    """
    *layers, loss = graph.node
    tensor = graph.input[0].name
    for node in layers:
        if node.input[0] != tensor or not _is_layer(node):
            raise NotImplementedError(f"no torch model is built of {node.op_type}")
        tensor = node.output[0]
    if loss.op_type != "SoftmaxCrossEntropyLoss" or loss.input[0] != tensor or loss.attribute[0].s != b"mean":
        raise NotImplementedError(f"no torch model is built with {loss.op_type}")
    return layers


def _is_layer(node: onnx.NodeProto) -> bool:
    if node.op_type != "Gemm":
        return node.op_type in ACTIVATIONS
    given = {item.name: helper.get_node_attr_value(node, item.name) for item in node.attribute}
    return len(node.input) == 3 and given.items() <= LINEAR.items() and given.get("transB") == 1


def chain_step(artifacts: ArtifactSet, data: Mapping[str, np.ndarray], threads: int) -> Step:
    """torch's step of a set with a learning rate of 0. Raises NotImplementedError for what is no chain of layers."""
    parameters = {name: torch.tensor(array) for name, array in {**artifacts.frozen, **artifacts.trainable}.items()}
    layers = chain(artifacts.eval_model.graph)
    model = nn.Sequential(*(_module(node, parameters) for node in layers))
    rule: Any = artifacts.rule
    optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.0)
    if isinstance(rule, AdamWRule):
        given: dict[str, Any] = {"eps": rule.epsilon, "weight_decay": rule.weight_decay}
        optimizer = partial(torch.optim.AdamW, lr=0.0, betas=(rule.alpha, rule.beta), **given)
    x, labels = (torch.tensor(array) for array in data.values())
    return torch_step(model, x, labels, threads, optimizer(model.parameters()))


def _module(node: onnx.NodeProto, parameters: Mapping[str, Any]) -> nn.Module:
    if node.op_type != "Gemm":
        return ACTIVATIONS[node.op_type]()
    weight, bias = (nn.Parameter(parameters[name]) for name in node.input[1:])
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = weight, bias
    return layer
