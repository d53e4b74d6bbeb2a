"""The gradients of pooling."""
