"""The options of `opgrad bench`: names, defaults and help, and to which kinds of measurement they belong."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

CELLS, TRAINING, LOAD = "cells", "training", "load"  # the kinds of measurement
# What a result file keeps of them.
KEPT = ("device", "ops", "dtypes", "shapes", "peers", "seconds", "quick", "groups", "memory", "sweep", "isa")


class Said(NamedTuple):
    """What is said of an option. kinds: of measurement, to which it belongs. metavar: what stands for its value."""

    kinds: str
    help: str
    metavar: str | None = None
    flag: str = ""  # if it is not made from the option's name


@dataclass(frozen=True)
class Options:
    """What to measure, as the command line has it; "" and None stand for the default."""

    folders: Annotated[list[Path] | None, Said("training", "Artifact sets, with --training.", flag="DIR")] = None
    training: Annotated[bool, Said("training", "Measure training steps: graph, optimizer, Python.")] = False
    batches: Annotated[str, Said("training", "With --training; default: 4,50,500.", "ROWS,…")] = ""
    old_python: Annotated[
        Path | None, Said("training", "With --training: a Python with onnxruntime-training, measured as well.", "PATH")
    ] = None
    models: Annotated[
        str,
        Said(
            "training",
            "With --training: of GPT-2, BERT, ViT, MobileNetV2, small ones, and GPT-2-1024, Llama-1024, with attention "
            "in tiles and without; default: all, and the examples.",
            "NAME,…",
        ),
    ] = ""
    device: Annotated[str, Said("cells", "cpu or cuda; jax: compiled functions of JAX on the CPU.", "NAME")] = "cpu"
    isa: Annotated[
        str,
        Said(
            "cells training load",
            "Instruction sets of x86-64: avx2, avx512; below what the processor has, everybody is held to one. "
            "Default: what the processor has.",
            "NAME,…",
        ),
    ] = ""
    ops: Annotated[str, Said("cells load", "Operators; default: all.", "NAME,…")] = ""
    dtypes: Annotated[str, Said("cells load", "Default: float32,bfloat16,float16; there is float64 too.", "NAME,…")] = (
        ""
    )
    shapes: Annotated[str, Said("cells load", "Shapes such as 4096x1000; default: those of the table.", "SHAPE,…")] = ""
    peers: Annotated[
        str,
        Said(
            "cells load",
            "Of torch, torch.compile, onnxruntime, scipy, numpy; on CUDA of torch, torch.compile, liger, quack; "
            "beside JAX jax.nn. Default: those installed.",
            "NAME,…",
        ),
    ] = ""
    groups: Annotated[
        str,
        Said(
            "cells",
            "Of plain and, for softmax with attributes, types, post-ops, broadcast, attributes, gradients, plans; "
            "graph: the operators that only training graphs have; losses, attention: steps in PyTorch; "
            "of --sweep: rows, inner, axes, shapes, pages. Default: all.",
            "NAME,…",
        ),
    ] = ""
    memory: Annotated[
        str, Said("cells", "Whose memory arrays lie in: numpy, torch, huge, aligned, view. Default: numpy.", "NAME,…")
    ] = ""
    json: Annotated[Path | None, Said("cells training", "Write the result.", "FILE")] = None
    update: Annotated[bool, Said("cells", "Keep the cells of the JSON file that are not measured now.")] = False
    plot: Annotated[Path | None, Said("cells", "Draw the result into a PNG.", "FILE")] = None
    html: Annotated[Path | None, Said("cells training", "Write tables and a picture as one page.", "FILE")] = None
    seconds: Annotated[float | None, Said("cells training load", "How long to measure each cell.")] = None
    quick: Annotated[bool, Said("cells training", "A few cells, without torch.compile, in two minutes.")] = False
    sweep: Annotated[
        bool,
        Said(
            "cells",
            "Measure rows of every length, and other shapes and memory; with --update those that the file lacks.",
        ),
    ] = False
    load: Annotated[bool, Said("load", "Measure what is lost while another process keeps a core busy.")] = False
    predict: Annotated[bool, Said("cells", "With --device cuda: print what a model of the time predicts, too.")] = False
    fuse: Annotated[
        bool, Said("training", "With --training: replace nodes of the graph by faster ones.", flag="--fuse/--no-fuse")
    ] = True

    @property
    def kind(self) -> str:
        """The kind of measurement that is asked for."""
        return TRAINING if self.training else LOAD if self.load else CELLS

    def check(self) -> None:
        """Raise ValueError for the first option that does not go with the kind of measurement."""
        for name in self._given():
            flag = flag_of(name).rpartition("/")[2]
            if self.kind in SAID[name].kinds.split():
                continue
            if self.kind == CELLS:
                raise ValueError(f"bench: --training is missing, without which there is no {flag}")
            raise ValueError(f"bench: --{self.kind} has no {flag}")
        if self.predict and self.device != "cuda":
            raise ValueError("bench: --predict is for --device cuda")
        if self.update and self.json is None:
            raise ValueError("bench: --update needs --json with the file to be updated")

    def names(self, name: str) -> list[str]:
        """The names that an option lists."""
        return [word.strip() for word in getattr(self, name).split(",") if word.strip()]

    def words(self) -> list[str]:
        """The command line that says the same."""
        found: list[str] = []
        for name in self._given():
            flag, value = flag_of(name), getattr(self, name)
            if isinstance(value, bool):
                found.append(flag.rpartition("/")[2])
            else:
                found += map(str, value) if isinstance(value, list) else (flag, str(value))
        return found

    def _given(self) -> list[str]:
        """The options that are not at their defaults."""
        return [each.name for each in fields(self) if getattr(self, each.name) != each.default]

    def seconds_of(self, usual: float, quick: float) -> float:
        """How long to measure each cell, where nothing else is asked for so long, with --quick the latter."""
        return self.seconds if self.seconds is not None else quick if self.quick else usual

    def kept(self) -> dict[str, Any]:
        """What a result file says of them."""
        return {name: getattr(self, name) for name in KEPT}


HINTS = get_type_hints(Options, include_extras=True)
SAID: dict[str, Said] = {name: hint.__metadata__[0] for name, hint in HINTS.items()}


def flag_of(name: str) -> str:
    """How an option is written on the command line."""
    return SAID[name].flag or f"--{name.replace('_', '-')}"
