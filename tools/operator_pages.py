"""The reference of the operators as Markdown: a table of them, and a page for each family, from the declarations."""

import inspect
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from formulas import latex

from opgrad.contract import Operator
from opgrad.ops import graph_operators, operators

SOURCES = Path("src/opgrad")
PAGES = Path("docs/reference/operators")
TITLES = {
    "several": "Any number of arrays",
    "loss": "Losses of training graphs",
    "indexing": "Gather and scatter",
    "pooling": "Pooling and resizing",
}
# A docstring's formula, and what stands before and behind it.
PARTS = re.compile(
    r"(?P<text>.*?)\n\nFormula: (?P<formula>.*?)(?:(?:\.\s+|\s+)Source: (?P<source>.*?))?\n\nExample:\n(?P<example>.*)",
    re.DOTALL,
)


def families() -> dict[str, list[Operator]]:
    """The operators of each family."""
    found: dict[str, list[Operator]] = {}
    for op in (*operators().values(), *graph_operators().values()):
        found.setdefault(op.family, []).append(op)
    return found


def missing(root: Path) -> Iterator[tuple[Path, str]]:
    """The pages of families that have none yet, as `make tables` begins them."""
    for family in families():
        page = root / PAGES / f"{family}.md"
        if not page.exists():
            title = TITLES.get(family, family.replace("_", " ").capitalize())
            name = f"operators-of-{family}"
            yield page, f"# {title}\n\n<!-- {name}:begin -->\n<!-- {name}:end -->\n"


def table(chosen: Mapping[str, Operator], root: Path, folder: Path) -> str:
    """One row for each operator, with a link to its section."""
    lines = ["| operator | formula | ONNX, com.microsoft |", "|---|---|---|"]
    pages = Path(os.path.relpath(root / PAGES, folder))
    for op in chosen.values():
        place = (pages / f"{op.family}.md").as_posix()
        names = ", ".join(item.name for item in op.onnx)
        lines.append(f"| [`{op.name}`]({place}#{op.name}) | `{op.formula}` | {names} |")
    return "\n".join(lines)


def reference(family: str, root: Path, folder: Path) -> str:
    """A section for each operator of a family: signature, formula, documentation, example, ONNX names, sources."""
    return "\n\n".join(_section(op, root, folder) for op in families()[family])


def _section(op: Operator, root: Path, folder: Path) -> str:
    found = PARTS.fullmatch(inspect.getdoc(op.reference) or "")
    if found is None:
        raise ValueError(f"{op.name}: the documentation has no formula with an example behind it")
    lines = [f"## {op.name}", "", "```python", f"opgrad.{_signature(op)}", "```", "", "```math"]
    lines += [latex(" ".join(found["formula"].split())), "```", "", "```text", found["text"], "```", ""]
    lines += ["```pycon", found["example"].strip("\n"), "```", ""]
    for name in op.onnx:
        inputs, outputs = ", ".join(name.inputs), ", ".join(name.outputs)
        given = "".join(f"; {key}={value!r}" for key, value in name.attributes.items() if value is not None)
        lines.append(f"* ONNX: `{name.origin or 'ai.onnx'}.{name.name}({inputs}{given}) -> ({outputs})`")
    if op.forward:
        lines.append(f"* gradient of [`{op.forward}`](#{op.forward})")
    if found["source"]:
        lines.append(f"* after {' '.join(found['source'].split()).rstrip('.')}")
    return "\n".join([*lines, f"* source: {_links(op, root, folder)}"])


def _signature(op: Operator) -> str:
    signature = inspect.signature(op.reference)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return op.name + str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _links(op: Operator, root: Path, folder: Path) -> str:
    """Links to the declaration and to the kernels, relative to the folder of the document."""
    above = Path(os.path.relpath(root, folder))
    files = {"declaration": SOURCES / "ops" / f"{op.family}.py"}
    for backend in op.support.backends:
        families = SOURCES / {"cpu": "cpu/programs", "cuda": "cuda"}[backend]
        package = families / op.family / "__init__.py"
        files[backend] = package if (root / package).is_file() else families / f"{op.family}.py"
    return ", ".join(f"[{name}]({(above / path).as_posix()})" for name, path in files.items())
