// Operators that make tensors, view them, and copy them between host and device.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "device.h"
#include "generator.h"
#include "kernels.h"
#include "memory.h"

namespace sim {
namespace {

using at::IntArrayRef;
using at::Tensor;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::ScalarType type_or_default(std::optional<at::ScalarType> type) {
  return type.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}

c10::Device device_or_current(std::optional<c10::Device> device) {
  return {kType, or_current(device ? device->index() : -1)};
}

Tensor empty(
    IntArrayRef size,
    std::optional<at::ScalarType> type,
    std::optional<at::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool> pin,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, &device_memory(), kKeys, type_or_default(type), format);
}

Tensor empty_strided(
    IntArrayRef size,
    IntArrayRef stride,
    std::optional<at::ScalarType> type,
    std::optional<at::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory(), kKeys, type_or_default(type));
}

void launch_copy(const c10::Stream& stream, Tensor from, Tensor to) {
  launch(stream, [from = std::move(from), to = std::move(to)] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    to.copy_(from);
  });
}

// Memory of the host as a copy engine sees it: nothing keeps it alive.
Tensor unowned(const Tensor& host) {
  auto options = at::TensorOptions().dtype(host.dtype()).device(at::kCPU);
  return at::from_blob(const_cast<void*>(host.const_data_ptr()), host.sizes(), host.strides(), options);
}

// On the source's stream, after what the target's was given, which waits for it (ATen/native/cuda/Copy.cu, copy_device_to_device).
void copy_on_device(const Tensor& from, const Tensor& to) {
  auto stream = current_stream(from.device().index());
  bool crosses = from.device() != to.device();
  if (crosses) wait_on(stream, record(current_stream(to.device().index())));
  launch_copy(stream, as_cpu(from), as_cpu(to));
  if (crosses) wait_on(current_stream(to.device().index()), record(stream));
}

// Only copies of pinned memory leave the host free: from other memory CUDA takes the values at the call, and to other
// memory it returns when they are there.
void copy_from_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto stream = current_stream(to.device().index());
  bool pinned = is_pinned(from.const_data_ptr());
  launch_copy(stream, non_blocking && pinned ? unowned(from) : from.clone(), as_cpu(to));
  if (!non_blocking) {
    note_implicit_wait("aten::copy_ from the host");
    synchronize(stream);
  } else if (pinned) {
    record_copy(from.const_data_ptr(), record(stream));
  } else {
    note_implicit_wait("aten::copy_ from pageable memory");
  }
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto stream = current_stream(from.device().index());
  bool pinned = is_pinned(to.const_data_ptr());
  if (!non_blocking || !pinned) note_implicit_wait("aten::copy_ to the host");
  launch_copy(stream, as_cpu(from), unowned(to));
  if (non_blocking && pinned) {
    record_copy(to.const_data_ptr(), record(stream));
  } else {
    synchronize(stream);
  }
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
  if (from.is_privateuseone() && to.is_privateuseone()) {
    copy_on_device(from, to);
  } else if (to.is_privateuseone()) {
    copy_from_host(from, to, non_blocking);
  } else {
    copy_to_host(from, to, non_blocking);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }

Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = size_t(impl->storage_offset() + impl->numel()) * self.element_size();
  if (self.storage().nbytes() < needed) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

Tensor& set_source(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  auto num = int64_t(source.nbytes() / self.element_size());
  return set_source(self, std::move(source), 0, {num}, IntArrayRef());
}

void record_stream_of(Tensor& self, c10::Stream stream) { record_stream(self.storage().data_ptr(), stream); }

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(settings().num_devices); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = current_device();
    set_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }

  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::OptionalDeviceGuard guard(storage.device());
    auto fresh = device_memory().allocate(size);
    auto kept = std::min(size, storage.nbytes());
    launch(current_stream(-1), [to = fresh.get(), from = storage.data(), kept] {
      if (kept != 0) std::memcpy(to, from, kept);
    });
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &unfold);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_source);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("record_stream", &record_stream_of);
}

}  // namespace
}  // namespace sim
