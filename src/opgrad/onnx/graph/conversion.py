"""Converts a model to a newer opset of ai.onnx, with onnx's converter and corrections of its faults.

The converter refuses operators in the domain ai.onnx that ONNX does not have, such as those of training graphs. It
drops functions and metadata, and it changes the meaning or the types of some operators of opset 10.
"""

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, numpy_helper, shape_inference, version_converter

from opgrad.onnx.graph.large import is_large, without_large
from opgrad.onnx.graph.messages import copied_without, declared_types, keep

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
