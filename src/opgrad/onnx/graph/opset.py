"""Raises the opset of ai.onnx that a model imports, and lets its functions import the same."""

import functools
from collections.abc import Sequence

import onnx
from onnx import defs, inliner

from opgrad.onnx.graph.conversion import converted
from opgrad.onnx.graph.messages import domain_of, opset_of
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
