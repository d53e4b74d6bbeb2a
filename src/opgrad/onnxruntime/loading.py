"""Opens ONNX models in onnxruntime, and finds out by trials which library runs each of their nodes.

Every fault of a model raises a ValueError of one line with the model's name. The model of a file is lowered into
another file.
"""

import os
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.external_data_helper import uses_external_data

from opgrad.base.arguments import naming
from opgrad.base.files import check_regular, destination, replace_file
from opgrad.onnx.graph.loading import Source
from opgrad.onnx.graph.messages import FLOATS, copied, declared_types, domain_of
from opgrad.onnx.graph.nodes import captured, subgraphs
from opgrad.onnx.plain.lowering import lower
from opgrad.onnxruntime.private import reason
from opgrad.onnxruntime.sessions import CPU, InferenceSession, register

# onnxruntime's optimizer also takes out Dropout in training mode where nothing reads its mask.
DISABLED = ("EliminateDropout",)


def open_session(
    model: Source, options: onnxruntime.SessionOptions, what: str, stock: bool = False, folds: bool = True,
    providers: Sequence[Any] = (CPU,),
) -> onnxruntime.InferenceSession:  # fmt: skip
    """A session, by default on the CPU, with opgrad's operators or, for `stock`, without them.

    what: the model's name, for messages. folds: whether onnxruntime computes constants ahead, which has
    no limit of memory.
    Raises ValueError for whatever onnxruntime finds wrong with the model.
    """
    if not stock:
        register(options)
    make = onnxruntime.InferenceSession if stock else InferenceSession
    if stock and not isinstance(model, bytes):
        check_regular(Path(model), f"{what}: {os.fspath(model)}")
    try:
        disabled = DISABLED if folds else (*DISABLED, "ConstantFolding")
        return make(model, options, providers=list(providers), disabled_optimizers=disabled)
    except Exception as error:  # onnxruntime's exceptions have no common base class, and others come from its C++ part
        notes = getattr(error, "__notes__", ())
        raise ValueError(f"{what}: onnxruntime cannot load the model: {' '.join([reason(error), *notes])}") from None


NATIVE, OPGRAD, LOWERING, NOBODY = RUNNERS = "onnxruntime", "opgrad", "only by lowering", "nobody"
FLOAT = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
ELEMENT_TYPES = {f"tensor({name.lower()})": number for name, number in TensorProto.DataType.items()}


@dataclass(frozen=True)
class ModelOperator:
    """An operator of a model. `runner` is one of RUNNERS; `count` says how many nodes have it."""

    domain: str
    name: str
    count: int
    runner: str


def operators(model: onnx.ModelProto) -> list[ModelOperator]:
    """The operators of a model's graph, sorted by runner, those that nothing runs last, then the most frequent first.

    model: with or without functions. A node that calls one, or has a graph of its own, is judged as a whole.

    Every node is tried alone, as a model with one node, because a runner may lack an operator for some types only.
    """
    trials = _Trials(model)
    found = Counter((trials.runner(node), node.domain, node.op_type) for node in model.graph.node)
    result = [ModelOperator(domain, name, count, runner) for (runner, domain, name), count in found.items()]
    return sorted(result, key=lambda each: (RUNNERS.index(each.runner), -each.count, each.name))


class _Trials:
    """Trials of a model's nodes in their order, so that the types of a node's inputs are known from earlier trials."""

    def __init__(self, model: onnx.ModelProto):
        graph = model.graph
        self._model = model
        self._types, self._tensors = declared_types(graph), {each.name: each for each in graph.initializer}
        for name in self._tensors:
            self._types[name].tensor_type.ClearField("shape")
        self._known: dict[bytes, tuple[str, list[onnx.TypeProto]]] = {}

    def runner(self, node: onnx.NodeProto) -> str:
        """The runner of a node; to be called for the nodes in the order of the graph."""
        small = self._model_of(node)
        key = small.SerializeToString(deterministic=True)
        if key not in self._known:
            self._known[key] = self._try(small)
            if self._known[key][0] == NOBODY:
                # Shapes that a model declares may be wrong: onnxruntime then takes those that it infers.
                for item in (*small.graph.input, *small.graph.output):
                    if item.type.HasField("tensor_type"):
                        item.type.tensor_type.ClearField("shape")
                self._known[key] = self._try(small)
        runner, types = self._known[key]
        for name, kind in zip(filter(None, node.output), types, strict=True):
            self._types.setdefault(name, kind)
        return runner

    def _model_of(self, node: onnx.NodeProto) -> onnx.ModelProto:
        """A model of this node alone with numbered tensors, so that equal nodes give equal models."""
        outer = list(dict.fromkeys(captured(node)))
        inputs = [helper.make_value_info(name, self._type(name, outer)) for name in outer]
        if domain_of(node):  # of these onnxruntime wants sizes; others are alike whatever the sizes of their weights
            for item in inputs:
                if item.name in self._tensors:
                    tensor = self._tensors[item.name]
                    item.type.CopyFrom(helper.make_tensor_type_proto(tensor.data_type, tensor.dims))
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        for output in outputs:
            if output.name in self._types:
                output.type.CopyFrom(self._types[output.name])
        copy = copied(node)
        copy.name = "node"
        if not any(subgraphs(node)):  # whose tensors have the names of the outer ones
            names = {name: f"t{index}" for index, name in enumerate(dict.fromkeys([*outer, *node.output]))} | {"": ""}
            copy.input[:] = [names[name] for name in node.input]
            copy.output[:] = [names[name] for name in node.output]
            for item in (*inputs, *outputs):
                item.name = names[item.name]
        model = onnx.ModelProto()
        model.ir_version = self._model.ir_version
        model.opset_import.extend(self._model.opset_import)
        model.functions.extend(self._model.functions)
        model.graph.CopyFrom(helper.make_graph([copy], "trial", inputs, outputs))
        return model

    def _type(self, name: str, others: list[str]) -> onnx.TypeProto:
        """The type of a tensor; the result of a node that nothing runs is assumed to have its neighbours' type."""
        known = (self._types[each] for each in (name, *others) if each in self._types)
        return next(known, FLOAT)

    def _try(self, model: onnx.ModelProto) -> tuple[str, list[onnx.TypeProto]]:
        """The runner of a model's only node, and the types of its results as far as they are known."""
        for runner in (NATIVE, OPGRAD):
            types = _output_types(model, stock=runner == NATIVE)
            if types is not None:
                return runner, types
        with suppress(NotImplementedError, ValueError):
            types = _output_types(lower(model), stock=True)  # the lowered model may have more outputs
            if types is not None:
                return LOWERING, types[: len(model.graph.output)]
        given = [item.type for item in model.graph.input]
        floats = [each for each in given if each.tensor_type.elem_type in FLOATS]
        guess = helper.make_tensor_type_proto((floats or given or [FLOAT])[0].tensor_type.elem_type, None)
        return NOBODY, [item.type if item.HasField("type") else guess for item in model.graph.output]


def _output_types(model: onnx.ModelProto, stock: bool) -> list[onnx.TypeProto] | None:
    """The types of a model's outputs; None if no session can be made."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        outputs = open_session(model.SerializeToString(), options, "operators", stock).get_outputs()
    except ValueError:
        return None
    declared = {item.name: item.type for item in model.graph.output if item.HasField("type")}
    found = []
    for item in outputs:
        kind = onnx.TypeProto()  # stays empty for sequences and other types that are no tensors
        if item.type in ELEMENT_TYPES:
            kind = helper.make_tensor_type_proto(ELEMENT_TYPES[item.type], item.shape or None)  # [] means unknown, too
        found.append(declared.get(item.name) or kind)
    return found


@dataclass(frozen=True)
class Lowered:
    """The results of lowering a model.

    nodes, functions: how many nodes of each operator were lowered, and how many functions they call.
    outputs: those that were added. left: operators that stock onnxruntime still lacks.
    """

    nodes: dict[str, int]
    functions: dict[str, int]
    outputs: list[str]
    left: list[str]


@naming("lower")
def lower_file(source: Path, target: Path, only: Collection[str] | None = None) -> Lowered:
    """Write the lowered model; a crash on the way leaves an older file as it was.

    source: an ONNX model. target: the file to write; in the folder of the source if that keeps data in other files.
    only: the operators to lower, as for `lower`.
    Returns what became of the model. Raises what `lower` and `destination` raise, ValueError for a target in the wrong
    folder.
    """
    target = destination(target)
    after = lower(source, operators=only)  # this checks the file
    before = onnx.load(source, load_external_data=False)
    tensors = (*after.graph.initializer, *after.graph.sparse_initializer)
    outside = any(uses_external_data(each) for each in tensors if isinstance(each, onnx.TensorProto))
    if outside and source.resolve().parent != target.resolve().parent:
        raise ValueError(f"{source} keeps data in other files, expected an output in {source.parent}")
    replace_file(target, after.SerializeToString())
    old, new = (Counter((node.domain, node.op_type) for node in model.graph.node) for model in (before, after))
    nodes = {name: count for (domain, name), count in sorted(old.items()) if (domain, name) not in new}
    made = Counter(_operator(each.name, nodes) for each in after.functions[len(before.functions) :])
    kept = {each.name for each in before.graph.output}
    return Lowered(
        nodes=nodes,
        functions={name: made[name] for name in nodes},
        outputs=[each.name for each in after.graph.output if each.name not in kept],
        left=[each.name for each in operators(after) if each.runner != NATIVE],
    )


def _operator(function: str, names: Collection[str]) -> str:
    """The operator of a function, which has the operator's name, followed by a number from the second one on."""
    return max((name for name in names if function == name or function.startswith(f"{name}_")), key=len, default="")
