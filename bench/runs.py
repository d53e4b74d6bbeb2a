"""When a cell was measured, where, and with which options: each cell says so, as a file may hold cells of several runs.

A cell of an older file says nothing; the options of the file's last run are its own if they ask for it.
"""

from collections.abc import Mapping
from typing import Any

from bench import instruction_sets
from bench.cells import PLAIN

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
    }
    wanted = {name: [word.strip() for word in options.get(name, "").split(",") if word.strip()] for name in has}
    return all(not words or not has[name] or has[name] in words for name, words in wanted.items())


def runs(result: Measured) -> dict[tuple[str, str], list[Measured]]:
    """The cells of each run, by its day and its command; what may be older comes first."""
    found: dict[tuple[str, str], list[Measured]] = {}
    for cell in (stamped(result, cell) for cell in result.get("cells", ())):
        found.setdefault(_key(cell), []).append(cell)
    return dict(sorted(found.items(), key=lambda item: (item[0][0].rpartition(" ")[2], item[0][1])))


def described(result: Measured) -> str:
    """The runs of a result in one sentence."""
    parts = [
        f"{len(cells)} cells, {day}, {f'`{command}`' if command else 'options not kept'}"
        for (day, command), cells in runs(result).items()
    ]
    return f"Runs: {'; '.join(parts)}." if parts else ""


def when(result: Measured) -> str:
    """The date of a result; that of the last run if its cells are of several."""
    return f"{result['date']}, the last of several runs" if len(runs(result)) > 1 else str(result["date"])


def _key(cell: Measured) -> tuple[str, str]:
    """The day, and the command with its options; none where they are not kept."""
    day = cell["date"].partition(" ")[0]
    return (f"until {day}", "") if cell["options"] is None else (day, _command(cell["options"]))


def _command(options: Measured) -> str:
    """The command line that has these options."""
    given = {name: value for name, value in options.items() if value is not False and value not in ("", None)}
    words = (f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items())
    return " ".join(["python -m bench", *words])


# --- where ---


def machine_line(result: Measured) -> str:
    """Machine, threads or device, versions and date in one sentence."""
    date = when(result)
    machine, versions = result["machine"], result["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if "device" in result:
        return f"{_device(result['device'])}; on {machine['cpu']}; {packages}; {date}."
    caches = ", ".join(f"{level} {size >> 10} KiB" for level, size in machine["caches"].items())
    cpu = f"{machine['cpu']} ({machine['llvm_cpu']}, {machine['vector_bits']}-bit vectors)"
    legend = instruction_sets.legend(machine)
    return f"{cpu}, {result['threads']} threads; {caches}; {packages}; {date}.{legend}"


def _device(device: Measured) -> str:
    memory, l2 = device["memory"] / (1 << 30), device["l2"] >> 20
    parts = f"{device['multiprocessors']} multiprocessors, L2 {l2} MiB, memory {memory:.0f} GiB"
    return f"{device['name']} ({parts}), driver {device['driver'] or 'unknown'}, CUDA {device['cuda']}"
