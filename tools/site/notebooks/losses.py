# %% [markdown]
# # Loss curves
#
# The same artifact set, trained with several learning rates and schedules: what `opgrad train` does, called from
# Python, with a batch's loss after every step. It needs opgrad with the [extra](../start/install.md) `train`.

# %%

import matplotlib.pyplot as plt
import numpy as np

from opgrad.training import ArtifactSet, Trainer, load_named

digits = ArtifactSet.load("examples/digits")
data = load_named("digits", digits.inputs, {"pixels": 16})
training, test = data.split(297, 1)
print(training.rows, "rows to train with,", test.rows, "to test")

# %%
BATCH, EPOCHS = 50, 10


def curve(rate, scale=lambda share: 1.0):
    """The loss of every batch; scale: of the learning rate, by the share of the training that is done."""
    trainer, random, losses = Trainer(digits, learning_rate=rate), np.random.default_rng(0), []
    steps = EPOCHS * (training.rows // BATCH)
    while len(losses) < steps:
        order = random.permutation(training.rows)
        for start in range(0, training.rows - BATCH + 1, BATCH):
            trainer.learning_rate = rate * scale(len(losses) / steps)
            losses.append(float(trainer.step(training.take(order[start : start + BATCH]).arrays)))
    return np.array(losses), trainer.evaluate(test)


def smooth(losses, count=20):
    return np.convolve(losses, np.ones(count) / count, mode="valid")


# %%
figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
reached = {}
for rate in (0.0003, 0.001, 0.003, 0.03):
    losses, result = curve(rate)
    reached[rate] = losses[-20:].mean()
    axes.plot(smooth(losses), label=f"{rate:g}: {result.accuracy:.1%} right on the test rows")
axes.set(xlabel="step", ylabel="loss, mean of 20 batches", yscale="log", title="AdamW, by learning rate")
axes.grid(alpha=0.3)
axes.legend()
plt.show()
assert reached[0.003] < reached[0.001] < reached[0.0003]
assert reached[0.003] < reached[0.03]

# %% [markdown]
# Up to 0.003 the loss at the end is the lower, the larger the rate is; 0.03 is too large for the last steps.

# %% [markdown]
# ## A schedule
#
# The largest of these rates learns fast at first, and then jumps about. It does better when it falls towards the end:

# %%
figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")


def cosine(share):
    return 0.5 + 0.5 * np.cos(np.pi * share)


found = {}
for name, scale in {"constant": lambda share: 1.0, "cosine": cosine}.items():
    losses, result = curve(0.03, scale)
    found[name] = result
    axes.plot(smooth(losses), label=f"{name}: {result.accuracy:.1%} right on the test rows")
axes.set(xlabel="step", ylabel="loss, mean of 20 batches", yscale="log", title="AdamW, learning rate 0.03")
axes.grid(alpha=0.3)
axes.legend()
plt.show()
assert found["cosine"].loss < found["constant"].loss
assert found["cosine"].accuracy > found["constant"].accuracy
