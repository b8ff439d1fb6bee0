"""Running a rank's ops on lanes: at cell granularity all in one thread, at layer granularity beside each other.

One executor goes through a rank's list, and launches each op on its lane, which runs it at once, on a thread or on a
stream. The ops of a lane run one after the other. The compute lane is the caller's thread.

    state                                                     owner, or guard
    autograd, gradients, pending wgrads, module state, RNG    compute lane; an exchange must not use parameters
    a parameter's gradient after its chunk's last wgrad       DP lane, until the step ends
    values, inputs, outputs, losses of a micro-batch          the lane whose op runs; the Program orders those ops
    a channel, an expert group, a reduction's group           its one lane
    storages of saved tensors                                 the lane whose op runs; counts are under a lock
    the rank's progress                                       a lock
    ends and errors of a step                                 each op's own entry; the first error wins

On a device the host launches in the order of one execution under the costs, at most 64 compute ops ahead, as memory
that is recorded for a stream is free only when that stream has passed. Events order kernels, not the allocator:
whatever reads a tensor that another stream may have allocated records it. The trace is one clock reading a call of
one thread; starts and ends are computed when somebody asks.
"""
