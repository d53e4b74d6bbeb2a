"""What trains: graphs bound to memory, optimizers, evaluation, export, and `Trainer`, which puts them together."""
