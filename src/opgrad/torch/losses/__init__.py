"""Cross-entropy on tensors: of logits, of a linear layer, and of classes that are split over processes."""
