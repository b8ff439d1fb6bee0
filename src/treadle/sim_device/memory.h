// The device's memory and the host's pinned memory.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include "device.h"

namespace sim {

c10::DeviceAllocator& device_memory();
c10::Allocator& pinned_memory();

// The allocator gives the block to nobody before the stream has come to where it is now.
void record_stream(const c10::DataPtr&, const c10::Stream&);

bool is_pinned(const void*);
// A pinned block is reused when all copies of it have ended.
void record_copy(const void* pinned, MarkerPtr end);

constexpr size_t kMemoryBytes = size_t(8) << 30;  // of a device, as it reports

}  // namespace sim
