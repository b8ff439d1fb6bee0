// Tensors of the device as the CPU's kernels see them.
#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

// Returns the same memory as a tensor of the CPU, which keeps nothing alive; other tensors as they are.
at::Tensor as_cpu(const at::Tensor&);

}  // namespace sim
