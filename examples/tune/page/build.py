"""Make the page's folder: python build.py MODEL DATA [SITE]. It needs opgrad, and onnxruntime-web from npm.

MODEL is a folder that `opgrad tune` takes, DATA a .jsonl file with examples. SITE has all that the page asks for: the
training of adapters as one ONNX model, the model's own weights, and the examples as tokens.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np

from opgrad.tune import Tuner
from opgrad.tune.examples import TokenData

HERE = Path(__file__).parent
BROWSER = HERE.parents[1] / "browser"
PAGE = (*(HERE / name for name in ("index.html", "main.mjs", "worker.mjs", "learner.mjs")),
        *(BROWSER / name for name in ("style.css", "step.mjs", "chart.mjs")))  # fmt: skip
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
LORA, MAX_LENGTH, ROWS = "rank=16, alpha=32, target=all-linear", 96, 400
PROMPTS = ("What does sorted do?", "What does json.dumps do?", "What does math.hypot do?")


def build(model: Path, data: Path, site: Path, modules: Path) -> None:
    """Write the page, the runtime, the step and the examples into a folder."""
    site.mkdir(parents=True, exist_ok=True)
    for path in (*PAGE, *(modules / "onnxruntime-web" / "dist" / name for name in RUNTIME)):
        shutil.copyfile(path, site / path.name)
    tuner = Tuner(model, lora=LORA, max_length=MAX_LENGTH)
    tuner.export_step(site / "step.onnx", flat=True, clip_norm=1.0, models=["infer"])
    (site / "examples.json").write_text(json.dumps(examples(tuner, data)))


def examples(tuner: Tuner, data: Path) -> dict[str, object]:
    """Rows of tokens and labels, prompts, the text of each token, and the tokens that end an answer."""
    found = tuner.adapted.examples(data)
    order = np.random.default_rng(0).permutation(len(found))[:ROWS]
    rows = TokenData(found, order, 1, "tokens", "labels")
    arrays = [{name: array[0].tolist() for name, array in rows.take(np.array([row])).arrays.items()}
              for row in range(rows.rows)]  # fmt: skip
    texts = [tuner.adapted.tokenizer.decode([token]) for token in range(tuner.adapted.tokenizer.size)]
    prompts = [{"text": text, "tokens": tuner.adapted.prompt_tokens(text).tolist()} for text in PROMPTS]
    return {"rows": arrays, "prompts": prompts, "texts": texts, "ends": list(tuner.adapted.tokenizer.ends)}


if __name__ == "__main__":
    site = Path(sys.argv[3]) if len(sys.argv) > 3 else HERE / "site"
    build(Path(sys.argv[1]), Path(sys.argv[2]), site, BROWSER / "node_modules")
