"""`python -m bench.steps`: training steps beside onnxruntime-training 1.19.2 and torch."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bench import command, instruction_sets
from bench.command import told
from bench.plots import save
from bench.run import store
from bench.steps.run import SECONDS, StepOptions, run
from bench.steps.tables import drawing, parts
from bench.tables import show
from opgrad.base.terminal import console

CELL = 6.0  # seconds that a cell takes beside those of --seconds
Folders = Annotated[list[Path] | None, typer.Argument(help="Artifact sets; default: those of examples/.")]


def steps(options: StepOptions, folders: Folders = None) -> None:
    """Training steps of artifact sets: graph, optimizer and Python, beside onnxruntime-training 1.19.2 and torch.

    By default of the sets of examples/ and of small GPT-2, BERT, ViT and MobileNetV2; how long first steps take; and
    graphs that opgrad generates, of the sets' models and of some in torch.
    """
    instruction_sets.hold(options.isa, "bench.steps")
    with told(CELL + options.seconds_of(SECONDS)) as progress:
        result = run(options, progress, folders or ())
    show(console(), parts(result))
    store(options.json, result, None)
    if options.plot is not None:
        save(drawing(result), options.plot)


main = partial(command.run, steps)

if __name__ == "__main__":
    main()
