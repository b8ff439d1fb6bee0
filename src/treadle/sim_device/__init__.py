"""A device made of threads, to find races of streams where no GPU is at hand.

    from treadle import sim_device

    sim_device.load(delay_us=500, seed=3)
    with torch.device("sim"):
        ...

`load` compiles the device and registers it with torch as "sim" (torch's PrivateUse1), with a c10d backend "simccl".
Streams are threads that start kernels late, each at its own pace. The allocator overwrites a freed block with NaN, in
the order of the block's stream. Pinned memory, events, generators and communicators behave as those of CUDA and NCCL.

build.py            g++, a cache
backend.py          what torch asks of a device's Python module, and of a c10d backend
device.h            what the parts in C++ share
streams.cpp         streams, events, errors
memory.cpp          the allocator, pinned memory
kernels.cpp         every operator: shapes from the meta device, numbers from the CPU's kernel
tensors.cpp         views, copies between host and device
generator.cpp       random numbers
collectives.cpp     communicators, carried out by gloo
"""

from treadle.sim_device.backend import NAME, forbid_waits, in_host_memory, is_loaded, load, sleep, take_waits
from treadle.sim_device.build import BuildError

__all__ = ["NAME", "BuildError", "forbid_waits", "in_host_memory", "is_loaded", "load", "sleep", "take_waits"]
