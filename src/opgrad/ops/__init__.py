"""The declarations: one file a family. An operator is a NumPy function, whose body is the float64 reference."""

# In the order of the documentation.
FAMILIES = (
    *("softmax", "cross_entropy", "sample_loss", "activation", "gather", "accumulate"),
    *("gelu", "gated", "dropout", "attention", "sink", "rotary", "loss", "distillation", "arithmetic", "normalization"),
    *("convolution", "recurrent", "pooling", "resize", "scatter", "several", "optimizer"),
    *("quantized", "linear_loss", "vocab_parallel"),
)
