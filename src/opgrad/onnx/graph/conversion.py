"""Models in another form: in a newer opset, with float32 for halves, and with another mode of batch normalization.

onnx's converter refuses operators in the domain ai.onnx that ONNX does not have, such as those of training graphs. It
drops functions and metadata, and it changes the meaning or the types of some operators of opset 10. onnxruntime's CPU
loads no arithmetic of bfloat16, and computes with float16 in generic code: stored weights of halves are cast where they
are read, and what is computed of them is float32.
"""

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, defs, helper, inliner, numpy_helper, shape_inference, version_converter
from onnx.external_data_helper import uses_external_data

from opgrad.onnx.graph.messages import (
    HALVES,
    copied_without,
    declared_types,
    domain_of,
    free_name,
    is_large,
    keep,
    opset_of,
    size_of,
    without_large,
)
from opgrad.onnx.graph.nodes import all_nodes, model_nodes, names_in, read_by, rename_inputs, subgraphs

LEAST = 16  # the first opset whose ScatterND and ScatterElements can add
LAYER_NORMALIZATION = 17  # the first opset with LayerNormalization, which onnxruntime-training wrote into older ones
SCAN_WITHOUT_BATCHES = 9  # the first opset whose Scan goes through its inputs along any axis, not along the second
# Between these opsets only types were added, except to the operators below.
UNCHANGED_FROM, UNCHANGED_TO = 13, 17
BODIES_FROM = 11  # the first opset whose functions are converted: of older ones onnx's converter changes the meaning


def raise_opset(model: onnx.ModelProto, least: int = LEAST) -> None:
    """Convert a model, in place, so that it imports at least opset `least` of ai.onnx.

    From opset 13 to 17 its operators mean the same, except RoiAlign and a training BatchNormalization; onnx's converter
    rewrites models with those, models of older opsets, and models for newer ones.
    Raises NotImplementedError where the converter cannot.
    """
    entry = next((each for each in model.opset_import if each.domain in ("", "ai.onnx")), None)
    if entry is None:
        model.opset_import.append(onnx.helper.make_opsetid("", least))
        return
    plain = [node for node in all_nodes(model.graph.node) if node.domain in ("", "ai.onnx")]
    normalized = any(node.op_type == "LayerNormalization" for node in plain)
    wanted = max(entry.version, LAYER_NORMALIZATION if normalized and least == LEAST else least)
    if entry.version == wanted:
        return
    scan = next((node for node in plain if node.op_type == "Scan"), None)
    if scan is not None and entry.version < SCAN_WITHOUT_BATCHES:
        raise NotImplementedError(
            f"{(scan.name or scan.output[0])!r} is a Scan of opset {entry.version}, which has an axis for "
            f"batches, expected opset {SCAN_WITHOUT_BATCHES} or later"
        )
    if _means_the_same(plain, entry.version, wanted):
        entry.version = wanted
        align_functions(model)
    else:
        version = entry.version
        try:
            if model.functions:
                model.CopyFrom(inliner.inline_local_functions(model))
            model.CopyFrom(converted(model, version, wanted))
        except Exception as error:
            raise NotImplementedError(
                f"the model imports opset {version} of ai.onnx, and onnx cannot convert it to {wanted}: {error}"
            ) from error


def _means_the_same(nodes: Sequence[onnx.NodeProto], version: int, wanted: int) -> bool:
    """Whether nodes mean the same in two opsets, of which only types may differ."""
    first, last = sorted((version, wanted))
    changed = any(
        node.op_type == "RoiAlign" or (node.op_type == "BatchNormalization" and len(node.output) > 1) for node in nodes
    )
    if first >= UNCHANGED_FROM and last <= UNCHANGED_TO and not (changed and first < 14):
        return True
    return all(_since(node.op_type, first) == _since(node.op_type, last) for node in nodes)


@functools.cache
def _since(kind: str, version: int) -> int:
    """The opset of the last change of an operator up to a version; 0 for one that ONNX does not have."""
    return int(defs.get_schema(kind, version, "").since_version) if defs.has(kind, version, "") else 0


def align_functions(model: onnx.ModelProto, what: str = "the model") -> None:
    """Let the functions of a model mean what they say where they import another opset of ai.onnx than it, in place.

    onnxruntime takes their nodes as nodes of the model's opset. Where these mean something else, all calls are replaced
    by converted bodies. what: the model's name, for messages. Raises ValueError where onnx cannot convert them.
    """
    wanted, different = opset_of(model), None
    called = {(node.domain, node.op_type) for node in model_nodes(model)}
    for function in model.functions:
        entry = next((each for each in function.opset_import if each.domain in ("", "ai.onnx")), None)
        if entry is None or entry.version == wanted or (function.domain, function.name) not in called:
            continue
        if _means_the_same([node for node in all_nodes(function.node) if not domain_of(node)], entry.version, wanted):
            entry.version = wanted
        else:
            different = function, entry.version
    if different is None:
        return
    try:
        if different[1] < BODIES_FROM:
            raise ValueError(f"expected opset {BODIES_FROM} at least")
        model.CopyFrom(inliner.inline_local_functions(model, convert_version=True))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{what}: the function {different[0].domain}.{different[0].name} imports opset {different[1]} of ai.onnx "
            f"and the model opset {wanted}, to which onnx cannot convert it: {reason}; export both with one opset"
        ) from None


UNKNOWN = "opgrad.unknown"  # the domain of operators that ONNX does not have, during the conversion
RESIZE_CHANGED = BOUNDS_ARE_INPUTS = 11  # the opset with both changes
FILLED = ("Clip", "Pad")  # operators with attributes that became inputs, which have to be of the type of the data
SAVED_STATISTICS = slice(3, 5)  # saved outputs of BatchNormalization, which it lost with opset 14


def converted(model: onnx.ModelProto, version: int, wanted: int) -> onnx.ModelProto:
    """A model that imports opset `wanted` instead of `version`. Raises whatever the converter does."""
    draft = copied_without(model, "graph")
    draft.graph.CopyFrom(without_large(model.graph))
    read = {name for node in draft.graph.node for name in node.input} | {each.name for each in draft.graph.output}
    for node in draft.graph.node:
        if node.domain in ("", "ai.onnx") and not defs.has(node.op_type, version, ""):
            node.domain = UNKNOWN
        if node.op_type == "BatchNormalization" and not read.intersection(node.output[SAVED_STATISTICS]):
            del node.output[SAVED_STATISTICS]  # which newer opsets lack
    draft.opset_import.append(helper.make_opsetid(UNKNOWN, 1))
    result = version_converter.convert_version(draft, wanted)
    graph = result.graph
    if version < BOUNDS_ARE_INPUTS <= wanted:
        _type_fillers(result)
    constants = {each.name: each for each in graph.initializer}
    constants |= {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
    for node in graph.node:
        if node.op_type == "Resize" and version < RESIZE_CHANGED <= wanted:
            # Upsample, and Resize of opset 10, align the edges of elements, not the centres.
            scales = constants.get(node.input[2])
            shrinks = scales is not None and (numpy_helper.to_array(scales) < 1).any()
            modes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "ceil" if shrinks else "floor"}
            node.attribute.extend(helper.make_attribute(*each) for each in modes.items())
        elif node.op_type == "BatchNormalization" and version < TRAINING_MODE_FROM <= wanted and len(node.output) > 1:
            node.attribute.append(helper.make_attribute("training_mode", 1))  # which several outputs meant before
        if node.domain == UNKNOWN:
            node.domain = ""
    keep(result.opset_import, [each for each in result.opset_import if each.domain != UNKNOWN])
    given = {each.name for each in model.graph.input}
    keep(graph.input, [each for each in graph.input if each.name in given])
    graph.initializer.extend(filter(is_large, model.graph.initializer))
    for name in ("functions", "metadata_props"):
        del getattr(result, name)[:]
        getattr(result, name).extend(getattr(model, name))
    return result


def _type_fillers(model: onnx.ModelProto) -> None:
    """Convert bounds and fill values, which the converter writes in float32, to the type of the data."""
    types = declared_types(shape_inference.infer_shapes(model).graph)
    constants = {node.output[0]: node for node in model.graph.node if node.op_type == "Constant"}
    for node in model.graph.node:
        declared = types.get(node.input[0]) if node.op_type in FILLED else None
        dtype = 0 if declared is None else declared.tensor_type.elem_type
        for constant in (constants.get(name) for name in node.input[1:]):
            if dtype and constant is not None and constant.attribute[0].t.data_type == TensorProto.FLOAT:
                tensor = constant.attribute[0].t
                with np.errstate(over="ignore"):
                    array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(dtype))
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


LOADED_AS_FLOATS = (TensorProto.BFLOAT16,)  # types that onnxruntime's CPU stores and casts, but computes nothing with
# Attributes that name the type of a result, or the one in which it is computed.
TYPED = ("to", "dtype", "output_dtype", "output_type", "stash_type", "softmax_precision", "precision")


def has_halves(model: onnx.ModelProto, kinds: Collection[int] = HALVES) -> bool:
    """Whether a graph computes anything in float16 or bfloat16, or takes or stores it. kinds: which of the two."""
    graph = model.graph
    values = {each.type.tensor_type.elem_type for each in (*graph.input, *graph.output, *graph.value_info)}
    stored = {each.data_type for each in graph.initializer}
    typed = (_typed(each, kinds) for node in model_nodes(model) for each in node.attribute)
    return not {*values, *stored}.isdisjoint(kinds) or any(typed)


def compute_in_float32(model: onnx.ModelProto, widened: Collection[str] = ()) -> bool:
    """Let a graph compute in float32 what it computes in float16 and bfloat16; whether it had any.

    model: changed; its functions are inlined. Outputs of these types become float32. Inputs and initializers keep
    theirs, and are cast where they are read, but for single numbers and the inputs named in `widened`, which become
    float32. A graph that computes in float32 already stays as it is.
    """
    if not has_halves(model):
        return False
    if model.functions:
        model.CopyFrom(inliner.inline_local_functions(model))
    graph, taken = model.graph, names_in(model.graph)
    _widen(each for each in graph.input if each.name in widened)
    # Turn initializers that are one number into float32: what recognizes nodes by their constants still sees them.
    for tensor in graph.initializer:
        if tensor.data_type in HALVES and size_of(tensor) == 1 and not uses_external_data(tensor):
            _widen_tensor(tensor)
    stored = [each.name for each in graph.initializer if each.data_type in HALVES]
    stored += [
        each.name for each in graph.input if each.type.tensor_type.elem_type in HALVES and each.name not in stored
    ]
    _widen(each for each in graph.output if each.name not in stored)
    for node in graph.node:
        _of_node(node)
    readers = [node for node in graph.node if not _casts_to_float32(node)]
    read = read_by(readers)
    names = {name: free_name(f"{name}.float32", taken) for name in stored if name in read}
    for node in readers:
        rename_inputs(node, names)
    to = TensorProto.FLOAT
    casts = [helper.make_node("Cast", [name], [new], f"{new}/Cast", to=to) for name, new in names.items()]
    keep(graph.node, [*casts, *graph.node])
    del graph.value_info[:]
    return True


def without_casts(graph: onnx.GraphProto, names: Collection[str]) -> None:
    """Let what read casts of these values to float32 read the values, which are float32 themselves."""
    casts = [node for node in graph.node if _casts_to_float32(node) and node.input[0] in names]
    read = {node.output[0]: node.input[0] for node in casts}
    keep(graph.node, [node for node in graph.node if not node.output or node.output[0] not in read])
    for node in graph.node:
        rename_inputs(node, read)


def in_float32(array: np.ndarray) -> np.ndarray:
    """An array of float16 or bfloat16 as float32, exactly; any other array as it is."""
    return array.astype(np.float32) if is_half(array.dtype) else array


def rounded(array: np.ndarray, kind: int, what: str) -> np.ndarray:
    """An array of float32 in the type of this TensorProto.DataType if that is a half; any other array as it is.

    what: the array, for messages. Raises ValueError if float16 cannot hold one of the numbers.
    """
    if kind not in HALVES or array.dtype != np.float32:
        return array
    with np.errstate(over="ignore"):
        found = array.astype(helper.tensor_dtype_to_np_dtype(kind))
    if (lost := np.isinf(found) & np.isfinite(array)).any():
        raise ValueError(f"{what} has {array[lost][0]:g}, which {found.dtype.name} cannot hold")
    return found


def is_half(dtype: "np.dtype[np.generic]") -> bool:
    """Whether a dtype is float16 or bfloat16."""
    return dtype.name in ("float16", "bfloat16")


def _widen(values: Iterable[onnx.ValueInfoProto]) -> None:
    for each in values:
        if each.type.tensor_type.elem_type in HALVES:
            each.type.tensor_type.elem_type = TensorProto.FLOAT


def _widen_tensor(tensor: TensorProto) -> None:
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def _typed(attribute: AttributeProto, kinds: Collection[int] = HALVES) -> bool:
    """Whether an attribute says a half: as the type of a result, or as a tensor."""
    if attribute.type == AttributeProto.TENSOR:
        return attribute.t.data_type in kinds
    return attribute.name in TYPED and attribute.type == AttributeProto.INT and attribute.i in kinds


def _casts_to_float32(node: onnx.NodeProto) -> bool:
    return node.op_type == "Cast" and any(each.name == "to" and each.i == TensorProto.FLOAT for each in node.attribute)


def _of_node(node: onnx.NodeProto) -> None:
    """Let attributes of a node, and the graphs inside of it, say float32 where they say a half."""
    for each in filter(_typed, node.attribute):
        if each.type == AttributeProto.TENSOR:
            _widen_tensor(each.t)
        else:
            each.i = TensorProto.FLOAT
    for body in subgraphs(node):
        _widen((*body.input, *body.output, *body.value_info))
        for tensor in body.initializer:
            if tensor.data_type in HALVES:
                _widen_tensor(tensor)
        for inner in body.node:
            _of_node(inner)


TRAINING_MODE_FROM = 14  # the first opset whose batch normalization says whether it trains
STATISTICS = (3, 4)  # the places of a batch normalization's mean and variance


def batch_norms(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """The batch normalizations of a model."""
    return (node for node in model_nodes(model) if node.op_type == "BatchNormalization" and not domain_of(node))


def trains(node: onnx.NodeProto, opset: int) -> bool:
    """Whether a batch normalization is in training mode and uses the statistics of the batch."""
    if opset < TRAINING_MODE_FROM:
        return len(node.output) > 1
    return any(each.name == "training_mode" and each.i for each in node.attribute)


def freeze(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Set batch normalizations to evaluation mode, in which they use the stored statistics."""
    lost: dict[str, str] = {}
    for node in nodes:
        set_training_mode(node, 0, opset_of(model))
        lost |= {name: node.input[place] for name, place in zip(node.output[1:], STATISTICS, strict=False) if name}
        del node.output[1:]
    graph = model.graph
    read = {name for node in all_nodes(graph.node) for name in node.input} | {each.name for each in graph.output}
    for name in (each for each in lost if each in read):
        graph.node.insert(0, helper.make_node("Identity", [lost[name]], [name]))


def set_training_mode(node: onnx.NodeProto, value: int, opset: int) -> None:
    """Set the mode of a batch normalization; in older opsets there is no attribute for it."""
    keep(node.attribute, [each for each in node.attribute if each.name != "training_mode"])
    if opset >= TRAINING_MODE_FROM:
        node.attribute.append(helper.make_attribute("training_mode", value))


def one_output(model: onnx.ModelProto) -> None:
    """Remove the further outputs of batch normalizations in evaluation mode, which ONNX does not allow.

    onnxruntime-training left the outputs with the running statistics if a model was exported in training mode.
    """
    opset = opset_of(model)
    freeze(model, [node for node in batch_norms(model) if len(node.output) > 1 and not trains(node, opset)])


def evaluating(model: onnx.ModelProto) -> None:
    """Set all batch normalizations of an eval model to evaluation mode."""
    opset = opset_of(model)
    freeze(model, [node for node in batch_norms(model) if trains(node, opset)])


def written_inputs(graph: onnx.GraphProto) -> set[str]:
    """The inputs that a run of a training graph changes: the running statistics of batch normalization."""
    return {name for node in graph.node if node.op_type == "BatchNormInternal" for name in node.input[3:5]}
