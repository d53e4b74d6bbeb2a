"""Operators on any number of arrays."""
