# %% [markdown]
# # Memory of the fused loss
#
# Cross-entropy over a large vocabulary: PyTorch writes log-probabilities, keeps them, and makes the gradient of them.
# `opgrad.torch.cross_entropy` makes the gradient in the same pass and keeps nothing else. Measured is the largest
# resident memory of a process that does one forward and backward pass, less that of one that only has the logits.

# %%
import subprocess
import sys

import matplotlib.pyplot as plt

CODE = """
import resource, sys
import torch, opgrad.torch
rows, classes, dtype, way = int(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3]), sys.argv[4]
loss = {"torch": torch.nn.functional.cross_entropy, "opgrad": opgrad.torch.cross_entropy}.get(way)
warm = torch.zeros(8, 16, dtype=dtype, requires_grad=True)
for call in (torch.nn.functional.cross_entropy, opgrad.torch.cross_entropy):
    call(warm, torch.zeros(8, dtype=torch.int64)).backward()
logits = torch.empty(rows, classes, dtype=dtype).fill_(0.1).requires_grad_()
labels = torch.zeros(rows, dtype=torch.int64)
if loss:
    loss(logits, labels).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak(rows, classes, dtype, way):
    words = [sys.executable, "-c", CODE, str(rows), str(classes), dtype, way]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


# %%
ROWS, VOCABULARIES = 1024, (8000, 16000, 32000)
WAYS = ("torch", "opgrad")
found = {}
for dtype in ("float32", "bfloat16"):
    for classes in VOCABULARIES:
        without = peak(ROWS, classes, dtype, "nothing")
        for way in WAYS:
            found[dtype, way, classes] = (peak(ROWS, classes, dtype, way) - without) / 2**20
for dtype in ("float32", "bfloat16"):
    size = ROWS * VOCABULARIES[-1] * (4 if dtype == "float32" else 2) / 2**20
    told = ", ".join(f"{way} {found[dtype, way, VOCABULARIES[-1]]:.0f} MiB" for way in WAYS)
    print(f"{dtype}, {VOCABULARIES[-1]:,} classes: logits {size:.0f} MiB, beside them {told}")

# %%
figure, all_axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
for axes, dtype in zip(all_axes, ("float32", "bfloat16"), strict=True):
    for way, marker in zip(WAYS, "so", strict=True):
        axes.plot(VOCABULARIES, [found[dtype, way, classes] for classes in VOCABULARIES], marker=marker, label=way)
    axes.set(title=f"{dtype}, {ROWS} rows", xlabel="classes", ylabel="MiB beside the logits")
    axes.grid(alpha=0.3)
    axes.legend()
plt.show()

# %% [markdown]
# The gradient itself has the size of the logits: no loss needs less unless it writes over them, which the plain
# function does, `opgrad.softmax_cross_entropy_loss_and_grad(logits, labels, out=(loss, logits))`.
