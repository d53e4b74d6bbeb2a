"""Softmax with attributes: stages around one softmax, put together for each call."""
