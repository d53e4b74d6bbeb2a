"""Dropout and its gradient."""
