"""Cross-entropy in all its forms: the plain losses, and those with all options or over shards of the classes."""
