"""What several families of operators share: attributes, formulas of post-ops, dropout, attention and recurrences."""
