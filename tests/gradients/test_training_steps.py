"""Twenty steps of AdamW and of SGD on artifacts of models that PyTorch exported follow its own losses."""

import numpy as np
import pytest

from opgrad.training import ArtifactSet, Trainer
from opgrad.training.artifacts import LossType, generate_artifacts
from opgrad.training.onnxblock import optim

torch = pytest.importorskip("torch")
architectures = pytest.importorskip("architectures")
STEPS = 20


class WithLoss(torch.nn.Module):
    """GPT-2 with its loss, each token predicting the next."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, words, labels):
        scores = self.model(words)
        return torch.nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels.reshape(-1))


MODELS = {
    "images": (architectures.Convolutional, 3, 12),
    "text": (architectures.GPT2, 13, 17),
}
OPTIMIZERS = {
    "AdamW": (optim.AdamW(eps=1e-8), lambda weights: torch.optim.AdamW(weights, 1e-2, weight_decay=0, eps=1e-8)),
    "SGD": (optim.SGD(), lambda weights: torch.optim.SGD(weights, 1e-2)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_losses_follow_those_of_pytorch(kind, optimizer, tmp_path):
    make, classes, opset = MODELS[kind]
    torch.manual_seed(0)
    model, (x,) = make(), make.example
    labels = torch.randint(
        0, classes, x.shape[: 2 if kind == "text" else 1], generator=torch.Generator().manual_seed(6)
    )
    whole = WithLoss(model) if kind == "text" else model
    given = (x, labels) if kind == "text" else (x,)
    ours, theirs = OPTIMIZERS[optimizer]
    exported = architectures.exported(whole, given, opset)
    loss = None if kind == "text" else LossType.CrossEntropyLoss
    made = generate_artifacts(exported, loss=loss, optimizer=ours, artifact_directory=tmp_path)
    assert len(made.trainable) == len(list(whole.parameters()))
    trainer = Trainer(ArtifactSet.load(tmp_path), 1e-2)
    batch = dict(zip(made.inputs, (x.numpy(), labels.numpy()), strict=True))
    found = [trainer.step(batch) for _ in range(STEPS)]
    np.testing.assert_allclose(found, torch_losses(whole, theirs(list(whole.parameters())), given, labels), rtol=2e-4)
    assert found[-1] < found[0]


def torch_losses(whole, optimizer, given, labels):
    """The losses of the same steps in PyTorch."""
    losses = []
    whole.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        result = whole(*given)
        loss = result if len(given) > 1 else torch.nn.functional.cross_entropy(result, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
