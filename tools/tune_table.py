"""Compare `opgrad tune` with PEFT and torch on this machine, for the table of docs/start/tune.md.

    python tools/tune_table.py speed  --peft-python PYTHON NAME ONNX_FOLDER HF_FOLDER
    python tools/tune_table.py losses --peft-python PYTHON NAME ONNX_FOLDER HF_FOLDER
    python tools/tune_table.py nodes  --peft-python PYTHON NAME ONNX_FOLDER HF_FOLDER

PYTHON is an interpreter with torch, transformers and peft; ONNX_FOLDER a model as onnxruntime-genai's builder wrote it
of HF_FOLDER, a model of transformers. Each run adds its figures to the file. Everything is measured in a process of its
own, with all cores; `make tables` writes the table.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "tuning.json"
LENGTH, RANK, ALPHA, TARGETS, RATE = 512, 8, 16, ("q_proj", "v_proj"), 1e-3
SHORT, STEPS = (2, 32), 50  # the batches whose losses are compared
SECONDS = 40  # of a measurement of speed, after the first step
PROFILED = 5  # steps whose nodes are timed
# Operators whose times are told together; what is not listed is the rest.
GROUPS = {
    "products with weights": ("MatMul", "FusedMatMul", "Gemm", "MatMulNBits", "QuantizedMatMulGrad"),
    "attention": ("GroupQueryAttention", "AttentionTraining", "AttentionGrad", "RotaryEmbeddingTraining"),
    "scores and loss": ("LinearCrossEntropyLoss", "LinearCrossEntropyLossAndGrad", "SoftmaxCrossEntropyLossAndGrad"),
}


def tokens(shape: tuple[int, ...], step: int) -> np.ndarray:
    """The tokens of a batch, and the one that follows each."""
    rows, length = shape
    return np.random.default_rng(step).integers(2, 500, (rows, length + 1))


def peak() -> float:
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


# --- what is measured, in processes of their own ---


class OfOpgrad:
    """A fine-tuning by opgrad.

    folder: where what PEFT shall begin with is written; "" for speed alone. profile: how the name of the file begins
    into which onnxruntime writes the times of nodes; "" for none.
    """

    def __init__(self, model: str, shape: tuple[int, int], folder: str, more: str, profile: str = ""):
        from opgrad import get_num_threads
        from opgrad.training import Trainer
        from opgrad.training.engine.trainer import session_options
        from opgrad.tune import Tuner, peft

        tuner = Tuner(model, lora=f"rank={RANK}, alpha={ALPHA}, target={'|'.join(TARGETS)}{more}")
        self._adapters, self._peft = tuner.adapters, peft
        if folder:
            peft.write(Path(folder), tuner.adapted.base, tuner.adapters, tuner.values)
            write_base(tuner, Path(folder) / "base")
        options = session_options(get_num_threads(), patterns=False)  # as those of `Tuner.fit`
        if profile:
            options.enable_profiling, options.profile_file_prefix = True, profile
        self.trainer = Trainer(tuner.adapted.setting(*shape).artifacts, RATE, options)

    def step(self, rows: np.ndarray) -> float:
        return self.trainer.step({"input_ids": rows[:, :-1], "labels": np.ascontiguousarray(rows[:, 1:])})

    def gradients(self) -> dict[str, np.ndarray]:
        found = self.trainer.gradients
        return {
            name: np.array(self._peft.turned(found[own]))
            for adapter in self._adapters
            for own, name in self._peft.names_of(adapter).items()
        }


def write_base(tuner: Any, folder: Path) -> None:
    """Write the weights of all modules as floats, each into a file with its name in transformers."""
    from opgrad.tune.lora import Adapter, Lora, columns_of, slices

    folder.mkdir()
    for product in tuner.adapted.base.products:
        for name, _, bounds in slices(product) if not product.op.startswith("Gather") else ():
            parts = columns_of(tuner.adapted.base, Adapter(name, product, Lora(), *bounds))
            np.save(folder / f"{name}.weight.npy", np.concatenate([part.astype(np.float32) for _, part in parts]))


class OfPeft:
    """The same by PEFT with torch. folder: with the adapter and the base's weights to begin with; "" for its own."""

    def __init__(self, model: str, dtype: str, folder: str, more: str):
        import torch
        from peft import LoraConfig, PeftModel, get_peft_model
        from transformers import AutoModelForCausalLM

        self._torch = torch
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        base = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        if folder:
            with torch.no_grad():
                for path in Path(folder, "base").iterdir():
                    base.get_parameter(path.stem).copy_(torch.from_numpy(np.load(path)))
            self.model = PeftModel.from_pretrained(base, folder, is_trainable=True)
        else:
            given = {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS), "use_dora": "dora=true" in more}
            self.model = get_peft_model(base, LoraConfig(**given))
        self._trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        self._optimizer = torch.optim.AdamW(self._trained.values(), lr=RATE, weight_decay=0.0)

    def step(self, rows: np.ndarray) -> float:
        torch, given = self._torch, self._torch.tensor(rows)
        scores = self.model(input_ids=given[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1).float(), given[:, 1:].flatten())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def gradients(self) -> dict[str, np.ndarray]:
        names = {name: name.replace(".default", "") for name in self._trained}
        return {
            own.removesuffix(".weight") if "magnitude" in own else own: self._trained[name].grad.numpy()
            for name, own in names.items()
        }


def measure(side: str, what: str, model: str, folder: str, more: str) -> None:
    """Run one side: print its speed, or write its losses and gradients into a folder."""
    shape = SHORT if what == "losses" else (1, LENGTH)
    if what == "nodes":
        run = OfOpgrad(model, shape, "", more, str(Path(folder) / "profile"))
        print(json.dumps(times_of_nodes(run, shape, Path(folder))))
        return
    run = OfOpgrad(model, shape, folder, more) if side == "opgrad" else OfPeft(model, side, folder, more)
    if what == "losses":
        losses, gradients = [], {}
        for step in range(STEPS):
            losses.append(run.step(tokens(shape, step)))
            if step in (0, STEPS - 1):
                gradients |= {f"{step} {name}": array for name, array in run.gradients().items()}
        np.savez(Path(folder) / f"{side}.npz", losses=losses, **gradients)
        return
    run.step(tokens(shape, 0))
    times: list[float] = []
    while sum(times) < SECONDS and len(times) < 10:
        before = time.perf_counter()
        run.step(tokens(shape, len(times) + 1))
        times.append(time.perf_counter() - before)
    print(json.dumps({"tokens_per_second": LENGTH / min(times), "steps": len(times), "peak_mb": peak()}))


def times_of_nodes(run: Any, shape: tuple[int, int], folder: Path) -> dict[str, float]:
    """Milliseconds of a step by groups of operators, and what is not within a node."""
    run.step(tokens(shape, 0))
    before = time.perf_counter()
    for step in range(PROFILED):
        run.step(tokens(shape, step + 1))
    whole = (time.perf_counter() - before) * 1e3 / PROFILED
    del run.trainer
    gc.collect()  # the session's end writes the file
    events = [json.loads(file.read_text()) for file in folder.glob("profile*.json")]
    nodes = [each for file in events for each in file if each["name"].endswith("_kernel_time")]
    found = dict.fromkeys([*GROUPS, "other nodes"], 0.0)
    seen = set[str]()
    for each in nodes:
        if each["name"] not in seen:  # in the first step, which makes plans
            seen.add(each["name"])
            continue
        operator = each["args"]["op_name"]
        group = next((name for name, operators in GROUPS.items() if operator in operators), "other nodes")
        found[group] += each["dur"] / 1e3 / PROFILED
    return {**found, "outside of nodes": whole - sum(found.values()), "step": whole}


# --- the results ---


def started(python: str, *words: str) -> str:
    """What a process of this script prints last."""
    found = subprocess.run([python, __file__, "measure", *words], stdout=subprocess.PIPE, text=True, check=True)
    return (found.stdout.splitlines() or [""])[-1]


def compare(what: str, python: str, onnx_folder: str, hf_folder: str, sides: list[str], more: str) -> dict[str, Any]:
    """The figures of a model: speed and peak memory of each side, or how far losses and gradients are apart."""
    folders = {"opgrad": (sys.executable, onnx_folder), **dict.fromkeys(("float32", "bfloat16"), (python, hf_folder))}
    if what == "speed":
        return {side: json.loads(started(folders[side][0], side, what, folders[side][1], "", more)) for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        if what == "nodes":
            return {what: json.loads(started(sys.executable, "opgrad", what, onnx_folder, folder, more))}
        for side in ("opgrad", "float32"):
            started(folders[side][0], side, what, folders[side][1], folder, more)
        ours, theirs = (dict(np.load(Path(folder) / f"{side}.npz")) for side in ("opgrad", "float32"))
    largest = {
        step: max(np.abs(theirs[name]).max() for name in theirs if name.startswith(step)) for step in ("0 ", "49 ")
    }
    apart = [np.abs(ours[name] - theirs[name]).max() / largest[f"{name.split()[0]} "] for name in ours if " " in name]
    return {"losses": float(np.abs(ours["losses"] - theirs["losses"]).max()), "gradients": float(max(apart))}


def table(result: dict[str, Any]) -> str:
    """Markdown: a row for each model."""
    lines = [
        "| model, base | opgrad | PEFT, float32 | PEFT, bfloat16 | 50 losses | gradients |",
        "|---|---|---|---|---|---|",
    ]
    for name, figures in result["models"].items():
        speeds = [figures.get(side) for side in ("opgrad", "float32", "bfloat16")]
        cells = [
            f"{each['tokens_per_second']:.1f} tokens/s, {each['peak_mb']:,.0f} MB" if each else "" for each in speeds
        ]
        apart = [f"{figures[what]:.0e}" if what in figures else "" for what in ("losses", "gradients")]
        lines.append(f"| {' | '.join([name, *cells, *apart])} |")
    machine, versions = result["machine"], result["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("onnxruntime", "torch", "peft", "transformers"))
    return "\n".join([*lines, "", f"{machine['cpu']}, {machine['cores']} cores; {packages}."])


def nodes_table(result: dict[str, Any]) -> str:
    """Markdown: where the milliseconds of a step go."""
    profiled = {name: figures["nodes"] for name, figures in result["models"].items() if "nodes" in figures}
    kinds, machine = next(iter(profiled.values())), result["profiled_on"]
    lines = [f"| ms of a step | {' | '.join(profiled)} |", f"|---|{'---|' * len(profiled)}"]
    lines += [f"| {kind} | {' | '.join(f'{each[kind]:,.0f}' for each in profiled.values())} |" for kind in kinds]
    return "\n".join(
        [*lines, "", f"{machine['cpu']}, {machine['cores']} cores, vectors of {machine['vector_bits']} bits."]
    )


def main() -> None:
    if sys.argv[1:2] == ["measure"]:
        measure(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "losses", "nodes"))
    for name in ("name", "onnx_folder", "hf_folder"):
        parser.add_argument(name)
    parser.add_argument("--peft-python", default="python")
    parser.add_argument("--sides", default="opgrad,float32,bfloat16", help="those whose speed is measured")
    parser.add_argument("--more", default="", help="what opgrad's --lora gets beside the rank, such as ', dora=true'")
    given = parser.parse_args()
    result = json.loads(RESULT.read_text()) if RESULT.is_file() else {"models": {}}
    from opgrad.cli.machine import describe, versions

    folders, sides = (given.onnx_folder, given.hf_folder), given.sides.split(",")
    found = compare(given.what, given.peft_python, *folders, sides, given.more)
    if given.what == "nodes":
        result["profiled_on"] = describe()
    else:
        packages = ("torch", "peft", "transformers")
        asked = f"import json; print(json.dumps([__import__(each).__version__ for each in {packages}]))"
        told = json.loads(subprocess.check_output([given.peft_python, "-c", asked], text=True))
        result |= {"machine": describe(), "versions": versions() | dict(zip(packages, told, strict=True))}
    result["models"].setdefault(given.name, {}).update(found)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
