# %% [markdown]
# # Memory of the fused loss
#
# Cross-entropy over a large vocabulary: PyTorch writes log-probabilities, keeps them, and makes the gradient of them.
# `opgrad.torch.cross_entropy` makes the gradient in the same pass and keeps only that; the backward pass scales it, in
# new memory or, with `inplace_backward=True`, where it lies. Measured is how far the resident memory of this process
# rises in one forward and backward pass, as Linux counts it.

# %%
import ctypes
import gc
import re
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import opgrad.torch

LOSSES = {
    "torch": torch.nn.functional.cross_entropy,
    "opgrad": opgrad.torch.cross_entropy,
    "opgrad, inplace_backward": partial(opgrad.torch.cross_entropy, inplace_backward=True),
}


def resident(name):
    """MiB: VmRSS is the memory now, VmHWM the most since it was last reset."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024


def rise(loss, logits, labels):
    logits.grad = None
    gc.collect()
    opgrad.empty_pool()
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system
    Path("/proc/self/clear_refs").write_text("5")  # resets the most
    before = resident("VmRSS")
    loss(logits, labels).backward()
    return resident("VmHWM") - before


# %%
ROWS, VOCABULARIES = 1024, (8000, 16000, 32000)
found = {}
for dtype in (torch.float32, torch.bfloat16):
    for classes in VOCABULARIES:
        logits = torch.full((ROWS, classes), 0.1, dtype=dtype, requires_grad=True)
        labels = torch.zeros(ROWS, dtype=torch.int64)
        for way, loss in LOSSES.items():
            rise(loss, logits[:8].detach().requires_grad_(), labels[:8])  # compiles
            found[dtype, way, classes] = rise(loss, logits, labels)
    told = ", ".join(f"{way} {found[dtype, way, classes]:.0f} MiB" for way in LOSSES)
    print(f"{dtype}, {classes:,} classes: logits {logits.nbytes / 2**20:.0f} MiB, beside them {told}")
    # Torch writes log-probabilities and two gradients, the fused loss a gradient and a scaled copy, in place just one.
    assert [round(found[dtype, way, classes] * 2**20 / logits.nbytes) for way in LOSSES] == [3, 2, 1]

# %%
figure, all_axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
for axes, dtype in zip(all_axes, (torch.float32, torch.bfloat16), strict=True):
    for way, marker in zip(LOSSES, "so^", strict=True):
        axes.plot(VOCABULARIES, [found[dtype, way, classes] for classes in VOCABULARIES], marker=marker, label=way)
    axes.set(title=f"{dtype}, {ROWS} rows", xlabel="classes", ylabel="MiB beside the logits")
    axes.grid(alpha=0.3)
    axes.legend()
plt.show()

# %% [markdown]
# The gradient itself has the size of the logits: no loss needs less unless it writes over them, which the plain
# function does: `opgrad.softmax_cross_entropy_loss_and_grad(logits, labels, out=(loss, logits))`.
