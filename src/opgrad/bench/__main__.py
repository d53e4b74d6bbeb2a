"""`python -m opgrad.bench`: `opgrad bench` where typer, rich and matplotlib are missing; writes the JSON file alone."""

import argparse
import sys
from typing import Any

from opgrad.bench import instruction_sets
from opgrad.bench.options import KEPT, BenchOptions
from opgrad.bench.run import measured


def main() -> None:
    """Measure, and write the result file. The options are those of `opgrad bench`."""
    parser = argparse.ArgumentParser(prog="python -m opgrad.bench", description=__doc__)
    options = BenchOptions.parsed(parser, None, (*KEPT, "json", "update"))
    if options.json is None:
        parser.error("the following arguments are required: --json")
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
