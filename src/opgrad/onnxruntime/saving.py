"""Lower the model of a file into another file, and say what became of it."""

from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx.external_data_helper import uses_external_data

from opgrad.onnxruntime.lowering import lower
from opgrad.onnxruntime.runners import NATIVE, operators
from opgrad.writing import replace_file


def lower_file(source: Path, target: Path) -> list[str]:
    """Write the lowered model; a crash on the way leaves an older file as it was.

    source: an ONNX model. target: the file to write; in the folder of the source if that keeps data in other files.
    Returns lines that tell which operators were lowered, which outputs were added, and what stock onnxruntime still
    cannot run. Raises what `lower` raises, ValueError for a target in the wrong folder, FileNotFoundError for one in
    a folder that is not there.
    """
    after = lower(source)  # first: it says what is wrong with a file that is no model
    before = onnx.load(source, load_external_data=False)
    tensors = (*after.graph.initializer, *after.graph.sparse_initializer)
    outside = any(uses_external_data(each) for each in tensors if isinstance(each, onnx.TensorProto))
    if outside and source.resolve().parent != target.resolve().parent:
        raise ValueError(f"lower: {source} keeps data in other files, expected an output in {source.parent}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"lower: there is no folder {target.parent} to write {target.name} into")
    replace_file(target, after.SerializeToString())
    return list(_lines(before, after, target))


def _lines(before: onnx.ModelProto, after: onnx.ModelProto, target: Path) -> Iterator[str]:
    old, new = ({(node.domain, node.op_type) for node in model.graph.node} for model in (before, after))
    lowered = ", ".join(sorted(name for _, name in old - new)) or "nothing"
    yield f"{target}: {len(after.functions) - len(before.functions)} functions in place of {lowered}"
    outputs = {each.name for each in before.graph.output}
    if added := [each.name for each in after.graph.output if each.name not in outputs]:
        yield f"outputs added: {', '.join(added)}"
    if rest := [each.name for each in operators(after) if each.runner != NATIVE]:
        yield f"not lowered, and not in stock onnxruntime: {', '.join(rest)}"
