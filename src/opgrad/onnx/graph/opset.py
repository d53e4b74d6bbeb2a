"""Raises the opset of ai.onnx that a model imports, and lets its functions import the same.

onnx's converter refuses operators in the domain ai.onnx that ONNX does not have, such as those of training graphs. It
drops functions and metadata, and it changes the meaning or the types of some operators of opset 10.
"""

import functools
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, inliner, numpy_helper, shape_inference, version_converter

from opgrad.onnx.graph.messages import (
    copied_without,
    declared_types,
    domain_of,
    is_large,
    keep,
    opset_of,
    without_large,
)
from opgrad.onnx.graph.nodes import all_nodes, model_nodes

LEAST = 16  # the first opset whose ScatterND and ScatterElements can add
LAYER_NORMALIZATION = 17  # the first opset with LayerNormalization, which onnxruntime-training wrote into older ones
SCAN_WITHOUT_BATCHES = 9  # the first opset whose Scan goes through its inputs along any axis, not along the second
# Between these opsets only types were added, except to the operators below.
UNCHANGED_FROM, UNCHANGED_TO = 13, 17
BODIES_FROM = 11  # the first opset whose functions are converted: of older ones onnx's converter changes the meaning


def raise_opset(model: onnx.ModelProto, least: int = LEAST, who: str = "lower") -> None:
    """Convert a model, in place, so that it imports at least opset `least` of ai.onnx. who: the caller, for messages.

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
            f"{who}: {(scan.name or scan.output[0])!r} is a Scan of opset {entry.version}, which has an axis for "
            f"batches, expected opset {SCAN_WITHOUT_BATCHES} or later"
        )
    if _means_the_same(plain, entry.version, wanted):
        entry.version = wanted
        align_functions(model, who)
    else:
        _convert(model, entry.version, wanted, who)


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


def align_functions(model: onnx.ModelProto, who: str) -> None:
    """Let the functions of a model mean what they say where they import another opset of ai.onnx than it, in place.

    onnxruntime takes their nodes as nodes of the model's opset. Where these mean something else, all calls are replaced
    by converted bodies. who: the caller, for messages. Raises ValueError where onnx cannot convert them.
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
            f"{who}: the function {different[0].domain}.{different[0].name} imports opset {different[1]} of ai.onnx "
            f"and the model opset {wanted}, to which onnx cannot convert it: {reason}; export both with one opset"
        ) from None


def _convert(model: onnx.ModelProto, version: int, wanted: int, who: str) -> None:
    try:
        if model.functions:
            model.CopyFrom(inliner.inline_local_functions(model))
        model.CopyFrom(converted(model, version, wanted))
    except Exception as error:
        raise NotImplementedError(
            f"{who}: the model imports opset {version} of ai.onnx, and onnx cannot convert it to {wanted}: {error}"
        ) from error


# --- onnx's converter, with corrections of its faults ---


UNKNOWN = "opgrad.unknown"  # the domain of operators that ONNX does not have, during the conversion
RESIZE_CHANGED = BOUNDS_ARE_INPUTS = 11  # the opset with both changes
TRAINING_IS_ATTRIBUTE = 14  # the first opset whose BatchNormalization has the attribute training_mode
FILLED = ("Clip", "Pad")  # operators with attributes that became inputs, which have to be of the type of the data
STATISTICS = slice(3, 5)  # saved outputs of BatchNormalization, which it lost with opset 14


def converted(model: onnx.ModelProto, version: int, wanted: int) -> onnx.ModelProto:
    """A model that imports opset `wanted` instead of `version`. Raises whatever the converter does."""
    draft = copied_without(model, "graph")
    draft.graph.CopyFrom(without_large(model.graph))
    for node in draft.graph.node:
        if node.domain in ("", "ai.onnx") and not defs.has(node.op_type, version, ""):
            node.domain = UNKNOWN
    draft.opset_import.append(helper.make_opsetid(UNKNOWN, 1))
    _drop_saved_statistics(draft.graph)
    result = version_converter.convert_version(draft, wanted)
    if version < RESIZE_CHANGED <= wanted:
        _keep_resizing(result.graph)
    if version < BOUNDS_ARE_INPUTS <= wanted:
        _type_fillers(result)
    if version < TRAINING_IS_ATTRIBUTE <= wanted:
        _keep_training(result.graph)
    _show_unknown(result)
    given = {each.name for each in model.graph.input}
    keep(result.graph.input, [each for each in result.graph.input if each.name in given])
    result.graph.initializer.extend(filter(is_large, model.graph.initializer))
    for name in ("functions", "metadata_props"):
        del getattr(result, name)[:]
        getattr(result, name).extend(getattr(model, name))
    return result


# --- operators that ai.onnx does not have ---


def _show_unknown(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.domain == UNKNOWN:
            node.domain = ""
    kept = [each for each in model.opset_import if each.domain != UNKNOWN]
    del model.opset_import[:]
    model.opset_import.extend(kept)


# --- what conversion changes ---


def _drop_saved_statistics(graph: onnx.GraphProto) -> None:
    """Remove the outputs of BatchNormalization that newer opsets lack, if no node reads them."""
    read = {name for node in graph.node for name in node.input} | {each.name for each in graph.output}
    for node in graph.node:
        if node.op_type == "BatchNormalization" and not read.intersection(node.output[STATISTICS]):
            del node.output[STATISTICS]


def _keep_training(graph: onnx.GraphProto) -> None:
    """Set training_mode for batch normalizations with several outputs, which meant training in older opsets."""
    for node in graph.node:
        if node.op_type == "BatchNormalization" and len(node.output) > 1:
            node.attribute.append(helper.make_attribute("training_mode", 1))


def _keep_resizing(graph: onnx.GraphProto) -> None:
    """Keep the meaning of Upsample and of Resize of opset 10, which align the edges of elements, not the centres."""
    constants = {each.name: each for each in graph.initializer}
    constants |= {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
    for node in graph.node:
        if node.op_type == "Resize":
            scales = constants.get(node.input[2])
            shrinks = scales is not None and (numpy_helper.to_array(scales) < 1).any()
            given = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "ceil" if shrinks else "floor"}
            node.attribute.extend(helper.make_attribute(*each) for each in given.items())


def _type_fillers(model: onnx.ModelProto) -> None:
    """Convert bounds and fill values, which the converter writes in float32, to the type of the data."""
    types = declared_types(shape_inference.infer_shapes(model).graph)
    constants = {node.output[0]: node for node in model.graph.node if node.op_type == "Constant"}
    for node in model.graph.node:
        declared = types.get(node.input[0]) if node.op_type in FILLED else None
        kind = 0 if declared is None else declared.tensor_type.elem_type
        for constant in (constants.get(name) for name in node.input[1:]):
            if kind and constant is not None and constant.attribute[0].t.data_type == TensorProto.FLOAT:
                tensor = constant.attribute[0].t
                with np.errstate(over="ignore"):
                    array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(kind))
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
