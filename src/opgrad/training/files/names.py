"""The names of inputs, outputs, files and metadata that are shared by the graphs of an artifact set and their users."""

VALUES = "weights.data"  # the file with large tensors that are no parameters, from which both models map them
OUTPUTS = "opgrad.outputs"  # the entry of an eval model's metadata with the outputs that the model had, as JSON
