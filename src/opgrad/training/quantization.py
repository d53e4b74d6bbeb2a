"""Quantized training: a float model becomes one that rounds as integers do, is trained, and becomes an integer model.

Imports `training/run`, `training/make` and below.

`prepare` puts pairs of QuantizeLinear and DequantizeLinear into a model, whose weights stay float and whose scales
are weights, too; artifacts are made of it and trained as of any other model. `convert` makes the integer model of
what was trained. `with_teacher` and `Distillation` let it learn from the float model, too.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, compose, helper, numpy_helper

from opgrad.base.arguments import ArgumentError, ArgumentTypeError, naming, require
from opgrad.base.files import new_file
from opgrad.onnx import passes
from opgrad.onnx.graph.byte_products import LIMITED, MOST
from opgrad.onnx.graph.conversion import raise_opset
from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.formulas import widened
from opgrad.onnx.graph.loading import Model, load
from opgrad.onnx.graph.messages import MICROSOFT, copied, free_name, import_microsoft, keep, opset_of, size_of
from opgrad.onnx.graph.nodes import (
    SCOPES,
    all_nodes,
    attributes_of,
    module_path,
    needed,
    read_by,
    reads_values,
    rename_inputs,
)
from opgrad.onnx.rules.quantization import LIMITS
from opgrad.training.files.artifact_set import tensor_spec
from opgrad.training.files.dataset import batches, load_inputs, located
from opgrad.training.make.blocks import Block, Formulas, current, positive
from opgrad.training.make.losses import KLDivLoss
from opgrad.training.make.selection import Candidates
from opgrad.training.make.tensors import is_handed_on, matching
from opgrad.training.run.recipe import Recipe

__all__ = ["KINDS", "Distillation", "convert", "prepare", "with_teacher"]

KINDS = ("int8", "int4")
TEACHER = "teacher/"  # in front of the names of the float model's values


@naming("quantization.with_teacher")
def with_teacher(student: onnx.ModelProto, teacher: Model) -> onnx.ModelProto:
    """A model that computes what a float model does, too, from the same inputs, under names behind "teacher/".

    student: a model that `prepare` made of the teacher; it is not changed. teacher: the float model.
    Its weights are to be frozen: `frozen_params=["teacher/*"]`.
    """
    given = load(teacher)
    inputs = {each.name for each in given.graph.input} - {each.name for each in given.graph.initializer}
    raise_opset(given, opset_of(student))
    floats, model = compose.add_prefix(given, TEACHER), copied(student)
    for node in floats.graph.node:
        rename_inputs(node, {f"{TEACHER}{name}": name for name in inputs})
    versions = {each.domain: each for each in model.opset_import}
    model.opset_import.extend(each for each in floats.opset_import if each.domain not in versions)
    for field in ("node", "initializer", "value_info"):
        getattr(model.graph, field).extend(getattr(floats.graph, field))
    return model


class Distillation(Block):
    """(1 - weight) * loss + weight * temperature**2 * the mean of KL(teacher's classes, own classes).

    The classes' probabilities are softmax(scores / temperature) along the last axis, of the model that is trained and
    of that whose values `with_teacher` has put beside it. Source: Hinton, Vinyals and Dean 2015.

    loss: a block of `onnxblock.loss`, whose first argument are the scores. weight: from 0 to 1. temperature: above 0.
    """

    def __init__(self, loss: Block, weight: float = 0.5, temperature: float = 2.0):
        is_share = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight <= 1
        require(is_share, "weight", weight, "a number from 0 to 1")
        self._loss, self._weight = loss, float(weight)
        self._temperature = positive("temperature", temperature)

    def build(self, scores_input_name: str, *others: str) -> Any:
        """Append the loss. others: what else the loss takes."""
        taught = f"{TEACHER}{scores_input_name}"
        if not current().has_value(taught):
            raise ValueError(
                f"the model has no {taught!r}, expected a model of `with_teacher` and scores that are an output of both"
            )
        body, own = Formulas(), self._loss(scores_input_name, *others)
        student, teacher = (
            (widened(body.value(each)) / self._temperature).apply("LogSoftmax", axis=-1).name
            for each in (scores_input_name, taught)
        )
        divergence = body.value(KLDivLoss("none", log_target=True)(student, teacher))
        mean = divergence.sum([-1], keepdims=False).apply("ReduceMean", keepdims=0)
        factor = self._weight * self._temperature**2
        return (body.value(own) * (1 - self._weight) + mean * factor).name


MOST_ROWS, BATCH_ROWS = 512, 64


def calibration(
    model: onnx.ModelProto, recipe: Recipe, data: Path | None, file: Path | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Batches of the inputs of a model, of at most 512 examples.

    recipe: names the dataset, where there is no file, and the rows that are for training. data: the file with all
    examples, of which those for training are taken. file: another one, of which all are.
    Raises ValueError for data that do not fit, OSError.
    """
    held = {each.name for each in model.graph.initializer}
    inputs, rows = located([tensor_spec(each) for each in model.graph.input if each.name not in held])
    source = file or data or recipe.dataset
    if source is None:
        raise ValueError("calibration: there are no data, expected a file or a dataset")
    found = load_inputs(source, inputs, recipe.divide)
    if file is None:
        found, _ = found.split(recipe.test_rows or max(1, found.rows // 5), recipe.split_seed)
    found = found.take(np.arange(min(found.rows, MOST_ROWS))).whole(rows)
    for _, batch in batches(found, rows or BATCH_ROWS):
        yield dict(batch.arrays)


PAIRS_FROM = 13  # from which on a scale may be one of an axis
# The places of weights among the inputs of nodes by which users choose what is quantized.
PLACES = {"Conv": (1,), "ConvTranspose": (1,), "Gemm": (0, 1), "MatMul": (0, 1), "Gather": (0,)}


# What onnxruntime's optimizer writes in front of the name of a weight with which it multiplied another.
FUSED = re.compile(r"(Conv\w*?Fusion_W_)+")
MATCHED = ("weight that is quantized", "weight that is quantized")
Choose: TypeAlias = Callable[[Iterable[str]], set[str]]  # of weights that could be quantized, those that are


def choice(weights: Iterable[str], candidates: Candidates) -> Choose:
    """The choice of these weights: names or patterns. candidates: of the model that was given, whose names they are."""

    def choose(known: Iterable[str]) -> set[str]:
        """Raises ValueError for a name or a pattern that matches none of the known ones."""
        origins = {result: name for name in candidates.weights for result in candidates.results(name)}
        own = {name: origins.get(plain := FUSED.sub("", name), plain) for name in known}
        names = list(dict.fromkeys(own.values()))
        exact, loose = matching("weights", weights, names, names, candidates.modules, MATCHED)
        return {name for name, origin in own.items() if origin in {*exact, *loose}}

    return choose


def with_pairs(
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
    constants = {each.name for each in model.graph.initializer}
    names = [each.name for each in model.graph.input if each.name not in constants]
    for batch in calibration:
        if not isinstance(batch, Mapping):
            raise ArgumentTypeError("calibration", f"has a {type(batch).__name__}, expected arrays by name")
        if missing := [name for name in names if name not in batch]:
            raise ArgumentError("calibration", f"lacks the input {missing[0]!r}, expected {', '.join(names)}")
    before = simplified(model, PAIRS_FROM)
    nodes = None if choose is None else _nodes(before.graph, choose)
    with TemporaryDirectory(prefix="opgrad-") as folder, _silent():
        floats, integers = Path(folder) / "floats.onnx", Path(folder) / "integers.onnx"
        new_file(floats, before.SerializeToString())
        # Activations are unsigned: onnxruntime's kernels for x86-64 take no others, and it converts only some.
        # Weights have 7 bits, as in `learning`.
        form = {"quant_format": QuantFormat.QDQ, "activation_type": QuantType.QUInt8, "per_channel": per_channel}
        form |= {"reduce_range": True, "nodes_to_quantize": nodes}
        reader = SimpleNamespace(get_next=partial(next, map(dict, calibration), None))
        quantize_static(str(floats), str(integers), reader, **form)
        after = onnx.load(integers)
    return after, {name: numpy_helper.to_array(each) for name, each in Candidates(before).tensors.items()}


def _nodes(graph: onnx.GraphProto, choose: Choose) -> list[str]:
    """The names of the nodes with chosen weights; all nodes get one."""
    taken: set[str] = set()
    for node in graph.node:
        node.name = free_name(node.name or node.output[0], taken)
    held = {each.name for each in graph.initializer if each.data_type == TensorProto.FLOAT}
    read = {
        node.name: held.intersection(node.input[index] for index in PLACES[node.op_type] if index < len(node.input))
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

    raise_opset(model, opset)
    candidates = Candidates(model)
    simple = passes.prepare(model, variable=[*candidates.weights, *candidates.statistics], plain=True)
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
            keep(node.attribute, [each for each in node.attribute if each.name != name])


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

    paths: of the float model. An initializer of several modules is left out where the number of its readers changed.
    """
    reads = [(node, name) for node, names in _reads(model.graph) for name in names if name in paths]
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node, name in reads:
        readers.setdefault(name, []).append(node)
    for name, nodes in readers.items():
        own = paths[name] if len(paths[name]) == len(nodes) else [*dict.fromkeys(paths[name])] * len(nodes)
        for node, path in zip(nodes, own if len(own) == len(nodes) else (), strict=False):
            keep(node.metadata_props, [each for each in node.metadata_props if each.key != SCOPES])
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


BLOCKS_FROM = 21  # which has 4 bits, and blocks
BLOCK = 32  # rows of a weight that have one scale
LARGEST = 7
MATRIX = 2


def with_four_bits(
    model: onnx.ModelProto, per_channel: bool, choose: Choose | None
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model with pairs and integer weights, and the float weights by name. choose: those quantized; None: all."""
    simple = simplified(model, BLOCKS_FROM)
    graph = simple.graph
    values = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    found: dict[str, dict[str, Any]] = {}  # by weight, the attributes of its pair
    for node in graph.node:
        name, told = node.input[1] if len(node.input) > 1 else "", attributes_of(node)
        if name not in values or values[name].dtype != np.float32:
            continue
        if node.op_type == "Conv":
            found[name] = {"axis": 0} if per_channel else {}
        elif node.op_type == "MatMul" and values[name].ndim == MATRIX:
            found[name] = {"axis": 0, "block_size": BLOCK}
        elif node.op_type == "Gemm" and not told.get("transA") and told.get("alpha", 1.0) == told.get("beta", 1.0) == 1:
            found[name] = {"axis": told.get("transB", 0), "block_size": BLOCK}
    if not found:
        raise ValueError("the model has no MatMul, Gemm or Conv with a constant weight, expected one for int4")
    if choose is not None:
        chosen = choose(found)
        found = {name: attributes for name, attributes in found.items() if name in chosen}
    made: list[onnx.NodeProto] = []
    for name, attributes in found.items():
        axis, block = attributes.get("axis"), attributes.get("block_size")
        scale = scales(values[name], axis, block)
        integers = np.clip(
            np.rint(values[name] / stretched(scale, values[name].shape, axis, block)), -LARGEST - 1, LARGEST
        )
        tensors = {
            f"{name}_quantized": integers.astype(ml_dtypes.int4),
            f"{name}_scale": scale,
            f"{name}_zero_point": np.zeros(scale.shape, ml_dtypes.int4),
        }
        graph.initializer.extend(numpy_helper.from_array(array, each) for each, array in tensors.items())
        made.append(
            helper.make_node("DequantizeLinear", list(tensors), [f"{name}_floats"], f"{name}_floats", **attributes)
        )
    for node in graph.node:
        if len(node.input) > 1 and node.input[1] in found and node.op_type in ("MatMul", "Gemm", "Conv"):
            node.input[1] = f"{node.input[1]}_floats"
    keep(graph.node, [*made, *graph.node])
    return simple, values


def scales(w: np.ndarray, axis: int | None, block: int | None) -> np.ndarray:
    """The scales of a weight, float32: of those that leave its largest numbers out more and more, the best for each.

    axis: that of the scales; None: one for all. block: numbers along it with one scale; None: one number.
    """
    best, least = None, None
    for part in np.linspace(0.5, 1.0, 21):
        scale = np.maximum(_reduced(np.maximum, np.abs(w), axis, block) * part / LARGEST, np.finfo(np.float32).tiny)
        scale = scale.astype(np.float32)
        wide = stretched(scale, w.shape, axis, block)
        error = _reduced(np.add, (np.clip(np.rint(w / wide), -LARGEST - 1, LARGEST) * wide - w) ** 2, axis, block)
        best = scale if best is None else np.where(error < least, scale, best)
        least = error if least is None else np.minimum(error, least)
    assert best is not None
    return best


def _reduced(function: np.ufunc, a: np.ndarray, axis: int | None, block: int | None) -> np.ndarray:
    """A number for all, for each place of an axis, or for each block along it."""
    if axis is None:
        return np.asarray(function.reduce(a, axis=None))
    if block is None:
        return np.asarray(function.reduce(a, axis=tuple(each for each in range(a.ndim) if each != axis)))
    return np.asarray(function.reduceat(a, np.arange(0, a.shape[axis], block), axis=axis))


def stretched(scale: np.ndarray, shape: tuple[int, ...], axis: int | None, block: int | None) -> np.ndarray:
    """Scales, or zero points, in a shape that broadcasts to the weight's."""
    if axis is None or scale.ndim == 0:
        return scale
    if block is None:
        return scale.reshape([-1 if each == axis else 1 for each in range(len(shape))])
    return np.take(scale, np.arange(shape[axis]) // block, axis=axis)


PAIR = ("QuantizeLinear", "DequantizeLinear")
LOG = ".log"  # behind the name of a scale: the weight of which it is the exponential
MOST_NAME = "quantization.most"  # the number as a tensor


def with_learned_scales(model: onnx.ModelProto, floats: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """A quantized model for training.

    model: with integer weights before DequantizeLinear, named as those in `floats` with "_quantized" behind; it is
    changed. floats: the values of float weights, by name.
    """
    graph = model.graph
    tensors = {each.name: each for each in graph.initializer}
    nodes, renamed, kept = [], dict[str, str](), dict[str, np.ndarray]()
    for node in graph.node:
        held = tensors.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if held is None:
            nodes.append(node)
            continue
        name = held.name.removesuffix("_quantized")
        if name in floats:
            kept[name] = floats[name]
        else:  # a copy that the quantizer made
            integers, scale, *zero = (numpy_helper.to_array(tensors[each]) for each in node.input)
            axis = attributes_of(node).get("axis", 1) if scale.size > 1 else None
            wide, offset = (stretched(each, integers.shape, axis, None) for each in (scale, *(zero or [np.zeros(())])))
            kept[name] = ((integers.astype(np.float64) - offset) * wide).astype(scale.dtype)
        if held.data_type == TensorProto.INT32:  # a bias, whose integers are so fine that training need not round it
            renamed[node.output[0]] = name
            continue
        limited = name
        if held.data_type == TensorProto.INT8:
            limited = f"{name}{LIMITED}"
            nodes += _limits(name, node, kept[name].ndim, tensors)
        rounded = helper.make_node("QuantizeLinear", [limited, *node.input[1:]], [f"{name}/rounded"], f"{name}/rounded")
        rounded.attribute.extend(node.attribute)
        node.input[0] = rounded.output[0]
        nodes += [rounded, node]
    # Sizes are read of what is quantized: a second reader of floats keeps onnxruntime from its integer kernels.
    rounded_of = {node.output[0]: node.input[0] for node in nodes if node.op_type == "QuantizeLinear"}
    sources = {each.output[0]: rounded_of.get(each.input[0]) for each in nodes if each.op_type == "DequantizeLinear"}
    for node in nodes:
        rename_inputs(node, renamed)
        if node.op_type in ("Shape", "Size") and (source := sources.get(node.input[0])) is not None:
            node.input[0] = source
    nodes = needed(nodes, [each.name for each in graph.output])
    scales = {node.input[1]: None for node in nodes if node.op_type in PAIR}
    kept = {name: array for name, array in kept.items() if name in read_by(nodes)}
    kept |= {f"{name}{LOG}": np.log(numpy_helper.to_array(tensors[name])) for name in scales}
    exponentials = [helper.make_node("Exp", [f"{name}{LOG}"], [name], f"{name}/Exp") for name in scales]
    read = read_by(nodes)
    others = [each for name, each in tensors.items() if name in read and name not in scales and name not in kept]
    del graph.node[:], graph.initializer[:]
    graph.node.extend([*exponentials, *nodes])
    graph.initializer.extend([*others, *(numpy_helper.from_array(np.asarray(v), name) for name, v in kept.items())])
    return model


def _limits(name: str, node: onnx.NodeProto, rank: int, tensors: dict[str, onnx.TensorProto]) -> list[onnx.NodeProto]:
    """Nodes that keep a weight within MOST times its scale, of which it gets its gradient beyond.

    node: what makes floats of its integers. tensors: get the numbers that the nodes read.
    """
    scale, axis, made = node.input[1], attributes_of(node).get("axis", 1) % max(rank, 1), []
    tensors.setdefault(MOST_NAME, numpy_helper.from_array(np.array(MOST, np.float32), MOST_NAME))
    if size_of(tensors[scale]) > 1 and axis < rank - 1:
        shape = f"{name}{LIMITED}/shape"
        tensors[shape] = numpy_helper.from_array(np.array([-1, *[1] * (rank - 1 - axis)]), shape)
        made.append(helper.make_node("Reshape", [scale, shape], [f"{name}{LIMITED}/scale"], f"{name}{LIMITED}/scale"))
        scale = made[-1].output[0]
    high, low, below = (f"{name}{LIMITED}/{each}" for each in ("high", "low", "below"))
    return [
        *made,
        helper.make_node("Mul", [scale, MOST_NAME], [high], high),
        helper.make_node("Neg", [high], [low], low),
        helper.make_node("Min", [name, high], [below], below),
        helper.make_node("Max", [below, low], [f"{name}{LIMITED}"], f"{name}{LIMITED}"),
    ]


BIASED, BIAS = ("Conv", "Gemm"), 2  # which add a bias, and its place
PARTS = 3  # of what is quantized: numbers, scale and zero point
MIDDLE = 8  # the zero point of unsigned integers of 4 bits
INT32 = np.iinfo(np.int32)


def _exponentials(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Those that onnxruntime computes, to the last bit: training rounded by them."""
    if not arrays:
        return []
    kind = helper.np_dtype_to_tensor_dtype(arrays[0].dtype)
    given, made = ([helper.make_tensor_value_info(name, kind, ["n"])] for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Exp", ["x"], ["y"])], "exp", given, made)
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    whole = session.run(None, {"x": np.concatenate([each.reshape(-1) for each in arrays])})[0]
    parts = np.split(whole, np.cumsum([each.size for each in arrays])[:-1])
    return [part.reshape(each.shape) for part, each in zip(parts, arrays, strict=True)]


def _without_rounding(
    nodes: Sequence[onnx.NodeProto], values: dict[str, np.ndarray]
) -> tuple[list[onnx.NodeProto], int]:
    """The nodes without those that round weights, which become integers, and how many there were."""
    rest = []
    for node in nodes:
        given = [name.removesuffix(LIMITED) for name in node.input]
        if node.op_type != "QuantizeLinear" or not all(name in values for name in given) or len(given) < PARTS:
            rest.append(node)
            continue
        w, scale, zero = (values[name] for name in given)
        attributes = attributes_of(node)
        several, block = scale.ndim > 0 and scale.size > 1, attributes.get("block_size") or None
        axis = attributes.get("axis", 1) % w.ndim if several else None
        low, high = LIMITS[helper.np_dtype_to_tensor_dtype(zero.dtype)]
        if node.input[0].endswith(LIMITED):
            low, high = -MOST, MOST
        wide, offset = (stretched(each, w.shape, axis, block) for each in (scale, zero.astype(np.int32)))
        values[node.output[0]] = np.clip(np.rint(w / wide) + offset, low, high).astype(zero.dtype)
    return [node for node in rest if LIMITED not in node.output[0]], len(nodes) - len(rest)


def _bias(
    node: onnx.NodeProto, x: onnx.NodeProto | None, weight: onnx.NodeProto, values: dict[str, np.ndarray]
) -> list[onnx.NodeProto]:
    """The node that makes the bias of int32, if there is one, which the node reads then.

    Its scale is that of x times that of the weight, as that of the products, to which it is added as an integer.
    """
    name = node.input[BIAS]
    if name not in values or x is None or x.op_type != "DequantizeLinear" or attributes_of(node).get("beta", 1.0) != 1:
        return []
    if weight.input[0] not in values or values[weight.input[0]].dtype.itemsize != 1 or x.input[1] not in values:
        return []
    scale = (values[x.input[1]] * values[weight.input[1]]).astype(np.float32)
    if scale.size > 1 and scale.shape != values[name].shape:
        return []
    made, integers, own = f"{name}/{node.name or node.output[0]}", f"{name}_quantized", f"{name}_scale"
    values[f"{made}/{integers}"] = np.clip(
        np.rint(values[name] / scale.astype(np.float64)), INT32.min, INT32.max
    ).astype(np.int32)
    values[f"{made}/{own}"] = scale
    axis: dict[str, Any] = {"axis": 0} if scale.size > 1 else {}
    node.input[BIAS] = f"{made}/floats"
    return [
        helper.make_node("DequantizeLinear", [f"{made}/{integers}", f"{made}/{own}"], [f"{made}/floats"], made, **axis)
    ]


def _in_four_bits(node: onnx.NodeProto, weight: onnx.NodeProto, values: dict[str, np.ndarray]) -> list[onnx.NodeProto]:
    """The product as MatMulNBits, and a node that adds its bias."""
    attributes, block = attributes_of(weight), attributes_of(weight)["block_size"]
    integers, scale = values[weight.input[0]], values[weight.input[1]]
    if attributes["axis"] == 0:
        integers, scale = integers.T, scale.T
    rows, depth = integers.shape
    whole = np.full((rows, scale.shape[1] * block), MIDDLE, np.uint8)
    whole[:, :depth] = integers.astype(np.int8) + MIDDLE
    packed, scales = f"{weight.output[0]}/packed", f"{weight.output[0]}/scales"
    values[packed] = (whole[:, ::2] | whole[:, 1::2] << 4).reshape(rows, scale.shape[1], block // 2)
    values[scales] = np.ascontiguousarray(scale).reshape(-1)
    biased = len(node.input) > BIAS and node.input[BIAS]
    result = f"{node.output[0]}/product" if biased else node.output[0]
    size: dict[str, Any] = {"K": depth, "N": rows, "bits": 4, "block_size": block}
    given = [node.input[0], packed, scales]
    made = [helper.make_node("MatMulNBits", given, [result], node.name, domain=MICROSOFT, **size)]
    if biased:
        made.append(helper.make_node("Add", [result, node.input[BIAS]], [node.output[0]], f"{node.output[0]}/Add"))
    return made


@naming("quantization.prepare")
def prepare(
    model: Model,
    kind: str = "int8",
    calibration: Iterable[Mapping[str, np.ndarray]] = (),
    *,
    per_channel: bool = False,
    weights: Iterable[str] | None = None,
) -> onnx.ModelProto:
    """A model that rounds its numbers as integers do, for training; batch normalization becomes part of convolutions.

    model: a float model, its bytes or the path of its file; it is not changed.
    kind: "int8": weights and activations are rounded, where onnxruntime's quantizer puts its pairs, by onnxruntime's
        quantizer itself. "int4": the weights of MatMul, Gemm and Conv alone, those of products in blocks of 32 rows.
    calibration: batches of the model's inputs, by name, for the scales of activations; int8 needs them, int4 not.
    per_channel: whether each channel of a convolution, and with int8 of a product, has a scale of its own.
    weights: names or patterns of quantized weights, with int8 also of tables, and activations beside; None: all.

    Each scale is exp(w) of a weight w, named as the scale with ".log" behind; its gradient is that of a learned step
    size. Source: Learned Step Size Quantization, Esser et al. 2020; logarithms as in Trained Quantization Thresholds,
    Jain et al. 2020.
    Raises TypeError and ValueError for other arguments, or a model in which nothing can be quantized.
    """
    require(kind in KINDS, "kind", kind, " or ".join(KINDS))
    given = load(model)
    if quantized := next((node.op_type for node in all_nodes(given.graph.node) if facts_of(node).quantized), None):
        raise ValueError(f"the model is quantized already, it has {quantized}; expected a float model")
    paths, choose = paths_of(given), None if weights is None else choice(weights, Candidates(given))
    if kind == "int4":
        made = with_learned_scales(*with_four_bits(given, per_channel, choose))
    else:
        made = with_learned_scales(*with_pairs(given, list(calibration), per_channel, choose))
    keep_paths(made, paths)
    return made


@naming("quantization.convert")
def convert(model: Model) -> onnx.ModelProto:
    """The integer model of a trained one that `prepare` made, for stock onnxruntime.

    model: what a `Trainer` exported. Weights become integers, biases of int8 products int32. onnxruntime computes int8
    operators between their pairs in its integer kernels; products of int4 are nodes MatMulNBits.
    Raises ValueError for a model in which nothing is quantized.
    """
    result = load(model)
    graph = result.graph
    values = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    # The nodes without those that make scales, which become constants.
    scales = {node.input[1] for node in graph.node if node.op_type in PAIR}
    made = {
        node.output[0]: values[node.input[0]]
        for node in graph.node
        if node.op_type == "Exp" and node.output[0] in scales and node.input[0].endswith(LOG)
    }
    values |= dict(zip(made, _exponentials(list(made.values())), strict=True))
    nodes = [node for node in graph.node if made.keys().isdisjoint(node.output)]
    nodes, count = _without_rounding(nodes, values)
    if not count:
        raise ValueError("no weight of the model is quantized, expected a trained one that `prepare` made")
    makers = {name: node for node in nodes for name in node.output}
    written = []
    for node in nodes:
        weight = makers.get(node.input[1]) if len(node.input) > 1 else None
        if weight is None or weight.op_type != "DequantizeLinear":
            written.append(node)
            continue
        if node.op_type in ("MatMul", "Gemm") and attributes_of(weight).get("block_size"):
            written += _in_four_bits(node, weight, values)
            continue
        if node.op_type in BIASED and len(node.input) > BIAS:
            written += _bias(node, makers.get(node.input[0]), weight, values)
        written.append(node)
    used = needed(written, [each.name for each in graph.output])
    read = read_by(used)
    del graph.node[:], graph.initializer[:]
    graph.node.extend(used)
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in values.items() if name in read)
    if any(node.domain == MICROSOFT for node in used):
        import_microsoft(result)
    return result
