"""The content of an artifact set or a model, its trainability, and the tables that commands print."""
