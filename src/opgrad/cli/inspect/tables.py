"""The tables that the commands print about artifact sets and models."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from opgrad.cli.inspect.inspection import Inspection
from opgrad.cli.inspect.text import (
    amount,
    facts,
    fit,
    optimizer_text,
    parameter_table,
    ports_text,
    shown_number,
    size,
)
from opgrad.onnxruntime.runners import LOWERING, NOBODY, OPGRAD
from opgrad.training.files.artifact_set import FILES
from opgrad.training.make.checks import listed, quantity
from opgrad.training.make.outputs import cut_note
from opgrad.training.make.trainability import Trainability
from opgrad.tune.adapted_model import Adapted

LONGEST = 60  # the most characters of a property in a table


def print_inspection(console: Console, found: Inspection) -> None:
    """Print tables of parameters and operators, and lines about the rest."""
    fit(console)
    console.print(facts(found.path, _rows(found)))
    if found.parameters:
        console.print(parameter_table(found.parameters))
    if found.operators:
        console.print(_operator_table(found))
    if found.tuning:
        print_adapters(console, "opgrad tune trains by default", found.tuning.adapters)
        console.print(facts("", found.tuning.facts().items()))
    for operators, count in Counter((each.operators, each.by) for each in found.fused).items():
        console.print(f"in training {' + '.join(operators[0])} becomes {operators[1]}: {count} times", highlight=False)
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
    """The lines about the training of a model."""
    if training is None or not training.nodes:
        return []
    rows = [("graph", f"opset {training.opset}, {quantity(training.nodes, 'node')}")]
    rows += [("note", cut_note(*each)) for each in training.cut.items()]
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


def print_adapters(console: Console, title: str, adapters: Iterable[Adapted]) -> None:
    """Print a line for all adapters that are alike, with the layers where they are."""
    groups: dict[tuple[Any, ...], list[Adapted]] = {}
    for each in adapters:
        alike = (each.role, each.operator, each.bits, each.inputs, each.outputs, each.rank)
        groups.setdefault(alike, []).append(each)
    table = Table("beside", "layers", "operator", title=title, title_justify="left")
    for heading in ("bits", "sizes", "rank", "adapters", "numbers"):
        table.add_column(heading, justify="right")
    for (role, operator, bits, inputs, outputs, rank), group in groups.items():
        numbers = (rank, len(group), sum(each.numbers for each in group))
        layers, sizes = _ranges(each.layer for each in group), f"{inputs} x {outputs}"
        table.add_row(role, layers, operator, str(bits), sizes, *(f"{number:,}" for number in numbers))
    fit(console)
    console.print(table)


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers of layers, those behind each other as the first and the last; -1 is outside of layers."""
    found: list[list[int]] = []
    for number in sorted(number for number in set(numbers) if number >= 0):
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in found)
