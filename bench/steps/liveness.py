"""How many bytes of results are alive at once in a graph, as onnxruntime runs it."""

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from opgrad.onnx.graph.messages import copied
from opgrad.onnxruntime import InferenceSession

SHARING = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")  # whose result is the memory of the first input
ITEM = {"float": 4, "double": 8, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1, "uint8": 1, "int8": 1}


def peak_bytes(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> int:
    """The most bytes that are alive after any node, in the order in which onnxruntime runs the optimized graph.

    Inputs and initializers do not count, and nothing is taken to be computed in the memory of an input.
    """
    named = copied(model)
    for place, node in enumerate(named.graph.node):
        node.name = f"node_{place}"
    with tempfile.TemporaryDirectory() as folder:
        optimized, events = _profile(named, feeds, Path(folder))
    nodes = {node.name: node for node in optimized.graph.node}
    order = [nodes[each["name"].removesuffix("_kernel_time")] for each in events]
    return _most_alive(order, events, [each.name for each in optimized.graph.output])


def _profile(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], folder: Path
) -> tuple[onnx.ModelProto, list[dict[str, Any]]]:
    """The optimized graph, and what onnxruntime tells of each node that it ran."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    session = InferenceSession(model.SerializeToString(), options)
    session.run(None, dict(feeds))
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return onnx.load(options.optimized_model_filepath), [
        each for each in events if each["name"].endswith("_kernel_time")
    ]


def _most_alive(order: Sequence[onnx.NodeProto], events: Iterable[dict[str, Any]], outputs: Iterable[str]) -> int:
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for node, event in zip(order, events, strict=True):
        kinds = [next(iter(each.items())) for each in event["args"]["output_type_shape"]]
        for name, (kind, shape) in zip(filter(None, node.output), kinds, strict=True):
            sizes[name] = math.prod(shape) * ITEM[kind]
        if node.op_type in SHARING:
            owner[node.output[0]] = owner.get(node.input[0], node.input[0])
    last = {owner.get(name, name): place for place, node in enumerate(order) for name in node.input}
    last |= {owner.get(name, name): len(order) for name in outputs}
    alive: dict[str, int] = {}
    most = 0
    for place, node in enumerate(order):
        alive |= {name: sizes[name] for name in node.output if name and name not in owner}
        most = max(most, sum(alive.values()))
        alive = {name: size for name, size in alive.items() if last.get(name, place) > place}
    return most
