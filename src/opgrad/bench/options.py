"""The options of `opgrad bench`: their names, defaults and help, and to which kinds of measurement they belong."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

CELLS, TRAINING, LOAD = "cells", "training", "load"  # the kinds of measurement
# What a result file keeps of them.
KEPT = ("device", "ops", "dtypes", "shapes", "peers", "seconds", "quick", "groups", "memory", "sweep")


class Said(NamedTuple):
    """What is said of an option. kinds: of measurement, to which it belongs. metavar: what stands for its value."""

    kinds: str
    help: str
    metavar: str | None = None
    flag: str = ""  # if it is not made from the option's name


OPTIONS = {
    "folders": Said("training", "Artifact sets, with --training.", flag="DIR"),
    "training": Said("training", "Measure training steps: graph, optimizer, Python."),
    "batches": Said("training", "With --training; default: 4,50,500.", "ROWS,…"),
    "old_python": Said("training", "With --training: a Python with onnxruntime-training, measured as well.", "PATH"),
    "models": Said(
        "training",
        "With --training: of GPT-2, BERT, ViT, MobileNetV2, small ones; default: all, and the examples.",
        "NAME,…",
    ),
    "device": Said("cells", "cpu or cuda; jax: compiled functions of JAX on the CPU.", "NAME"),
    "ops": Said("cells load", "Operators; default: all.", "NAME,…"),
    "dtypes": Said("cells load", "Default: float32,bfloat16,float16; there is float64 too.", "NAME,…"),
    "shapes": Said("cells load", "Shapes such as 4096x1000; default: those of the table.", "SHAPE,…"),
    "peers": Said(
        "cells load",
        "Of torch, torch.compile, onnxruntime, scipy, numpy; on CUDA of torch, torch.compile, liger, quack; "
        "beside JAX jax.nn. Default: those installed.",
        "NAME,…",
    ),
    "groups": Said(
        "cells",
        "Of plain and, for softmax with attributes, types, post-ops, broadcast, attributes, gradients, plans; "
        "graph: the operators that only training graphs have; losses: steps of PyTorch's losses. Default: all.",
        "NAME,…",
    ),
    "memory": Said("cells", "Whose memory arrays lie in: numpy, torch, aligned, view. Default: numpy.", "NAME,…"),
    "json": Said("cells training", "Write the result.", "FILE"),
    "update": Said("cells", "Keep the cells of the JSON file that are not measured now."),
    "plot": Said("cells", "Draw the result into a PNG.", "FILE"),
    "html": Said("cells training", "Write tables and a picture as one page.", "FILE"),
    "seconds": Said("cells training load", "How long to measure each cell."),
    "quick": Said("cells training", "A few cells, without torch.compile, in two minutes."),
    "sweep": Said("cells", "Measure rows of every length; with --update those that the file lacks."),
    "load": Said("load", "Measure what is lost while another process keeps a core busy."),
    "predict": Said("cells", "With --device cuda: print what a model of the time predicts, too."),
    "fuse": Said("training", "With --training: replace nodes of the graph by faster ones.", flag="--fuse/--no-fuse"),
}


@dataclass(frozen=True)
class Options:
    """What to measure, as the command line has it, see `OPTIONS`; "" and None stand for the default."""

    folders: list[Path] | None = None
    training: bool = False
    batches: str = ""
    old_python: Path | None = None
    models: str = ""
    device: str = "cpu"
    ops: str = ""
    dtypes: str = ""
    shapes: str = ""
    peers: str = ""
    groups: str = ""
    memory: str = ""
    json: Path | None = None
    update: bool = False
    plot: Path | None = None
    html: Path | None = None
    seconds: float | None = None
    quick: bool = False
    sweep: bool = False
    load: bool = False
    predict: bool = False
    fuse: bool = True

    @property
    def kind(self) -> str:
        """The kind of measurement that is asked for."""
        return TRAINING if self.training else LOAD if self.load else CELLS

    def check(self) -> None:
        """Raise ValueError for the first option that does not go with the kind of measurement."""
        for each in fields(self):
            if getattr(self, each.name) == each.default or self.kind in OPTIONS[each.name].kinds.split():
                continue
            name = flag_of(each.name).rpartition("/")[2]
            if self.kind == CELLS:
                raise ValueError(f"bench: --training is missing, without which there is no {name}")
            raise ValueError(f"bench: --{self.kind} has no {name}")
        if self.predict and self.device != "cuda":
            raise ValueError("bench: --predict is for --device cuda")

    def names(self, name: str) -> list[str]:
        """The names that an option lists."""
        return [word.strip() for word in getattr(self, name).split(",") if word.strip()]

    def seconds_of(self, usual: float, quick: float) -> float:
        """How long to measure each cell, where nothing else is asked for so long, with --quick the latter."""
        return self.seconds if self.seconds is not None else quick if self.quick else usual

    def kept(self) -> dict[str, Any]:
        """What a result file says of them."""
        return {name: getattr(self, name) for name in KEPT}


def flag_of(name: str) -> str:
    """How an option is written on the command line."""
    return OPTIONS[name].flag or f"--{name.replace('_', '-')}"
