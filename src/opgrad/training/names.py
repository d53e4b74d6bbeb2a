"""The names by which the graphs of an artifact set, and what runs them, know each other."""

BUFFER_SUFFIX = "_grad.accumulation.buffer"  # behind a parameter's name: the input that its gradient is added to
RESULT_SUFFIX = "_grad.accumulation.out"  # the output that says so
RESET = "lazy_reset_grad"  # the input that says whether gradients overwrite their buffers
VALUES = "weights.data"  # the file with large tensors that are no parameters, from which both models map them
OUTPUTS = "opgrad.outputs"  # the entry of an eval model's metadata with the outputs that the model had, as JSON
