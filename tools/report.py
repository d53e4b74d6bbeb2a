"""The generated parts of README.md and docs/: `python tools/report.py` in the repository's root writes them.

A part stands between the lines `<!-- NAME:begin -->` and `<!-- NAME:end -->`; NAME is a key of PARTS, or OPERATORS_OF
and a family. The benchmark's parts come from the files in bench/results.
"""

import functools
import importlib
import inspect
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import command_pages
import operator_pages
from operator_pages import SOURCES

sys.path.append(str(Path(__file__).parents[1]))  # for bench

from opgrad.ops import graph_operators, operators

RESULTS = Path("bench/results")
LOOPS = Path("bench/loops.json")  # what `python tools/loop_costs` counted
TUNING = Path("bench/tuning.json")  # what `python tools/tune_table.py` measured
EMBEDDING = Path("bench/embedding.json")  # what `python tools/embed_table.py` measured
CUDA_REGIMES = Path("bench/cuda-regimes.jsonl")  # the fastest of what `tools/gpu/regimes.py` measured
HISTORY = Path("bench/history")  # a folder for each release, with the results as they were then
PLOT = Path("docs/explain/benchmark.png")
CUDA_PLOT = Path("docs/explain/benchmark-cuda.png")
SWEEP_PLOT = Path("docs/explain/benchmark-sweep.png")
# The rows of the README's table: every kind of kernel, a loss among them.
TEN = (
    ("softmax", "4096x1000"),
    ("softmax", "2048x32000"),
    ("log_softmax", "32768x128"),
    ("softmax_grad", "16x1000x56x56, axis 1"),
    ("softmax_grad", "2048x32000"),
    ("softmax_cross_entropy_loss_and_grad", "2048x32000"),
    ("relu_grad", "16777216"),
    ("quick_gelu_grad", "16777216"),
    ("gather", "50257x768, 8192 indices"),
    ("gather_grad", "50257x768, 8192 indices"),
)
MARKED = re.compile(r"(<!-- (?P<name>[\w-]+):begin -->\n).*?(<!-- (?P=name):end -->)", re.DOTALL)
TABLE = re.compile(r"(?P<head>\| operator \|[^\n]*\n\|[^\n]*\n)(?P<rows>(?:\|[^\n]*\n?)+)")
CAUSE = (
    "A cell is one operator on arrays of one shape and dtype; the figure is the geometric mean over the cells of the "
    "time of the fastest of torch, onnxruntime, SciPy and NumPy in the same run over ours. In new memory the lead is "
    "larger, as our results lie in memory that was released before and in huge pages, torch's in small pages that the "
    "system clears anew."
)
NO_RESULT = "There is no result file yet."
NOT_MEASURED = "The speed on CUDA has not been measured yet."


def documents(root: Path) -> list[Path]:
    """The files that may have generated parts."""
    return [path for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))] if path.exists()]


def rewritten(path: Path, root: Path) -> str:
    """The document's text with all parts generated anew.

    Raises ValueError for the name of a part that is not known.
    """

    def replace(match: re.Match[str]) -> str:
        return f"{match[1]}\n{_part(match['name'], path)(root, path.parent)}\n\n{match[3]}"

    return MARKED.sub(replace, path.read_text(encoding="utf-8"))


def _part(name: str, path: Path) -> Callable[[Path, Path], str]:
    """What writes a part of this name."""
    if name in PARTS:
        return PARTS[name]
    if name.startswith(OPERATORS_OF):
        return functools.partial(operator_pages.reference, name.removeprefix(OPERATORS_OF))
    raise ValueError(f"report: {path} has a part {name!r}, expected one of {', '.join([*PARTS, OPERATORS_OF])}")


def write(root: Path) -> None:
    """Begin the pages that are missing, then write the generated parts of the documents and the plots of results."""
    for page, text in missing(root):
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    for path in documents(root):
        path.write_text(rewritten(path, root), encoding="utf-8")
    pictures = {PLOT: newest_of_sets(root), CUDA_PLOT: [newest(root, "cuda")], SWEEP_PLOT: newest_sweeps(root)}
    for picture, (result, *others) in ((picture, found) for picture, found in pictures.items() if any(found)):
        from bench.plots import drawing, save

        save(drawing(result, *others), root / picture)


# --- operators ----------------------------------------------------------------------------------------------


def missing(root: Path) -> Iterator[tuple[Path, str]]:
    """The generated pages that are not there yet, each with the text that it begins with."""
    if (root / operator_pages.PAGES).parent.is_dir():
        yield from operator_pages.missing(root)


def operator_table(root: Path, folder: Path) -> str:
    """One row for each operator that every front end has."""
    return operator_pages.table(operators(), root, folder)


def graph_operator_table(root: Path, folder: Path) -> str:
    """One row for each of the other operators of training graphs."""
    return operator_pages.table(graph_operators(), root, folder)


def post_op_table(root: Path, folder: Path) -> str:
    """The post-ops of softmax: how each is called, what it is, whether it has a gradient."""
    from opgrad.ops.reference import post_ops

    lines = ["| post-op | value | gradient |", "|---|---|---|"]
    for name in (*post_ops.BINARY, *post_ops.VALUES):
        function = getattr(post_ops, name)
        parameters = ", ".join(map(_parameter, inspect.signature(function).parameters.values()))
        value = re.sub(r"([|*])", r"\\\1", inspect.getdoc(function) or "")
        lines.append(f"| `{name}({parameters})` | {value} | {'yes' if post_ops.has_gradient(name) else 'no'} |")
    return "\n".join(lines)


def _parameter(parameter: inspect.Parameter) -> str:
    """Its name, and its default in a few digits."""
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default:.4g}"


def gradient_rules(root: Path, folder: Path) -> str:
    """One row for each operator that has a gradient: the rule, and in which opsets and forms it is checked, and how."""
    from opgrad.onnx.rules.node import RULES

    cases = _gradient_cases(root)
    lines = ["| operator | gradient | opsets checked | forms checked | how |", "|---|---|---|---|---|"]
    for domain, name in sorted({*RULES, *((case.domain, case.op) for case in cases.CASES), *cases.EXPANDED}):
        own = [case for case in cases.CASES if (case.domain, case.op) == (domain, name)]
        opsets = ", ".join(map(str, sorted({case.opset for case in own})))
        forms = "; ".join(dict.fromkeys(case.form for case in own if case.form))
        how = cases.DIFFERENCES if own else cases.ELSEWHERE.get((domain, name), cases.NOTHING)
        declared = RULES.get((domain, name))
        module = declared.rule.__module__ if declared else "opgrad.onnx.gradients.expansion"
        file = module.removeprefix("opgrad.").replace(".", "/") + ".py"
        link = (Path(os.path.relpath(root, folder)) / SOURCES / file).as_posix()
        given = inspect.getdoc(declared.rule) if declared else cases.EXPANDED.get((domain, name), cases.FUNCTION)
        text = " ".join((given or "").split()).replace("|", "\\|").replace("*", "\\*")
        title = f"{domain}.{name}" if domain else name
        lines.append(f"| [{title}]({link}) | {text} | {opsets} | {forms} | {how} |")
    return "\n".join(lines)


def runtime_operators(root: Path, folder: Path) -> str:
    """One row for each operator that a stock session of onnxruntime runs on the CPU: whether it has a gradient."""
    from opgrad.onnx.rules.coverage import coverage

    cases = _runtime_registry(root)
    lines = ["| operator | gradient | how, or why not |", "|---|---|---|"]
    for domain, name in cases.operators():
        found = coverage(domain, name)
        kind, text = ("?", "") if found is None else (found.kind, found.text)
        lines.append(f"| {domain}{'.' * bool(domain)}{name} | {kind} | {text} |")
    return "\n".join(lines)


def _runtime_registry(root: Path) -> Any:
    """What onnxruntime runs, which a module among the tests asks it."""
    return _support(root, "runtime_registry")


def _gradient_cases(root: Path) -> Any:
    """What the rules are checked with, which stands among the tests."""
    return _support(root, "gradient_cases")


def _support(root: Path, module: str) -> Any:
    """A module of tests/support."""
    return _module(root / "tests" / "support", module)


def _module(place: Path, module: str) -> Any:
    """A module that stands in a folder."""
    folder = str(place.resolve())
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(folder)


# --- benchmark ----------------------------------------------------------------------------------------------


def results(root: Path, device: str) -> dict[str, dict[str, Any]]:
    """The result files of a device, cpu or cuda, by name, the newest last, but those of training steps and sweeps."""
    from bench.sweep import is_sweep

    every = all_results(root).items()
    found = {name: result for name, result in every if "training" not in result and not is_sweep(result)}
    return {name: result for name, result in found.items() if ("device" in result) == (device == "cuda")}


def all_results(root: Path) -> dict[str, dict[str, Any]]:
    """All result files by name, which is that of the machine, the newest last."""
    from bench.figures import read

    found = {path.stem: read(path) for path in sorted((root / RESULTS).glob("*.json"))}
    return dict(sorted(found.items(), key=lambda item: item[1]["date"]))


def history(root: Path) -> dict[str, list[dict[str, Any]]]:
    """The results of each machine in all releases, the newest last."""
    from bench.figures import read

    found: dict[str, list[dict[str, Any]]] = {}
    for path in [*(root / HISTORY).glob("*/*.json"), *(root / RESULTS).glob("*.json")]:
        found.setdefault(path.stem, []).append(read(path))
    return {name: sorted(results, key=lambda result: str(result["date"])) for name, results in found.items()}


def newest(root: Path, device: str) -> dict[str, Any] | None:
    """The newest result of a device with plain cells, None if there is none."""
    from bench.figures import figures

    return next((result for result in reversed(results(root, device).values()) if figures(result)), None)


def newest_of_sets(root: Path) -> list[dict[str, Any]]:
    """The newest result with plain cells for each instruction set of CPUs, the slower set first."""
    from bench.figures import figures

    return _of_each_set(result for result in results(root, "cpu").values() if figures(result))


def newest_sweeps(root: Path) -> list[dict[str, Any]]:
    """The newest result of a sweep for each instruction set, the slower set first."""
    from bench.sweep import is_sweep

    return _of_each_set(each for each in all_results(root).values() if is_sweep(each))


def _of_each_set(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last for each instruction set."""
    from bench import instruction_sets

    last = {instruction_sets.of(result["machine"]): result for result in found}
    return sorted(last.values(), key=lambda result: int(result["machine"]["vector_bits"]))


def headlines(root: Path, folder: Path) -> str:
    """The means and ten rows of the newest result, beside that of the other instruction set."""
    from benchmark_tables import short_table

    found = newest_of_sets(root)
    return f"{speed(root, folder)}\n\n{short_table(found, TEN)}" if found else NO_RESULT


def speed(root: Path, _: Path) -> str:
    """The newest result as a table, a row for each instruction set, the slower first, and what to think of it."""
    from bench import instruction_sets
    from bench.figures import figures
    from bench.tables import Table

    found = newest_of_sets(root)
    if not found:
        return NO_RESULT
    rows = [[instruction_sets.title(each["machine"]), *_means(figures(each))] for each in found]
    ways = ("results in memory that is given (`out=`)", "results in new memory", "cells")
    table = Table(("as fast as the fastest peer", *ways), rows, align="lll").markdown()
    return f"{table}\n\n{CAUSE}"


def _means(cells: Sequence[Any]) -> list[str]:
    """The geometric mean and the cells behind, in each way, and how many cells there are."""
    from bench.figures import geometric_mean, losses
    from bench.measure import WAYS

    means = [(geometric_mean(cells, way), len(losses(cells, way)) or "none") for way in WAYS]
    return [f"**{mean:.1f} times**, slower in {behind}" if mean else "no peer" for mean, behind in means] + [
        str(len(cells))
    ]


def benchmark(root: Path, _: Path) -> str:
    """The short table of the newest result, for each instruction set if there are several."""
    from benchmark_tables import headline_table

    from bench import instruction_sets

    tables = (
        f"### {instruction_sets.title(result['machine'])}\n\n{headline_table(result)}"
        for result in newest_of_sets(root)
    )
    return "\n\n".join(tables) or NO_RESULT


def sweep(root: Path, _: Path) -> str:
    """The table of the newest sweep, for each instruction set if there are several."""
    from bench.tables import full_table

    return "\n\n".join(map(full_table, newest_sweeps(root))) or NO_RESULT


def cells(result: dict[str, Any]) -> str:
    """The page of the site with every cell of a result."""
    from bench.tables import full_table, title

    return f"# {title(result)}\n\n{TABLE.sub(_folded, full_table(result))}"


def _folded(table: re.Match[str]) -> str:
    """A table of which readers unfold one operator at a time: 300 rows at once are 20,000 pixels on a screen."""
    folds = []
    for name, rows in itertools.groupby(table["rows"].splitlines(), lambda row: row.split(" | ")[0].strip("| `")):
        own = list(rows)
        summary = f"<summary><code>{name}</code>, {len(own)} cells</summary>"
        folds += ["<details markdown>", summary, "", table["head"] + "\n".join(own), "", "</details>", ""]
    return "\n".join(folds)


def result_pages(root: Path, folder: Path) -> str:
    """A link to each result, the newest first; the site has its table there."""
    from bench.figures import machine_line
    from bench.tables import title

    files = Path(os.path.relpath(root / RESULTS, folder))
    found = {f"[{title(each)}]({(files / name).as_posix()}.json)": each for name, each in results(root, "cpu").items()}
    return "\n".join(f"* {link}: {machine_line(found[link])}" for link in reversed(found)) or NO_RESULT


def training_steps(root: Path, _: Path) -> str:
    """The table of every result of training steps, the newest first."""
    from bench.steps.tables import parts
    from bench.tables import text, title

    found = [result for result in all_results(root).values() if "training" in result]
    return "\n\n".join(f"#### {title(each)}\n\n{text(parts(each))}" for each in reversed(found)) or NO_RESULT


def tuning(root: Path, _: Path) -> str:
    """What fine-tunings of several models come to, beside those by PEFT."""
    from tune_table import table

    return table(json.loads((root / TUNING).read_text(encoding="utf-8")))


def tuning_nodes(root: Path, _: Path) -> str:
    """Where the time of a fine-tuning's step goes."""
    from tune_table import nodes_table

    return nodes_table(json.loads((root / TUNING).read_text(encoding="utf-8")))


def embedding(root: Path, _: Path) -> str:
    """How fast an embedding model trains, beside sentence-transformers."""
    from embed_table import table

    return table(json.loads((root / EMBEDDING).read_text(encoding="utf-8")))


def cuda_speed(root: Path, _: Path) -> str:
    """One sentence about the newest result on CUDA."""
    from bench.figures import figures
    from bench.tables import summary

    result = newest(root, "cuda")
    return f"On CUDA, {result['device']['name']}: {summary(figures(result))}" if result else NOT_MEASURED


def cuda_benchmark(root: Path, _: Path) -> str:
    """The short table of the newest result on CUDA, then every cell of every such result."""
    from benchmark_tables import headline_table

    result = newest(root, "cuda")
    return f"{headline_table(result)}\n\n{_full_tables(results(root, 'cuda'))}" if result else NOT_MEASURED


def _full_tables(found: dict[str, dict[str, Any]]) -> str:
    from bench.tables import full_table, title

    return "\n\n".join(f"### {title(each)}\n\n{full_table(each)}" for each in reversed(found.values()))


def cuda_regimes(root: Path, _: Path) -> str:
    """The regimes of CUDA kernels beside others."""
    from benchmark_tables import regimes_table

    return regimes_table(root / CUDA_REGIMES)


def loop_costs(root: Path, folder: Path) -> str:
    """For each instruction set, the longest loop over whole vectors of each headline kernel, and of each C formula."""
    found = json.loads((root / LOOPS).read_text(encoding="utf-8"))
    return "\n\n".join(f"### {name}\n\n{_loops_of_set(costs)}" for name, costs in found.items())


def _loops_of_set(costs: dict[str, list[dict[str, Any]]]) -> str:
    longest = {
        label: max((each for each in loops if not each["masked"]), key=lambda each: each["instructions"], default=None)
        for label, loops in costs.items()
    }
    processors = next(iter(filter(None, longest.values())))["cycles"]
    head = ["kernel", "instructions", "loads from the stack", "bytes written", *processors]
    rows = [
        [f"`{label}`", loop["instructions"], loop["stack_loads"], loop["stored_bytes"]]
        + ["" if each is None else f"{each:.0f}" for each in loop["cycles"].values()]
        for label, loop in longest.items()
        if loop
    ]
    rule = "|:--|" + "--:|" * (len(head) - 1)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


PARTS: dict[str, Callable[[Path, Path], str]] = {
    "operators": operator_table,
    "graph-operators": graph_operator_table,
    "gradient-rules": gradient_rules,
    "runtime-operators": runtime_operators,
    "post-ops": post_op_table,
    "commands": command_pages.commands,
    "recipe": command_pages.recipe,
    "headlines": headlines,
    "speed": speed,
    "tuning": tuning,
    "tuning-nodes": tuning_nodes,
    "embedding": embedding,
    "cuda-speed": cuda_speed,
}

# Tables that only the site has, where a document's line ends in <!-- site: NAME -->.
SITE_PARTS: dict[str, Callable[[Path, Path], str]] = {
    "benchmark": benchmark,
    "results": result_pages,
    "sweep": sweep,
    "training-steps": training_steps,
    "loop-costs": loop_costs,
    "cuda-benchmark": cuda_benchmark,
    "cuda-regimes": cuda_regimes,
}

OPERATORS_OF = "operators-of-"  # before the name of a family, the part with its operators

if __name__ == "__main__":
    write(Path.cwd())
