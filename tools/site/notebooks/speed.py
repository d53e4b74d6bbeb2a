# %% [markdown]
# # Speed beside others, on your machine
#
# `python -m bench` measures every operator for minutes; here are a few, in a form that you can change. All work on the
# same arrays, in turns, with results in new memory; bars are medians. Other work on the machine spoils the figures, and
# this notebook was run on a machine that did other work: run it on yours.

# %%
import statistics
import time

import matplotlib.pyplot as plt
import numpy as np
import scipy.special
import torch

import opgrad

ROWS, CLASSES = 1024, 8000
logits = np.random.default_rng(0).standard_normal((ROWS, CLASSES), np.float32)
labels = np.random.default_rng(1).integers(0, CLASSES, ROWS)
y, dy = opgrad.softmax(logits), np.ones_like(logits)
T = {name: torch.from_numpy(array) for name, array in {"x": logits, "y": y, "dy": dy, "labels": labels}.items()}


def torch_loss_and_gradient():
    x = T["x"].detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy(x, T["labels"])
    loss.backward()
    return loss, x.grad


CALLS = {
    "softmax": {
        "opgrad": lambda: opgrad.softmax(logits),
        "torch": lambda: torch.softmax(T["x"], -1),
        "SciPy": lambda: scipy.special.softmax(logits, axis=-1),
    },
    "gradient of softmax": {
        "opgrad": lambda: opgrad.softmax_grad(dy, y),
        "torch": lambda: torch.ops.aten._softmax_backward_data(T["dy"], T["y"], -1, torch.float32),
        "NumPy": lambda: y * (dy - (y * dy).sum(-1, keepdims=True)),
    },
    "cross-entropy and its gradient": {
        "opgrad": lambda: opgrad.softmax_cross_entropy_loss_and_grad(logits, labels),
        "torch": torch_loss_and_gradient,
    },
}


# %%
def measured(calls, seconds=2.0):
    """Median milliseconds of each; they take turns."""
    for call in calls.values():
        call()  # compiles
    times, end = {name: [] for name in calls}, time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in times.items()}


results = {name: {who: call() for who, call in calls.items()} for name, calls in CALLS.items()}
for found in results.values():  # all compute the same
    first = found.pop("opgrad")
    for result in found.values():
        for one, other in zip(*(each if isinstance(each, tuple) else (each,) for each in (first, result)), strict=True):
            np.testing.assert_allclose(one, other.detach() if torch.is_tensor(other) else other, rtol=1e-4, atol=1e-6)

figures = {name: measured(calls) for name, calls in CALLS.items()}
for name, found in figures.items():
    print(f"{name}:", ", ".join(f"{who} {milliseconds:.1f} ms" for who, milliseconds in found.items()))

# %%
COLOURS = {"opgrad": "tab:blue", "torch": "tab:orange", "SciPy": "tab:green", "NumPy": "tab:purple"}
figure, all_axes = plt.subplots(1, len(figures), figsize=(10, 3.6), layout="constrained")
for axes, (name, found) in zip(all_axes, figures.items(), strict=True):
    bars = axes.bar(list(found), list(found.values()), color=[COLOURS[who] for who in found])
    axes.bar_label(bars, fmt="%.1f")
    axes.set(title=name, ylabel="milliseconds")
figure.suptitle(f"{ROWS} x {CLASSES}, float32, {opgrad.get_num_threads()} threads")
plt.show()

# %% [markdown]
# Everything, with a picture: `python -m bench --plot result.png`.
