"""ONNX models as graphs, without a runtime: loading, opsets, nodes, sizes, and the passes that rewrite them."""
