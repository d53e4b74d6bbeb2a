"""The benchmark on a CUDA device, with PyTorch's tensors as arrays.

cells.py    what is measured        peers.py   who else computes it    case.py     the tensors of a cell
device.py   the device's clock      measure.py how time is taken       target.py   one cell, into JSON
"""
