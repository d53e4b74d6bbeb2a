"""The modules of PyTorch that nodes were exported from."""

import ast
import itertools

import onnx

SCOPES = "pkg.torch.onnx.name_scopes"  # of the exporter by torch.export: the paths of all modules around a node


def module_path(node: onnx.NodeProto) -> str | None:
    """The path of a node's module, such as model.layers.0.self_attn.q_proj; None if the node tells nothing of it.

    The older exporter names nodes by it: /model/layers.0/self_attn/q_proj/MatMul, and /layers.0/layers.0.1/MatMul for a
    module in a list in a list.
    """
    written = next((each.value for each in node.metadata_props if each.key == SCOPES), None)
    if written is None:
        parts = node.name.split("/")[1:]
        names = [part for part, inner in itertools.pairwise(parts) if not inner.startswith(f"{part}.")]
        return ".".join(names) if node.name.startswith("/") else None
    try:
        scopes = ast.literal_eval(written)
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        return None
    is_list = isinstance(scopes, list) and len(scopes) > 1 and all(isinstance(each, str) for each in scopes)
    return scopes[-2] if is_list else None
