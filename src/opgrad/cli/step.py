"""`opgrad step`: the training step of an artifact set as one plain ONNX model."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.text import Text

from opgrad.base.terminal import console, existing, visible
from opgrad.cli.artifacts import made_folder, numbers
from opgrad.cli.options import opt, option, positive, takes_groups

if TYPE_CHECKING:
    from opgrad.training.export.rules import StepRule


class StepOptimizer(StrEnum):
    """The optimizers of an exported step; nesterov is momentum's."""

    AdamW = "adamw"
    SGD = "sgd"
    Momentum = "momentum"
    Nesterov = "nesterov"
    Lion = "lion"
    Adagrad = "adagrad"


class Dtype(StrEnum):
    Float32 = "float32"
    Float16 = "float16"


@dataclass(frozen=True)
class StepOptimizerOptions:
    """The optimizer. Those below `optimizer` are its attributes; the learning rate is an input of the step."""

    PANEL: ClassVar = "Optimizer"
    optimizer: StepOptimizer | None = opt(
        f"The optimizer is {', '.join(StepOptimizer)}; default: that of the set.", metavar="KIND"
    )
    betas: str | None = opt(
        "The decay of the moments of adamw and lion; default: 0.9,0.999, of lion 0.9,0.99.",
        metavar="NUMBERS",
        callback=numbers,
    )
    eps: float | None = opt("What adamw and adagrad add to their divisor; default: 1e-8, of adagrad 1e-10.")
    weight_decay: float | None = opt("The weight decay of all but sgd; default: 0, of adamw 0.01.")
    momentum: float | None = opt("The momentum of momentum and nesterov; default: 0.9.")
    adam_mode: int | None = opt("The order of adamw's operations, 1 as Hugging Face, 0 as PyTorch; default: 0.")

    def rule(self) -> "StepRule | None":
        """The rule, None for that of the set. Raises ValueError for an attribute of another optimizer."""
        from opgrad.cli.text import SETTINGS
        from opgrad.training.export.rules import rule

        given = {name: value for name, value in vars(self).items() if name != "optimizer" and value is not None}
        if self.optimizer is None:
            if given:
                raise ValueError(f"step: {option(next(iter(given)))} is of an optimizer, expected --optimizer, too")
            return None
        attributes: dict[str, Any] = {}
        for name, value in given.items():
            names = SETTINGS.get(name, (name,))
            values = [float(each) for each in value.split(",")] if name == "betas" else [value]
            if len(values) != len(names):
                raise ValueError(f"step: {option(name)} is {value}, expected {len(names)} numbers")
            attributes |= dict(zip(names, values, strict=True))
        return rule(self.optimizer, **attributes)


@dataclass(frozen=True)
class StepOptions:
    """The inputs, outputs and files of the step."""

    PANEL: ClassVar = "Step"
    accumulate: bool = opt("Add gradients of several batches before a step.", default=False)
    clip_norm: float | None = opt("Largest norm of all gradients; default: as the set.", callback=positive)
    flat: bool = opt("All parameters in one input, all moments in another.", default=False)
    weights: Dtype = opt("The dtype in which parameters are kept.", default=Dtype.Float32)
    opset: int | None = opt("The version of ai.onnx; default: the graph's, 16 at least.")
    inline: bool = opt("No functions, for runtimes without them.", default=False)
    output_name: list[str] | None = opt("A value of the graph as output, or accuracy; default: none.", metavar="NAME")

    evaluation: bool = opt("Also write the model of loss, scores, accuracy.", "--eval", default=False)
    inference: bool = opt("Also write the model of the scores.", "--infer", default=False)
    checkpoint: Path | None = opt(
        "The checkpoint whose parameters and moments the weights are; default: the set's.",
        callback=existing,
        dir_okay=False,
    )


@dataclass(frozen=True)
class LanguageOptions:
    """What is trained of a language model; see `opgrad tune`."""

    PANEL: ClassVar = "Language model"
    lora: list[str] | None = opt("The adapters, such as 'rank=8, target=*q_proj*'; default: attention.", metavar="TEXT")
    train: list[str] | None = opt("Weights to train themselves; default: none.", metavar="PATTERN")
    adapter: Path | None = opt("An adapter to train further, as of opgrad tune; default: none.", callback=existing)
    max_length: int | None = opt("The most tokens of a row; default: 2048.", min=2)


@takes_groups
def step(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The artifact set, or a language model's folder.", callback=existing)
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", dir_okay=False, help="File of the step, such as step.onnx; its folder is made."),
    ],
    options: StepOptions,
    optimizer: StepOptimizerOptions,
    language: LanguageOptions,
) -> None:
    """Write a training step as one plain ONNX model, for every runtime and without opgrad.

    Beside step.onnx stand step.json, which tells a client all that it must know, and step.safetensors, the weights. DIR
    is an artifact set, or a language model as opgrad tune takes it: adapters are trained, and files with weights of the
    model are copied as they are.

    Example: opgrad step examples/digits --flat --eval --infer -o step.onnx
    """
    from opgrad.cli import text
    from opgrad.training.export import export_step
    from opgrad.training.files.artifact_set import FILES
    from opgrad.training.files.dataset import show
    from opgrad.training.make.checks import quantity

    given = {**vars(options), "optimizer": optimizer.rule()}
    given["outputs"] = given.pop("output_name") or ()
    wanted = {"eval": given.pop("evaluation"), "infer": given.pop("inference")}
    given["models"] = [name for name, is_wanted in wanted.items() if is_wanted]
    trained, notes = {name: value for name, value in vars(language).items() if value}, tuple[str, ...]()
    with made_folder(output.absolute().parent):
        is_set = any((directory / name).exists() for name in FILES)
        if trained or ((directory / "tokenizer.json").is_file() and not is_set):
            from opgrad.tune import Tuner

            tuner = Tuner(directory, **trained)
            made, notes = tuner.export_step(output, **given), tuner.adapted.setting().notes
        else:
            made = export_step(directory, output, **given)
    manifest, screen = made.manifest, console()
    text.fit(screen)
    files = [(made.files[kind].name, text.size(entry["bytes"])) for kind, entry in manifest["files"].items()]
    batch = ", ".join(f"{each['name']} {each['dtype']} {show(each['shape'])}" for each in manifest["batch"])
    settings = text.settings_text({name: value for name, value in manifest["optimizer"].items() if name != "name"})
    files += [(each["name"], f"{text.size(each['bytes'])} of the base") for each in manifest["data"]]
    rows = [
        *files,
        (made.files["manifest"].name, "names, sizes, checksums"),
        ("takes", f"{batch}; {', '.join(manifest['scalars'])}"),
        ("keeps", text.amount(len(manifest["state"]), sum(each["bytes"] for each in manifest["state"]) // 4)),
        ("gives", ", ".join(manifest["outputs"])),
        ("optimizer", ": ".join(filter(None, (manifest["optimizer"]["name"], settings)))),
        ("opset", f"{manifest['opset']}, {quantity(manifest['functions'], 'function')}"),
    ]
    screen.print(text.facts(f"step of {manifest['name']} in {made.files['step'].parent}", rows))
    for note in notes:
        screen.print(Text(visible(f"note: {note}")))
