"""Attention in tiles: products, softmax with the sums so far, products again."""
