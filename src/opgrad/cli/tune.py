"""The command `opgrad tune`."""

import re
import shlex
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from opgrad.base.arguments import ArgumentError
from opgrad.base.terminal import console, existing, visible
from opgrad.cli.artifacts import results_folder
from opgrad.cli.options import RunSettings, given, opt, takes_groups, words

if TYPE_CHECKING:
    from opgrad.training.engine.distributed import OneProcess
    from opgrad.tune import Tuner

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class What:
    """What is trained."""

    PANEL: ClassVar = "Model"
    lora: list[str] | None = opt("Adapters such as 'rank=8, alpha=16, target=q|v'; default: attention.", metavar="TEXT")
    train: list[str] | None = opt("Weights to train themselves, without adapters; default: none.", metavar="PATTERN")
    task: str = opt(
        "The task, with options: write, 'prefer, beta=0.1', 'embed, sizes=64', 'classify, labels=neg|pos' or rank.",
        default="write",
        metavar="TEXT",
    )
    adapter: Path | None = opt(
        "An adapter to use or train further: a folder, of PEFT too, or a step's weights; default: none.",
        callback=existing,
    )
    memory: str | None = opt(
        "The most that a step may take, such as 4GB; default: 1.5 times the base, and 1 GB for 512 tokens.",
        metavar="SIZE",
    )
    max_length: int = opt("The most tokens of an example; longer ones are cut.", default=2048, min=2)
    pack: bool = opt("Batches are one row of examples, without padding.", default=False)
    weight_decay: float = opt("The weight decay of AdamW.", default=0.0, min=0)


@dataclass(frozen=True)
class Texts:
    """Texts that are read and written."""

    data: Path | None = opt(
        "Examples: .jsonl, .json, .csv or .parquet, or a folder of such files; default: no training.", callback=existing
    )
    output: Path | None = opt("Folder for the results; default: tuned/NAME.", file_okay=False)
    train_on: str = opt(
        "What is learned: answers and completions (assistant), of a chat the last answer alone (last), or all.",
        default="assistant",
        metavar="KIND",
    )
    skip_bad: bool = opt("Leave wrong examples out, and tell how many, instead of an error.", default=False)
    show: int = opt("Show so many examples, with what is learned of them marked, and do not train.", default=0, min=0)
    sample: list[str] | None = opt("A prompt that is written on after every epoch; default: none.", metavar="PROMPT")
    resume: bool = opt("Go on from last.checkpoint in the output.", "--resume", default=False)


@dataclass(frozen=True)
class Trying:
    """The uses of a model or an adapter that exists."""

    PANEL: ClassVar = "Use"
    prompt: str | None = opt("The prompt to write on from; default: none.")
    tokens: int = opt("The most tokens that are written.", default=128, min=1)
    temperature: float = opt("How freely tokens are drawn; 0 writes the likeliest each time.", default=0.0, min=0)
    chat: bool | None = opt("Whether the prompt is a message in the model's template; default: if it has one.")
    merge: Path | None = opt("The folder for one model with the adapter in it; default: none.", file_okay=False)


@takes_groups
def tune(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Folder with model.onnx and tokenizer.json, or an .onnx file in one.",
            callback=existing,
        ),
    ],
    what: What,
    texts: Texts,
    settings: RunSettings,
    trying: Trying,
) -> None:
    """Fine-tune a language model, or an encoder, on texts: adapters (LoRA) beside its weights, or weights.

    Writes the adapter for onnxruntime and onnxruntime-genai (adapter.onnx_adapter, and model.onnx, which takes it), the
    same for PEFT (adapter_config.json, adapter_model.safetensors), and all figures. The base stays as it is. Started by
    torchrun, the processes share out every batch.

    Example: opgrad tune model/ --data chats.jsonl --lora 'rank=8, alpha=16' --epochs 2 --output tuned/
    """
    written = texts.output if what.adapter is not None else None  # its files, if it is not trained further
    if texts.data is None and trying.prompt is None and trying.merge is None and written is None:
        raise ValueError("tune: nothing to do, expected --data to train, or --prompt or --merge to use what is there")
    if texts.data is not None and (trying.prompt is not None or trying.merge is not None):
        raise ValueError("tune: --prompt and --merge use what is there, expected no --data; first train, then use it")
    _check_used(what, texts, settings, trying)
    from opgrad.training.engine import distributed
    from opgrad.tune import Tuner

    processes = distributed.begin()
    output = texts.output or Path("tuned") / (model.resolve().name if model.is_dir() else model.stem)
    screen = console(not processes.is_first)
    with processes.failing_together():
        trains = texts.data is not None and not texts.show and processes.is_first
        with results_folder(output) if trains else nullcontext():
            tuner = Tuner(
                model, lora=what.lora, train=what.train or (), adapter=what.adapter,
                memory=size_in_bytes(what.memory), max_length=what.max_length, weight_decay=what.weight_decay,
                seed=settings.seed or 0, pack=what.pack, task=what.task,
            )  # fmt: skip
            if texts.data is not None:
                if texts.show:
                    _show(tuner, texts, screen)
                    return
                going_on = given(what, replace(texts, resume=True, output=output), settings)
                command = shlex.join(["opgrad", "tune", str(model), *words(going_on)])
                _train(tuner, texts, output, settings, processes, screen, command)
                return
    if trying.prompt is not None:
        screen.print(_written(tuner, trying.prompt, what.adapter, trying, settings.seed or 0))
    if written is not None:
        screen.print(f"written  {written}: {', '.join(tuner.save(written))}")
    if trying.merge is not None:
        screen.print(f"written  {trying.merge}: {', '.join(tuner.merge(trying.merge))}")


def _check_used(what: What, texts: Texts, settings: RunSettings, trying: Trying) -> None:
    """Raise ValueError for an option that decides nothing, as the one that it is for is not given."""
    adapter = what.adapter
    what = replace(what, adapter=None, task=What.task)  # which say what a model is, whatever is done with it
    trained = what, replace(texts, data=None, output=None), replace(settings, seed=None)
    for name, value, options in (
        ("--data", texts.data, given(*trained)),
        ("--prompt", trying.prompt, given(replace(trying, prompt=None, merge=None))),
        ("--data or --adapter", texts.data or adapter, ["--output"] if texts.output else []),
        ("--data or --prompt", texts.data or trying.prompt, [] if settings.seed is None else ["--seed"]),
    ):
        if value is None and options:
            raise ValueError(f"tune: {next(iter(options))} is for {name}, which is not given")


def size_in_bytes(text: str | None) -> int | None:
    """A size such as 4GB or 512M as a number of bytes. Raises ArgumentError."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if found is None:
        raise ArgumentError("memory", f"is {text!r}, expected a size such as 4GB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def _train(
    tuner: "Tuner", texts: Texts, output: Path, settings: RunSettings, processes: "OneProcess", screen: Console,
    command: str,
) -> None:  # fmt: skip
    """Train, and print what came of it. command: goes on with the run."""
    from opgrad.cli.inspection import print_adapters
    from opgrad.training.make.checks import quantity
    from opgrad.training.run.fit import Interrupted
    from opgrad.training.run.report import TrainingBar
    from opgrad.training.run.state import LAST, Resumption
    from opgrad.tune.adapted_model import adapted

    assert texts.data is not None
    model, waiting = tuner.adapted, [tuner.adapters] if tuner.adapters else []
    adapters = quantity(len(tuner.adapters), "adapter")
    what = adapters if tuner.adapters else f"weights of its own are trained: {', '.join(model.train)}"
    screen.print(f"{model.file}: {what}", soft_wrap=True)

    def log(line: str) -> None:
        """Print a line about the run, before the first one the adapters: by then options and data have proved right."""
        while waiting:
            print_adapters(screen, "", adapted(waiting.pop()))
        screen.print(line)

    if settings.validation is not None and Path(settings.validation).exists():  # a file of examples
        given_settings = {**replace(settings, validation=None).of_recipe(), "validation": Path(settings.validation)}
    else:
        given_settings = settings.of_recipe()
    try:
        last = output / LAST if texts.resume else None
        state = Resumption.read(last).state if last is not None and last.is_file() else None
        epochs = settings.epochs or (model.task.DEFAULTS["epochs"] if state is None else state.recipe.epochs)
        with TrainingBar(screen, model.folder.resolve().name, "tokens", epochs) as bar:
            run = tuner.fit(
                texts.data, output, train_on=texts.train_on, skip_bad=texts.skip_bad, samples=texts.sample or (),
                progress=bar, log=log, resume=texts.resume, processes=processes, loggers=settings.log or (),
                **given_settings,
            )  # fmt: skip
    except Interrupted as interruption:
        raise RuntimeError(f"{interruption}; to go on: {command}") from None
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    history, best = run.state.history, run.best_epoch
    table.add_row("trained", f"{run.trained:,} numbers on {run.rows:,} examples, {len(history)} times")
    table.add_row(
        "training loss", f"{history[0].train_loss:.4f} in the first epoch, {history[-1].train_loss:.4f} in the last"
    )
    perplexities = [each for each in run.perplexities() if each is not None]
    if best is not None and perplexities:
        table.add_row(
            "perplexity", f"{perplexities[0]:.3g} before, {min(perplexities[1:]):.3g} after epoch {best}, the best"
        )
    for name, (before, after) in run.figures.items():
        table.add_row(name, f"{after:.4f}" if before is None else f"{before:.4f} before, {after:.4f} after")
    table.add_row("speed", f"{run.tokens_per_second:,.0f} tokens/s")
    table.add_row("written", f"{run.output}: {', '.join(run.files)}")
    screen.print(table)


def _show(tuner: "Tuner", texts: Texts, screen: Console) -> None:
    """Print the first examples: what is learned in green, and in «brackets» where there are no colours."""
    from opgrad.tune.tuner import notes

    assert texts.data is not None
    model = tuner.adapted
    model.task.refuse(show=texts.show)
    examples = model.examples(texts.data, texts.train_on, texts.skip_bad)
    for number in range(min(texts.show, len(examples))):
        text = Text(style="dim")
        for part, is_learned in examples[number].spans():
            lines = model.tokenizer.decode(part, special=True).split("\n")
            written = "\n".join(map(visible, lines))
            bare = written if screen.color_system else f"«{written}»"
            text.append(bare if is_learned else written, "not dim green" if is_learned else "")
        screen.print(Panel(text, title=examples.origin(number), title_align="left"))
    for line in notes(examples.told, model.max_length):
        screen.print(line)


def _written(tuner: "Tuner", prompt: str, adapter: Path | None, trying: Trying, seed: int) -> str:
    """The model's text after a prompt: by onnxruntime-genai, if it is installed and the folder has its CONFIG."""
    from opgrad.tune import adapted_model
    from opgrad.tune.outputs import ADAPTER

    model, folder = tuner.adapted, adapter or tuner.adapted.folder
    file = None if adapter is None else adapter / ADAPTER
    settings = trying.tokens, trying.temperature, seed
    is_made = (folder / adapted_model.CONFIG).is_file() and (file is None or file.is_file())
    if not is_made or find_spec("onnxruntime_genai") is None:
        return model.write(prompt, *settings, trying.chat)
    return model.tokenizer.decode(
        list(adapted_model.write_by_genai(folder, file, model.prompt_tokens(prompt, trying.chat), *settings))
    )
