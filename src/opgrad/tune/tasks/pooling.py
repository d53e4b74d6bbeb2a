"""One vector for each text: what an encoder's outputs are, and the pooling that a model's folder names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.base.arguments import ArgumentError
from opgrad.onnx.graph.formulas import GraphBody, Value
from opgrad.onnx.graph.messages import keep
from opgrad.onnx.graph.nodes import needed
from opgrad.tune.language.model import ENCODED, WHO, LanguageModel
from opgrad.tune.tokenizer import read_json

POOLINGS = ("mean", "cls", "last")
# What configurations of sentence-transformers' poolings call these.
MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}
SENTENCE = ("sentence_embedding", "embeddings")  # outputs that are pooled already
SMALLEST = 1e-12


def output_of(ranks: Mapping[str, int], pooling: str | None, what: str) -> str:
    """The output that the vectors are made of: those of tokens, or, unless a pooling is given, those of texts."""
    texts = [name for name, rank in ranks.items() if rank == 2 and name in SENTENCE and pooling is None]
    tokens = [name for name, rank in ranks.items() if rank == 3 and name in ENCODED]
    if not (found := texts or tokens):
        known = ", ".join((*ENCODED, *SENTENCE))
        raise ValueError(f"{what} has the outputs {', '.join(ranks)}, expected one of {known}, as encoders have")
    return found[0]


def vectors_of(base: LanguageModel, body: GraphBody, pooling: str, what: str) -> Value:
    """The vectors of texts, whose nodes are written behind an encoder's output."""
    hidden = Value(body, base.logits, TensorProto.FLOAT)
    if base.logits in SENTENCE:
        return hidden
    if pooling == "cls":
        return hidden.slice(0, 1, axis=1).squeeze(1)
    name = next((each.name for each in base.model.graph.input if "mask" in each.name), None)
    if name is None:
        raise ValueError(f"{what} has no input attention_mask, expected one for texts of different lengths")
    counted = Value(body, name, TensorProto.INT64).cast(TensorProto.FLOAT)
    if pooling == "last":
        ends = body.node("CumSum", counted, body.constant(np.array(1))).equals(counted.sum([1]))
        counted = counted * ends.cast(TensorProto.FLOAT)
    total = (hidden * counted.unsqueeze(2)).sum([1], keepdims=False)
    return total / body.node("Max", counted.sum([1]), body.number(SMALLEST, hidden))


def unit(vectors: Value) -> Value:
    """Vectors with the length 1."""
    square = (vectors * vectors).sum([1])
    return vectors / vectors.body.node("Max", square.apply("Sqrt"), vectors.body.number(SMALLEST, vectors))


def finish(model: onnx.ModelProto, value: Value, name: str, shape: list[Any]) -> None:
    """Append the nodes of a value's body to a model, of which the value, under a name, becomes the only output."""
    assert isinstance(value.body, GraphBody)
    model.graph.initializer.extend(value.body.initializers)
    model.graph.node.extend([*value.body.nodes, helper.make_node("Identity", [value.name], [name], f"{name}/Identity")])
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    keep(model.graph.node, needed(list(model.graph.node), [name]))


def pooling_of(folder: Path) -> str | None:
    """The pooling of a model's folder, as sentence-transformers writes it down; None if it does not."""
    path = folder / "modules.json"
    listed = json.loads(path.read_bytes()) if path.is_file() else [{"type": "Pooling", "path": "1_Pooling"}]
    modules = {str(each.get("type", "")).rpartition(".")[2]: str(each.get("path", "")) for each in listed}
    if "Dense" in modules:
        raise NotImplementedError(f"{WHO}: {folder} has a module Dense behind its pooling, expected none")
    config = read_json(folder / modules.get("Pooling", "1_Pooling") / "config.json")
    named = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    found = [MODES.get(each, each) for each in named or filter(None, [config.get("pooling_mode")])]
    if found and (len(found) > 1 or found[0] not in POOLINGS):
        raise ArgumentError("task", f"and {folder} with the pooling {found}, expected pooling=mean, cls or last")
    return found[0] if found else None
