"""Data for training: arrays by name, the files that they are read from, and the axis of a batch."""
