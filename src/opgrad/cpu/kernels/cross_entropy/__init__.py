"""Cross-entropy in all its forms."""
