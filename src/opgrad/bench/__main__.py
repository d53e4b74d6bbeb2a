"""`python -m opgrad.bench`: `opgrad bench` where typer, rich and matplotlib are missing; writes the JSON file alone."""

import argparse
import sys
from pathlib import Path

from opgrad.bench.cells import Cell
from opgrad.bench.run import Options, prepared, previous, store


def main() -> None:
    """Measure, and write the result file. The options are those of `opgrad bench`."""
    parser = argparse.ArgumentParser(prog="python -m opgrad.bench", description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, required=True, help="where to write the result")
    parser.add_argument("--update", action="store_true", help="keep the cells that are not measured now")
    parser.add_argument("--device", default="cpu")
    for name in ("ops", "dtypes", "shapes", "peers", "groups", "memory"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    given = vars(parser.parse_args())
    path, update = given.pop("json"), given.pop("update")
    try:
        old = previous(path, update)
        store(path, prepared(Options(**given), old)(_progress), old)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"opgrad: {error}")


def _progress(done: int, total: int, cell: Cell) -> None:
    print(f"{done + 1}/{total} {cell.name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
