"""Lowers the model of a file into another file."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx.external_data_helper import uses_external_data

from opgrad.base.writing import destination, replace_file
from opgrad.onnx.plain.lowering import lower
from opgrad.onnxruntime.runners import NATIVE, operators


@dataclass(frozen=True)
class Lowered:
    """The results of lowering a model.

    nodes, functions: how many nodes of each operator were lowered, and how many functions they call.
    outputs: those that were added. left: operators that stock onnxruntime still lacks.
    """

    nodes: dict[str, int]
    functions: dict[str, int]
    outputs: list[str]
    left: list[str]


def lower_file(source: Path, target: Path, only: Collection[str] | None = None) -> Lowered:
    """Write the lowered model; a crash on the way leaves an older file as it was.

    source: an ONNX model. target: the file to write; in the folder of the source if that keeps data in other files.
    only: the operators to lower, as for `lower`.
    Returns what became of the model. Raises what `lower` and `destination` raise, ValueError for a target in the wrong
    folder,
    FileNotFoundError for one in a folder that is not there.
    """
    target = destination(target)
    after = lower(source, operators=only)  # this checks the file
    before = onnx.load(source, load_external_data=False)
    tensors = (*after.graph.initializer, *after.graph.sparse_initializer)
    outside = any(uses_external_data(each) for each in tensors if isinstance(each, onnx.TensorProto))
    if outside and source.resolve().parent != target.resolve().parent:
        raise ValueError(f"lower: {source} keeps data in other files, expected an output in {source.parent}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"lower: there is no folder {target.parent} to write {target.name} into")
    replace_file(target, after.SerializeToString())
    return _compared(before, after)


def _compared(before: onnx.ModelProto, after: onnx.ModelProto) -> Lowered:
    old, new = (Counter((node.domain, node.op_type) for node in model.graph.node) for model in (before, after))
    nodes = {name: count for (domain, name), count in sorted(old.items()) if (domain, name) not in new}
    made = Counter(_operator(each.name, nodes) for each in after.functions[len(before.functions) :])
    kept = {each.name for each in before.graph.output}
    return Lowered(
        nodes=nodes,
        functions={name: made[name] for name in nodes},
        outputs=[each.name for each in after.graph.output if each.name not in kept],
        left=[each.name for each in operators(after) if each.runner != NATIVE],
    )


def _operator(function: str, names: Collection[str]) -> str:
    """The operator of a function, which has the operator's name, followed by a number from the second one on."""
    return max((name for name in names if function == name or function.startswith(f"{name}_")), key=len, default="")
