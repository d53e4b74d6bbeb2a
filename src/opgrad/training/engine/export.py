"""The trained model as an ordinary ONNX inference model."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
from onnx import helper
from onnx.external_data_helper import uses_external_data

from opgrad.base.arguments import ArgumentError
from opgrad.base.files import destination, staged
from opgrad.onnx.graph.conversion import LOADED_AS_FLOATS, compute_in_float32, has_halves, rounded
from opgrad.onnx.graph.loading import read_model
from opgrad.onnx.graph.messages import FEW_BITS, LARGE, copied, import_microsoft, size_of
from opgrad.onnx.graph.nodes import needed, read_by
from opgrad.onnxruntime import loading
from opgrad.onnxruntime.loading import ELEMENT_TYPES
from opgrad.training.engine.training_graph import open_session, session_options
from opgrad.training.files.artifact_set import ArtifactSet
from opgrad.training.files.tensor_values import Apart, Held, placeholder, tensor_of, write_whole
from opgrad.training.make.checks import check_built, without_values

Values: TypeAlias = Sequence[onnx.ValueInfoProto]
"""Declared inputs or outputs."""


def export_model(
    source: onnx.ModelProto, name: str, values: Mapping[str, np.ndarray], outputs: Values, path: str | PathLike[str]
) -> None:
    """Write an eval graph up to some of its tensors under a name, with values in the places of inputs.

    values: of all inputs but those of a batch, by name; they are stored in the types that the graph has for them.
    outputs: the tensors that become the outputs, see `declared_outputs`.
    path: the file; beyond 2 GiB the values are in a second file, path + ".data". An error leaves older files alone.
    """
    model, held = _inference_model(source, name, values, outputs)
    path = destination(Path(path))
    check_built(model)
    beside = f"{path.name}.data"
    with staged(path.parent, lambda _: [beside] if _keeps_in(path, beside) else [], path.name) as folder:
        write_whole(model, held, folder / path.name)


def check_export(artifacts: ArtifactSet, outputs: Values) -> None:
    """Raise ValueError if `export_model` would fail, or if stock onnxruntime would not take what it writes."""
    model, _ = _inference_model(artifacts.eval_model, artifacts.name, artifacts.values, outputs)
    what = f"the model that would be exported of {artifacts.directory}"
    check_built(model, what)
    bare = without_values(model, unknown=False)
    if has_halves(bare, LOADED_AS_FLOATS):
        compute_in_float32(bare)
    loading.open_session(bare.SerializeToString(), session_options(1), what, stock=True, folds=False)


def declared_outputs(source: onnx.ModelProto, names: Sequence[str]) -> list[onnx.ValueInfoProto]:
    """The declarations of tensors that shall become outputs, from the graph, onnx's inference or onnxruntime.

    Raises ArgumentError of graph_output_names if there are none, or one is of no tensor that a node computes.
    """
    graph = source.graph
    computed = [name for node in graph.node for name in node.output if name]
    wrong = [name for name in names if name not in computed]
    if wrong or not names:
        found = ", ".join(map(repr, wrong)) or "no names"
        known = ", ".join(computed[-8:])
        raise ArgumentError("graph_output_names", f"has {found}, expected tensors of the eval graph such as {known}")
    typed = {value.name: value for value in (*graph.value_info, *graph.output)}
    if any(name not in typed for name in names):
        inferred = onnx.shape_inference.infer_shapes(source).graph
        typed |= {value.name: value for value in (*inferred.value_info, *inferred.output)}
    if unknown := [name for name in names if name not in typed]:
        model = copied(source)
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in unknown)
        import_microsoft(model)  # onnxruntime needs it for nodes that it fuses when opgrad's operators are registered
        for each in open_session(model, session_options(1), source.graph.name).get_outputs():
            if each.name in unknown:
                kind = ELEMENT_TYPES[each.type]
                typed[each.name] = helper.make_tensor_value_info(each.name, kind, each.shape or None)
    return [typed[name] for name in names]


def graph_between(source: onnx.ModelProto, given: Values, wanted: Values) -> onnx.ModelProto:
    """The part of a graph that computes some tensors from others, and from inputs of the graph."""
    names = {value.name for value in given}
    nodes = needed(source.graph.node, [value.name for value in wanted], names)
    read = read_by(nodes)
    inputs = [value for value in (*given, *source.graph.input) if value.name in read]
    constants = [tensor for tensor in source.graph.initializer if tensor.name in read]
    graph = helper.make_graph(nodes, "between", inputs, wanted, constants)
    return _model(source, graph)


def _inference_model(
    source: onnx.ModelProto, name: str, parameters: Mapping[str, np.ndarray], outputs: Values
) -> Apart:
    """The model of a graph up to some of its tensors, with placeholders for large tensors, and their values by name."""
    nodes = needed(source.graph.node, [output.name for output in outputs])
    read = read_by(nodes)
    inputs = [value for value in source.graph.input if value.name in read and value.name not in parameters]
    held: dict[str, Held] = {each.name: each for each in source.graph.initializer if each.name in read}
    given = {each.name: each for each in source.graph.input if each.name in parameters and each.name in read}
    for name, value in given.items():
        kind = value.type.tensor_type
        array = rounded(parameters[name], kind.elem_type, f"the parameter {name!r}")
        dims = [axis.dim_value for axis in kind.shape.dim]
        held[name] = tensor_of(name, array, kind.elem_type, dims) if kind.elem_type in FEW_BITS else array
    sizes = {name: each.size if isinstance(each, np.ndarray) else size_of(each) for name, each in held.items()}
    large = {name: each for name, each in held.items() if sizes[name] > LARGE}
    constants = [placeholder(name, each) if name in large else tensor_of(name, each) for name, each in held.items()]
    return _model(source, helper.make_graph(nodes, name, inputs, outputs, constants)), large


def _model(source: onnx.ModelProto, graph: onnx.GraphProto) -> onnx.ModelProto:
    """A model of a graph with the opsets, functions and format version of another model."""
    return helper.make_model(
        graph,
        producer_name="opgrad",
        ir_version=source.ir_version,
        opset_imports=source.opset_import,
        functions=source.functions,
    )


def _keeps_in(path: Path, beside: str) -> bool:
    """Whether a file is a model that keeps tensors in a file of this name."""
    if not path.is_file() or not path.with_name(beside).is_file():
        return False
    try:
        tensors = read_model(path, outside=False).graph.initializer
    except ValueError:
        return False
    kept = (entry for each in tensors if uses_external_data(each) for entry in each.external_data)
    return any(entry.key == "location" and entry.value == beside for entry in kept)
