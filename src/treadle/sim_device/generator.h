// The device's random numbers.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace sim {

const at::Generator& default_generator(c10::DeviceIndex);
at::Generator new_generator(c10::DeviceIndex);

// The CPU's generator in it: numbers that depend on no values are drawn at the launch, and are those of the CPU.
at::Generator on_host(at::Generator);

// Returns a generator for one kernel, seeded by the next number. As Philox does, it depends on what was drawn before the
// launch and not on when the kernel runs (ATen/cuda/CUDAGeneratorImpl.cpp, philox_cuda_state).
at::Generator for_kernel(at::Generator);

}  // namespace sim
