"""The options of `python -m bench`: names, defaults and help; and how a command line says them."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, get_type_hints

# What a result file keeps of the options.
KEPT = ("device", "ops", "dtypes", "shapes", "peers", "seconds", "quick", "groups", "sweep", "isa")
TYPES = {Path | None: Path, float | None: float}  # of the options that are no text


class Said(NamedTuple):
    """What is said of an option. metavar: what stands for its value."""

    help: str
    metavar: str | None = None


@dataclass(frozen=True)
class CommandLine:
    """Options, each a field whose annotation has what is `Said` of it; "" and None stand for the default.

    A list of paths is an argument without a name.
    """

    isa: Annotated[
        str,
        Said(
            "An instruction set of x86-64, avx2 or avx512; below what the processor has, everybody is held to it. "
            "Default: what the processor has.",
            "NAME",
        ),
    ] = ""
    seconds: Annotated[float | None, Said("How long to measure each cell; default: by the kind of cell.")] = None
    json: Annotated[Path | None, Said("A file for the result; default: none.", "FILE")] = None
    plot: Annotated[Path | None, Said("A PNG file for a picture of the result; default: none.", "FILE")] = None

    @classmethod
    def said(cls) -> dict[str, tuple[Any, Said]]:
        """The type of each option, and what is said of it."""
        hints = get_type_hints(cls, include_extras=True)
        return {each.name: (hints[each.name].__origin__, hints[each.name].__metadata__[0]) for each in fields(cls)}

    @classmethod
    def parsed(cls, parser: argparse.ArgumentParser, words: Sequence[str] | None, names: Sequence[str] = ()) -> Self:
        """The options of these names, or all, of a command line; None: of this process's."""
        for each in fields(cls):
            kind, said = cls.said()[each.name]
            if names and each.name not in names:
                continue
            if kind is bool:
                parser.add_argument(flag_of(each.name), action="store_true", help=said.help)
            elif kind == list[Path] | None:
                parser.add_argument(each.name, nargs="*", type=Path, metavar=said.metavar, help=said.help)
            else:
                given: dict[str, Any] = {"type": TYPES.get(kind, str), "default": each.default, "help": said.help}
                parser.add_argument(flag_of(each.name), metavar=said.metavar, **given)
        return cls(**vars(parser.parse_args(words)))

    def names(self, name: str) -> list[str]:
        """The names that an option lists."""
        return [word.strip() for word in getattr(self, name).split(",") if word.strip()]

    def seconds_of(self, usual: float) -> float:
        """How long to measure each cell, where nothing else is asked for so long."""
        return usual if self.seconds is None else self.seconds


@dataclass(frozen=True)
class BenchOptions(CommandLine):
    """What to measure, as the command line has it."""

    device: Annotated[str, Said("The device, cpu or cuda.", "NAME")] = "cpu"
    ops: Annotated[str, Said("Operators; default: all.", "NAME,…")] = ""
    dtypes: Annotated[str, Said("Default: float32,bfloat16,float16; there is float64 too.", "NAME,…")] = ""
    shapes: Annotated[str, Said("Shapes such as 4096x1000; default: those of the table.", "SHAPE,…")] = ""
    peers: Annotated[
        str,
        Said(
            "Of torch, torch.compile, onnxruntime, scipy, numpy; on CUDA of torch, torch.compile, liger, quack. "
            "Default: those installed.",
            "NAME,…",
        ),
    ] = ""
    groups: Annotated[
        str,
        Said(
            "Of plain; graph: the operators that only training graphs have; losses, attention: steps in PyTorch; "
            "of --sweep: rows, inner, axes, shapes. Default: all.",
            "NAME,…",
        ),
    ] = ""
    update: Annotated[bool, Said("Keep the cells of the JSON file that are not measured now.")] = False
    quick: Annotated[bool, Said("A few cells, without torch.compile, in two minutes.")] = False
    sweep: Annotated[
        bool,
        Said("Measure rows of every length, and other shapes; with --update those that the file lacks."),
    ] = False

    def check(self) -> None:
        """Raise ValueError for the first option that does not go with the others."""
        if self.update and self.json is None:
            raise ValueError("bench: --update needs --json with the file to be updated")
        if self.isa and self.device == "cuda":
            raise ValueError("bench: isa is of processors, but the device is 'cuda'")

    def kept(self) -> dict[str, Any]:
        """What a result file says of them."""
        return {name: getattr(self, name) for name in KEPT}


def flag_of(name: str) -> str:
    """How an option is written on the command line."""
    return f"--{name.replace('_', '-')}"
