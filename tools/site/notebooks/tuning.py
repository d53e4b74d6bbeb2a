# %% [markdown]
# # A language model, from nothing and fine-tuned
#
# A decoder of two million weights learns Python's language reference, and then, by adapters, to answer questions. All
# of it runs in stock onnxruntime on two cores. It needs opgrad with the [extra](../start/install.md) `tune`.
# [The tutorial](../start/tune.md) does the same in a terminal.

# %%
import importlib.util
from pathlib import Path

import matplotlib.pyplot as plt

from opgrad.tune import Tuner

spec = importlib.util.spec_from_file_location("make", "examples/tune/make.py")
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
example.make(Path())  # model/, text.jsonl, chats.jsonl
print(Path("text.jsonl").read_text()[:200])
print(Path("chats.jsonl").read_text().splitlines()[40])

# %% [markdown]
# ## From nothing
#
# All weights are trained; the loss of each batch follows.

# %%
scratch = Tuner("model", train="*", max_length=256)
run = scratch.fit("text.jsonl", "base", epochs=3, learning_rate=3e-3, batch_size=8, warmup=20, validation=0.02)
losses = [loss for epoch in run.batch_losses for loss in epoch]
plt.figure(figsize=(8, 4))
plt.plot(losses, linewidth=0.8)
plt.xlabel("step")
plt.ylabel("loss")
plt.grid(alpha=0.3)
plt.show()
print("perplexity:", [round(each, 1) for each in run.perplexities()])
print(f"{run.tokens_per_second:,.0f} tokens a second")

# %%
print(scratch.write("The return statement", max_new_tokens=40, chat=False))

# %% [markdown]
# ## Fine-tuned
#
# The weights stay; each product of a layer gets an adapter of rank 16.

# %%
question = "What does json.dumps do?"
tuner = Tuner("base", lora="rank=16, alpha=32, target=all-linear", max_length=256)
before = tuner.write(question, max_new_tokens=30)
tuned = tuner.fit(
    "chats.jsonl", "tuned", epochs=4, learning_rate=4e-3, batch_size=16, validation=40, samples=[question]
)
print(f"{tuned.trained:,} numbers in {len(tuner.adapters)} adapters")
print("perplexity:", [round(each, 1) for each in tuned.perplexities()])
print("before:", repr(before))
for number, texts in enumerate(tuned.samples, 1):
    print(f"after epoch {number}:", repr(texts[question]))
assert tuned.perplexities()[-1] < tuned.perplexities()[0] / 3
