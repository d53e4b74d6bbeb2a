"""The generated parts of README.md and docs/: `python -m opgrad.report` in the repository's root writes them.

A part stands between the lines `<!-- NAME:begin -->` and `<!-- NAME:end -->`; NAME is a key of PARTS. The
benchmark's parts come from the files in bench/results.
"""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opgrad.contract import Operator, graph_operators, operators

RESULTS = Path("bench/results")
HISTORY = Path("bench/history")  # a folder for each release, with the results as they were then
PLOT = Path("docs/benchmark.png")
CUDA_PLOT = Path("docs/benchmark-cuda.png")
SWEEP_PLOT = Path("docs/benchmark-sweep.png")
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
SOURCES = Path("src/opgrad")
MARKED = re.compile(r"(<!-- (?P<name>[\w-]+):begin -->\n).*?(<!-- (?P=name):end -->)", re.DOTALL)
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
        name = match["name"]
        if name not in PARTS:
            raise ValueError(f"report: {path} has a part {name!r}, expected one of {', '.join(PARTS)}")
        return f"{match[1]}\n{PARTS[name](root, path.parent)}\n\n{match[3]}"

    return MARKED.sub(replace, path.read_text(encoding="utf-8"))


def write(root: Path) -> None:
    """Write the generated parts of all documents, and a plot where there is a result."""
    for path in documents(root):
        path.write_text(rewritten(path, root), encoding="utf-8")
    pictures = {PLOT: newest(root, "cpu"), CUDA_PLOT: newest(root, "cuda"), SWEEP_PLOT: newest_sweep(root)}
    for picture, result in pictures.items():
        if result:
            from opgrad.bench.plot import plot

            plot(result, root / picture)


# --- operators ----------------------------------------------------------------------------------------------


def operator_table(root: Path, folder: Path) -> str:
    """One row for each operator that every front end has, with links to its sources."""
    return _operator_table(operators(), root, folder)


def operator_reference(root: Path, folder: Path) -> str:
    """A section for each of them: signature, documentation, ONNX names, sources."""
    return _operator_reference(operators(), root, folder)


def graph_operator_table(root: Path, folder: Path) -> str:
    """One row for each of the other operators of training graphs."""
    return _operator_table(graph_operators(), root, folder)


def graph_operator_reference(root: Path, folder: Path) -> str:
    """A section for each of them."""
    return _operator_reference(graph_operators(), root, folder)


def _operator_table(chosen: Mapping[str, Operator], root: Path, folder: Path) -> str:
    from opgrad.cli import operator_row

    lines = ["| operator | formula | dtypes | ONNX, com.microsoft | source |", "|---|---|---|---|---|"]
    for op in chosen.values():
        name, formula, dtypes, backends, onnx_names = operator_row(op)
        sources = _links(op, backends.split(", "), root, folder)
        lines.append(f"| `{name}` | `{formula}` | {dtypes} | {onnx_names} | {sources} |")
    return "\n".join(lines)


def _operator_reference(chosen: Mapping[str, Operator], root: Path, folder: Path) -> str:
    from opgrad.cli import operator_row

    links = [_links(op, operator_row(op)[3].split(", "), root, folder) for op in chosen.values()]
    return "\n\n".join(map(_section, chosen.values(), links))


def post_op_table(root: Path, folder: Path) -> str:
    """The post-ops of softmax: how each is called, what it is, whether it has a gradient."""
    from opgrad import post_ops

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


def _section(op: Operator, sources: str) -> str:
    lines = [f"## {op.name}", "", "```python", f"opgrad.{_signature(op)}", "```", ""]
    lines += ["```text", inspect.getdoc(op.reference) or "", "```", ""]
    for name in op.onnx:
        inputs, outputs = ", ".join(name.inputs), ", ".join(name.outputs)
        given = "".join(f"; {key}={value!r}" for key, value in name.attributes.items() if value is not None)
        domain = name.origin or "ai.onnx"
        lines.append(f"* ONNX: `{domain}.{name.name}({inputs}{given}) -> ({outputs})`")
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
    for backend in filter(None, backends):
        package = SOURCES / backend / op.family / "__init__.py"
        files[backend] = package if (root / package).is_file() else SOURCES / backend / f"{op.family}.py"
    return ", ".join(f"[{name}]({(above / path).as_posix()})" for name, path in files.items())


def gradient_rules(root: Path, folder: Path) -> str:
    """One row for each operator that has a gradient: the rule, and in which opsets and forms it is checked, and how."""
    from opgrad.gradients.registry import RULES

    cases = _gradient_cases(root)
    lines = ["| operator | gradient | opsets checked | forms checked | how |", "|---|---|---|---|---|"]
    for domain, name in sorted({*RULES, *((case.domain, case.op) for case in cases.CASES), *cases.EXPANDED}):
        own = [case for case in cases.CASES if (case.domain, case.op) == (domain, name)]
        opsets = ", ".join(map(str, sorted({case.opset for case in own})))
        forms = "; ".join(dict.fromkeys(case.form for case in own if case.form))
        how = cases.DIFFERENCES if own else cases.ELSEWHERE.get((domain, name), cases.NOTHING)
        declared = RULES.get((domain, name))
        source = f"rules/{declared.rule.__module__.rpartition('.')[2]}.py" if declared else "expansion.py"
        link = (Path(os.path.relpath(root, folder)) / SOURCES / "gradients" / source).as_posix()
        given = inspect.getdoc(declared.rule) if declared else cases.EXPANDED.get((domain, name), cases.FUNCTION)
        text = " ".join((given or "").split()).replace("|", "\\|").replace("*", "\\*")
        title = f"{domain}.{name}" if domain else name
        lines.append(f"| [{title}]({link}) | {text} | {opsets} | {forms} | {how} |")
    return "\n".join(lines)


def _gradient_cases(root: Path) -> Any:
    """What the rules are checked with, which stands among the tests."""
    folder = str((root / "tests" / "support").resolve())
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("gradient_cases")
    finally:
        sys.path.remove(folder)


# --- benchmark ----------------------------------------------------------------------------------------------


def results(root: Path, device: str) -> dict[str, dict[str, Any]]:
    """The result files of a device, cpu or cuda, by name, the newest last, but those of training steps and sweeps."""
    from opgrad.bench.sweep import curves

    every = all_results(root).items()
    found = {name: result for name, result in every if "training" not in result and not curves(result)}
    return {name: result for name, result in found.items() if ("device" in result) == (device == "cuda")}


def all_results(root: Path) -> dict[str, dict[str, Any]]:
    """All result files by name, which is that of the machine, the newest last."""
    from opgrad.bench.figures import read

    found = {path.stem: read(path) for path in sorted((root / RESULTS).glob("*.json"))}
    return dict(sorted(found.items(), key=lambda item: item[1]["date"]))


def history(root: Path) -> dict[str, list[dict[str, Any]]]:
    """The results of each machine in all releases, the newest last."""
    from opgrad.bench.figures import read

    found: dict[str, list[dict[str, Any]]] = {}
    for path in [*(root / HISTORY).glob("*/*.json"), *(root / RESULTS).glob("*.json")]:
        found.setdefault(path.stem, []).append(read(path))
    return {name: sorted(results, key=lambda result: str(result["date"])) for name, results in found.items()}


def newest(root: Path, device: str) -> dict[str, Any] | None:
    """The newest result of a device with plain cells, None if there is none."""
    from opgrad.bench.figures import figures

    return next((result for result in reversed(results(root, device).values()) if figures(result)), None)


def newest_sweep(root: Path) -> dict[str, Any] | None:
    """The newest result of a sweep, None if there is none."""
    from opgrad.bench.sweep import curves

    found = [result for result in all_results(root).values() if "training" not in result and curves(result)]
    return found[-1] if found else None


def headlines(root: Path, folder: Path) -> str:
    """The plot and ten rows of the newest result."""
    from opgrad.bench.tables import headline_table

    result = newest(root, "cpu")
    return f"{_plot(root, folder, PLOT)}\n\n{headline_table(result, TEN)}" if result else NO_RESULT


def benchmark(root: Path, folder: Path) -> str:
    """The plot and the short table of the newest result."""
    result = newest(root, "cpu")
    return _plot_and_table(result, root, folder, PLOT) if result else NO_RESULT


def sweep(root: Path, folder: Path) -> str:
    """The plot and the table of the newest sweep."""
    from opgrad.bench.tables import sweep_table

    result = newest_sweep(root)
    if result is None:
        return NO_RESULT
    picture = (Path(os.path.relpath(root, folder)) / SWEEP_PLOT).as_posix()
    return f"![Time per element over the length of rows]({picture})\n\n{sweep_table(result)}"


def benchmark_cells(root: Path, _: Path) -> str:
    """Every cell of every result, the newest first."""
    return _full_tables(results(root, "cpu")) or NO_RESULT


def training_steps(root: Path, _: Path) -> str:
    """The table of every result of training steps, the newest first."""
    from opgrad.bench.training_tables import is_training, markdown

    found = {name: result for name, result in all_results(root).items() if is_training(result)}
    parts = [f"#### {name}\n\n{markdown(result)}" for name, result in reversed(found.items())]
    return "\n\n".join(parts) or NO_RESULT


def cuda_speed(root: Path, _: Path) -> str:
    """One sentence about the newest result on CUDA."""
    from opgrad.bench.figures import figures
    from opgrad.bench.tables import summary

    result = newest(root, "cuda")
    return f"On CUDA, {result['device']['name']}: {summary(figures(result))}" if result else NOT_MEASURED


def cuda_benchmark(root: Path, folder: Path) -> str:
    """The plot and the short table of the newest result on CUDA, then every cell of every such result."""
    result = newest(root, "cuda")
    if result is None:
        return NOT_MEASURED
    return f"{_plot_and_table(result, root, folder, CUDA_PLOT)}\n\n{_full_tables(results(root, 'cuda'))}"


def _plot_and_table(result: dict[str, Any], root: Path, folder: Path, plot: Path) -> str:
    from opgrad.bench.tables import headline_table

    return f"{_plot(root, folder, plot)}\n\n{headline_table(result)}"


def _plot(root: Path, folder: Path, plot: Path) -> str:
    picture = (Path(os.path.relpath(root, folder)) / plot).as_posix()
    return f"![Speed against the best peer, cell by cell]({picture})"


def _full_tables(found: dict[str, dict[str, Any]]) -> str:
    from opgrad.bench.tables import full_table

    return "\n\n".join(f"### {name}\n\n{full_table(result)}" for name, result in reversed(found.items()))


def cuda_predictions(root: Path, folder: Path) -> str:
    """What a model of the time says of the cells on CUDA devices."""
    from opgrad.bench.cuda.predictions import markdown

    return markdown()


PARTS: dict[str, Callable[[Path, Path], str]] = {
    "operators": operator_table,
    "operator-reference": operator_reference,
    "graph-operators": graph_operator_table,
    "graph-operator-reference": graph_operator_reference,
    "gradient-rules": gradient_rules,
    "post-ops": post_op_table,
    "headlines": headlines,
    "benchmark": benchmark,
    "benchmark-cells": benchmark_cells,
    "sweep": sweep,
    "training-steps": training_steps,
    "cuda-speed": cuda_speed,
    "cuda-benchmark": cuda_benchmark,
    "cuda-predictions": cuda_predictions,
}

if __name__ == "__main__":
    write(Path.cwd())
