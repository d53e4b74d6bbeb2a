"""The command `opgrad`: commands, self-test, ahead-of-time compilation. Imports every room."""

import sys

from opgrad import __version__


def main() -> None:
    """Run the command line. Exit status: 0 all is well, 1 the work failed, 2 wrong usage."""
    if sys.argv[1:] == ["--version"]:  # without NumPy, typer and rich, which take half a second
        print(f"opgrad {__version__}")
        return
    from opgrad.cli.app import run

    run()
