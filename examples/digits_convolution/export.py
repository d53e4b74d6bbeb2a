"""Write model.onnx with PyTorch's exporter of today: python export.py. Training does not need this, nor PyTorch."""

from pathlib import Path

import onnx
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.GELU()),
    *(nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.GELU()),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
).eval()
program = torch.onnx.export(
    model,
    (torch.zeros(2, 1, 8, 8),),
    dynamo=True,
    opset_version=20,
    input_names=["pixels"],
    output_names=["scores"],
    dynamic_shapes=({0: torch.export.Dim("batch")},),
    optimize=False,  # else constants of other names take the places of the parameters
)
exported = program.model_proto
for part in (exported, exported.graph, *exported.graph.node, *exported.graph.value_info):
    del part.metadata_props[:]  # where in this file each node comes from
onnx.save(exported, Path(__file__).with_name("model.onnx"))
