"""`python -m opgrad.bench`: `opgrad bench` where typer, rich and matplotlib are missing; writes the JSON file alone."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from opgrad.bench import instruction_sets
from opgrad.bench.options import KEPT, SAID, Options, flag_of
from opgrad.bench.run import measured

TYPES = {"json": Path, "seconds": float}  # of the options that are no text


def main() -> None:
    """Measure, and write the result file. The options are those of `opgrad bench`."""
    parser = argparse.ArgumentParser(prog="python -m opgrad.bench", description=__doc__)
    for each in fields(Options):
        if each.name in (*KEPT, "json", "update"):
            flag, help = flag_of(each.name), SAID[each.name].help
            if each.default is False:
                parser.add_argument(flag, action="store_true", help=help)
            else:
                kind, required = TYPES.get(each.name, str), each.name == "json"
                parser.add_argument(flag, type=kind, default=each.default, required=required, help=help)
    options = Options(**vars(parser.parse_args()))
    try:
        if sets := instruction_sets.in_processes(options):
            instruction_sets.measure_each(options, sets, ["opgrad.bench"])
        else:
            measured(options, _progress)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"opgrad: {error}")


def _progress(done: int, total: int, cell: Any) -> None:
    print(f"{done + 1}/{total} {cell.name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
