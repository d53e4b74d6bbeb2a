"""Training graphs: from a model to a training model, an eval model and their parameters."""
