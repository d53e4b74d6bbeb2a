"""Softmax as attention uses it: with a bias before it, with dropout behind it."""
