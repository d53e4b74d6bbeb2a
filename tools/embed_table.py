"""Compare `opgrad tune --task embed` with sentence-transformers here, for the table of docs/guides/encoders.md.

    python tools/embed_table.py

It needs torch, sentence-transformers and the extra `tune`. The model has MiniLM's shape and random weights, the pairs
are those of examples/embed; all weights are trained. Each side measures in processes of its own, in turns; `make
tables` writes the table.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
EXAMPLE, RESULT = ROOT / "examples" / "embed", ROOT / "bench" / "embedding.json"
LAYERS, WIDTH, VOCABULARY = 6, 384, 30522
ROWS, LENGTH, PAIRS, RATE = 32, 128, 320, 2e-5  # of a batch, of a text in tokens, of an epoch whose time is taken
SHORT, STEPS, SHORT_RATE = (16, 64), 50, 1e-4  # the batches whose losses are compared
ROUNDS, NAMES = 3, ("anchor", "positive")


def make(folder: Path) -> None:
    """Write the model in sentence-transformers' layout, with the ONNX file beside it, and the pairs."""
    import torch
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    subprocess.run([sys.executable, str(EXAMPLE / "make.py")], check=True, stdout=subprocess.DEVNULL)
    lines = (EXAMPLE / "pairs.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "pairs.jsonl").write_text("".join(lines[:PAIRS]), encoding="utf-8")
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    file = str(EXAMPLE / "model" / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, model_max_length=LENGTH, **special)
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    model = BertModel(BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=WIDTH // 32,
        intermediate_size=4 * WIDTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ), add_pooling_layer=False).eval()  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():
        for each in model.parameters():  # equal tensors would be stored once
            each += 0.01 * torch.randn_like(each)
    model.save_pretrained(folder / "hf")
    tokenizer.save_pretrained(folder / "hf")
    parts = models.Transformer(str(folder / "hf")), models.Pooling(WIDTH, pooling_mode="mean"), models.Normalize()
    SentenceTransformer(modules=list(parts), device="cpu").save_pretrained(str(folder / "model"))
    names = ["input_ids", "attention_mask", "token_type_ids"]
    tokens = torch.ones(2, 7, dtype=torch.int64)
    (folder / "model" / "onnx").mkdir()

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: Any) -> Any:
            return self.model(**dict(zip(names, given, strict=True))).last_hidden_state

    torch.onnx.export(
        Encoder(), tuple(tokens for _ in names), str(folder / "model" / "onnx" / "model.onnx"), dynamo=False,
        input_names=names, output_names=["last_hidden_state"],
        dynamic_axes={name: {0: "batch", 1: "length"} for name in (*names, "last_hidden_state")},
    )  # fmt: skip


def batches() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.choice(PAIRS, SHORT[0], replace=False) for _ in range(STEPS)]


def of_opgrad(folder: Path, what: str) -> Any:
    """The losses of steps, or pairs a second of an epoch without its first step."""
    from opgrad.tune import Tuner

    given: dict[str, Any] = {"train": "*", "task": "embed", "weight_decay": 0.01}
    if what == "losses":
        adapted = Tuner(folder / "model", max_length=SHORT[1], **given).adapted
        rows = adapted.task.rows(adapted, adapted.examples(folder / "pairs.jsonl"), SHORT[0])
        trainer = adapted.task.trainer(adapted)(adapted.setting(*rows.shape()).artifacts, SHORT_RATE)
        return [float(trainer.step(rows.take(chosen).arrays)) for chosen in batches()]
    stamps: list[float] = []
    Tuner(folder / "model", max_length=LENGTH, **given).fit(
        folder / "pairs.jsonl", folder / f"tuned{time.time_ns()}", epochs=1, batch_size=ROWS, learning_rate=RATE,
        progress=lambda *_: stamps.append(time.perf_counter()),
    )  # fmt: skip
    return (PAIRS - ROWS) / (stamps[PAIRS // ROWS - 1] - stamps[0])


def of_torch(folder: Path, what: str) -> Any:
    """The same by sentence-transformers: its model, its loss, torch's AdamW and clipping."""
    import torch
    from sentence_transformers import SentenceTransformer, losses

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    lines = [json.loads(line) for line in (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    model = SentenceTransformer(str(folder / "model"), device="cpu").train()
    model.max_seq_length = SHORT[1] if what == "losses" else LENGTH
    contrast = losses.MultipleNegativesRankingLoss(model, scale=20.0)
    optimizer = torch.optim.AdamW(model.parameters(), SHORT_RATE if what == "losses" else RATE, weight_decay=0.01)

    def step(rows: np.ndarray, clip: float | None) -> float:
        loss = contrast([model.tokenize([lines[row][name] for row in rows]) for name in NAMES], None)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return float(loss.item())

    if what == "losses":
        return [step(rows, None) for rows in batches()]
    order = np.random.default_rng(0).permutation(PAIRS).reshape(-1, ROWS)
    step(order[0], 1.0)
    before = time.perf_counter()
    for rows in order[1:]:
        step(rows, 1.0)
    return (PAIRS - ROWS) / (time.perf_counter() - before)


SIDES = {"opgrad": of_opgrad, "torch": of_torch}


def started(side: str, folder: Path, what: str) -> Any:
    command = [sys.executable, __file__, side, str(folder), what]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def table(result: dict[str, Any]) -> str:
    """Markdown: the figures of both."""
    ours, theirs = (result["pairs_per_second"][side] for side in SIDES)
    machine, versions = result["machine"], result["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("onnxruntime", "torch", "sentence_transformers"))
    return (
        "| pairs a second, float32 | opgrad | sentence-transformers | ratio | 50 losses |\n|---|---|---|---|---|\n"
        f"| {LAYERS} layers, {WIDTH} wide; {ROWS} pairs of up to {LENGTH} tokens | {ours:.1f} | {theirs:.1f} | "
        f"{ours / theirs:.2f} | {result['losses']:.0e} apart |\n\n"
        f"{machine['cpu']}, {machine['cores']} cores, vectors of {machine['vector_bits']} bits; {packages}."
    )


def main() -> None:
    if len(sys.argv) > 1:
        side, folder, what = sys.argv[1:]
        print(json.dumps(SIDES[side](Path(folder), what)))
        return
    from opgrad.cli.machine import describe, versions

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        ours, theirs = (np.array(started(side, folder, "losses")) for side in SIDES)
        found: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(ROUNDS):
            for side, speeds in found.items():
                speeds.append(started(side, folder, "speed"))

    result = {
        "machine": describe(), "versions": versions(["sentence_transformers"]),
        "losses": float(np.abs(ours - theirs).max()),
        "pairs_per_second": {side: statistics.median(speeds) for side, speeds in found.items()}, "rounds": found,
    }  # fmt: skip
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
