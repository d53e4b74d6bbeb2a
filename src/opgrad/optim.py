"""Optimizers on NumPy arrays: of rows of a table, and of bfloat16 weights; the code is in `opgrad.call.optim`."""

from opgrad.call.optim import SplitAdamW, SplitSGD, adagrad_rows, adam_rows, sgd_rows

__all__ = ["SplitAdamW", "SplitSGD", "adagrad_rows", "adam_rows", "sgd_rows"]
