"""A small GPT trained with PyTorch's loss and with opgrad's: the same losses, less memory, more tokens a second.

    python examples/gpt.py [--steps 8] [--dtype float32|bfloat16] [--vocabulary 50257]

The text is Python's standard library, which is on every machine; its words, numbers and signs are the tokens. Each loss
trains the same model, with the same batches, in a process of its own.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import opgrad.torch

BATCH, CONTEXT, HIDDEN, HEADS, LAYERS = 8, 128, 128, 4, 2
RARE = 0  # the token that stands for all that are not in the vocabulary


def tokens_of(vocabulary: int) -> Tensor:
    """The text as numbers of its tokens, the commonest first."""
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))
    found = re.findall(r"\w+|[^\w\s]|\s+", "".join(each.read_text(encoding="utf-8", errors="ignore") for each in files))
    common = Counter(found).most_common(vocabulary - 1)
    numbers = {token: number for number, (token, _) in enumerate(common, 1)}
    return torch.tensor([numbers.get(token, RARE) for token in found])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.joined = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.wide, self.narrow = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(mixed.transpose(1, 2).reshape(batch, length, HIDDEN))
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


class GPT(nn.Module):
    """Token and place, blocks, and an output layer that shares the tokens' table."""

    def __init__(self, vocabulary: int, fused: bool):
        super().__init__()
        self.fused = fused
        self.tokens, self.places = nn.Embedding(vocabulary, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.last = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.last(self.blocks(self.tokens(x) + self.places.weight[: x.shape[1]]))
        if self.fused:
            loss: Tensor = opgrad.torch.linear_cross_entropy(hidden, self.tokens.weight, y)
            return loss
        logits = functional.linear(hidden, self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def train(fused: bool, steps: int, dtype: torch.dtype, vocabulary: int) -> dict[str, object]:
    torch.manual_seed(0)
    text, model = tokens_of(vocabulary), GPT(vocabulary, fused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    for _ in range(steps):
        starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
        began = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    return {"losses": losses, "tokens": BATCH * CONTEXT / sorted(seconds)[len(seconds) // 2], "memory": peak_memory()}


def peak_memory() -> float:
    """MiB that this process has taken at most; NaN where the system does not tell."""
    try:
        import resource
    except ImportError:
        return float("nan")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--loss", choices=("torch", "opgrad"), help="train with this one alone and print JSON")
    given = parser.parse_args()
    if given.loss:
        print(json.dumps(train(given.loss == "opgrad", given.steps, getattr(torch, given.dtype), given.vocabulary)))
        return
    for loss in ("torch", "opgrad"):
        command = [sys.executable, __file__, *sys.argv[1:], "--loss", loss]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        print(f"{loss:6s} {found['tokens']:7.0f} tokens/s {found['memory']:7.0f} MiB  losses", end="")
        print("".join(f" {each:.4f}" for each in found["losses"]), flush=True)


if __name__ == "__main__":
    main()
