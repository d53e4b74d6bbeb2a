"""The command `opgrad bench`."""

import inspect
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from opgrad.bench.options import BenchOptions, flag_of
from opgrad.terminal import console

Result = Mapping[str, Any]

# Seconds that a cell takes beside those of --seconds, on two cores: arrays, compiling, the reference.
CELL, SWEEP_CELL = 3.5, 0.4


def bench(**given: Any) -> None:
    """Measure the operators beside torch, onnxruntime, SciPy and NumPy.

    Everybody uses the same arrays and number of threads, and takes turns, in
    the two ways in which users work: with results in memory that is given,
    after "given", and in new memory, after "new".
    GB/s of the first count each input and each result once; "of copy" compares
    that with a copy of as many bytes; "ratio" is the best peer's time over ours; "ulp"
    is the worst error against float64. Other work on the machine spoils the
    figures. On CUDA times are the device's, and "host" is that of our call;
    --predict sets beside them what a model of the time predicts, which it
    prints where there is no device, too.

    With --sweep softmax, log_softmax and their gradients, or --ops, on rows
    of 1 to 4 million elements, along inner axes, and in memory of several
    kinds of pages: time per element. With --load a few cells while another
    process computes. With --isa for other instruction sets.

    Example: opgrad bench --ops relu,softmax_grad --json result.json
    """
    options = BenchOptions(**given)
    options.check()
    from opgrad.bench import instruction_sets

    if sets := instruction_sets.in_processes(options):
        _bench_sets(options, sets)
    elif options.load:
        _bench_load(options)
    elif not options.predict or _has_device(options):
        pictures = _pictures(options)
        result = _bench_cells(options)
        pictures and pictures.write(options, [result])


def _parameter(name: str, default: Any) -> inspect.Parameter:
    """An option as typer takes it."""
    kind, said = BenchOptions.said()[name]
    told = typer.Option(flag_of(name), metavar=said.metavar, help=said.help, min=0 if name == "seconds" else None)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, told])


PARAMETERS = [_parameter(each.name, each.default) for each in fields(BenchOptions)]
bench.__signature__ = inspect.Signature(PARAMETERS)  # type: ignore[attr-defined]


def _bench_cells(options: BenchOptions) -> Result:
    """Measure cells, print the tables; the result that is written."""
    from opgrad.bench.progress import QUICK_LIMIT, told
    from opgrad.bench.run import measured
    from opgrad.bench.tables import show

    each = (SWEEP_CELL if options.sweep else CELL) + (options.seconds or 0.0)
    with told(each, QUICK_LIMIT if options.quick else None) as progress:
        result, written = measured(options, progress)
    show(console(), result)
    if options.predict:
        from opgrad.bench.cuda import predictions

        predictions.show_beside(console(), result)
    return written


def _bench_load(options: BenchOptions) -> None:
    """Measure with and without another process that computes, print the table."""
    from opgrad.bench.load import PEERS, SECONDS, cells, measure
    from opgrad.bench.peers import chosen, installed
    from opgrad.bench.progress import told
    from opgrad.bench.tables import show_load

    wanted = chosen(options.names("peers") or [name for name in PEERS if name in installed()], installed())
    found = cells(options.names("ops"), options.names("dtypes"), options.names("shapes"))
    seconds = options.seconds_of(SECONDS)
    with told(CELL + seconds) as progress:
        losses = measure(found, wanted, seconds, progress)
    show_load(console(), losses)


def _bench_sets(options: BenchOptions, sets: list[str]) -> None:
    """Measure each instruction set in a process of its own, which prints its tables; then set them side by side."""
    from opgrad.bench import instruction_sets
    from opgrad.bench.figures import read
    from opgrad.bench.tables import show_sets

    pictures = _pictures(options)
    with TemporaryDirectory() as folder:
        json = options.json or (None if options.load else Path(folder) / "result.json")
        files = instruction_sets.measure_each(replace(options, json=json), sets, ["opgrad", "bench"])
        results = [read(file) for file in files.values()]
    show_sets(console(), results)
    pictures and pictures.write(options, results)


def _has_device(options: BenchOptions) -> bool:
    """Whether there is a device to be measured; where there is none, predictions are printed alone."""
    from opgrad import machine
    from opgrad.bench.cuda import predictions

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
    from opgrad.bench import page

    return page
