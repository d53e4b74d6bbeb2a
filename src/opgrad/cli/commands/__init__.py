"""The commands that train, and what makes the models for them."""
