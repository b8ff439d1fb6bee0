"""A rank's stages as autograd sees them: forward, backward, weight gradients, saved tensors.

A forward starts from leaves of its own and keeps only the edges at which its backward starts, so an output is free
once it is sent. The first message of a shape has a header. Where layers name their segments, each segment is an
autograd cut.

Weight gradients: while a dgrad runs, each linear puts its input and output gradient aside for the wgrad op; other
parameters get their gradients in the dgrad. Gradients are scaled at the loss, summed in `.grad` (float32 beside
two-byte parameters), reduced chunk by chunk; a tied parameter is reduced over all its holders. A recomputed segment
runs under autograd and keeps its inputs alone; its second run has the same random state and copies of the buffers that
it writes.

Saved tensors go through autograd's hooks into a store, by storage. OFFLOAD copies a layer's storages into a pool and
frees them; ONLOAD brings them back. Parameters, buffers and the batch stay.
"""
