"""What an artifact set or a model holds, what can be trained, and the tables that commands print of it."""
