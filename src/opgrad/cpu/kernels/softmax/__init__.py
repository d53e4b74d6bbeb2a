"""Softmax, log-softmax and their gradients: a file for each layout of opgrad.cpu.programs.layout."""
