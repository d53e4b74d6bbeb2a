"""The command `opgrad artifacts`."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from rich.text import Text

from opgrad.base.terminal import console, existing, visible
from opgrad.cli.commands.making import LossOptions, Making, OptimizerOptions, ParameterOptions, make
from opgrad.cli.commands.options import opt, positive, takes_groups

if TYPE_CHECKING:
    from opgrad.training.make.artifacts import Artifacts


@dataclass(frozen=True)
class FileOptions:
    """Which files are written."""

    PANEL: ClassVar = "Files"
    output: Path = opt("The folder; made if need be.", "--output", "-o", default=MISSING, file_okay=False)
    prefix: str = opt("What stands in front of the names of all files; default: nothing.", default="")
    output_name: list[str] | None = opt(
        "A value that both models have as an output, too; default: none.", metavar="NAME"
    )
    nominal: bool = opt("Write a checkpoint without values, too.", default=False)
    ort_format: bool = opt("Write the models in ORT format, too.", default=False)
    custom_op_library: Path | None = opt(
        "A library with operators of your own, for --ort-format; default: none.", callback=existing
    )
    precision: str = opt(
        "What a model in float16 or bfloat16 computes in: float32, or model, its own type.", default="float32"
    )


@takes_groups
def artifacts(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An .onnx file.", callback=existing, dir_okay=False)],
    files: FileOptions,
    parameters: ParameterOptions,
    loss: LossOptions,
    optimizer: OptimizerOptions,
    clip_norm: Annotated[
        float | None,
        typer.Option(
            callback=positive, help="The largest norm of all gradients; default: no limit.", rich_help_panel="Optimizer"
        ),
    ] = None,
) -> None:
    """Make training artifacts of a model: training model, eval model, optimizer model and checkpoint.

    Shows what was chosen. Train them with `opgrad train DIR`, with opgrad.training.api, or with onnxruntime-training.

    Example: opgrad artifacts model.onnx --loss cross-entropy --freeze 'backbone.*' -o artifacts
    """
    screen = console()
    with screen.status(Text(visible(f"making artifacts of {model}"))):
        made = make(
            model,
            Making(parameters, loss, optimizer),
            files.output,
            "artifacts",
            clip_norm,
            prefix=files.prefix,
            additional_output_names=files.output_name or None,
            nominal_checkpoint=files.nominal,
            ort_format=files.ort_format,
            custom_op_library=files.custom_op_library,
            precision=files.precision,
        )
    _print(made, files.prefix, str(loss.loss or "the model's own"))


def _print(made: "Artifacts", prefix: str, loss: str) -> None:
    """Print what was chosen and written."""
    from opgrad.cli.inspect import inspection, text

    screen = console()
    text.fit(screen)
    found = inspection.inspect_made(made.directory, prefix, made.files)
    rows = [("files", ", ".join(f"{name} {text.size(count)}" for name, count in found.files.items()))]
    rows += [("loss", f"{loss}: {made.loss}"), ("batch", text.ports_text(found.inputs))]
    rows += [("outputs", ", ".join(made.outputs))] if len(made.outputs) > 1 else []
    rows += [("optimizer", text.optimizer_text(node)) for node in found.optimizer]
    for what, names in (("trainable", made.trainable), ("frozen", made.frozen)):
        count = sum(made.sizes.get(name, 0) for name in names)
        rows.append((what, text.amount(len(names), count)))
    rows += [("constants", f"not trained: {', '.join(made.constants)}")] if made.constants else []
    rows += [("note", note) for note in made.notes]
    screen.print(text.facts(f"artifacts in {made.directory}", rows))
    screen.print(text.parameter_table(found.parameters))
