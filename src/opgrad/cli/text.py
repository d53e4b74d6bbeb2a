"""Words and small tables that commands share: sizes, amounts, settings of optimizers, inputs, parameters."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from opgrad.training.files.dataset import show
from opgrad.training.make.checks import quantity

if TYPE_CHECKING:
    from opgrad.cli.inspection import InspectedParameter, InspectedTensor

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


def ports_text(ports: Iterable["InspectedTensor"]) -> str:
    """Names, dtypes and shapes."""
    return "; ".join(f"{each.name} {each.dtype} {show(each.shape)}" for each in ports) or "none"


def optimizer_text(node: Mapping[str, Any]) -> str:
    """A node of an optimizer model with its attributes."""
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


def parameter_table(parameters: Iterable["InspectedParameter"]) -> Table:
    """A line for each parameter, and the sums."""
    table = Table("parameter", "shape", "dtype", "kind", row_styles=("", "dim"))
    table.add_column("bytes", justify="right")
    parameters = list(parameters)
    for each in parameters:
        table.add_row(each.name, show(each.shape), each.dtype, each.kind, f"{each.bytes:,}")
    table.add_section()
    for kind in dict.fromkeys(each.kind for each in parameters):
        of_kind = [each for each in parameters if each.kind == kind]
        table.add_row(f"{len(of_kind)} in all", "", "", kind, f"{sum(each.bytes for each in of_kind):,}")
    return table


def amount(tensors: int, numbers: int) -> str:
    """The number of tensors, and of the numbers in all of them."""
    return f"{quantity(tensors, 'tensor')}, {quantity(numbers, 'number')}" if tensors else "none"


def size(count: int) -> str:
    """Bytes in the unit that fits."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.1f} {unit}"
    return f"{count} bytes"
