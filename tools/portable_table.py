"""Run the plain form of every lowered operator in other runtimes, and write the table of docs/guides/portable.md.

    python tools/portable_table.py --old PYTHON [--node FOLDER]

PYTHON is an interpreter with the oldest onnxruntime that opgrad takes and NumPy; FOLDER has node_modules with
onnxruntime-node and onnxruntime-web (default: examples/node). Each operator is a model of one node, of which the result
must be that of its formula; one that stands in several cases must pass all of them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "forms")]

from opgrad.onnxruntime import lower  # noqa: E402

BEGIN, END = "<!-- from here on by tools/portable_table.py -->", "<!-- up to here -->"
# Runs all models of a folder in whatever onnxruntime an interpreter has.
RUNNER = """
import json, sys
import numpy as np, onnxruntime
found = {}
for case in json.load(open(sys.argv[1] + "/cases.json")):
    try:
        arrays = {
            each["name"]: np.fromfile(f"{sys.argv[1]}/{each['file']}", each["dtype"]).reshape(each["shape"])
            for each in case["inputs"]
        }
        session = onnxruntime.InferenceSession(f"{sys.argv[1]}/{case['file']}", providers=["CPUExecutionProvider"])
        results = session.run(case["outputs"], arrays)
        found[case["file"]] = [np.asarray(each, np.float64).ravel().tolist() for each in results]
    except Exception as error:
        found[case["file"]] = " ".join(str(error).split())[:200]
print(json.dumps({"version": onnxruntime.__version__, "found": found}))
"""


def nodes() -> Iterator[tuple[str, onnx.ModelProto, dict, dict]]:
    """Every operator of training graphs: its name, a model of it, inputs, and what it must give."""
    import test_lower

    for case in test_lower.CASES:
        if "float32" in case.dtypes:
            yield case.op, *test_lower.built(case, "float32", 17, np.random.default_rng(0))
    yield from recurrent_nodes()
    yield from pooling_nodes()


def recurrent_nodes() -> Iterator[tuple[str, onnx.ModelProto, dict, dict]]:
    """Layers and their gradients, in all forms that the tests have."""
    import test_recurrent

    from opgrad.cli.examples import examples, expected

    for op in test_recurrent.OPERATORS.values():
        for example in examples(op, "float32"):
            if example.arguments["x"].size:  # onnxruntime's Scan takes no empty arrays
                model = onnx.load_from_string(test_recurrent.model_of(op, example.arguments))
                results = expected(op, example.arguments)
                exact = dict(zip([each.name for each in model.graph.output], results, strict=True))
                yield op.onnx[0].name, model, test_recurrent.arrays(example.arguments), exact


def pooling_nodes() -> Iterator[tuple[str, onnx.ModelProto, dict, dict]]:
    """The gradient of a maximum, which goes to its place."""
    import test_lower

    x = np.random.default_rng(0).standard_normal((2, 1, 4, 3)).astype(np.float32)
    indices, dy = np.array([[[[0, 5]]], [[[23, 23]]]]), np.arange(4, dtype=np.float32).reshape(2, 1, 1, 2)
    exact = np.zeros_like(x)
    np.add.at(exact.reshape(-1), indices.ravel(), dy.ravel())
    model = test_lower.max_pool_model(x, {}, forward=False)
    yield "MaxPoolGrad", model, {"dy": dy, "indices": indices}, {"dx": exact}


def write_cases(folder: Path) -> list[dict]:
    """Write the models, their inputs and what they must give."""
    told = []
    for index, (op, model, inputs, exact) in enumerate(nodes()):
        onnx.save(lower(model, operators=[op]), folder / f"{index}.onnx")
        entries = []
        for place, (name, array) in enumerate(inputs.items()):
            array.tofile(folder / f"{index}-{place}.bin")
            entry = {"name": name, "dtype": array.dtype.name, "shape": array.shape, "file": f"{index}-{place}.bin"}
            entries.append(entry)
        exact = {name: np.asarray(each, np.float64).ravel().tolist() for name, each in exact.items()}
        wanted = {"outputs": [*exact], "exact": [*exact.values()]}
        told.append({"op": op, "file": f"{index}.onnx", "inputs": entries, **wanted})
    (folder / "cases.json").write_text(json.dumps(told))
    return told


def passed(case: dict, found: object) -> bool:
    """Whether the results are those of the formula."""
    return isinstance(found, list) and all(map(close, found, case["exact"]))


def close(found: list, exact: list) -> bool:
    """Whether numbers are these, to three digits of the largest; what is not finite may be text, as of JavaScript."""
    one, other = (np.array([float(each) for each in values]) for values in (found, exact))
    largest = np.abs(other[np.isfinite(other)]).max(initial=0)
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-3, atol=1e-3 * (1 + largest), equal_nan=True)


def runs(folder: Path, old: str, node: Path) -> dict[str, dict]:
    """The results of each runtime by its name."""
    script = folder / "run.py"
    script.write_text(RUNNER)
    found = {}
    for python in (old, sys.executable):
        done = subprocess.run([python, script, folder], capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout)
        found[f"onnxruntime {answer['version']}"] = answer["found"]
    for kind in ("node", "web"):
        command = ["node", ROOT / "tools" / "portable_table.mjs", folder, node, kind]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout.splitlines()[-1])
        found[f"onnxruntime-{kind} {answer['version']}"] = answer["found"]
    return found


def table(told: list[dict], found: dict[str, dict]) -> str:
    """The table: a line for all operators that every runtime has, and one for each of the others."""
    operators = sorted({case["op"] for case in told})
    rows: dict[tuple[str, ...], list[str]] = {}
    for op in operators:
        own = [case for case in told if case["op"] == op]
        marks = []
        for results in found.values():
            good = sum(passed(case, results[case["file"]]) for case in own)
            marks.append("yes" if good == len(own) else "no" if not good else f"{good} of {len(own)} cases")
        rows.setdefault(tuple(marks), []).append(op)
    lines = ["| operators | " + " | ".join(found) + " |", "|---|" + "---|" * len(found)]
    for marks, names in sorted(rows.items(), key=lambda item: -len(item[1])):
        lines.append("| " + " | ".join([", ".join(names), *marks]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run, and write the table into the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", default=sys.executable)
    parser.add_argument("--node", type=Path, default=ROOT / "examples" / "node")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = write_cases(folder)
        found = runs(folder, given.old, given.node.resolve())
    for runtime, results in found.items():
        for case in told:
            if not passed(case, results[case["file"]]):
                print(runtime, case["op"], str(results[case["file"]])[:150])
    path = ROOT / "docs" / "guides" / "portable.md"
    text = path.read_text(encoding="utf-8")
    start, _, rest = text.partition(BEGIN)
    path.write_text(f"{start}{BEGIN}\n{table(told, found)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    print(f"{len(told)} cases, onnxruntime {onnxruntime.__version__}")


if __name__ == "__main__":
    main()
