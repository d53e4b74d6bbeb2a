"""A training run: its recipe, its epochs, its state in checkpoints, and what it shows and writes.

Imports the engine and below.
"""
