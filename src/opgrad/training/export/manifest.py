"""The manifest of an exported step as JSON: names, order and sizes of all inputs and outputs, SHA-256 of each file."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx

from opgrad.base.reading import sha256_of
from opgrad.onnx.graph.messages import opset_of
from opgrad.training.export.building import RATE, SHARE, STEP, UPDATE, Labels
from opgrad.training.export.dropout import SEED
from opgrad.training.export.layout import GRADIENTS, Carried, StateLayout
from opgrad.training.export.rules import NAMES, StepRule
from opgrad.training.files.artifact_set import ArtifactSet, tensor_spec
from opgrad.training.files.weights import fixed_metadata

FORMAT, VERSION = "opgrad.step", 1


def manifest(
    artifacts: ArtifactSet,
    layout: StateLayout,
    rule: StepRule,
    labels: Labels | None,
    step: onnx.ModelProto,
    dtype: str,
) -> dict[str, Any]:
    """The content of the manifest without the entries of files."""
    inputs = {value.name for value in step.graph.input}
    scalars = [name for name in (RATE, STEP, SHARE, UPDATE, SEED) if name in inputs]
    held = {each.input for each in layout.parts} | set(scalars)
    batch = [value for value in step.graph.input if value.name not in held]
    name = NAMES[type(rule)]
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": artifacts.name,
        "opset": opset_of(step),
        "functions": len(step.functions),
        "optimizer": {"name": name, **asdict(rule)},
        "batch": [_tensor(value) for value in batch],
        "batch_rows": artifacts.batch_rows,
        "label": None
        if labels is None
        else {"name": labels.name, "classes": labels.classes, "ignored": labels.ignored},
        "scalars": scalars,
        "state": _state(layout.parts),
        "outputs": [
            value.name for value in step.graph.output if value.name not in {each.output for each in layout.parts}
        ],
        "weights": {
            "bytes": sum(each.nbytes for each in layout.weights),
            "all_bytes": sum(each.nbytes for each in layout.tensors),
            "tensors": layout.header(),
            "metadata": fixed_metadata(name, dtype, [each.name for each in layout.statistics], artifacts.tune),
        },
    }


def _state(parts: Sequence[Carried]) -> list[dict[str, Any]]:
    """The inputs of the state, with their place in a weights file; sums of gradients are not in the file."""
    found, end = [], 0
    for part in parts:
        place = None if part.kind == GRADIENTS else end
        end += part.nbytes
        entry = {"kind": part.kind, "input": part.input, "output": part.output, "dtype": part.dtype.name}
        found.append({**entry, "shape": list(part.shape), "offset": place, "bytes": part.nbytes})
    return found


def _tensor(value: onnx.ValueInfoProto) -> dict[str, Any]:
    spec = tensor_spec(value)
    return {"name": spec.name, "dtype": spec.dtype.name, "shape": list(spec.shape)}


def forward_entry(model: onnx.ModelProto) -> dict[str, Any]:
    """Inputs and outputs of an evaluation or inference model."""
    return {
        "inputs": [value.name for value in model.graph.input],
        "outputs": [value.name for value in model.graph.output],
    }


def file_entry(path: Path) -> dict[str, Any]:
    """Name, size and SHA-256 of a file."""
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of([path])}
