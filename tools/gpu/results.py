"""The file of results: a line of JSON for everything that was seen, written at once, so that a limit loses nothing."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "OPGRAD_GPU_OUT"  # the folder of results, for the processes of steps
DRY = "OPGRAD_GPU_DRY"  # "1" in a dry run
LINES = "gpu.jsonl"


def folder() -> Path:
    return Path(os.environ[VARIABLE])


def is_dry() -> bool:
    return os.environ.get(DRY) == "1"


def append(what: str, found: Mapping[str, Any]) -> None:
    """Add a line. what: its kind, such as "test" or "cell"."""
    line = json.dumps({"what": what, **found}) + "\n"
    with open(folder() / LINES, "a", encoding="utf-8") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """What a file of results holds; a line that was cut off is left out."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue
