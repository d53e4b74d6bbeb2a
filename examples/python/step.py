"""Train an exported step with onnxruntime and NumPy alone: copy this file into your program.

step = Step("digits/step.json")
loss = step.train({"pixels": pixels, "labels": labels}, learning_rate=0.001)
step.save("trained.safetensors")
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import onnxruntime


def digest(content):
    return hashlib.sha256(content).hexdigest()


class Step:
    """An exported step: its models, and what it keeps from call to call."""

    def __init__(self, manifest):
        self.folder, self.manifest = Path(manifest).parent, json.loads(Path(manifest).read_text())
        if self.manifest.get("format") != "opgrad.step" or self.manifest.get("version") != 1:
            raise ValueError(f"{manifest} is no manifest of an exported step, or of another version")
        self.sessions, self.state, self.steps, self.rate, self.seed = {}, {}, 0, 0.001, 0
        self.load(self.read("weights"))

    def read(self, kind):
        """The content of a file of the export."""
        return self.file(self.manifest["files"][kind]).read_bytes()

    def file(self, entry):
        """A file of the export, which must be the one that was written."""
        path, total = self.folder / entry["name"], hashlib.sha256()
        with open(path, "rb") as opened:
            while block := opened.read(1 << 20):
                total.update(block)
        if total.hexdigest() != entry["sha256"]:
            raise ValueError(f"{entry['name']} is damaged, or of another export: its SHA-256 is another")
        return path

    def run(self, kind, feeds):
        """The outputs of a model by name; it takes what it needs of the feeds and of the state."""
        if kind not in self.sessions:
            if not self.sessions:  # the models share files of large constants, which are mapped into memory
                for entry in self.manifest.get("data", ()):
                    self.file(entry)
            options = onnxruntime.SessionOptions()
            # Products behind DequantizeLinear take floats: by default the runtime rounds them to 8 bits there.
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
            self.sessions[kind] = onnxruntime.InferenceSession(
                self.file(self.manifest["files"][kind]),
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=["ShapeInputMerge"],  # that of 1.18 takes some shapes for others
            )
        session = self.sessions[kind]
        feeds = {**self.state, **feeds}
        given = {value.name: feeds[value.name] for value in session.get_inputs()}
        return dict(zip([value.name for value in session.get_outputs()], session.run(None, given), strict=True))

    # --- training ---

    def check(self, batch):
        """Raise ValueError for a batch that the models do not take; the message says why."""
        for entry in self.manifest["batch"]:
            if entry["name"] not in batch:
                raise ValueError(f"{entry['name']} is missing, expected an array for every input of the model")
            array, shape = batch[entry["name"]], entry["shape"]
            fits = len(array.shape) == len(shape) and all(
                isinstance(wanted, str) or wanted == size for wanted, size in zip(shape, array.shape, strict=True)
            )
            if not fits or array.dtype != entry["dtype"]:
                expected = f"{entry['dtype']} of shape {shape}"
                raise ValueError(f"{entry['name']} is {array.dtype} of shape {array.shape}, expected {expected}")
        label = self.manifest["label"]
        if label and label["classes"]:
            labels = batch[label["name"]]
            wrong = labels[((labels < 0) | (labels >= label["classes"])) & (labels != label["ignored"])]
            if wrong.size:
                raise ValueError(f"{label['name']} has {wrong[0]}, expected 0 to {label['classes'] - 1}")

    def train(self, batch, learning_rate, share=1.0, update=True):
        """Train on a batch and return its loss. share, update: of a step that accumulates gradients."""
        self.check(batch)
        self.rate = learning_rate
        given = {"learning_rate": np.array([learning_rate], np.float32), "step": np.array([self.steps + 1], np.int64)}
        given["seed"] = np.array([self.seed], np.int64)  # of dropout: another one for each batch
        given |= {"share": np.array([share], np.float32), "update": np.array([update])}
        results = self.run("step", {**batch, **given})
        self.state = {part["input"]: results[part["output"]] for part in self.manifest["state"]}
        self.steps += bool(update)
        self.seed += 1
        return float(np.reshape(results["loss"], -1)[0])

    def evaluate(self, batch):
        """Loss, scores and, for classes, accuracy of a batch."""
        self.check(batch)
        return self.run("eval", batch)

    # --- weights files ---

    def load(self, content):
        """Take the state from a weights file: of the export, of `save`, of another client."""
        told = self.manifest["weights"]
        length = int.from_bytes(content[:8], "little")
        try:
            header = json.loads(content[8 : 8 + length])
        except ValueError:
            raise ValueError("the weights are damaged: no header") from None
        metadata, data = header.pop("__metadata__", {}), content[8 + length :]
        if metadata.get("sha256") != digest(data) or len(data) not in (told["bytes"], told["all_bytes"]):
            raise ValueError("the weights are damaged, or of another model: their SHA-256 or size is another")
        if any(told["tensors"].get(name) != entry for name, entry in header.items()):
            raise ValueError("the weights are of another model: their tensors are others")
        if len(data) > told["bytes"] and metadata["optimizer"] != told["metadata"]["optimizer"]:
            raise ValueError(
                f"the weights have moments of {metadata['optimizer']}, expected {told['metadata']['optimizer']}"
            )
        self.steps = int(metadata["step"]) if len(data) == told["all_bytes"] else 0
        self.state = {}
        for part in self.manifest["state"]:
            offset, size = part["offset"], part["bytes"]
            held = offset is not None and offset < len(data)  # what a file does not have starts at 0
            values = data[offset : offset + size] if held else bytes(size)
            self.state[part["input"]] = np.frombuffer(values, part["dtype"]).reshape(part["shape"])

    def content(self):
        """The weights file of the present state."""
        told = self.manifest["weights"]
        kept = [part for part in self.manifest["state"] if part["offset"] is not None]
        data = b"".join(self.state[part["input"]].tobytes() for part in kept)
        changing = {"step": str(self.steps), "learning_rate": repr(self.rate), "sha256": digest(data)}
        header = json.dumps({"__metadata__": {**told["metadata"], **changing}, **told["tensors"]}).encode()
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header + data

    def save(self, path):
        """Write the weights; a crash on the way leaves an older file as it was."""
        temporary = Path(f"{path}.tmp")
        temporary.write_bytes(self.content())
        os.replace(temporary, path)
