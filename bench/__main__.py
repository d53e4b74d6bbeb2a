"""Measure the operators beside torch, onnxruntime, SciPy and NumPy.

Everybody uses the same arrays and number of threads, and takes turns, in the two ways in which users work: with results
in memory that is given, after "given", and in new memory, after "new". GB/s of the first count each input and each
result once; "of copy" compares that with a copy of as many bytes; "ratio" is the best peer's time over ours; "ulp" is
the worst error against float64. Other work on the machine spoils the figures. On CUDA times are the device's, and
"host" is that of our call; --predict sets beside them what a model of the time predicts, which it prints where there is
no device, too.

With --sweep softmax, log_softmax and their gradients, or --ops, on rows of 1 to 4 million elements, along inner axes,
and in memory of several kinds of pages: time per element. With --load a few cells while another process computes. With
--isa for other instruction sets.

Example: python -m bench --ops relu,softmax_grad --json result.json
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import instruction_sets, tables
from bench.figures import read
from bench.options import BenchOptions
from bench.progress import QUICK_LIMIT, told
from bench.run import measured
from opgrad.base.terminal import console
from opgrad.cli import machine

Result = Mapping[str, Any]

# Seconds that a cell takes beside those of --seconds, on two cores: arrays, compiling, the reference.
CELL, SWEEP_CELL = 3.5, 0.4


def main(words: Sequence[str] | None = None) -> None:
    """Measure what a command line asks for, print the tables, write the files."""
    kind = argparse.RawDescriptionHelpFormatter
    options = BenchOptions.parsed(
        argparse.ArgumentParser("python -m bench", None, __doc__, formatter_class=kind), words
    )
    try:
        options.check()
        if sets := instruction_sets.in_processes(options):
            _bench_sets(options, sets)
        elif options.load:
            _bench_load(options)
        elif not options.predict or _has_device(options):
            pictures = _pictures(options)
            result = _bench_cells(options)
            pictures and pictures.write(options, [result])
    except (ValueError, RuntimeError) as error:
        sys.exit(str(error))


def _bench_cells(options: BenchOptions) -> Result:
    """Measure cells, print the tables; the result that is written."""
    each = (SWEEP_CELL if options.sweep else CELL) + (options.seconds or 0.0)
    with told(each, QUICK_LIMIT if options.quick else None) as progress:
        result, written = measured(options, progress)
    tables.show(console(), result)
    if options.predict:
        from bench.cuda import predictions

        predictions.show_beside(console(), result)
    return written


def _bench_load(options: BenchOptions) -> None:
    """Measure with and without another process that computes, print the table."""
    from bench.load import PEERS, SECONDS, cells, measure
    from bench.peers import chosen, installed

    wanted = chosen(options.names("peers") or [name for name in PEERS if name in installed()], installed())
    found = cells(options.names("ops"), options.names("dtypes"), options.names("shapes"))
    seconds = options.seconds_of(SECONDS)
    with told(CELL + seconds) as progress:
        losses = measure(found, wanted, seconds, progress)
    tables.show_load(console(), losses)


def _bench_sets(options: BenchOptions, sets: list[str]) -> None:
    """Measure each instruction set in a process of its own, which prints its tables; then set them side by side."""
    pictures = _pictures(options)
    with TemporaryDirectory() as folder:
        json = options.json or (None if options.load else Path(folder) / "result.json")
        files = instruction_sets.measure_each(replace(options, json=json), sets, ["bench"])
        results = [read(file) for file in files.values()]
    tables.show_sets(console(), results)
    pictures and pictures.write(options, results)


def _has_device(options: BenchOptions) -> bool:
    """Whether there is a device to be measured; where there is none, predictions are printed alone."""
    from bench.cuda import predictions

    problem = machine.cuda_problem()
    if problem:
        screen = console()
        predictions.show(screen, options.names("ops"), options.names("dtypes"))
        screen.print(f"Nothing is measured: {problem}.", highlight=False)
    return not problem


def _pictures(options: BenchOptions) -> Any:
    """The module that draws results, if anything is to be drawn; before measuring, as a library may be missing."""
    if options.plot is None and options.html is None:
        return None
    from bench import page

    return page


if __name__ == "__main__":
    main()
