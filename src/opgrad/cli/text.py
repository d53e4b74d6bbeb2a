"""Words and small tables that commands share: sizes, amounts, settings of optimizers."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from opgrad.training.make.checks import quantity

PIPE_WIDTH = 160  # the width of a table in a file or a pipe
# The attributes of optimizers by the option that sets them, where that has another name; `betas` takes two numbers.
SETTINGS = {"betas": ("alpha", "beta"), "eps": ("epsilon",), "bias_correction": ("correct_bias",)}
SETTINGS |= {"clip_norm": ("max_norm",)}


def fit(console: Console) -> None:
    """Widen the console for tables if it is a file or a pipe."""
    if not console.is_terminal:
        console.width = PIPE_WIDTH


def facts(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A table of lines that begin with a word each."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def optimizer_text(node: Mapping[str, Any]) -> str:
    return ": ".join(filter(None, (node["name"], settings_text(node["attributes"]))))


def settings_text(attributes: Mapping[str, Any]) -> str:
    """An optimizer's attributes under the names of the options that set them, without those that have no value."""
    left = {name: value for name, value in attributes.items() if value is not None}
    found = {}
    for option, names in SETTINGS.items():
        if all(name in left for name in names):
            found[option] = ",".join(shown_number(left.pop(name)) for name in names)
    found |= {name: shown_number(value) for name, value in left.items()}
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in found.items())


def shown_number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def amount(tensors: int, numbers: int) -> str:
    """The number of tensors, and of the numbers in all of them."""
    return f"{quantity(tensors, 'tensor')}, {quantity(numbers, 'number')}" if tensors else "none"


def size(count: int) -> str:
    """Bytes in the unit that fits."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.1f} {unit}"
    return f"{count} bytes"
