"""Writes model.onnx, a BERT-shaped classifier with random weights, and data.npz, what it learns: python make.py.

Each example is a pair of sentences of words that are numbers. Its label says which half of the vocabulary most words
of the second sentence come from, so that the model has to tell sentences, and words from padding.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HERE = Path(__file__).parent
VOCABULARY, LAYERS, WIDTH, HEADS, LENGTH, EXAMPLES = 1024, 2, 128, 2, 32, 2048
CLASS, SEPARATOR, SPECIAL = 1, 2, 3  # tokens; 0 is padding, and words begin at SPECIAL
INPUTS = ("input_ids", "token_type_ids", "attention_mask")


class Body:
    """Nodes and weights of a graph, in order."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(0)

    def add(self, op: str, *inputs: str, **attributes: object) -> str:
        """Append a node; the name of its result."""
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], **attributes))
        return name

    def constant(self, name: str, value: object) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def weight(self, name: str, *shape: int) -> str:
        """Small random numbers; the name."""
        return self.constant(name, 0.05 * self.random.standard_normal(shape, np.float32))

    def linear(self, x: str, name: str, inputs: int, outputs: int) -> str:
        bias = self.constant(f"{name}.bias", np.zeros(outputs, np.float32))
        return self.add("Add", self.add("MatMul", x, self.weight(f"{name}.weight", inputs, outputs)), bias)

    def norm(self, x: str, name: str) -> str:
        weight = self.constant(f"{name}.weight", np.ones(WIDTH, np.float32))
        return self.add("LayerNormalization", x, weight, self.constant(f"{name}.bias", np.zeros(WIDTH, np.float32)))

    def heads(self, x: str, perm: list[int]) -> str:
        return self.add("Transpose", self.add("Reshape", x, "split"), perm=perm)


def attention(body: Body, x: str, mask: str, name: str) -> str:
    """All tokens attend to each other, but not to padding."""
    q, k, v = (body.linear(x, f"{name}.{role}", WIDTH, WIDTH) for role in ("query", "key", "value"))
    scores = body.add("MatMul", body.heads(q, [0, 2, 1, 3]), body.heads(k, [0, 2, 3, 1]))
    p = body.add("Softmax", body.add("Add", body.add("Mul", scores, "scale"), mask), axis=-1)
    context = body.add("Transpose", body.add("MatMul", p, body.heads(v, [0, 2, 1, 3])), perm=[0, 2, 1, 3])
    return body.linear(body.add("Reshape", context, "joined"), f"{name}.output", WIDTH, WIDTH)


def layer(body: Body, x: str, mask: str, name: str) -> str:
    """A layer of BERT, with the normalization behind its parts."""
    x = body.norm(body.add("Add", x, attention(body, x, mask, f"{name}.attention")), f"{name}.attention.norm")
    inner = body.add("Gelu", body.linear(x, f"{name}.up", WIDTH, 4 * WIDTH))
    return body.norm(body.add("Add", x, body.linear(inner, f"{name}.down", 4 * WIDTH, WIDTH)), f"{name}.norm")


def make_model() -> onnx.ModelProto:
    """The model: embeddings, layers, and a class of what stands at the first token."""
    body = Body()
    for name, value in (("split", [0, 0, HEADS, WIDTH // HEADS]), ("joined", [0, 0, WIDTH]), ("axes", [1, 2])):
        body.constant(name, np.array(value, np.int64))
    for name, number in (("one", 1), ("masked", -10000), ("scale", (WIDTH // HEADS) ** -0.5)):
        body.constant(name, np.float32(number))
    body.constant("first", np.int64(0))
    words = body.add("Gather", body.weight("words", VOCABULARY, WIDTH), "input_ids")
    kinds = body.add("Gather", body.weight("kinds", 2, WIDTH), "token_type_ids")
    places = body.weight("places", LENGTH, WIDTH)
    x = body.norm(body.add("Add", body.add("Add", words, kinds), places), "norm")
    padding = body.add("Sub", "one", body.add("Cast", "attention_mask", to=TensorProto.FLOAT))
    mask = body.add("Mul", body.add("Unsqueeze", padding, "axes"), "masked")
    for number in range(LAYERS):
        x = layer(body, x, mask, f"layers.{number}")
    pooled = body.add("Tanh", body.linear(body.add("Gather", x, "first", axis=1), "pooler", WIDTH, WIDTH))
    scores = body.linear(pooled, "classes", WIDTH, 2)
    body.nodes.append(helper.make_node("Identity", [scores], ["scores"]))
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", LENGTH]) for name in INPUTS]
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 2])]
    graph = helper.make_graph(body.nodes, "bert", inputs, outputs, body.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def make_data() -> dict[str, np.ndarray]:
    """Pairs of sentences, and the label of each."""
    random, half = np.random.default_rng(1), (VOCABULARY - SPECIAL) // 2
    data = {name: np.zeros((EXAMPLES, LENGTH), np.int64) for name in INPUTS}
    labels = random.integers(0, 2, EXAMPLES)
    for row, label in enumerate(labels):
        first, last = random.integers(LENGTH // 4, LENGTH // 2), random.integers(3 * LENGTH // 4, LENGTH + 1)
        sides = random.integers(0, 2, last)
        sides[first:] = np.where(random.random(last - first) < 0.8, label, 1 - label)
        ids = SPECIAL + sides * half + random.integers(0, half, last)
        ids[0], ids[[first, last - 1]] = CLASS, SEPARATOR
        data["input_ids"][row, :last] = ids
        data["token_type_ids"][row, first + 1 : last] = 1
        data["attention_mask"][row, :last] = 1
    return {**data, "labels": labels}


def make(folder: Path = HERE) -> None:
    """Write model.onnx and data.npz into a folder."""
    onnx.save(make_model(), folder / "model.onnx")
    np.savez(folder / "data.npz", allow_pickle=False, **make_data())


if __name__ == "__main__":
    make()
