"""The generated parts of README.md and docs/: `python -m opgrad.report` in the repository's root writes them.

A part stands between the lines `<!-- NAME:begin -->` and `<!-- NAME:end -->`; NAME is a key of PARTS. The
benchmark's parts come from the files in bench/results.
"""

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opgrad.contract import Operator, operators

RESULTS = Path("bench/results")
PLOT = Path("docs/benchmark.png")
SOURCES = Path("src/opgrad")
MARKED = re.compile(r"(<!-- (?P<name>[\w-]+):begin -->\n).*?(<!-- (?P=name):end -->)", re.DOTALL)
NO_RESULT = "There is no result file yet."


def documents(root: Path) -> list[Path]:
    """The files that may have generated parts."""
    return [path for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))] if path.exists()]


def rewritten(path: Path, root: Path) -> str:
    """The document's text with all parts generated anew.

    Raises ValueError for the name of a part that is not known.
    """

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in PARTS:
            raise ValueError(f"report: {path} has a part {name!r}, expected one of {', '.join(PARTS)}")
        return f"{match[1]}\n{PARTS[name](root, path.parent)}\n\n{match[3]}"

    return MARKED.sub(replace, path.read_text(encoding="utf-8"))


def write(root: Path) -> None:
    """Write the generated parts of all documents, and the plot if there is a result."""
    for path in documents(root):
        path.write_text(rewritten(path, root), encoding="utf-8")
    if result := newest(root):
        from opgrad.bench.plot import plot

        plot(result, root / PLOT)


# --- operators ----------------------------------------------------------------------------------------------


def operator_table(root: Path, folder: Path) -> str:
    """One row for each operator, with links to its sources."""
    from opgrad.cli import operator_rows

    lines = ["| operator | formula | dtypes | ONNX, com.microsoft | source |", "|---|---|---|---|---|"]
    for name, formula, dtypes, backends, onnx_names in operator_rows():
        sources = _links(operators()[name], backends.split(", "), root, folder)
        lines.append(f"| `{name}` | `{formula}` | {dtypes} | {onnx_names} | {sources} |")
    return "\n".join(lines)


def operator_reference(root: Path, folder: Path) -> str:
    """A section for each operator: signature, documentation, ONNX names, sources."""
    from opgrad.cli import operator_rows

    backends = {name: found.split(", ") for name, _, _, found, _ in operator_rows()}
    return "\n\n".join(_section(op, _links(op, backends[name], root, folder)) for name, op in operators().items())


def _section(op: Operator, sources: str) -> str:
    lines = [f"## {op.name}", "", "```python", f"opgrad.{_signature(op)}", "```", ""]
    lines += ["```text", inspect.getdoc(op.reference) or "", "```", ""]
    for name in op.onnx:
        inputs, outputs = ", ".join(name.inputs), ", ".join(name.outputs)
        given = "".join(f"; {key}={value!r}" for key, value in name.attributes.items() if value is not None)
        lines.append(f"* ONNX: `com.microsoft.{name.name}({inputs}{given}) -> ({outputs})`")
    if op.forward:
        lines.append(f"* gradient of [`{op.forward}`](#{op.forward})")
    return "\n".join([*lines, f"* source: {sources}"])


def _signature(op: Operator) -> str:
    signature = inspect.signature(op.reference)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return op.name + str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _links(op: Operator, backends: list[str], root: Path, folder: Path) -> str:
    """Links to the declaration and to the kernels, relative to the folder of the document."""
    above = Path(os.path.relpath(root, folder))
    files = {"declaration": SOURCES / "ops" / f"{op.family}.py"}
    files |= {backend: SOURCES / backend / f"{op.family}.py" for backend in backends if backend}
    return ", ".join(f"[{name}]({(above / path).as_posix()})" for name, path in files.items())


# --- benchmark ----------------------------------------------------------------------------------------------


def results(root: Path) -> dict[str, dict[str, Any]]:
    """The result files by name, the newest last."""
    from opgrad.bench.figures import read

    found = {path.stem: read(path) for path in sorted((root / RESULTS).glob("*.json"))}
    return dict(sorted(found.items(), key=lambda item: item[1]["date"]))


def newest(root: Path) -> dict[str, Any] | None:
    """The newest result, None if there is none."""
    return next(reversed(results(root).values()), None)


def benchmark(root: Path, folder: Path) -> str:
    """The plot and the short table of the newest result."""
    from opgrad.bench.tables import headline_table

    result = newest(root)
    if result is None:
        return NO_RESULT
    plot = (Path(os.path.relpath(root, folder)) / PLOT).as_posix()
    return f"![Speed against the best peer, cell by cell]({plot})\n\n{headline_table(result)}"


def benchmark_cells(root: Path, _: Path) -> str:
    """Every cell of every result, the newest first."""
    from opgrad.bench.tables import full_table

    parts = [f"### {name}\n\n{full_table(result)}" for name, result in reversed(results(root).items())]
    return "\n\n".join(parts) or NO_RESULT


PARTS: dict[str, Callable[[Path, Path], str]] = {
    "operators": operator_table,
    "operator-reference": operator_reference,
    "benchmark": benchmark,
    "benchmark-cells": benchmark_cells,
}

if __name__ == "__main__":
    write(Path.cwd())
