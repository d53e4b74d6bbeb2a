"""A model that `opgrad train` shall train as an integer model."""

from pathlib import Path
from typing import TYPE_CHECKING

from opgrad.cli.commands.making import QuantizationOptions
from opgrad.cli.commands.options import said

if TYPE_CHECKING:
    from opgrad.training.run.recipe import Recipe


def check(options: QuantizationOptions) -> None:
    """Raise ValueError for options that do not go together."""
    from opgrad.training.quantization import KINDS

    if options.quantize is None:
        others = ("quantize_weights", "per_channel", "calibrate", "distill", "temperature")
        if used := [name for name in others if getattr(options, name) not in (None, [])]:
            raise ValueError(f"train: --{used[0].replace('_', '-')} is of a quantized model, expected --quantize, too")
        return
    if options.quantize not in KINDS:
        raise ValueError(f"train: --quantize is {options.quantize!r}, expected {' or '.join(KINDS)}")
    if options.calibrate is not None and options.quantize != "int8":
        raise ValueError(f"train: --calibrate is for activations, and {options.quantize} rounds weights alone")
    if options.temperature is not None and options.distill is None:
        raise ValueError("train: --temperature is of what is learned from the float model, expected --distill, too")


def prepared(model: Path, options: QuantizationOptions, recipe: "Recipe", data: Path | None, folder: Path) -> Path:
    """The file of the model that is trained, in a folder: it rounds as the integer model will."""
    from opgrad.base.writing import new_file
    from opgrad.onnx.graph.loading import read_model
    from opgrad.training.quantization import prepare, with_teacher
    from opgrad.training.quantization.calibration import calibration

    given, kind = read_model(model, "train"), options.quantize or ""
    try:
        rows = calibration(given, recipe, data, options.calibrate) if kind == "int8" else ()
        weights = options.quantize_weights or None
        made = prepare(given, kind, rows, per_channel=bool(options.per_channel), weights=weights)
        if options.distill is not None:
            made = with_teacher(made, given)
    except (NotImplementedError, TypeError, ValueError) as error:
        names = {"weights": "quantize_weights", "kind": "quantize"}
        raise ValueError(f"train: {model}: {said(error, 'quantization.prepare', names)}") from None
    new_file(folder / model.name, made.SerializeToString())
    return folder / model.name


def convert_file(file: Path) -> None:
    """Make the integer model of a trained one, in its file."""
    from opgrad.base.writing import replace_file
    from opgrad.training.quantization import convert

    replace_file(file, convert(file).SerializeToString())
