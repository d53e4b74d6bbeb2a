"""Losses over the last axis: cross-entropy with dense and with sparse labels."""
