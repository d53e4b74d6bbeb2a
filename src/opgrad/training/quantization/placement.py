"""Pairs for int8, where onnxruntime's own quantizer puts them: it is called."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from opgrad.base.arguments import ArgumentError, ArgumentTypeError
from opgrad.base.writing import new_file
from opgrad.onnx.graph.conversion import raise_opset
from opgrad.onnx.graph.messages import free_name
from opgrad.onnx.graph.nodes import SCOPES, module_path, reads_values
from opgrad.onnx.passes import prepare
from opgrad.training.make.selection import Candidates, is_handed_on, matching

WHO = "quantization.prepare"
LEAST_OPSET = 13  # from which on a scale may be one of an axis
# The places of weights among the inputs of nodes by which users choose what is quantized.
PLACES = {"Conv": (1,), "ConvTranspose": (1,), "Gemm": (0, 1), "MatMul": (0, 1), "Gather": (0,)}


# What onnxruntime's optimizer writes in front of the name of a weight with which it multiplied another.
FUSED = re.compile(r"(Conv\w*?Fusion_W_)+")
KINDS = ("weight that is quantized", "weight that is quantized")
Choose: TypeAlias = Callable[[Iterable[str]], set[str]]  # of weights that could be quantized, those that are


def choice(weights: Iterable[str], candidates: Candidates) -> Choose:
    """The choice of these weights: names or patterns.

    candidates: of the model that was given, whose names they are.
    """

    def choose(known: Iterable[str]) -> set[str]:
        """Raises ValueError for a name or a pattern that matches none of the known ones."""
        origins = {result: name for name in candidates.weights for result in candidates.results(name)}
        own = {name: origins.get(plain := FUSED.sub("", name), plain) for name in known}
        names = list(dict.fromkeys(own.values()))
        exact, loose = matching("weights", weights, names, names, candidates.modules, KINDS)
        return {name for name, origin in own.items() if origin in {*exact, *loose}}

    return choose


def placed(
    model: onnx.ModelProto, calibration: Sequence[Mapping[str, np.ndarray]], per_channel: bool,
    choose: Choose | None,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:  # fmt: skip
    """The model with pairs and integer weights, and the float weights by name.

    calibration: batches of the inputs, whose least and largest numbers give the scales.
    choose: by which weights the nodes are quantized; None: all nodes are.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    if not calibration:
        raise ArgumentError("calibration", "has no batches, expected some of the model's inputs for int8")
    check_inputs(model, calibration)
    before = simplified(model, LEAST_OPSET)
    nodes = None if choose is None else _nodes(before.graph, choose)
    with TemporaryDirectory(prefix="opgrad-") as folder, _silent():
        floats, integers = Path(folder) / "floats.onnx", Path(folder) / "integers.onnx"
        new_file(floats, before.SerializeToString())
        # Activations are unsigned: onnxruntime's kernels for x86-64 take no others, and it converts only some.
        # Weights have 7 bits, as in `learning`.
        form = {"quant_format": QuantFormat.QDQ, "activation_type": QuantType.QUInt8, "per_channel": per_channel}
        form |= {"reduce_range": True, "nodes_to_quantize": nodes}
        quantize_static(str(floats), str(integers), _Batches(calibration), **form)
        after = onnx.load(integers)
    return after, {name: numpy_helper.to_array(each) for name, each in Candidates(before).tensors.items()}


def _nodes(graph: onnx.GraphProto, choose: Choose) -> list[str]:
    """The names of the nodes with chosen weights; all nodes get one."""
    taken: set[str] = set()
    for node in graph.node:
        node.name = free_name(node.name or node.output[0], taken)
    held = {each.name for each in graph.initializer if each.data_type == TensorProto.FLOAT}
    read = {
        node.name: held.intersection(node.input[place] for place in PLACES[node.op_type] if place < len(node.input))
        for node in graph.node
        if node.op_type in PLACES
    }
    chosen = choose(dict.fromkeys(name for names in read.values() for name in sorted(names)))
    return [name for name, names in read.items() if names & chosen]


def simplified(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """A model of at least this opset, simplified as onnxruntime's quantizer asks for: convolutions with their batch
    normalization, constants computed. The given one is changed.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process

    raise_opset(model, opset, WHO)
    candidates = Candidates(model)
    simple = prepare(model, variable=[*candidates.weights, *candidates.statistics], plain=True)
    with TemporaryDirectory(prefix="opgrad-") as folder, _silent():
        given, result = Path(folder) / "given.onnx", Path(folder) / "result.onnx"
        new_file(given, simple.SerializeToString())
        quant_pre_process(str(given), str(result), skip_symbolic_shape=True)
        found = onnx.load(result)
    _multiply_factors(found.graph)
    return found


def _multiply_factors(graph: onnx.GraphProto) -> None:
    """Multiply weights and biases by alpha and beta of Gemm, of which onnxruntime's quantizer loses the latter."""
    values = {each.name: each for each in graph.initializer}
    for node in graph.node:
        for place, name in ((1, "alpha"), (2, "beta")):
            factor = next((each.f for each in node.attribute if each.name == name), 1.0)
            held = values.get(node.input[place]) if node.op_type == "Gemm" and place < len(node.input) else None
            if held is None or factor == 1:
                continue
            shared = sum(held.name in each.input for each in graph.node) > 1
            own = f"{held.name}/{node.output[0]}" if shared else held.name
            product = numpy_helper.from_array(numpy_helper.to_array(held) * np.float32(factor), own)
            if shared:
                graph.initializer.append(product)
                node.input[place] = own
            else:
                held.CopyFrom(product)
            rest = [each for each in node.attribute if each.name != name]
            del node.attribute[:]
            node.attribute.extend(rest)


def check_inputs(model: onnx.ModelProto, calibration: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Raise TypeError or ValueError unless each batch has an array for every input."""
    constants = {each.name for each in model.graph.initializer}
    names = [each.name for each in model.graph.input if each.name not in constants]
    for batch in calibration:
        if not isinstance(batch, Mapping):
            raise ArgumentTypeError("calibration", f"has a {type(batch).__name__}, expected arrays by name")
        if missing := [name for name in names if name not in batch]:
            raise ArgumentError("calibration", f"lacks the input {missing[0]!r}, expected {', '.join(names)}")


class _Batches:
    """The batches, one after the other, as onnxruntime's quantizer asks for them."""

    def __init__(self, batches: Sequence[Mapping[str, np.ndarray]]):
        self._rest: Iterator[Mapping[str, np.ndarray]] = iter(batches)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next batch, None behind the last."""
        found = next(self._rest, None)
        return None if found is None else dict(found)

    def __len__(self) -> int:
        return 0


@contextmanager
def _silent() -> Iterator[None]:
    """Let the root logger say nothing meanwhile: the quantizer warns of what it leaves as it is."""
    root = logging.getLogger()
    before, root.disabled = root.disabled, True
    try:
        yield
    finally:
        root.disabled = before


# --- modules of PyTorch ---


def paths_of(model: onnx.ModelProto) -> dict[str, list[str]]:
    """By the name of an initializer, the paths of the modules that read it, in the order of the nodes."""
    found: dict[str, list[str]] = {}
    for node, names in _reads(model.graph):
        if (path := module_path(node)) is not None:
            for name in names:
                found.setdefault(name, []).append(path)
    return found


def keep_paths(model: onnx.ModelProto, paths: dict[str, list[str]]) -> None:
    """Write the paths of modules beside the nodes that read the initializers, in place.

    paths: those of the model that this was made of. An initializer that several modules read is left out where another
    number of nodes reads it now.
    """
    reads = [(node, name) for node, names in _reads(model.graph) for name in names if name in paths]
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node, name in reads:
        readers.setdefault(name, []).append(node)
    for name, nodes in readers.items():
        told = paths[name] if len(paths[name]) == len(nodes) else [*dict.fromkeys(paths[name])] * len(nodes)
        for node, path in zip(nodes, told if len(told) == len(nodes) else (), strict=False):
            others = [each for each in node.metadata_props if each.key != SCOPES]
            del node.metadata_props[:]
            node.metadata_props.extend(others)
            node.metadata_props.add(key=SCOPES, value=repr(["", path, node.name]))


def _reads(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, list[str]]]:
    """The nodes that read initializers, directly or reshaped, cast or rounded, with the names of these."""
    origins = {each.name: each.name for each in graph.initializer}
    for node in filter(reads_values, graph.node):
        if node.input and is_handed_on(node, 0):
            if node.input[0] in origins:
                origins[node.output[0]] = origins[node.input[0]]
        elif names := [origins[name] for name in node.input if name in origins]:
            yield node, names
