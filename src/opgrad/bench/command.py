"""The command `opgrad bench`."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from opgrad.bench.options import LOAD, OPTIONS, TRAINING, Options, flag_of
from opgrad.terminal import console, folders_argument

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
    of 1 to 4 million elements: time per element. With --load a few cells
    while another process computes.

    Example: opgrad bench --ops relu,softmax_grad --json result.json
    """
    options = Options(**given)
    options.check()
    {TRAINING: _bench_training, LOAD: _bench_load}.get(options.kind, _bench_cells)(options)


def _parameter(option: Any, kind: Any) -> inspect.Parameter:
    """An option as typer takes it. option: a field of `Options`. kind: its type."""
    said, flag = OPTIONS[option.name], flag_of(option.name)
    if flag.startswith("--"):
        least = 0 if option.name == "seconds" else None
        told = typer.Option(flag, metavar=said.metavar, help=said.help, min=least)
    else:
        told = folders_argument(said.help)
    annotation = Annotated[kind, told]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=annotation)


HINTS = get_type_hints(Options)
PARAMETERS = [_parameter(each, HINTS[each.name]) for each in fields(Options)]
bench.__signature__ = inspect.Signature(PARAMETERS)  # type: ignore[attr-defined]


def _bench_cells(options: Options) -> None:
    """Measure cells, print the tables, write and draw the result."""
    from opgrad.bench.progress import QUICK_LIMIT, told
    from opgrad.bench.run import prepared, previous, store
    from opgrad.bench.tables import show

    if options.predict and not _has_device(options):
        return
    write_pictures = _picture_writer(options)
    if options.update and options.json is None:
        raise ValueError("bench: --update needs --json with the file to be updated")
    screen = console()
    old = previous(options.json, options.update)
    measure = prepared(options, old)
    each = (SWEEP_CELL if options.sweep else CELL) + (options.seconds or 0.0)
    with told(each, QUICK_LIMIT if options.quick else None) as progress:
        result = measure(progress)
    show(screen, result)
    if options.predict:
        from opgrad.bench.cuda import predictions

        predictions.show(screen, "", "", result)
    if options.json is not None:
        result = store(options.json, result, old)
    write_pictures(result)


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


def _picture_writer(options: Options) -> Callable[[Any], None]:
    """What draws a result into files; found before measuring, as a library may be missing."""
    if options.plot is None and options.html is None:
        return lambda _: None
    from opgrad.bench.page import page
    from opgrad.bench.plots import plot
    from opgrad.writing import replace_file

    def write(result: Any) -> None:
        for file in filter(None, (options.plot, options.html)):
            file.parent.mkdir(parents=True, exist_ok=True)
        if options.plot is not None:
            plot(result, options.plot)
        if options.html is not None:
            replace_file(options.html, page(result).encode())

    return write


def _bench_load(options: Options) -> None:
    """Measure with and without another process that computes, print the table."""
    from opgrad.bench.load import PEERS, SECONDS, cells, measure
    from opgrad.bench.peers import chosen, installed
    from opgrad.bench.progress import told
    from opgrad.bench.tables import show_load

    wanted = chosen(options.names("peers") or [name for name in PEERS if name in installed()], installed())
    found = cells(options.names("ops"), options.names("dtypes"), options.names("shapes"))
    seconds = options.seconds_of(SECONDS, SECONDS)
    with told(CELL + seconds) as progress:
        losses = measure(found, wanted, seconds, progress)
    show_load(console(), losses)


def _bench_training(options: Options) -> None:
    """Measure training steps, print the table, write the result."""
    from opgrad.bench import training
    from opgrad.bench.progress import QUICK_LIMIT, told
    from opgrad.bench.run import store
    from opgrad.bench.training_tables import show

    screen, write_pictures = console(), _picture_writer(options)
    each = TRAINING_CELL + options.seconds_of(training.SECONDS, training.QUICK_SECONDS)
    with told(each, QUICK_LIMIT if options.quick else None) as progress:
        result = training.run(options, progress)
    show(screen, result)
    if options.json is not None:
        store(options.json, result, None)
    write_pictures(result)
