"""Training steps of artifact sets: graph, optimizer and Python, beside onnxruntime-training 1.19.2 and torch.

By default of the sets of examples/ and of small GPT-2, BERT, ViT and MobileNetV2; how long first steps take; and graphs
that opgrad generates, of the sets' models and of some in torch.
"""

import argparse
import sys
from collections.abc import Sequence

from bench import instruction_sets
from bench.command import told
from bench.plots import save
from bench.run import store
from bench.steps import tables
from bench.steps.run import SECONDS, StepOptions, run
from opgrad.base.terminal import console

CELL = 6.0  # seconds that a cell takes beside those of --seconds


def main(words: Sequence[str] | None = None) -> None:
    """Measure what a command line asks for, print the tables, write the files."""
    options = StepOptions.parsed(argparse.ArgumentParser(prog="python -m bench.steps", description=__doc__), words)
    try:
        instruction_sets.hold(options.isa, "bench.steps", words)
        with told(CELL + options.seconds_of(SECONDS)) as progress:
            result = run(options, progress)
        tables.show(console(), result)
        if options.json is not None:
            store(options.json, result, None)
        if options.plot is not None:
            save(tables.drawing(result), options.plot)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"bench.steps: {error}")


if __name__ == "__main__":
    main()
