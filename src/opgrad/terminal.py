"""What the commands print on."""

from rich.console import Console


def console() -> Console:
    """A console that prints text as it is: file names, shapes and messages have brackets, which are no markup."""
    return Console(markup=False)
