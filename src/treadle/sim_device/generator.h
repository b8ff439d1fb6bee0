// The device's random numbers.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace sim {

const at::Generator& default_generator(c10::DeviceIndex);
at::Generator new_generator(c10::DeviceIndex);

// Returns the CPU's generator for one kernel. As Philox does, it depends on the seed and on how many numbers were taken
// before the launch, and not on when the kernel runs (ATen/cuda/CUDAGeneratorImpl.cpp, philox_cuda_state).
at::Generator for_kernel(at::Generator);

}  // namespace sim
