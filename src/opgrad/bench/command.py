"""The command `opgrad bench`."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from opgrad.bench.options import CELLS, HINTS, LOAD, SAID, TRAINING, Options, flag_of
from opgrad.terminal import console, folders_argument

Result = Mapping[str, Any]

# Seconds that a cell takes beside those of --seconds, on two cores: arrays, compiling, the reference.
CELL, SWEEP_CELL, TRAINING_CELL = 3.5, 0.4, 6.0


def bench(**given: Any) -> None:
    """Measure the operators beside torch, onnxruntime, SciPy and NumPy.

    Everybody uses the same arrays and number of threads, and takes turns, in
    the two ways in which users work: with results in new memory, which "time"
    and what follows are about, and in memory that is given, after "given".
    GB/s count each input and each result once; "of copy" compares that with
    a copy of as many bytes; "ratio" is the best peer's time over ours; "ulp"
    is the worst error against float64. Other work on the machine spoils the
    figures. On CUDA times are the device's, and "host" is that of our call;
    --predict sets beside them what a model of the time predicts, which it
    prints where there is no device, too.

    With --training the steps of artifact sets, by default those of examples/
    and of small GPT-2, BERT, ViT and MobileNetV2, beside torch, and graphs
    that opgrad generates, of the sets' models and of some in torch.

    With --sweep softmax, log_softmax and their gradients, or --ops, on rows
    of 1 to 4 million elements, along inner axes, and in memory of several
    kinds of pages: time per element. With --load a few cells while another
    process computes. With --isa for other instruction sets.

    Example: opgrad bench --ops relu,softmax_grad --json result.json
    """
    options = Options(**given)
    options.check()
    from opgrad.bench import instruction_sets

    if sets := instruction_sets.in_processes(options):
        _bench_sets(options, sets)
    elif not options.predict or _has_device(options):
        write_pictures = _picture_writer(options)
        result = {TRAINING: _bench_training, LOAD: _bench_load}.get(options.kind, _bench_cells)(options)
        write_pictures(*result)


def _parameter(name: str, default: Any) -> inspect.Parameter:
    """An option as typer takes it."""
    said, flag = SAID[name], flag_of(name)
    if flag.startswith("--"):
        told = typer.Option(flag, metavar=said.metavar, help=said.help, min=0 if name == "seconds" else None)
    else:
        told = folders_argument(said.help)
    kind: Any = Annotated[HINTS[name].__origin__, told]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


PARAMETERS = [_parameter(each.name, each.default) for each in fields(Options)]
bench.__signature__ = inspect.Signature(PARAMETERS)  # type: ignore[attr-defined]


def _bench_cells(options: Options) -> list[Result]:
    """Measure cells, print the tables, write the result."""
    from opgrad.bench.run import measured
    from opgrad.bench.tables import show

    with _told(options, (SWEEP_CELL if options.sweep else CELL) + (options.seconds or 0.0)) as progress:
        result, written = measured(options, progress)
    show(console(), result)
    if options.predict:
        from opgrad.bench.cuda import predictions

        predictions.show(console(), "", "", result)
    return [written]


def _bench_load(options: Options) -> list[Result]:
    """Measure with and without another process that computes, print the table."""
    from opgrad.bench.load import PEERS, SECONDS, cells, measure
    from opgrad.bench.peers import chosen, installed
    from opgrad.bench.tables import show_load

    wanted = chosen(options.names("peers") or [name for name in PEERS if name in installed()], installed())
    found = cells(options.names("ops"), options.names("dtypes"), options.names("shapes"))
    seconds = options.seconds_of(SECONDS, SECONDS)
    with _told(options, CELL + seconds) as progress:
        losses = measure(found, wanted, seconds, progress)
    show_load(console(), losses)
    return []


def _bench_training(options: Options) -> list[Result]:
    """Measure training steps, print the table, write the result."""
    from opgrad.bench import training
    from opgrad.bench.run import store
    from opgrad.bench.training_tables import show

    seconds = options.seconds_of(training.SECONDS, training.QUICK_SECONDS)
    with _told(options, TRAINING_CELL + seconds) as progress:
        result = training.run(options, progress)
    show(console(), result)
    return [result if options.json is None else store(options.json, result, None)]


def _bench_sets(options: Options, sets: list[str]) -> None:
    """Measure each instruction set in a process of its own, which prints its tables; then set them side by side."""
    from opgrad.bench import instruction_sets
    from opgrad.bench.figures import read
    from opgrad.bench.tables import show_sets

    write_pictures = _picture_writer(options)
    with TemporaryDirectory() as folder:
        json = options.json or (None if options.kind == LOAD else Path(folder) / "result.json")
        files = instruction_sets.measure_each(replace(options, json=json), sets, ["opgrad", "bench"])
        results = [read(file) for file in files.values()]
    if options.kind == CELLS:
        show_sets(console(), results)
    write_pictures(*results)


def _told(options: Options, each: float) -> AbstractContextManager[Any]:
    """What tells of the progress. each: seconds that a cell is likely to take."""
    from opgrad.bench.progress import QUICK_LIMIT, told

    return told(each, QUICK_LIMIT if options.quick else None)


def _has_device(options: Options) -> bool:
    """Whether there is a device to be measured; where there is none, predictions are printed alone."""
    from opgrad import machine
    from opgrad.bench.cuda import predictions

    problem = machine.cuda_problem()
    if problem:
        screen = console()
        predictions.show(screen, options.ops, options.dtypes)
        screen.print(f"Nothing is measured: {problem}.", highlight=False)
    return not problem


def _picture_writer(options: Options) -> Callable[..., None]:
    """What draws results, one for each instruction set; found before measuring, as a library may be missing."""
    if options.plot is None and options.html is None:
        return lambda *_: None
    from opgrad.bench.page import page
    from opgrad.bench.plots import plot
    from opgrad.writing import replace_file

    def write(result: Result, *others: Result) -> None:
        for file in filter(None, (options.plot, options.html)):
            file.parent.mkdir(parents=True, exist_ok=True)
        if options.plot is not None:
            plot(result, options.plot, *others)
        if options.html is not None:
            replace_file(options.html, page(result, *others).encode())

    return write
