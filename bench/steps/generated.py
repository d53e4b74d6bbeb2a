"""Graphs with gradients as opgrad generates them, beside the graphs of onnxruntime-training and torch eager.

Of each, the time is measured, and how many bytes of results are alive at once as onnxruntime runs it.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

import opgrad
from bench.measure import take_turns, turns
from opgrad.gradients import gradients
from opgrad.onnx.gradients.backward import SUFFIX
from opgrad.onnx.gradients.differentiation import with_gradients
from opgrad.onnx.graph.messages import copied
from opgrad.onnx.passes.patterns import use_internal_losses
from opgrad.onnxruntime import InferenceSession
from opgrad.training import ArtifactSet
from opgrad.training.engine.memory import FlatTensors
from opgrad.training.engine.training_graph import BoundGraph, declared, session_options
from opgrad.training.make.models import take_parameters
from opgrad.training.make.outputs import inputs_as_constants

SHARING = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")  # whose result is the memory of the first input
ITEM = {"float": 4, "double": 8, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1, "uint8": 1, "int8": 1}


def peak_bytes(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> int:
    """The most bytes that are alive after any node, in the order in which onnxruntime runs the optimized graph.

    Inputs and initializers do not count, and nothing is taken to be computed in the memory of an input.
    """
    named = copied(model)
    for place, node in enumerate(named.graph.node):
        node.name = f"node_{place}"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder, "optimized.onnx"))
        options.enable_profiling, options.profile_file_prefix = True, str(Path(folder, "profile"))
        session = InferenceSession(named.SerializeToString(), options)
        session.run(None, dict(feeds))
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        optimized = onnx.load(options.optimized_model_filepath)
    nodes = {f"{node.name}_kernel_time": node for node in optimized.graph.node}
    ran = [(nodes[each["name"]], each) for each in events if each["name"] in nodes]
    return _most_alive(ran, [each.name for each in optimized.graph.output])


def _most_alive(ran: Sequence[tuple[onnx.NodeProto, dict[str, Any]]], outputs: Iterable[str]) -> int:
    """ran: the nodes in their order, each with what onnxruntime tells of it."""
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for node, event in ran:
        kinds = [next(iter(each.items())) for each in event["args"]["output_type_shape"]]
        for name, (kind, shape) in zip(filter(None, node.output), kinds, strict=True):
            sizes[name] = math.prod(shape) * ITEM[kind]
        if node.op_type in SHARING:
            owner[node.output[0]] = owner.get(node.input[0], node.input[0])
    last = {owner.get(name, name): place for place, (node, _) in enumerate(ran) for name in node.input}
    last |= {owner.get(name, name): len(ran) for name in outputs}
    alive: dict[str, int] = {}
    most = 0
    for place, (node, _) in enumerate(ran):
        alive |= {name: sizes[name] for name in node.output if name and name not in owner}
        most = max(most, sum(alive.values()))
        alive = {name: size for name, size in alive.items() if last.get(name, place) > place}
    return most


GENERATED, RECOMPUTED = "generated", "segments"  # ours, and ours with a part of the activations
OLD_GRAPH, TORCH = "old graph", "torch"
TILES, SCORES = "tiles", "scores"  # attention recognized, and as the products and the softmax that it is made of
SEGMENTS = 2
SAME_LOSS = 1e-3  # relative


@dataclass(frozen=True)
class Subject:
    """A model to generate gradients for.

    model: with a loss as its first output; its parameters are inputs or initializers. parameters: by name.
    feeds: of one batch. others: contestants that compute the same.
    """

    name: str
    model: onnx.ModelProto
    parameters: Mapping[str, np.ndarray]
    feeds: Mapping[str, np.ndarray]
    others: Mapping[str, Callable[[], Any]]


def of_set(artifacts: ArtifactSet, feeds: Mapping[str, np.ndarray], graph: Callable[[], BoundGraph]) -> Subject:
    """The model of an artifact set, whose gradients are generated anew. graph: runs the set's own training graph."""
    model = copied(artifacts.eval_model)
    parameters = {**artifacts.frozen, **artifacts.trainable}
    inputs_as_constants(model.graph, [numpy_helper.from_array(array, name) for name, array in parameters.items()])
    return Subject(artifacts.name, model, artifacts.trainable, feeds, {OLD_GRAPH: lambda: graph().loss_ahead()()})


def measure(subject: Subject, seconds: float) -> dict[str, Any]:
    """What is measured of a subject's graphs, with all activations kept and with a part of them."""
    began = time.perf_counter()
    asked = subject.model, subject.model.graph.output[0].name, list(subject.parameters)
    whole = gradients(*asked)
    took = time.perf_counter() - began
    graphs = {GENERATED: whole, RECOMPUTED: gradients(*asked, checkpoint_segments=SEGMENTS)}
    found = _raced(subject, graphs, subject.others, seconds)
    return found | {"nodes": len(whole.graph.node), "generating": round(took, 3)}


def measure_attention(subject: Subject, seconds: float) -> dict[str, Any]:
    """What is measured of forward and backward with attention in tiles and with matrices of scores."""
    asked = subject.model, subject.model.graph.output[0].name, list(subject.parameters)
    graphs = {name: with_gradients(*asked, False, None, in_tiles=name == TILES) for name in (TILES, SCORES)}
    parameters = sum(array.size for array in subject.parameters.values())
    return _raced(subject, graphs, {}, seconds) | {"parameters": parameters}


def _raced(
    subject: Subject, graphs: Mapping[str, onnx.ModelProto], others: Mapping[str, Callable[[], Any]], seconds: float
) -> dict[str, Any]:
    """The times of a subject's graphs and of others, which take turns, and the most bytes that are alive in ours."""
    calls = {name: _runner(subject, model) for name, model in graphs.items()} | dict(others)
    times = best_of_torch(take_turns({name: turns(call) for name, call in calls.items()}, seconds))
    losses = {name: float(np.asarray(call())) for name, call in calls.items()}
    notes = disagreements(losses, losses[next(iter(graphs))])
    return {
        "model": subject.name,
        "batch": len(next(iter(subject.feeds.values()))),
        "peak": {name: peak_bytes(_fused(model), subject.feeds) for name, model in graphs.items()},
        "times": times,
        **({"notes": notes} if notes else {}),
    }


def thread_counts() -> set[int]:
    """The numbers of threads that torch is measured with."""
    return {1, opgrad.get_num_threads()}


def best_of_torch(times: Mapping[str, Any]) -> dict[str, Any]:
    """The times with those of torch under one name, with all threads or with one, whichever was faster."""
    of_torch = [name for name in times if name.startswith(TORCH)]
    best = min(of_torch, key=lambda name: times[name]["median"], default=None)
    others = {name: taken for name, taken in times.items() if name not in of_torch}
    return others | ({TORCH: times[best]} if best else {})


def disagreements(losses: Mapping[str, float], ours: float) -> dict[str, str]:
    """Notes for the contestants whose loss is not ours."""
    return {
        name: f"its loss is {loss:.6g}, ours {ours:.6g}: it computes something else"
        for name, loss in losses.items()
        if abs(loss - ours) > SAME_LOSS * abs(ours)
    }


def _fused(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph as a training step has it: with opgrad's loss in place of onnxruntime's ten nodes."""
    copy = copied(model)
    use_internal_losses(copy)
    return copy


def _runner(subject: Subject, model: onnx.ModelProto) -> Callable[[], float]:
    """Runs a graph on bound memory, with parameters that are inputs, as a training step does; returns the loss."""
    bound = _fused(model)
    shapes = {name: array.shape for name, array in subject.parameters.items()}
    graph, written = bound.graph, FlatTensors({f"{name}{SUFFIX}": shape for name, shape in shapes.items()})
    fixed = {name: array.copy() for name, array in subject.parameters.items()}
    take_parameters(bound, fixed.keys())
    inputs = [declared(value) for value in graph.input if value.name in subject.feeds]
    options = session_options(opgrad.get_num_threads())
    runner = BoundGraph(bound, options, "bench", inputs, [declared(graph.output[0])], fixed, dict(written))
    values = [subject.feeds[spec.name] for spec in inputs]
    return lambda: runner(values).loss_ahead()()
