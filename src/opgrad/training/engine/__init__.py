"""What trains: graphs bound to memory, optimizers, evaluation, `Trainer`. Imports make, files and below."""
