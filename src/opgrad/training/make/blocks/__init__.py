"""Blocks that build a loss, an optimizer or a whole training graph onto an ONNX model; `onnxblock` has their names."""
