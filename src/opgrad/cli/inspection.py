"""The content of an artifact set or an ONNX model, which library runs each of its operators, and tables of all that."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import helper
from onnx.external_data_helper import uses_external_data
from onnx.helper import get_attribute_value
from rich.console import Console
from rich.table import Table

from opgrad.base.arguments import naming
from opgrad.cli.text import amount, facts, fit, optimizer_text, shown_number, size
from opgrad.onnx.graph.conversion import compute_in_float32, evaluating, written_inputs
from opgrad.onnx.graph.loading import check_sizes, read_model
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnxruntime import NOT_LOWERED
from opgrad.onnxruntime.exact_products import note
from opgrad.onnxruntime.loading import LOWERING, NATIVE, NOBODY, OPGRAD, ModelOperator, open_session, operators
from opgrad.training.engine.training_graph import Fused, fuse_nodes, session_options
from opgrad.training.files.artifact_set import BUFFER_SUFFIX, FILES, RESET, read_rule, tensor_spec
from opgrad.training.files.checkpoint import Checkpoint, data_of, read_checkpoint
from opgrad.training.files.dataset import show
from opgrad.training.files.tensor_values import VALUES, read_apart, read_shared
from opgrad.training.make.checks import listed, quantity, refused_types
from opgrad.training.make.outputs import cut_note
from opgrad.training.make.selection import MOST_SHARED, turned_note
from opgrad.training.make.trainability import Trainability, trainability

if TYPE_CHECKING:
    from opgrad.tune.adapted_model import Summary

TRAINING, EVALUATION, OPTIMIZER, CHECKPOINT = FILES


@dataclass(frozen=True)
class InspectedParameter:
    """`kind` is trainable, frozen or, of a model without checkpoint that would not make it a parameter, initializer."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int | str, ...]
    bytes: int


@dataclass(frozen=True)
class InspectedTensor:
    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Inspection:
    """The content of an artifact set or of a model.

    files: bytes of each file by name.
    parameters: of the checkpoint, or the initializers of a single model, as training would take them.
    inputs, outputs: of the training graph, without parameters, gradients and `lazy_reset_grad`; or of a single model.
    operators: of the same graph. fused: what training replaces there, unless `fuse` is False.
    problem: the reason why onnxruntime with opgrad cannot load it or the eval model, and advice; None if it can.
    optimizer: nodes of the optimizer model with their attributes; optimizer_problem: why opgrad cannot run them.
    checkpoint: its content beside the parameters.
    training: what a single model would be trained as, see `Trainability`; None for a training graph.
    tuning: what `opgrad tune` trains of a language model by default; None: another model. tuning_problem: why not.
    note: what onnxruntime computes otherwise on this processor than the model says; None if nothing.
    """

    path: str
    files: dict[str, int]
    parameters: list[InspectedParameter] = field(default_factory=list)
    inputs: list[InspectedTensor] = field(default_factory=list)
    outputs: list[InspectedTensor] = field(default_factory=list)
    operators: list[ModelOperator] = field(default_factory=list)
    fused: list[Fused] = field(default_factory=list)
    problem: str | None = None
    optimizer: list[dict[str, Any]] = field(default_factory=list)
    optimizer_problem: str | None = None
    checkpoint: dict[str, Any] | None = None
    training: Trainability | None = None
    tuning: "Summary | None" = None
    tuning_problem: str | None = None
    note: str | None = None

    @property
    def runs(self) -> bool:
        return self.problem is None and self.optimizer_problem is None

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values, with totals."""
        sums = {
            kind: sum(each.bytes for each in self.parameters if each.kind == kind)
            for kind in dict.fromkeys(each.kind for each in self.parameters)
        }
        return {**asdict(self), "parameter_bytes": sums, "runs": self.runs}


@naming("inspect")
def inspect(path: str | PathLike[str]) -> Inspection:
    """Look at the folder of an artifact set, of which files may be missing, or at one ONNX model, alone or in a folder.

    Raises what `read_checkpoint` raises, FileNotFoundError without any of the files, ValueError for a damaged one.
    """
    from opgrad.tune.outputs import MODEL

    path = Path(path)
    if path.is_dir() and not any((path / name).is_file() for name in FILES) and (path / MODEL).is_file():
        path = path / MODEL
    if path.is_dir():
        return _inspect_folder(path)
    model = _load(path)
    try:
        training = trainability(*read_apart(path))
    except (ValueError, OSError) as error:
        training = Trainability(problems=[str(error)])
    kinds = (
        dict.fromkeys(training.trainable, "trainable") | dict.fromkeys(training.frozen, "frozen") if training else {}
    )
    held = []
    for each in model.graph.initializer:
        dtype, shape = np.dtype(helper.tensor_dtype_to_np_dtype(each.data_type)), tuple(each.dims)
        size, kind = math.prod(shape) * dtype.itemsize, kinds.get(each.name, "initializer")
        held.append(InspectedParameter(each.name, kind, str(dtype), shape, size))
    own = {each.name for each in held}
    return Inspection(
        path=str(path),
        files={path.name: path.stat().st_size},
        parameters=held,
        inputs=[_tensor(value) for value in model.graph.input if value.name not in own],
        outputs=[_tensor(value) for value in model.graph.output],
        training=training,
        note=note(model),
        **_tuning(path),
        **_run(path, model),
    )


def _tuning(path: Path) -> dict[str, Any]:
    """The fields `tuning` and `tuning_problem` for a model."""
    from opgrad.tune.adapted_model import AdaptedModel, summary

    try:
        model = AdaptedModel(path)
    except (ValueError, OSError):
        return {}  # it is no language model
    except NotImplementedError as error:
        return {"tuning_problem": str(error).removeprefix("tune: ")}
    try:
        return {"tuning": summary(model, model.task.DEFAULTS["batch_size"], model.max_length)}
    except (ValueError, NotImplementedError) as error:
        return {"tuning_problem": str(error).removeprefix("tune: ")}


def _inspect_folder(folder: Path) -> Inspection:
    files = {name: (folder / name).stat().st_size for name in (*FILES, VALUES) if (folder / name).is_file()}
    if not files:
        raise FileNotFoundError(f"{folder} has none of the files {', '.join(FILES)}")
    parts: dict[str, Any] = {}
    checkpoint = read_checkpoint(folder / CHECKPOINT) if CHECKPOINT in files else None
    if checkpoint is not None:
        data, moments = data_of(folder / CHECKPOINT), dict[str, list[str]]()
        for name, group in checkpoint.optimizers.items():
            moments[name] = sorted({moment for each in group.moments.values() for moment in each})
        parts["parameters"] = _parameters(checkpoint)
        parts["checkpoint"] = {
            "optimizers": {
                name: {"step": each.step, "learning_rate": each.learning_rate, "moments": moments[name]}
                for name, each in checkpoint.optimizers.items()
            },
            "properties": checkpoint.properties,
            "nominal": checkpoint.nominal,
            "external_data": {"file": data.name, "bytes": data.stat().st_size} if data else None,
        }
        kinds = {helper.np_dtype_to_tensor_dtype(array.dtype) for array in checkpoint.trainable.values()}
        parts["problem"] = refused_types(kinds)
    if TRAINING in files:
        model = _load(folder / TRAINING)
        parts |= _ports(model, checkpoint.parameters if checkpoint else {})
        trained = list(checkpoint.trainable) if checkpoint else []
        changed = {*trained, *(name + BUFFER_SUFFIX for name in trained), *written_inputs(model.graph)}
        compute_in_float32(model, changed)
        found = _run(folder / TRAINING, model)
        parts |= found | {"problem": parts.get("problem") or found["problem"]}
        parts |= {"fused": fuse_nodes(model), "note": note(model)}
    if EVALUATION in files and not parts.get("problem"):
        model = _load(folder / EVALUATION)  # as the training API would read it
        evaluating(model)
        compute_in_float32(model, checkpoint.trainable if checkpoint else ())
        parts["problem"] = _run(folder / EVALUATION, model)["problem"]
    if OPTIMIZER in files:
        parts |= _optimizer(_load(folder / OPTIMIZER))
    return Inspection(str(folder), files, **parts)


def inspect_made(folder: Path, prefix: str, names: Iterable[str]) -> Inspection:
    """Inspect artifacts in these files, without finding out who runs their operators. prefix: of the files' names."""
    checkpoint = read_checkpoint(folder / f"{prefix}{CHECKPOINT}")
    parts: dict[str, Any] = {"parameters": _parameters(checkpoint)}
    parts |= _ports(_load(folder / f"{prefix}{TRAINING}"), checkpoint.parameters)
    parts |= _optimizer(_load(folder / f"{prefix}{OPTIMIZER}"))
    return Inspection(str(folder), {name: (folder / name).stat().st_size for name in names}, **parts)


def _load(path: Path) -> onnx.ModelProto:
    """The model without the tensors that it keeps in other files."""
    return read_model(path, outside=False)


def _run(path: Path, model: onnx.ModelProto) -> dict[str, Any]:
    """The fields `operators` and `problem` for a model."""
    found, reasons = operators(model), list[str]()
    for each in (each for each in found if each.runner == NOBODY):
        if each.domain == MICROSOFT and each.name in NOT_LOWERED:
            why = NOT_LOWERED[each.name]
        elif each.domain in ("", "ai.onnx"):
            why = "onnxruntime has it not for these types, attributes or this opset; export the model with others"
        else:
            has = "that neither onnxruntime nor opgrad has; export the model without"
            why = f"it is an operator of {each.domain} {has}"
        reasons.append(f"nobody runs {each.name}: {why}")
    if lowered := [each.name for each in found if each.runner == LOWERING]:
        options = " ".join(f"--operator {name}" for name in lowered)
        command = f"opgrad lower {path} {options} -o {path.stem}_lowered.onnx"
        reasons.append(f"{', '.join(lowered)} must be written with plain operators first: {command}")
    if not reasons:
        outside = any(map(uses_external_data, model.graph.initializer))
        is_native = {each.runner for each in found} == {NATIVE}
        try:
            check_sizes(model, str(path))
            given = (read_shared(path)[0] if outside else model).SerializeToString()
            open_session(given, session_options(1), str(path), is_native, folds=False)
        except (ValueError, OSError) as error:
            reasons.append(str(error))
    return {"operators": found, "problem": "; ".join(reasons) or None}


def _tensor(value: onnx.ValueInfoProto) -> InspectedTensor:
    if not value.type.HasField("tensor_type"):
        return InspectedTensor(value.name, value.type.WhichOneof("value") or "unknown", ())
    spec = tensor_spec(value, texts=True)
    return InspectedTensor(spec.name, str(spec.dtype), spec.shape)


def _ports(model: onnx.ModelProto, parameters: Mapping[str, Any]) -> dict[str, list[InspectedTensor]]:
    """The inputs and outputs without parameters, gradients and flags."""
    values = [_tensor(value) for value in model.graph.input]
    trained = {each.name.removesuffix(BUFFER_SUFFIX) for each in values if each.name.endswith(BUFFER_SUFFIX)}
    hidden = {name + BUFFER_SUFFIX for name in trained} | trained | parameters.keys() | {RESET}
    accumulated = {name for node in model.graph.node if "Accumulator" in node.op_type for name in node.output}
    return {
        "inputs": [each for each in values if each.name not in hidden],
        "outputs": [_tensor(value) for value in model.graph.output if value.name not in accumulated],
    }


def _parameters(checkpoint: Checkpoint) -> list[InspectedParameter]:
    groups = {"trainable": checkpoint.trainable, "frozen": checkpoint.frozen}
    return [
        InspectedParameter(name, kind, str(array.dtype), array.shape, array.nbytes)
        for kind, arrays in groups.items()
        for name, array in arrays.items()
    ]


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


LONGEST = 60  # the most characters of a property in a table


def ports_text(ports: Iterable[InspectedTensor]) -> str:
    return "; ".join(f"{each.name} {each.dtype} {show(each.shape)}" for each in ports) or "none"


def parameter_table(parameters: Iterable[InspectedParameter]) -> Table:
    """A line for each parameter, and the sums."""
    table = Table("parameter", "shape", "dtype", "kind", row_styles=("", "dim"))
    table.add_column("bytes", justify="right")
    parameters = list(parameters)
    for each in parameters:
        table.add_row(each.name, show(each.shape), each.dtype, each.kind, f"{each.bytes:,}")
    table.add_section()
    for kind in dict.fromkeys(each.kind for each in parameters):
        of_kind = [each for each in parameters if each.kind == kind]
        table.add_row(f"{len(of_kind)} in all", "", "", kind, f"{sum(each.bytes for each in of_kind):,}")
    return table


def print_inspection(console: Console, found: Inspection) -> None:
    """Print tables of parameters and operators, and lines about the rest."""
    fit(console)
    console.print(facts(found.path, _rows(found)))
    if found.parameters:
        console.print(parameter_table(found.parameters))
    if found.operators:
        table = Table("operator", "domain")
        table.add_column("nodes", justify="right")
        table.add_column("run by")
        styles = {NOBODY: "red", LOWERING: "yellow", OPGRAD: "cyan"}
        for each in found.operators:
            row = each.name, each.domain or "ai.onnx", str(each.count), each.runner
            table.add_row(*row, style=styles.get(each.runner, ""))
        console.print(table)
    if found.tuning:
        print_adapters(console, "opgrad tune trains by default", found.tuning.adapters)
        console.print(facts("", found.tuning.facts().items()))
    for (fused, by), count in Counter((each.operators, each.by) for each in found.fused).items():
        console.print(f"in training {' + '.join(fused)} becomes {by}: {count} times", highlight=False)
    for problem in filter(None, (found.problem, found.optimizer_problem)):
        console.print(f"cannot run: {problem}", style="red", highlight=False)
    for problem in found.training.problems if found.training else ():
        console.print(f"cannot be trained: {problem}", style="red", highlight=False)
    if found.tuning_problem:
        console.print(f"cannot be tuned: {found.tuning_problem}", style="red", highlight=False)


def _rows(found: Inspection) -> list[tuple[str, str]]:
    missing = [name for name in FILES if name not in found.files] if Path(found.path).is_dir() else []
    rows = [("files", ", ".join(f"{name} {size(count)}" for name, count in found.files.items()))]
    rows += [("missing", ", ".join(missing))] if missing else []
    rows += [(title, ports_text(ports)) for title, ports in (("inputs", found.inputs), ("outputs", found.outputs))]
    rows += [("optimizer", optimizer_text(node)) for node in found.optimizer]
    rows += [("note", found.note)] if found.note else []
    return rows + _checkpoint_rows(found.checkpoint or {}) + _training_rows(found.training)


def _training_rows(training: Trainability | None) -> list[tuple[str, str]]:
    if training is None or not training.nodes:
        return []
    rows = [("graph", f"opset {training.opset}, {quantity(training.nodes, 'node')}")]
    rows += [("note", cut_note(*each)) for each in training.cut.items()]
    rows += [("note", turned_note(*each)) for each in [*training.turned.items()][:MOST_SHARED]]
    if training.trainable:
        rows.append(("trainable", amount(len(training.trainable), training.numbers)))
    if training.frozen:
        rows.append(("frozen", f"{len(training.frozen)} statistics of normalization"))
    if training.trainable:
        others = {name: f" ({', '.join(found)})" for name, found in training.modules.items()}
        rows.append(("weights", ", ".join(f"{name}{others.get(name, '')}" for name in training.trainable)))
    for name, layers in training.shared.items():
        rows.append(("shared", f"{name} by {listed(layers)}: trained as one, with --untie each its own"))
    if training.constants:
        described = (f"{name} ({what})" for name, what in training.constants.items())
        rows.append(("not trained", ", ".join(described)))
    if training.as_inputs:
        names = ", ".join(training.as_inputs)
        rows.append(("inputs", f"{names}: nodes take them for weights; what is trained are initializers"))
    if training.unused:
        rows.append(("unused", f"no output depends on {', '.join(training.unused)}"))
    if known := sum(not each.reason for each in training.attention):
        rows.append(("attention", f"found {quantity(known, 'time')}: no matrix of scores is kept for the gradient"))
    rows += [("attention", f"not found at {each.node}: {each.reason}") for each in training.attention if each.reason]
    for output in training.outputs:
        wanted = {
            array: [loss for loss in output.losses if output.arrays[loss] == array] for array in output.arrays.values()
        }
        words = [f"{', '.join(losses)} with an array {array}" for array, losses in wanted.items()]
        rows.append(("losses", f"of {output.name}: {'; '.join(filter(None, [*words, output.hint]))}"))
    return rows


def _checkpoint_rows(checkpoint: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, group in checkpoint.get("optimizers", {}).items():
        moments = ", ".join(group["moments"]) or "no moments"
        rate = shown_number(group["learning_rate"])
        rows.append(("checkpoint", f"{name}: step {group['step']}, learning rate {rate}, {moments}"))
    if checkpoint and not rows:
        rows.append(("checkpoint", "no optimizer state"))
    if checkpoint.get("nominal"):
        rows.append(("", "the names of the parameters only"))
    if outside := checkpoint.get("external_data"):
        rows.append(("", f"parameters in {outside['file']}, {size(outside['bytes'])}"))
    for name, value in checkpoint.get("properties", {}).items():
        text = shown_number(value)
        rows.append(("property", f"{name} = {text if len(text) <= LONGEST else text[:LONGEST] + '…'}"))
    return rows


def print_adapters(console: Console, title: str, adapters: Iterable[dict[str, Any]]) -> None:
    """Print a line for all adapters that are alike, with the layers where they are."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in adapters:
        alike = tuple(each[name] for name in ("role", "operator", "bits", "inputs", "outputs", "rank"))
        groups.setdefault(alike, []).append(each)
    table = Table("beside", "layers", "operator", title=title, title_justify="left")
    for heading in ("bits", "sizes", "rank", "adapters", "numbers"):
        table.add_column(heading, justify="right")
    for (role, operator, bits, inputs, outputs, rank), group in groups.items():
        numbers = (rank, len(group), sum(each["numbers"] for each in group))
        ranges: list[list[int]] = []  # layers behind each other as the first and the last; -1 is outside of layers
        for layer in sorted({each["layer"] for each in group} - {-1}):
            if ranges and ranges[-1][-1] == layer - 1:
                ranges[-1][1:] = [layer]
            else:
                ranges.append([layer])
        layers, sizes = ", ".join("-".join(map(str, ends)) for ends in ranges), f"{inputs} x {outputs}"
        table.add_row(role, layers, operator, str(bits), sizes, *(f"{number:,}" for number in numbers))
    fit(console)
    console.print(table)
