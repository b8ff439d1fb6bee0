"""Buffers between an update rank and its worker, and copies in and out of them."""
