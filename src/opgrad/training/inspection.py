"""What an artifact set or an ONNX model contains, and who runs its operators."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.helper import get_attribute_value
from rich.console import Console
from rich.table import Table

from opgrad.onnxruntime.loading import open_session
from opgrad.onnxruntime.reading import read_model
from opgrad.onnxruntime.runners import LOWERING, NATIVE, NOBODY, OPGRAD, Operator, operators
from opgrad.training.artifact_set import FILES, tensor_spec
from opgrad.training.checkpoint import Checkpoint, read_checkpoint
from opgrad.training.data import show
from opgrad.training.loop import session_options
from opgrad.training.names import BUFFER_SUFFIX, RESET
from opgrad.training.optimizer import read_rule
from opgrad.training.replacing import bytes_in_use, data_path

TRAINING, EVALUATION, OPTIMIZER, CHECKPOINT = FILES
LONGEST = 60  # characters of a property in a table
PIPE_WIDTH = 160  # of a table in a file or a pipe


@dataclass(frozen=True)
class Parameter:
    """`kind` is trainable, frozen or, of a model without checkpoint, initializer."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int | str, ...]
    bytes: int


@dataclass(frozen=True)
class Tensor:
    """An input or output of a graph."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Inspection:
    """What there is at a path.

    files: bytes of each file by name.
    parameters: of the checkpoint, or the initializers of a single model.
    inputs, outputs: of the training graph, without parameters, gradients and `lazy_reset_grad`; or of a single model.
    operators: of the same graph. problem: why onnxruntime with opgrad cannot load it; None if it can, or if some
        of them must be lowered first.
    optimizer: nodes of the optimizer model with their attributes; optimizer_problem: why opgrad cannot run them.
    checkpoint: what it holds beside parameters.
    """

    path: str
    files: dict[str, int]
    parameters: list[Parameter] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    problem: str | None = None
    optimizer: list[dict[str, Any]] = field(default_factory=list)
    optimizer_problem: str | None = None
    checkpoint: dict[str, Any] | None = None

    @property
    def runs(self) -> bool:
        """Whether somebody runs every operator."""
        return self.problem is None and self.optimizer_problem is None

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values, with totals."""
        sums = {kind: sum(each.bytes for each in self.parameters if each.kind == kind) for kind in kinds(self)}
        return {**asdict(self), "parameter_bytes": sums, "runs": self.runs}


def kinds(found: Inspection) -> list[str]:
    """The kinds of parameters that there are."""
    return list(dict.fromkeys(each.kind for each in found.parameters))


def inspect(path: str | PathLike[str]) -> Inspection:
    """Look at the folder of an artifact set, of which files may be missing, or at one ONNX model.

    Raises FileNotFoundError if the folder has none of the files, ValueError for a damaged one, and what
    `read_checkpoint` raises.
    """
    path = Path(path)
    return _inspect_folder(path) if path.is_dir() else _inspect_model(path)


def _inspect_model(path: Path) -> Inspection:
    model = _load(path)
    held = [_parameter(tensor.name, "initializer", tensor) for tensor in model.graph.initializer]
    own = {each.name for each in held}
    return Inspection(
        path=str(path),
        files={path.name: path.stat().st_size},
        parameters=held,
        inputs=[_tensor(value) for value in model.graph.input if value.name not in own],
        outputs=[_tensor(value) for value in model.graph.output],
        **_run(path, model),
    )


def _inspect_folder(folder: Path) -> Inspection:
    files = {name: (folder / name).stat().st_size for name in FILES if (folder / name).is_file()}
    if not files:
        raise FileNotFoundError(f"inspect: {folder} has none of the files {', '.join(FILES)}")
    parts: dict[str, Any] = {}
    checkpoint = read_checkpoint(folder / CHECKPOINT) if CHECKPOINT in files else None
    if checkpoint is not None:
        parts |= {"parameters": _parameters(checkpoint), "checkpoint": _summary(checkpoint, folder / CHECKPOINT)}
    if TRAINING in files:
        model = _load(folder / TRAINING)
        parts |= _ports(model, checkpoint.parameters if checkpoint else {}) | _run(folder / TRAINING, model)
    if OPTIMIZER in files:
        parts |= _optimizer(_load(folder / OPTIMIZER))
    return Inspection(str(folder), files, **parts)


def _load(path: Path) -> onnx.ModelProto:
    """The model without the tensors that it keeps in other files."""
    return read_model(path, "inspect", outside=False)


def _run(path: Path, model: onnx.ModelProto) -> dict[str, Any]:
    """Who runs the operators of a model, and whether it can be loaded as a whole."""
    found = operators(model)
    if lost := [each.name for each in found if each.runner == NOBODY]:
        return {"operators": found, "problem": f"nobody runs {', '.join(lost)}"}
    if any(each.runner == LOWERING for each in found):
        return {"operators": found, "problem": None}
    stock = all(each.runner == NATIVE for each in found)
    try:
        open_session(path, session_options(1), f"inspect: {path}", stock)
    except ValueError as error:
        return {"operators": found, "problem": str(error)}
    return {"operators": found, "problem": None}


def _tensor(value: onnx.ValueInfoProto) -> Tensor:
    if not value.type.HasField("tensor_type"):
        return Tensor(value.name, value.type.WhichOneof("value") or "unknown", ())
    spec = tensor_spec(value)
    return Tensor(spec.name, str(spec.dtype), spec.shape)


def _ports(model: onnx.ModelProto, parameters: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Inputs and outputs that a user sees: gradients and parameters are the checkpoint's."""
    values = [_tensor(value) for value in model.graph.input]
    trained = {each.name.removesuffix(BUFFER_SUFFIX) for each in values if each.name.endswith(BUFFER_SUFFIX)}
    hidden = {name + BUFFER_SUFFIX for name in trained} | trained | parameters.keys() | {RESET}
    accumulated = {name for node in model.graph.node if "Accumulator" in node.op_type for name in node.output}
    return {
        "inputs": [each for each in values if each.name not in hidden],
        "outputs": [_tensor(value) for value in model.graph.output if value.name not in accumulated],
    }


def _parameter(name: str, kind: str, tensor: onnx.TensorProto) -> Parameter:
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    shape = tuple(tensor.dims)
    return Parameter(name, kind, str(dtype), shape, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)


def _parameters(checkpoint: Checkpoint) -> list[Parameter]:
    groups = {"trainable": checkpoint.trainable, "frozen": checkpoint.frozen}
    return [
        Parameter(name, kind, str(array.dtype), array.shape, array.nbytes)
        for kind, arrays in groups.items()
        for name, array in arrays.items()
    ]


def _summary(checkpoint: Checkpoint, path: Path) -> dict[str, Any]:
    used = bytes_in_use(path)
    groups = {
        name: {
            "step": group.step,
            "learning_rate": group.learning_rate,
            "moments": sorted({moment for each in group.moments.values() for moment in each}),
        }
        for name, group in checkpoint.optimizers.items()
    }
    return {
        "optimizers": groups,
        "properties": checkpoint.properties,
        "nominal": checkpoint.nominal,
        "external_data": {"file": data_path(path).name, "bytes": used[1] - used[0]} if used else None,
    }


def _optimizer(model: onnx.ModelProto) -> dict[str, Any]:
    nodes = [
        {"name": node.op_type, "attributes": {item.name: get_attribute_value(item) for item in node.attribute}}
        for node in model.graph.node
    ]
    try:
        read_rule(model)
    except (NotImplementedError, ValueError) as error:
        return {"optimizer": nodes, "optimizer_problem": str(error)}
    return {"optimizer": nodes}


# --- text ------------------------------------------------------------------------------------------------------------


def print_inspection(console: Console, found: Inspection) -> None:
    """Print tables of parameters and operators, and lines about the rest."""
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(_facts(found))
    if found.parameters:
        console.print(_parameter_table(found))
    if found.operators:
        console.print(_operator_table(found))
    for problem in filter(None, (found.problem, found.optimizer_problem)):
        console.print(f"cannot run: {problem}", style="red", highlight=False)


def _facts(found: Inspection) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title=found.path, title_justify="left")
    missing = [name for name in FILES if name not in found.files] if Path(found.path).is_dir() else []
    rows = [("files", ", ".join(f"{name} {size(count)}" for name, count in found.files.items()))]
    rows += [("missing", ", ".join(missing))] if missing else []
    rows += [(title, _ports_text(ports)) for title, ports in (("inputs", found.inputs), ("outputs", found.outputs))]
    rows += [("optimizer", _optimizer_text(node)) for node in found.optimizer]
    rows += _checkpoint_rows(found.checkpoint or {})
    for title, text in rows:
        table.add_row(title, text)
    return table


def _ports_text(ports: Iterable[Tensor]) -> str:
    return "; ".join(f"{each.name} {each.dtype} {show(each.shape)}" for each in ports) or "none"


def _optimizer_text(node: Mapping[str, Any]) -> str:
    return " ".join([node["name"], *(f"{name}={_number(value)}" for name, value in node["attributes"].items())])


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _checkpoint_rows(checkpoint: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, group in checkpoint.get("optimizers", {}).items():
        moments = ", ".join(group["moments"]) or "no moments"
        rate = _number(group["learning_rate"])
        rows.append(("checkpoint", f"{name}: step {group['step']}, learning rate {rate}, {moments}"))
    if checkpoint and not rows:
        rows.append(("checkpoint", "no optimizer state"))
    if checkpoint.get("nominal"):
        rows.append(("", "the names of the parameters only"))
    if outside := checkpoint.get("external_data"):
        rows.append(("", f"parameters in {outside['file']}, {size(outside['bytes'])}"))
    for name, value in checkpoint.get("properties", {}).items():
        text = _number(value)
        rows.append(("property", f"{name} = {text if len(text) <= LONGEST else text[:LONGEST] + '…'}"))
    return rows


def _parameter_table(found: Inspection) -> Table:
    table = Table("parameter", "shape", "dtype", "kind", row_styles=("", "dim"))
    table.add_column("bytes", justify="right")
    for each in found.parameters:
        table.add_row(each.name, show(each.shape), each.dtype, each.kind, f"{each.bytes:,}")
    table.add_section()
    for kind in kinds(found):
        of_kind = [each for each in found.parameters if each.kind == kind]
        table.add_row(f"{len(of_kind)} in all", "", "", kind, f"{sum(each.bytes for each in of_kind):,}")
    return table


def _operator_table(found: Inspection) -> Table:
    table = Table("operator", "domain")
    table.add_column("nodes", justify="right")
    table.add_column("run by")
    styles = {NOBODY: "red", LOWERING: "yellow", OPGRAD: "cyan"}
    for each in found.operators:
        table.add_row(
            each.name, each.domain or "ai.onnx", str(each.count), each.runner, style=styles.get(each.runner, "")
        )
    return table


def size(count: int) -> str:
    """Bytes in the unit that fits."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.1f} {unit}"
    return f"{count} bytes"
