"""From Python functions to object code: the vector types, their lowering, the cache."""
