"""torch eager for artifact sets that are a chain of layers, as a user would write it."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx.helper import get_node_attr_value

from opgrad.training import AdamWRule, ArtifactSet

ACTIVATIONS = {"Relu": "ReLU", "Tanh": "Tanh", "Sigmoid": "Sigmoid"}
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
    given = {item.name: get_node_attr_value(node, item.name) for item in node.attribute}
    return len(node.input) == 3 and given.items() <= LINEAR.items() and given.get("transB") == 1


def torch_step(artifacts: ArtifactSet, data: Mapping[str, np.ndarray], threads: int) -> Callable[[], Any]:
    """A training step with a learning rate of 0 that returns the loss.

    Raises ImportError without torch, NotImplementedError for a graph that is no chain of layers.
    """
    layers = chain(artifacts.eval_model.graph)
    import torch

    from opgrad.bench import training_models

    parameters = {name: torch.tensor(array) for name, array in {**artifacts.frozen, **artifacts.trainable}.items()}
    model = torch.nn.Sequential(*(_module(torch, node, parameters) for node in layers))
    rule: Any = artifacts.rule
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    if isinstance(rule, AdamWRule):
        given: dict[str, Any] = {
            "betas": (rule.alpha, rule.beta),
            "eps": rule.epsilon,
            "weight_decay": rule.weight_decay,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, **given)
    x, labels = (torch.tensor(array) for array in data.values())
    return training_models.torch_step(model, x, labels, threads, optimizer)


def _module(torch: Any, node: onnx.NodeProto, parameters: Mapping[str, Any]) -> Any:
    if node.op_type != "Gemm":
        return getattr(torch.nn, ACTIVATIONS[node.op_type])()
    weight, bias = (parameters[name] for name in node.input[1:])
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    return layer
