"""Products of bytes, which onnxruntime's kernels compute wrongly on some processors; see `graph.byte_products`."""

from functools import cache

import numpy as np
import onnx
import onnxruntime

from opgrad.onnx.graph.byte_products import inexact, with_unsigned


@cache
def saturates() -> bool:
    """Whether products saturate on this processor: one is tried."""
    text = """<ir_version: 8, opset_import: ["": 13]>
        tried (uint8[1, 8] a, int8[8, 1] b) => (int32[1, 1] y) { y = MatMulInteger (a, b) }"""
    model = onnx.parser.parse_model(text).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    feeds = {"a": np.full((1, 8), 255, np.uint8), "b": np.full((8, 1), 127, np.int8)}
    return int(session.run(None, feeds)[0].item()) != 8 * 255 * 127


def note(model: onnx.ModelProto) -> str | None:
    """What to say of a model whose products saturate on this processor; None if there are none."""
    found = [node.op_type for node, _, _ in inexact(model)] if saturates() else []
    if not found:
        return None
    return (
        f"products of unsigned and signed bytes saturate in onnxruntime on this processor, which has no VNNI: "
        f"{len(found)} here, of {', '.join(dict.fromkeys(found))}; opgrad's sessions compute what the integers say, "
        "others do not unless their option session.x64quantprecision is 1"
    )


def with_exact_products(model: bytes) -> bytes:
    """A model whose products are exact on this processor."""
    if not saturates():
        return model
    read = onnx.load_model_from_string(model)
    found = list(inexact(read))
    return with_unsigned(read, found).SerializeToString() if found else model
