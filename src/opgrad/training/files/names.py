"""The names of inputs, outputs, files and metadata that are shared by the graphs of an artifact set and their users."""

BUFFER_SUFFIX = "_grad.accumulation.buffer"  # behind a parameter's name: the input that its gradient is added to
RESULT_SUFFIX = "_grad.accumulation.out"  # behind a parameter's name: the accumulator's output, always true
RESET = "lazy_reset_grad"  # the input that says whether gradients overwrite their buffers
VALUES = "weights.data"  # the file with large tensors that are no parameters, from which both models map them
OUTPUTS = "opgrad.outputs"  # the entry of an eval model's metadata with the outputs that the model had, as JSON
