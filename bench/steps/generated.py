"""Graphs with gradients as opgrad generates them, beside the graphs of onnxruntime-training and torch eager."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

import opgrad
from bench.measure import take_turns, turns
from bench.steps.liveness import peak_bytes
from opgrad.gradients import gradients
from opgrad.onnx.gradients.backward import SUFFIX
from opgrad.onnx.gradients.differentiation import with_gradients
from opgrad.onnx.graph.messages import copied
from opgrad.onnx.passes.patterns import use_internal_losses
from opgrad.training import ArtifactSet
from opgrad.training.engine.binding import BoundGraph, declared
from opgrad.training.engine.memory import FlatTensors
from opgrad.training.engine.training_graph import open_session, session_options
from opgrad.training.make.models import take_parameters
from opgrad.training.make.outputs import inputs_as_constants

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
    return Subject(artifacts.name, model, artifacts.trainable, feeds, {OLD_GRAPH: lambda: graph().loss})


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
    session = open_session(bound, session_options(opgrad.get_num_threads()), "bench")
    runner = BoundGraph(session, inputs, [declared(graph.output[0])], fixed, dict(written), "bench")
    runner([subject.feeds[spec.name] for spec in inputs])

    return lambda: runner().loss
