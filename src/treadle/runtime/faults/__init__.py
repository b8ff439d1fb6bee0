"""Detection of lost ranks: which rank failed first, and at which op."""
