"""The command `opgrad bench`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from opgrad.terminal import console, folders_argument

# Seconds that a cell takes beside those of --seconds, on two cores: arrays, compiling, the reference.
CELL, SWEEP_CELL, TRAINING_CELL = 3.5, 0.4, 6.0


def _names(help: str) -> Any:
    return typer.Option(metavar="NAME,…", help=help)


Folders = Annotated[list[Path] | None, folders_argument("Artifact sets, with --training.")]
Training = Annotated[bool, typer.Option("--training", help="Measure training steps: graph, optimizer, Python.")]
Batches = Annotated[str, typer.Option(metavar="ROWS,…", help="With --training; default: 4,50,500.")]
OldPython = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="With --training: a Python with onnxruntime-training, measured as well."),
]
Models = Annotated[
    str, _names("With --training: of GPT-2, BERT, ViT, MobileNetV2, small ones; default: all, and the examples.")
]
Fuse = Annotated[
    bool, typer.Option("--fuse/--no-fuse", help="With --training: replace nodes of the graph by faster ones.")
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu or cuda; jax: compiled functions of JAX on the CPU.")]
Ops = Annotated[str, _names("Operators; default: all.")]
Dtypes = Annotated[str, _names("Default: float32,bfloat16,float16; there is float64 too.")]
Shapes = Annotated[str, typer.Option(metavar="SHAPE,…", help="Shapes such as 4096x1000; default: those of the table.")]
Peers = Annotated[
    str,
    _names(
        "Of torch, torch.compile, onnxruntime, scipy, numpy; on CUDA of torch, torch.compile, liger, quack; "
        "beside JAX jax.nn. "
        "Default: those installed."
    ),
]
Groups = Annotated[
    str,
    _names(
        "Of plain and, for softmax with attributes, types, post-ops, broadcast, attributes, gradients, plans; "
        "graph: the operators that only training graphs have; losses: steps of PyTorch's losses. "
        "Default: all."
    ),
]
Memory = Annotated[
    str, typer.Option(metavar="NAME,…", help="Whose memory arrays lie in: numpy, torch, aligned, view. Default: numpy.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result.")]
Update = Annotated[bool, typer.Option("--update", help="Keep the cells of the JSON file that are not measured now.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the result into a PNG.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write tables and charts as one page.")]
Seconds = Annotated[float | None, typer.Option(min=0, help="How long to measure each cell.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few cells, without torch.compile, in two minutes.")]

Sweep = Annotated[
    bool, typer.Option("--sweep", help="Measure rows of every length; with --update those that the file lacks.")
]
Load = Annotated[bool, typer.Option("--load", help="Measure what is lost while another process keeps a core busy.")]
Predict = Annotated[
    bool, typer.Option("--predict", help="With --device cuda: print what a model of the time predicts, too.")
]


def bench(
    folders: Folders = None, training: Training = False, batches: Batches = "", old_python: OldPython = None,
    models: Models = "", device: Device = "cpu", ops: Ops = "", dtypes: Dtypes = "", shapes: Shapes = "",
    peers: Peers = "", groups: Groups = "", memory: Memory = "", json_file: JsonFile = None, update: Update = False,
    plot: Plot = None, html: Html = None, seconds: Seconds = None, quick: Quick = False, sweep: Sweep = False,
    load: Load = False, predict: Predict = False, fuse: Fuse = True,
) -> None:  # fmt: skip
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
    if training:
        texts = {"--ops": ops, "--dtypes": dtypes, "--shapes": shapes, "--peers": peers, "--groups": groups}
        others = {"--memory": memory, "--update": update, "--plot": plot, "--device": device != "cpu"}
        kinds = {"--predict": predict, "--sweep": sweep, "--load": load}
        _refuse("--training has no", {**texts, **others, **kinds})
        return _bench_training(folders or [], batches, old_python, models, fuse, seconds, quick, json_file, html)
    of_training = {
        "DIR": folders,
        "--batches": batches,
        "--old-python": old_python,
        "--models": models,
        "--no-fuse": not fuse,
    }
    _refuse("--training is missing, without which there is no", of_training)
    if predict and device != "cuda":
        raise ValueError("bench: --predict is for --device cuda")
    if load:
        beyond = {"--device": device != "cpu", "--groups": groups, "--memory": memory, "--json": json_file}
        _refuse(
            "--load has no",
            beyond | {"--update": update, "--plot": plot, "--html": html, "--quick": quick, "--sweep": sweep},
        )
        return _bench_load(ops, dtypes, shapes, peers, seconds)
    if not predict or _has_device(ops, dtypes):
        options = (device, ops, dtypes, shapes, peers, seconds, quick, groups, memory, sweep)
        _bench_cells(options, json_file, update, plot, html, predict)
    return None


def _has_device(ops: str, dtypes: str) -> bool:
    """Whether there is a device to be measured; where there is none, predictions are printed alone."""
    from opgrad import machine
    from opgrad.bench.cuda import predictions

    problem = machine.cuda_problem()
    if problem:
        screen = console()
        predictions.show(screen, ops, dtypes)
        screen.print(f"Nothing is measured: {problem}.", highlight=False)
    return not problem


def _bench_cells(
    options: tuple[Any, ...],
    json_file: Path | None,
    update: bool,
    plot: Path | None,
    html: Path | None,
    predict: bool,
) -> None:
    """Measure cells, print the tables, write and draw the result; options: what `Options` takes."""
    from opgrad.bench.progress import QUICK_LIMIT, told
    from opgrad.bench.run import Options, prepared, previous, store
    from opgrad.bench.tables import show

    if plot is not None:
        from opgrad.bench.plots import plot as draw
    write_page = _page_writer(html)
    if update and json_file is None:
        raise ValueError("bench: --update needs --json with the file to be updated")
    screen = console()
    old = previous(json_file, update)
    asked = Options(*options)
    measure = prepared(asked, old)
    each = (SWEEP_CELL if asked.sweep else CELL) + (asked.seconds or 0.0)
    with told(each, QUICK_LIMIT if asked.quick else None) as progress:
        result = measure(progress)
    show(screen, result)
    if predict:
        from opgrad.bench.cuda import predictions

        predictions.show(screen, "", "", result)
    if json_file is not None:
        result = store(json_file, result, old)
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        draw(result, plot)
    write_page(result)


def _page_writer(file: Path | None) -> Callable[[Any], None]:
    """What writes a result as a page, or nothing; found before measuring, as a library may be missing."""
    if file is None:
        return lambda _: None
    from opgrad.bench.page import page
    from opgrad.writing import replace_file

    def write(result: Any) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, page(result).encode())

    return write


def _bench_load(ops: str, dtypes: str, shapes: str, peers: str, seconds: float | None) -> None:
    """Measure with and without another process that computes, print the table."""
    from opgrad.bench.load import PEERS, SECONDS, cells, measure
    from opgrad.bench.peers import chosen, installed
    from opgrad.bench.progress import told
    from opgrad.bench.run import names
    from opgrad.bench.tables import show_load

    wanted = chosen(names(peers) or [name for name in PEERS if name in installed()], installed())
    found = cells(names(ops), names(dtypes), names(shapes))
    seconds = SECONDS if seconds is None else seconds
    with told(CELL + seconds) as progress:
        losses = measure(found, wanted, seconds, progress)
    show_load(console(), losses)


def _refuse(why: str, given: dict[str, Any]) -> None:
    """Raise ValueError for the first option that is given."""
    for name, value in given.items():
        if value:
            raise ValueError(f"bench: {why} {name}")


def _bench_training(
    folders: list[Path],
    batches: str,
    old_python: Path | None,
    models: str,
    fuse: bool,
    seconds: float | None,
    quick: bool,
    json_file: Path | None,
    html: Path | None,
) -> None:
    """Measure training steps, print the table, write the result."""
    from opgrad.bench import training
    from opgrad.bench.progress import QUICK_LIMIT, told
    from opgrad.bench.run import names, store
    from opgrad.bench.training_tables import show

    if seconds is None:
        seconds = training.QUICK_SECONDS if quick else training.SECONDS
    rows = _batches(batches) if batches else training.BATCHES
    chosen = training.chosen_models(names(models))
    options = training.TrainingOptions(tuple(folders), rows, seconds, old_python, chosen, fuse)
    screen, write_page = console(), _page_writer(html)
    with told(TRAINING_CELL + seconds, QUICK_LIMIT if quick else None) as progress:
        result = training.run(options, progress)
    show(screen, result)
    if json_file is not None:
        store(json_file, result, None)
    write_page(result)


def _batches(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"bench: batches is {text!r}, expected numbers of rows such as 4,50,500")
    return tuple(map(int, words))
