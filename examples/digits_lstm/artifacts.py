"""Make the artifact set of model.onnx in this folder, and in no need of PyTorch: python artifacts.py."""

from pathlib import Path

from opgrad.training.artifacts import LossType, OptimType, generate_artifacts

folder = Path(__file__).parent
made = generate_artifacts(
    folder / "model.onnx",
    loss=LossType.CrossEntropyLoss,
    optimizer=OptimType.AdamW,
    artifact_directory=folder,
)
print(made)
