# %% [markdown]
# # An embedding model, and a classifier made of it
#
# An encoder of 940,000 random weights learns which texts belong together, and then to tell what texts are about. All of
# it runs in stock onnxruntime on two cores. It needs opgrad with the [extra](../start/install.md) `tune`.
# [The guide](../guides/encoders.md) has all options, and the same in a terminal.

# %%
import importlib.util
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
import tokenizers

from opgrad.tune import Tuner

spec = importlib.util.spec_from_file_location("make", "examples/embed/make.py")
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
example.make(Path("."))  # model/, pairs.jsonl
pairs = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
print(len(pairs), "pairs, such as", pairs[40])

# %% [markdown]
# ## Vectors
#
# Of the 64 texts of a batch, the one that belongs to an anchor shall be the nearest to it.

# %%
tuner = Tuner("model", task="embed, temperature=0.05", train="*")
run = tuner.fit("pairs.jsonl", "embedded", epochs=2, learning_rate=2e-3, batch_size=64, validation=400)
losses = [loss for epoch in run.batch_losses for loss in epoch]
plt.figure(figsize=(8, 4))
plt.plot(losses, linewidth=0.8)
plt.xlabel("step")
plt.ylabel("loss")
plt.grid(alpha=0.3)
plt.show()
for name, (before, after) in run.figures.items():
    print(f"{name}: {before:.2f} before, {after:.2f} after")
assert run.figures["nDCG@10"][1] > 2 * run.figures["nDCG@10"][0]

# %% [markdown]
# The output runs where the model ran.

# %%
tokenizer = tokenizers.Tokenizer.from_file("embedded/tokenizer.json")
tokenizer.enable_truncation(128)
session = onnxruntime.InferenceSession("embedded/onnx/model.onnx")


def vectors(texts):
    """Vectors of length 1: the means of those of the tokens, as 1_Pooling/config.json says."""
    tokenizer.enable_padding()
    found = tokenizer.encode_batch(texts)
    given = {"input_ids": [each.ids for each in found], "attention_mask": [each.attention_mask for each in found]}
    given = {name: np.array(value) for name, value in given.items()}
    mask = given["attention_mask"][..., None]
    means = (session.run(None, given)[0] * mask).sum(1) / mask.sum(1)
    return means / np.linalg.norm(means, axis=1, keepdims=True)


texts = [each["positive"] for each in pairs[:300]]
question = "Return the square root of a number."
best = np.argsort(-(vectors(texts) @ vectors([question])[0]))[:3]
for place in best:
    print(pairs[place]["anchor"], "|", texts[place][:80])

# %% [markdown]
# ## A classifier
#
# Is a docstring one of a question that is answered with true or false? A head is put on the encoder, and trained with
# adapters.

# %%
asked = [each["anchor"] for each in pairs]
labelled = [{"text": each, "label": "yes" if "True" in each or "whether" in each else "no"} for each in asked]
Path("texts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in labelled))
classifier = Tuner("embedded", task="classify, labels=no|yes, weights=1|8", lora="rank=8, target=all-linear")
told = classifier.fit("texts.jsonl", "classifier", epochs=2, learning_rate=2e-3, batch_size=32, validation=0.2)
for name, (_, after) in told.figures.items():
    print(f"{name}: {after:.2f}")
