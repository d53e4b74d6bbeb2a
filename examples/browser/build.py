"""Make the page's folder: python build.py [SITE]. It needs opgrad, and onnxruntime-web from npm.

SITE has all that the page asks for, so that any server of files will do, and none is needed beside it.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np

from opgrad.training import TensorSpec, load_named
from opgrad.training.export import export_step

HERE = Path(__file__).parent
PAGE = ("index.html", "style.css", "main.mjs", "worker.mjs", "step.mjs", "storage.mjs", "drawing.mjs", "chart.mjs")
PAGE += ("offline.mjs",)
RUNTIME = {
    "wasm": ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"),
    "webgpu": (
        "ort.webgpu.min.mjs",
        "ort-wasm-simd-threaded.asyncify.mjs",
        "ort-wasm-simd-threaded.asyncify.wasm",
    ),
}
TEST_ROWS = 297


def build(site: Path, modules: Path) -> None:
    """Write the page, the runtime, the models and the digits into a folder."""
    site.mkdir(parents=True, exist_ok=True)
    for name in PAGE:
        shutil.copyfile(HERE / name, site / name)
    runtime = modules / "onnxruntime-web" / "dist"
    for names in RUNTIME.values():
        for name in names:
            shutil.copyfile(runtime / name, site / name)
    shutil.copyfile(runtime.parent / "package.json", site / "onnxruntime-web.json")
    export_step(HERE.parent / "digits", site / "step.onnx", flat=True, models=["eval", "infer"])
    write_digits(site)


def write_digits(site: Path) -> None:
    """Write the digits: for each 64 bytes of pixels, 0 to 16, and its label; those for the test come last."""
    byte = np.dtype(np.uint8)
    digits = load_named("digits", [TensorSpec("pixels", byte, ("rows", 64)), TensorSpec("labels", byte, ("rows",))])
    labels = digits.arrays["labels"]
    order = np.random.default_rng(1).permutation(len(labels))
    content = np.column_stack([digits.arrays["pixels"], labels])[order].tobytes()
    (site / "digits.bin").write_bytes(content)
    told = {"name": "digits.bin", "pixels": 64, "train": len(labels) - TEST_ROWS, "test": TEST_ROWS}
    told["sha256"] = hashlib.sha256(content).hexdigest()
    (site / "digits.json").write_text(json.dumps(told))


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "site"), HERE / "node_modules")
