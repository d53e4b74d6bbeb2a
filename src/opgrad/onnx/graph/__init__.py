"""ONNX models as graphs, without a runtime: loading, opsets, nodes, shapes, formulas. Imports `base`."""
