"""Cross-entropy whose classes are split over gloo processes, beside the composition that one process computes."""

import hashlib
import os

import pytest
from processes import run_processes

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

from opgrad.torch.vocab_parallel import (  # noqa: E402
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)

CLASSES, HIDDEN, IGNORED = 37, 6, -100
RANGES = {1: (0, 37), 2: (0, 12, 37), 3: (0, 20, 20, 37), 5: (0, 1, 9, 9, 30, 37)}  # uneven, and empty
WEIGHT = torch.linspace(0.5, 2.0, CLASSES)
OPTIONS = [
    {},
    {"reduction": "none"},
    {"reduction": "sum", "label_smoothing": 0.2},
    {"weight": WEIGHT},
    {"weight": WEIGHT, "label_smoothing": 0.1, "reduction": "none"},
    {"label_smoothing": 0.1, "smoothing_formula": "megatron"},
    {"lse_square_scale": 0.01, "weight": WEIGHT},
    {"softcap": 2.0, "temperature": 0.7, "label_smoothing": 0.3},
    {"shift": 1, "num_items": 11},
    {"ignore_index": 5, "reduction": "none", "lse_square_scale": 0.1},
]
EXTRA = {"return_lse": True, "return_z_loss": True, "return_log_prob": True, "return_entropy": True}


def composed(x, target, weight=None, ignore_index=IGNORED, reduction="mean", label_smoothing=0.0,
             smoothing_formula="torch", lse_square_scale=0.0, softcap=None, temperature=1.0, shift=0,
             num_items=None):  # fmt: skip
    """The same loss of all classes as a composition, and what else a call may ask for."""
    z = x.double() if softcap is None else softcap * torch.tanh(x.double() / softcap)
    z = z / temperature
    if shift:
        target = torch.cat([target[..., 1:], torch.full_like(target[..., :1], ignore_index)], -1)
    log_p, lse = z.log_softmax(-1), z.logsumexp(-1)
    counts = target != ignore_index
    w = torch.ones(CLASSES).double() if weight is None else weight.double()
    picked = target.masked_fill(~counts, 0)
    smoothing = label_smoothing * (CLASSES / (CLASSES - 1) if smoothing_formula == "megatron" else 1)
    nll = -w[picked] * log_p.gather(-1, picked[..., None])[..., 0]
    losses = (1 - smoothing) * nll - smoothing / CLASSES * (log_p * w).sum(-1)
    losses, z_losses = losses * counts, lse_square_scale * lse.square() * counts
    over = ((w[picked] * counts).sum(), counts.sum()) if reduction == "mean" else (1, 1)
    over = over if num_items is None else (num_items, num_items)
    if reduction != "none":
        losses, z_losses = losses.sum() / over[0], z_losses.sum() / over[1]
    entropy = -(log_p.exp() * log_p).sum(-1) * counts
    log_prob = log_p.gather(-1, picked[..., None])[..., 0] * counts
    return losses + z_losses, lse * counts, z_losses, log_prob, entropy


def upstream(results):
    """A gradient of every result, another for each token."""
    generator = torch.Generator().manual_seed(7)
    return sum((each * torch.rand(each.shape, generator=generator)).sum() for each in results)


class Cases:
    """One process: what it finds wrong, and a digest of all that has to be the same on every process."""

    def __init__(self, rank, count):
        self.rank, self.count, self.faults, self.digest = rank, count, [], hashlib.sha256()
        generator = torch.Generator().manual_seed(1)
        self.x = 3 * torch.randn(2, 7, CLASSES, generator=generator)
        self.target = torch.randint(CLASSES, (2, 7), generator=generator)
        self.target[0, 3] = IGNORED
        self.first, self.last = RANGES[count][rank : rank + 2]
        self.hidden = torch.randn(2, 7, HIDDEN, generator=generator)
        self.layer = torch.randn(CLASSES, HIDDEN, generator=generator)
        self.bias = torch.randn(CLASSES, generator=generator)

    def targets(self, options):
        return self.target.where(self.target != IGNORED, options.get("ignore_index", IGNORED))

    def close(self, what, ours, theirs, tolerance):
        scale = theirs.abs().max().item() if theirs.numel() else 0
        if ours.shape != theirs.shape or not torch.allclose(
            ours.double(), theirs, rtol=0, atol=tolerance * (1 + scale)
        ):
            self.faults.append(f"{what}: {ours} is not {theirs}")

    def logits(self, options, dtype):
        whole = self.x.to(dtype, copy=True).requires_grad_()
        own = self.x.to(dtype)[..., self.first : self.last].clone().requires_grad_()
        found = vocab_parallel_cross_entropy(
            own, self.targets(options), vocab_range=(self.first, self.last), **options, **EXTRA
        )
        wanted = composed(whole, self.targets(options), **options)
        step = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
        for name, ours, theirs in zip(("loss", "lse", "z_loss", "log_prob", "entropy"), found, wanted, strict=False):
            rounded = dtype == torch.bfloat16 and name in ("loss", "z_loss")
            self.close(f"{name} {options} {dtype}", ours, theirs, step if rounded else min(step, 1e-6))
            self.digest.update(ours.detach().double().numpy().tobytes())
        upstream(found[:5]).backward()
        upstream(wanted).backward()
        if own.grad.dtype != dtype:
            self.faults.append(f"the gradient is {own.grad.dtype}")
        self.close(f"gradient {options} {dtype}", own.grad, whole.grad[..., self.first : self.last].double(), step * 3)

    def linear(self, options):
        x, layer, bias = (each.clone().requires_grad_() for each in (self.hidden, self.layer, self.bias))
        target = self.targets(options)
        wanted = composed(torch.nn.functional.linear(x.double(), layer.double(), bias.double()), target, **options)
        upstream(wanted).backward()
        own = [each[self.first : self.last].detach().clone().requires_grad_() for each in (layer, bias)]
        y = self.hidden.clone().requires_grad_()
        found = vocab_parallel_linear_cross_entropy(
            y, own[0], target, linear_bias=own[1], vocab_range=(self.first, self.last), **options, **EXTRA
        )
        upstream(found[:5]).backward()
        for name, ours, theirs in (("loss", found.loss, wanted[0]), ("dx", y.grad, x.grad.double())):
            self.close(f"linear {name} {options}", ours, theirs, 3e-6)
            self.digest.update(ours.detach().double().numpy().tobytes())
        for name, ours, theirs in zip(("weight", "bias"), own, (layer, bias), strict=True):
            self.close(f"linear d{name} {options}", ours.grad, theirs.grad[self.first : self.last].double(), 3e-6)

    def silent(self):
        """What does not count has a gradient of 0, whatever its logits are; NaN stays in its row."""
        own = self.x[0, :, self.first : self.last].clone()
        own[3] = torch.nan
        own[4] = torch.inf
        own[5] = -torch.inf
        own.requires_grad_()
        losses = vocab_parallel_cross_entropy(
            own, self.target[0], reduction="none", vocab_range=(self.first, self.last), lse_square_scale=0.1
        )
        losses.sum().backward()
        if not (losses[3] == 0 and losses[4].isnan() and losses[5].isnan() and losses[[0, 1, 2, 6]].isfinite().all()):
            self.faults.append(f"losses of rows without numbers: {losses}")
        if own.grad[3].any() or not own.grad[[0, 1, 2, 6]].isfinite().all():
            self.faults.append(f"gradients of rows without numbers: {own.grad}")

    def refused(self):
        own, target = self.x[0, :, self.first : self.last], self.target[0].clone()
        target[2] = CLASSES
        for what, call in {
            "target is 37 at 2": lambda: vocab_parallel_cross_entropy(own, target, vocab_range=(self.first, self.last)),
            "expected one that begins with 0": lambda: vocab_parallel_cross_entropy(
                own, self.target[0], vocab_range=(self.first + 1, self.last + 1)
            ),
            "expected a number above 0": lambda: vocab_parallel_cross_entropy(own, target, temperature=0.0),
            "target has shape": lambda: vocab_parallel_cross_entropy(own, target[1:]),
        }.items():
            try:
                call()
                self.faults.append(f"not refused: {what}")
            except ValueError as error:
                if what not in str(error):
                    self.faults.append(f"{error} does not say {what}")

    def dtensor(self):
        """Classes along one axis of a mesh, rows along another or not at all."""
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        rows = self.x[0, :5].clone()
        for shape, placements in (((self.count,), [Shard(1)]), ((1, self.count), [Shard(0), Shard(1)])):
            mesh = init_device_mesh("cpu", shape)
            shared = distribute_tensor(rows.clone(), mesh, placements).requires_grad_()
            whole = rows.clone().requires_grad_()
            for reduction in ("mean", "sum", "none"):
                options = {"reduction": reduction, "label_smoothing": 0.1}
                loss = vocab_parallel_cross_entropy(shared, self.target[0, :5], **options)
                wanted = composed(whole, self.target[0, :5], **options)[0]
                self.close(f"DTensor {shape} {reduction}", loss.full_tensor(), wanted, 1e-6)
                shared.grad = whole.grad = None
                loss.sum().backward()
                wanted.sum().backward()
                self.close(f"gradient of DTensor {shape}", shared.grad.full_tensor(), whole.grad.double(), 1e-6)
            if shared.grad.placements != tuple(placements):
                self.faults.append(f"the gradient lies as {shared.grad.placements}")


def work(rank, count):
    cases = Cases(rank, count)
    for options in OPTIONS:
        cases.logits(options, torch.float32)
        cases.linear(options)
    for dtype in (torch.float64, torch.bfloat16):
        cases.logits(OPTIONS[4], dtype)
    cases.silent()
    cases.refused()
    cases.dtensor()
    return {"faults": cases.faults, "digest": cases.digest.hexdigest()}


COUNTS = (1, 2, 3, 5) if "OPGRAD_PROCESSES" in os.environ else (3,)


@pytest.mark.parametrize("count", COUNTS)
def test_shards_are_what_the_whole_is(count, tmp_path):
    """On every process the same bits."""
    found = run_processes(work, count, str(tmp_path), count)
    assert [each["faults"] for each in found] == [[]] * count
    assert len({each["digest"] for each in found}) == 1
