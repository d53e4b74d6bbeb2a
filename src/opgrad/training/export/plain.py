"""Writes a model of an artifact set with operators that every onnxruntime has: others become functions of the model."""

from collections.abc import Iterator

import onnx
from onnx import inliner

from opgrad.base.arguments import ArgumentError
from opgrad.onnx.graph.conversion import LEAST, raise_opset
from opgrad.onnx.graph.messages import MICROSOFT, domain_of, opset_of
from opgrad.onnx.graph.nodes import is_known, model_nodes
from opgrad.onnx.passes.patterns import use_internal_losses
from opgrad.onnx.plain.lowering import DOMAIN
from opgrad.onnxruntime import LOWERED, lower
from opgrad.training.make.checks import sentence
from opgrad.training.make.outputs import inferred_model

WHO = "export_step"
# Operators of com.microsoft that onnxruntime, onnxruntime-node and onnxruntime-web all have on the CPU: where a model
# has them, its step has them, too.
STOCK = (
    *("DequantizeLinear", "GatherBlockQuantized", "GroupQueryAttention", "MatMulNBits", "MultiHeadAttention"),
    *("RotaryEmbedding", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
)


def plain_model(model: onnx.ModelProto, opset: int | None) -> onnx.ModelProto:
    """The same model in operators of ai.onnx and of `STOCK`, and functions of those of ai.onnx.

    model: a training or an eval graph, which is not changed. opset: that of the result; None: the model's, or the
        least that functions can be written for.
    Raises NotImplementedError, naming the operator, where there is no such form, ValueError for an older opset.
    """
    if opset is not None and opset < LEAST:
        raise ArgumentError("opset", f"is {opset}, expected {LEAST} at least")
    inlined = inliner.inline_local_functions(model) if model.functions else model
    try:
        typed = inferred_model(inlined)
    except onnx.shape_inference.InferenceError as error:
        raise ValueError(f"{WHO}: the graph is wrong: {sentence(error)}") from None
    use_internal_losses(typed)
    raise_opset(typed, opset or LEAST, WHO)
    if opset is not None and opset_of(typed) > opset:
        raise ArgumentError("opset", f"is {opset}, expected {opset_of(typed)} at least, which the graph needs")
    lowered = lower(typed, operators=LOWERED)
    if lack := sorted(set(_unknown(lowered))):
        raise NotImplementedError(
            f"{WHO}: the graph has {', '.join(lack)}, of which there is no form of plain ONNX operators: export the "
            "model without fusions, or write the node with operators of ai.onnx"
        )
    return lowered


def _unknown(model: onnx.ModelProto) -> Iterator[str]:
    """The operators that are neither of ai.onnx, nor functions of the model, nor among `STOCK`."""
    for node in model_nodes(model):
        if domain_of(node) == MICROSOFT and node.op_type in STOCK:
            continue
        if domain_of(node) != DOMAIN and (domain_of(node) or not is_known(node.op_type, opset_of(model))):
            yield ":".join(filter(None, (node.domain, node.op_type)))


def only_plain_imports(model: onnx.ModelProto) -> None:
    """Let a model import ai.onnx, and the domains of functions and of `STOCK` where it has such nodes."""
    used = {node.domain for node in model_nodes(model)} | {""}
    kept = [each for each in model.opset_import if each.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)
