"""Training steps of artifact sets: graph, optimizer and Python, beside onnxruntime-training 1.19.2 and torch.

By default of the sets of examples/ and of small GPT-2, BERT, ViT and MobileNetV2; how long first steps take; and graphs
that opgrad generates, of the sets' models and of some in torch.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import instruction_sets, page
from bench.figures import read
from bench.progress import told
from bench.run import store
from bench.steps import tables
from bench.steps.run import SECONDS, StepOptions, run
from opgrad.base.terminal import console

CELL = 6.0  # seconds that a cell takes beside those of --seconds


def main(words: Sequence[str] | None = None) -> None:
    """Measure what a command line asks for, print the tables, write the files."""
    options = StepOptions.parsed(argparse.ArgumentParser(prog="python -m bench.steps", description=__doc__), words)
    try:
        if sets := instruction_sets.in_processes(options):
            with TemporaryDirectory() as folder:
                kept = replace(options, json=options.json or Path(folder) / "result.json")
                results = [read(each) for each in instruction_sets.measure_each(kept, sets, ["bench.steps"]).values()]
        else:
            results = [_measured(options)]
        page.write(options, results, tables.drawing, tables.markdown)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"bench.steps: {error}")


def _measured(options: StepOptions) -> dict[str, object]:
    """The result, which is printed, and written if it is asked for."""
    with told(CELL + options.seconds_of(SECONDS)) as progress:
        result = run(options, progress)
    tables.show(console(), result)
    return result if options.json is None else store(options.json, result, None)


if __name__ == "__main__":
    main()
