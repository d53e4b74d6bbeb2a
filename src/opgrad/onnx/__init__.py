"""ONNX models without a runtime: graphs, passes, operators in plain ONNX, gradient rules. Imports `ops` and below."""
