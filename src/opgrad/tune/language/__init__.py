"""Language models of ONNX as training takes them: without caches, with their products found, and with a loss."""
