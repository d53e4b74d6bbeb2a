"""From a model to its training graphs: weights, losses, optimizers, gradients. Imports files and below."""
