"""A rank's stages as autograd sees them: forward, backward, weight gradients, saved tensors."""
