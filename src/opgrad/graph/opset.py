"""Raises the opset of ai.onnx that a model imports."""

import onnx

from opgrad.graph.conversion import converted
from opgrad.graph.nodes import all_nodes

LEAST = 16  # the first opset whose ScatterND and ScatterElements can add
LAYER_NORMALIZATION = 17  # the first opset with LayerNormalization, which onnxruntime-training wrote into older ones
SCAN_WITHOUT_BATCHES = 9  # the first opset whose Scan goes through its inputs along any axis, not along the second
# Between these opsets only types were added, except to the operators below.
UNCHANGED_FROM, UNCHANGED_TO = 13, 17


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
    changed = any(
        node.op_type == "RoiAlign" or (node.op_type == "BatchNormalization" and len(node.output) > 1) for node in plain
    )
    if entry.version < UNCHANGED_FROM or wanted > UNCHANGED_TO or (changed and entry.version < 14):
        _convert(model, entry.version, wanted, who)
    else:
        entry.version = wanted


def _convert(model: onnx.ModelProto, version: int, wanted: int, who: str) -> None:
    try:
        model.CopyFrom(converted(model, version, wanted))
    except Exception as error:
        raise NotImplementedError(
            f"{who}: the model imports opset {version} of ai.onnx, and onnx cannot convert it to {wanted}: {error}"
        ) from error
