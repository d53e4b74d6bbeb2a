"""Arrays of PyTorch, CuPy and JAX, and memory that others lend: shapes, dtypes, devices, calls. Imports `call`."""
