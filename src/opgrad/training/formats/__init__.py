"""Files of training: artifact sets, checkpoints, weights of exported steps, and models with their large tensors."""
