"""Files of training: artifact sets, checkpoints, weights, datasets, large models. Imports `onnx/graph`, `base`."""
