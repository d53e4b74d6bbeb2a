"""The snippets of the documents: which there are, and what runs them one after the other."""

import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import report
from typer.testing import CliRunner

from opgrad.cli.app import app

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\w*)(?P<options>[^\n]*)\n(?P<code>.*?)^(?P=indent)```", re.M | re.S)
MODEL = """
    <ir_version: 8, opset_import: ["": 17]>
    net (float[batch, 4] x) => (float[batch, 3] scores) { h = Gemm(x, backbone_w, backbone_b)  scores = Gemm(h, w, b) }
"""


def documents():
    """All documents that a reader may try, relative to the root."""
    places = [ROOT / "CONTRIBUTING.md", *report.documents(ROOT)]
    return [path.relative_to(ROOT).as_posix() for path in places]


def snippets(document):
    """Kind, options and code of each block that stands in a document itself; "" is a kind, too."""
    text = report.MARKED.sub("", (ROOT / document).read_text(encoding="utf-8"))
    return [(part["kind"], part["options"], textwrap.dedent(part["code"])) for part in FENCE.finditer(text)]


def executed(document):
    """The names that the Python of a document leaves, each block where the one before ended; how many blocks it has."""
    names, blocks = {}, [code for kind, _, code in snippets(document) if kind == "python"]
    for code in blocks:
        exec(compile(code, document, "exec"), names)
    return names, len(blocks)


def commands(document):
    """The words of each command line of opgrad in a document."""
    texts = [code for kind, _, code in snippets(document) if kind in ("", "sh")]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("opgrad ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def run(document, folder, slow=()):
    """Run the snippets of a document, each where the one before ended, in this folder, which is the current one.

    slow: commands that are left out.
    """
    prepare(folder)
    names = {"__name__": "snippets"}
    for kind, _, code in snippets(document):
        if kind == "python":
            exec(compile(code, document, "exec"), names)
        for line in code.splitlines() if kind in ("", "sh") else ():
            if line.startswith("python examples/tune/make.py"):
                subprocess.run([sys.executable, "examples/tune/make.py"], check=True)
                chats = Path("examples/tune/chats.jsonl")  # an eighth of them, of which a half validates
                chats.write_text("".join(chats.read_text("utf-8").splitlines(keepends=True)[:80]), "utf-8")
            if line.startswith("mkdir "):
                Path(line.split()[1]).mkdir()
            if line.startswith("opgrad ") and line.split()[1] not in slow:
                result = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
                assert result.exit_code == 0, (line, result.output)
    return names


def prepare(folder):
    """What readers have: a checkout's examples, an artifact set, a model and data of their own."""
    import onnx

    (folder / "examples").mkdir()
    for each in (ROOT / "examples").iterdir():
        if each.name == "tune":  # which a document makes anew
            shutil.copytree(each, folder / "examples" / "tune", ignore=shutil.ignore_patterns("model*", "*.jsonl"))
        else:
            (folder / "examples" / each.name).symlink_to(each)
    shutil.copytree(ROOT / "examples" / "digits", folder / "artifacts")
    shutil.copyfile(ROOT / "examples" / "digits" / "training_model.onnx", folder / "training_model.onnx")
    model, random = onnx.parser.parse_model(MODEL), np.random.default_rng(0)
    for name, shape in {"backbone_w": (4, 8), "backbone_b": (8,), "w": (8, 3), "b": (3,)}.items():
        values = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name.replace("_", ".")))
    model.graph.node[0].input[1:] = ["backbone.w", "backbone.b"]
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "my_data.npz", x=random.random((60, 4), np.float32), labels=np.arange(60) % 3)
