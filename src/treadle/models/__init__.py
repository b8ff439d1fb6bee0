"""Models in the shape people use, in segments, and Hugging Face's checkpoints of them both ways."""
