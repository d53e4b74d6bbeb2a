"""Write model.onnx with PyTorch's older exporter: python export.py. Training does not need this, nor PyTorch."""

from pathlib import Path

import torch
from torch import nn


class Rows(nn.Module):
    """Reads the rows of an image one after the other, from both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 24, batch_first=True, bidirectional=True)
        self.classes = nn.Linear(48, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [N, 8, 8]. Returns a score for each digit, [N, 10]."""
        scores: torch.Tensor = self.classes(self.lstm(rows)[0].mean(1))
        return scores


torch.manual_seed(0)
torch.onnx.export(
    Rows(),
    (torch.zeros(2, 8, 8),),
    Path(__file__).with_name("model.onnx"),
    dynamo=False,
    opset_version=12,
    input_names=["rows"],
    output_names=["scores"],
    dynamic_axes={"rows": {0: "batch"}, "scores": {0: "batch"}},
    training=torch.onnx.TrainingMode.TRAINING,
    do_constant_folding=False,  # else constants of other names take the places of the parameters
)
