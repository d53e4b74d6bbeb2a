"""What stands in the documents runs, as it stands there."""

import shutil
from pathlib import Path

import pytest
import typer
from snippets import ROOT, commands, documents, run, snippets
from subprocesses import run_python

import opgrad
from opgrad.cli.app import app

# Documents whose snippets run here, and those that have a test of their own, which knows what they should come to.
HERE = [
    "README.md",
    "docs/explain/attention.md",
    "docs/guides/quantized-training.md",
    "docs/reference/checkpoints.md",
    "docs/guides/distributed.md",
    "docs/reference/graph-operators.md",
    "docs/index.md",
    "docs/start/install.md",
    "docs/guides/losses.md",
    "docs/guides/onnxruntime.md",
    "docs/start/browser.md",
    "docs/start/numpy.md",
    "docs/start/onnx.md",
    "docs/start/pytorch.md",
    "docs/guides/arrays.md",
    "docs/guides/pytorch.md",
    "docs/reference/onednn.md",
]
ELSEWHERE = {
    "CONTRIBUTING.md": "test_snippets.py",
    "docs/guides/artifacts.md": "training/test_docs.py",
    "docs/guides/cuda.md": "cuda/test_gpu.py",
    "docs/explain/cuda.md": "cuda/test_gpu.py",
    "docs/reference/gradients.md": "gradients/test_gradients.py",
    "docs/guides/encoders.md": "training/tune/test_docs.py",
    "docs/guides/lowering.md": "plain/test_lower.py",
    "docs/guides/migration.md": "training/test_api.py",
    "docs/guides/portable.md": "training/test_portable.py",
    "docs/guides/training.md": "training/test_docs.py",
    "docs/start/operator.md": "test_snippets.py",
    "docs/start/tune.md": "training/tune/test_docs.py",
}
SLOW = ("check", "bench", "compile")  # which have tests of their own


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = opgrad.get_num_threads()
    yield tmp_path
    opgrad.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # PyTorch's own, in forward mode
@pytest.mark.parametrize("document", HERE)
def test_every_snippet_runs(document, folder):
    run(document, folder, SLOW)


@pytest.mark.parametrize("document", documents())
def test_no_snippet_is_left_out(document):
    has = any(kind == "python" for kind, _, _ in snippets(document))
    if has and document not in HERE:
        test = ROOT / "tests" / ELSEWHERE[document]
        assert Path(document).name in test.read_text(encoding="utf-8")


@pytest.mark.parametrize("document", documents())
def test_every_command_has_the_options_that_are_written(document):
    group = typer.main.get_command(app)
    for words in commands(document):
        if words[0].startswith("-"):
            continue
        command = group.commands[words[0]]
        known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
        for word in words[1:]:
            assert not word.startswith("-") or word.partition("=")[0] in known, (document, words)


def test_the_quoted_kernel_is_as_it_stands():
    quoted = [
        code for kind, _, code in snippets("CONTRIBUTING.md") if kind == "py" and code.startswith("def gradient_")
    ]
    source = (ROOT / "src/opgrad/cpu/kernels/softmax/rows.py").read_text(encoding="utf-8")
    assert [code in source for code in quoted] == [True]


# --- what changes the sources, in a copy of them --------------------------------------------------------------------

WRITTEN = {"docs/start/operator.md": "softsign", "CONTRIBUTING.md": "square"}
USE = """
op, x = operators()["{name}_grad"], np.linspace(-3, 3, 257, dtype=np.float32)
y = op.reference(np.ones(257), x.astype(np.float64))
np.testing.assert_allclose(opgrad.{name}_grad(np.ones_like(x), x), y, rtol=1e-6)
leaf = torch.from_numpy(x).requires_grad_()
opgrad.{name}(leaf).sum().backward()
np.testing.assert_allclose(leaf.grad.numpy(), y, rtol=1e-6)
"""


def test_an_operator_is_written_as_the_documents_say(tmp_path):
    """Declarations and kernels are put where they say; NumPy and PyTorch have the operators then, with gradients."""
    package = tmp_path / "opgrad"
    shutil.copytree(ROOT / "src" / "opgrad", package, ignore=shutil.ignore_patterns("__pycache__"))
    for document, name in WRITTEN.items():
        starts = ("@", f"{name} = ")
        codes = [code for kind, _, code in snippets(document) if kind == "python" and code.startswith(starts)]
        places = [package / layer / "activation.py" for layer in ("ops", "cpu/kernels", "cpu/programs", "cuda")]
        for path, code in zip(places, codes[:4], strict=True):
            path.write_text(f"{path.read_text(encoding='utf-8')}\n\n{code}", encoding="utf-8")
        public = (package / "call" / "operators.py").read_text(encoding="utf-8")
        imports = "".join(f"from opgrad.ops.activation import {each} as {each}\n" for each in (name, f"{name}_grad"))
        public = public.replace("from opgrad.ops.activation", f"{imports}from opgrad.ops.activation", 1)
        (package / "call" / "operators.py").write_text(public, encoding="utf-8")
    uses = [code for kind, _, code in snippets("docs/start/operator.md") if code.startswith("import")]
    imports = "import numpy as np, opgrad, torch\nfrom opgrad.ops import operators"
    checks = [USE.format(name=name) for name in WRITTEN.values()]
    run_python("\n".join([*uses, imports, *checks]), PYTHONPATH=str(tmp_path))
