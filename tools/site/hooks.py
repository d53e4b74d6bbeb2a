"""What MkDocs takes from outside of docs/: root documents, sources that are linked, the API, the figures of speed.

mkdocs.yml names this file as a hook. Nothing here is written by hand twice: pages of the API follow `__all__`,
operators their declarations (`tools/report.py`), plots the files in bench/results and bench/history.
"""

import ast
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tools")]

import benchmark_tables  # noqa: E402
import report  # noqa: E402

from bench import figures, plots, tables  # noqa: E402
from bench.steps import tables as step_tables  # noqa: E402
from opgrad.ops import graph_operators, operators  # noqa: E402

DOCS = ROOT / "docs"
# Documents of the root, under the names that they have in the site.
MOVED = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "README.md": "index.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]*)(#[^)\s]*)?(?=\))")
REFERENCE = re.compile(r"(<!-- operators-of-\w+:begin -->)(.*?)(<!-- )", re.DOTALL)
# The signature of an operator, then its formula, its documentation and its example, which mkdocstrings shows.
DOCSTRING = re.compile(
    r"^(## (\w+)\n\n```)python(\n.*?```\n\n)```math\n.*?```pycon\n.*?\n```$", re.DOTALL | re.MULTILINE
)
SITE_PART = re.compile(r"^\*The site has .*<!-- site: ([\w-]+) -->$", re.MULTILINE)
SOURCE = re.compile(r"^\* after .*\n", re.MULTILINE)  # which the documentation of the operator says, too
MODULES = {
    "opgrad": "Calls, plans, threads and memory",
    "opgrad.post_ops": "Post-ops of softmax",
    "opgrad.optim": "Optimizers on arrays",
    "opgrad.torch": "PyTorch",
    "opgrad.jax": "JAX",
    "opgrad.onnxruntime": "Stock onnxruntime",
    "opgrad.gradients": "Gradients of ONNX models",
    "opgrad.training": "Training",
    "opgrad.training.api": "The names of onnxruntime.training.api",
    "opgrad.training.artifacts": "Making artifacts",
    "opgrad.training.onnxblock": "Losses, optimizers and blocks of graphs",
    "opgrad.training.onnxblock.loss": "Losses of graphs",
    "opgrad.training.onnxblock.optim": "Optimizers of graphs",
    "opgrad.training.onnxblock.blocks": "Blocks of graphs",
    "opgrad.training.export": "A step as one model",
    "opgrad.tune": "Fine-tuning of language models",
}
FOREIGN = "https://unpkg.com/iframe-worker/shim"
LANGUAGES = {".py": "python", ".mjs": "javascript", ".cpp": "cpp", ".html": "html", ".md": "markdown", ".h": "cpp"}


def _file(module: str) -> str:
    """Where the source of a module stands, relative to the root."""
    place = "src/" + module.replace(".", "/")
    return f"{place}/__init__.py" if (ROOT / place).is_dir() else f"{place}.py"


PAGES = {_file(name): f"api/{name}.md" for name in MODULES}
# The tables of the benchmark's result files, which only the site has.
RESULTS = report.results(ROOT, "cpu")
CELLS = {f"bench/results/{name}.json": f"explain/benchmark/{name}.md" for name in RESULTS}
# The navigation: what is named here in this order, then the other pages of the folder.
START = ["install", "numpy", "onnx", "tune", "pytorch", "browser", "operator", "support"]
GUIDES = ["training", "artifacts", "migration"]
OPERATORS = ["operators", "graph-operators", "runtime-operators"]
EXPLAIN = ["design", "attention"]
SPEED = ["performance", "benchmark"]
PROJECT = ["security.md", "contributing.md", "changelog.md"]


# --- pages ----------------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the navigation together."""
    notebooks = sorted(f"notebooks/{path.name}" for path in (DOCS / "notebooks").glob("*.ipynb"))
    operators, speed = _pages("reference", OPERATORS)[: len(OPERATORS)], _pages("explain", SPEED)[: len(SPEED)]
    config.nav = [
        {"Start": ["index.md", *_pages("start", START), "examples.md", {"Notebooks": notebooks}]},
        {"Guides": _pages("guides", GUIDES)},
        {
            "Reference": [
                {"Operators": [*operators, *_pages("reference/operators")]},
                {"API": ["reference/api.md", *(f"api/{name}.md" for name in MODULES)]},
                *(page for page in _pages("reference") if page not in {*operators, "reference/api.md"}),
            ]
        },
        {
            "Explanation": [
                *(page for page in _pages("explain", EXPLAIN) if page not in speed),
                {"Speed": [*speed, *_pages("explain/benchmark"), *CELLS.values()]},
            ]
        },
        {"Project": PROJECT},
    ]
    return config


def _pages(folder: str, first: Sequence[str] = ()) -> list[str]:
    """The pages of a folder of docs/: those named first, then the others by name."""
    names = sorted(path.stem for path in (DOCS / folder).glob("*.md"))
    return [f"{folder}/{name}.md" for name in [*first, *(name for name in names if name not in first)]]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files of docs/, and the sources that are linked."""
    generated = {f"api/{name}.md": _api(name, title) for name, title in MODULES.items()}
    generated |= {_source_page(source): _listing(source) for source in sorted(_sources())}
    generated |= {page: report.cells(RESULTS[Path(source).stem]) for source, page in CELLS.items()}
    for path, place in MOVED.items():
        if place != "index.md":  # which docs/ has
            generated[place] = (ROOT / path).read_text(encoding="utf-8")
    for path, text in generated.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where their targets stand in the site, and show operators from their docstrings."""
    at = page.file.src_uri
    if at.startswith(("source/", "api/")) or at in CELLS.values():
        return markdown
    origin = {place: path for path, place in MOVED.items() if place != "index.md"}
    folder = (ROOT / origin[at] if at in origin else DOCS / at).parent
    if at == "explain/performance.md":
        return _performance(markdown)
    markdown = SITE_PART.sub(lambda part: report.SITE_PARTS[part[1]](ROOT, folder), markdown)
    text = _outside_code(markdown, lambda part: LINK.sub(lambda link: _link(link, folder, at), part))
    return REFERENCE.sub(lambda part: part[1] + SOURCE.sub("", DOCSTRING.sub(_operator, part[2])) + part[3], text)


def _operator(match: re.Match[str]) -> str:
    """The section of an operator: its docstring as mkdocstrings shows it."""
    options = "    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n      show_source: false"
    return f"{match[1]}py{match[3]}::: opgrad.{match[2]}\n{options}"


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take the theme's way of searching without a server from the site: it would load a script from elsewhere."""
    script = os.path.relpath("javascripts/worker.js", os.path.dirname(page.file.dest_uri) or ".")
    return output.replace(FOREIGN, script.replace(os.sep, "/"))


# --- the API --------------------------------------------------------------------------------------------------------


def _api(module: str, title: str) -> str:
    """The page of a module: every public name but modules and opgrad's operators, which have pages of their own."""
    apart = {name.rpartition(".")[2] for name in MODULES if name.startswith(f"{module}.")}
    if module == "opgrad":
        apart |= {*operators(), *graph_operators()}
    names = [name for name in _public(module) if name not in apart]
    lines = [f"# {title}", "", _summary(module), ""]
    if module == "opgrad":
        lines += [
            "The operators: [Operators](../reference/operators.md), "
            "[Operators of training graphs](../reference/graph-operators.md).\n"
        ]
    return "\n".join([*lines, *(f"::: {module}.{name}\n" for name in names)])


def _tree(module: str) -> ast.Module:
    return ast.parse((ROOT / _file(module)).read_text(encoding="utf-8"))


def _public(module: str) -> list[str]:
    """`__all__` of a module, or its functions and classes; read, not imported, as not all need be installed."""
    tree = _tree("opgrad.call.names" if module == "opgrad" else module)
    for node in tree.body:
        if isinstance(node, ast.Assign) and "__all__" in [getattr(target, "id", "") for target in node.targets]:
            return list(ast.literal_eval(node.value))
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [name for name in found if not name.startswith("_")]


def _summary(module: str) -> str:
    """The name of a module and its docstring's first sentence."""
    return f"`{module}`: {(ast.get_docstring(_tree(module)) or '').partition(chr(10) * 2)[0]}"


# --- links and sources ----------------------------------------------------------------------------------------------


def _link(match: re.Match[str], folder: Path, at: str) -> str:
    """A link of a document in `folder` as the page `at` of the site has it."""
    target, section = match[1], match[2] or ""
    if not target:
        return match[0]
    path = (folder / target).resolve()
    place = _place(path.relative_to(ROOT).as_posix()) if path.is_relative_to(ROOT) and path.exists() else target
    return os.path.relpath(place, os.path.dirname(at) or ".").replace(os.sep, "/") + section


def _place(path: str) -> str:
    """Where a file of the repository stands in the site."""
    if path in MOVED:
        return MOVED[path]
    if path in PAGES or path in CELLS:
        return PAGES.get(path) or CELLS[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else _source_page(path)


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change what stands outside of blocks and spans of code."""
    parts = re.split(r"(^ *```.*?^ *```$|`[^`\n]*`)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def _sources() -> set[str]:
    """The files outside of docs/ that documents link to, relative to the root."""
    documents = [*DOCS.rglob("*.md"), *(ROOT / path for path in MOVED)]
    found = set()
    for document in documents:
        for target, _ in LINK.findall(document.read_text(encoding="utf-8")):
            path = (document.parent / target).resolve()
            if target and path.is_file() and path.is_relative_to(ROOT) and not path.is_relative_to(DOCS):
                found.add(path.relative_to(ROOT).as_posix())
    return found - {*MOVED, *PAGES, *CELLS}


def _source_page(path: str) -> str:
    return f"source/{path}.md"


def _listing(path: str) -> str:
    """A page with a source, which the search leaves out; documents are shown as such."""
    text = (ROOT / path).read_text(encoding="utf-8")
    head = f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n\n"
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f'{head}# {path.rpartition("/")[2]}\n\n`{path}`\n\n````{language} linenums="1"\n{text}\n````\n'


# --- speed ----------------------------------------------------------------------------------------------------------


def _performance(text: str) -> str:
    """The page with a picture of every result file, the newest first, and of the releases."""
    lines = []
    for result in reversed(report.all_results(ROOT).values()):
        steps = step_tables if "training" in result else None
        said = steps.surroundings(result) if steps else figures.machine_line(result)
        lines += [f"## {tables.title(result)}", "", said, "", _picture((steps or plots).drawing(result)), ""]
    parts = {"charts": "\n".join(lines), "history": _picture(benchmark_tables.history(report.history(ROOT)))}
    return re.sub(r"<!-- (charts|history): .*? -->", lambda part: parts[part[1]], text)


def _picture(drawn: Any) -> str:
    return "" if drawn is None else f'<div class="chart">{plots.svg(drawn)}</div>\n'
