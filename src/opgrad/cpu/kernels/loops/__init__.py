"""The loops that kernels share: maps, rows, columns, transposed short rows, reductions, and what chooses among them."""
