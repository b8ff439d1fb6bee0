"""Finding out which rank failed first, and at which op."""
