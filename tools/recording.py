"""A picture of commands at work: python tools/recording.py docs/at-work.svg 'opgrad train examples/digits' …

Each command runs as in a terminal of 100 columns; of a line that is drawn again and again, one of the middle and the
last are shown.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

COLUMNS = 100
AGAIN = re.compile(r"(?:\r|\x1b\[2K|\x1b\[1A)+")  # back to the beginning of a line
FONT = re.compile(r" *@font-face \{.*?\}\n", re.DOTALL)  # which would be loaded from elsewhere
CURSOR = re.compile(r"\x1b\[\?25[lh]")


def said(command: str) -> str:
    """What a command writes in a terminal."""
    terminal = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    done = subprocess.run(shlex.split(command), env=terminal, capture_output=True, text=True, check=True)
    return done.stdout


def frames(written: str) -> list[str]:
    """The lines that are seen."""
    lines = []
    for line in CURSOR.sub("", written).rstrip().split("\n"):
        drawn = [each for each in AGAIN.split(line) if each.strip()]
        lines += drawn[len(drawn) // 2 : len(drawn) // 2 + 1] if len(drawn) > 2 else []
        lines += drawn[-1:] or [""]
    return lines


def picture(commands: Sequence[tuple[str, str]]) -> str:
    """An SVG of commands and what they wrote."""
    console = Console(record=True, width=COLUMNS, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for number, (command, written) in enumerate(commands):
        console.print(Text(f"{chr(10) * bool(number)}$ {command}", style="bold"))
        for line in frames(written):
            console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    return FONT.sub("", console.export_svg(title="opgrad", unique_id="opgrad"))


if __name__ == "__main__":
    target, *commands = sys.argv[1:]
    with open(target, "w", encoding="utf-8") as file:
        file.write(picture([(command, said(command)) for command in commands]))
