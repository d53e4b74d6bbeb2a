"""When a cell was measured, and with which options: each cell says so, as a file may hold cells of several runs.

A cell of an older file says nothing; the options of the file's last run are its own if they ask for it.
"""

from collections.abc import Mapping
from typing import Any

from opgrad.bench.cells import PLAIN
from opgrad.bench.memories import DEFAULT

LETTERS = "abcdefghijklmnopqrstuvwxyz"  # of runs, in tables
Measured = Mapping[str, Any]


def stamped(result: Measured, cell: Measured) -> dict[str, Any]:
    """A cell with the date and the options with which it was measured.

    Options that the file does not keep are None; the date is then the last that is possible.
    """
    options = result.get("options", {})
    return {"date": result["date"], "options": options if _asks_for(options, cell) else None, **cell}


def _asks_for(options: Measured, cell: Measured) -> bool:
    """Whether a run with these options measures the cell."""
    has = {
        "ops": cell["operator"],
        "dtypes": cell["dtype"],
        "shapes": cell["workload"].partition(",")[0],
        "groups": "" if options.get("sweep") else cell.get("group", PLAIN),
        "memory": cell.get("memory", DEFAULT),
    }
    wanted = {name: [word.strip() for word in options.get(name, "").split(",") if word.strip()] for name in has}
    return all(not words or not has[name] or has[name] in words for name, words in wanted.items())


def runs(result: Measured) -> dict[tuple[str, str], list[Measured]]:
    """The cells of each run, by its day and its options in words; what may be older comes first."""
    found: dict[tuple[str, str], list[Measured]] = {}
    for cell in (stamped(result, cell) for cell in result.get("cells", ())):
        found.setdefault(_key(cell), []).append(cell)
    return dict(sorted(found.items(), key=lambda item: (item[0][0].rpartition(" ")[2], item[0][1])))


def letters(result: Measured) -> list[str]:
    """The letter of each cell's run; none has one where all are of the same."""
    found = runs(result)
    names = dict(zip(found, LETTERS, strict=False)) if len(found) > 1 else {}
    return [names.get(_key(stamped(result, cell)), "") for cell in result["cells"]]


def described(result: Measured) -> str:
    """The runs of a result in one sentence."""
    found = runs(result)
    named = [f"{letter}: " if len(found) > 1 else "" for letter, _ in zip(LETTERS, found, strict=False)]
    parts = [
        f"{name}{len(cells)} cells, {day}, {f'`opgrad bench {words}`' if words else 'options not kept'}"
        for name, ((day, words), cells) in zip(named, found.items(), strict=False)
    ]
    return f"Runs: {'; '.join(parts)}." if parts else ""


def when(result: Measured) -> str:
    """The date of a result; that of the last run if its cells are of several."""
    return f"{result['date']}, the last of several runs" if len(runs(result)) > 1 else str(result["date"])


def _key(cell: Measured) -> tuple[str, str]:
    """The day, and the options in words; those that are not kept are of no words."""
    day = cell["date"].partition(" ")[0]
    return (f"until {day}", "") if cell["options"] is None else (day, _words(cell["options"]))


def _words(options: Measured) -> str:
    """The options that are given, as a command line has them."""
    given = {name.replace("_", "-"): value for name, value in options.items() if value not in ("", False, None)}
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items())
