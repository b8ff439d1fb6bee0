#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>

#include <array>

#include "device.h"

namespace sim {
namespace {

// The CPU's generator under the name of the device.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex index, at::Generator cpu = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu_(std::move(cpu)) {}

  void set_current_seed(uint64_t seed) override { cpu_.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu_.current_seed(); }
  uint64_t seed() override { return cpu_.seed(); }
  void set_offset(uint64_t offset) override { cpu_.set_offset(offset); }
  uint64_t get_offset() const override { return cpu_.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { cpu_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu_.unsafeGetGeneratorImpl()->get_state(); }

  const at::Generator& cpu() const { return cpu_; }

 private:
  Generator* clone_impl() const override { return new Generator(device().index(), cpu_.clone()); }

  at::Generator cpu_;
};

}  // namespace

at::Generator new_generator(c10::DeviceIndex index) { return at::make_generator<Generator>(or_current(index)); }

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = [] {
    auto* made = new std::array<at::Generator, kMaxDevices>();
    for (int at = 0; at < kMaxDevices; ++at) (*made)[at] = at::make_generator<Generator>(at);
    return made;
  }();
  return (*generators)[or_current(index)];
}

at::Generator on_host(at::Generator generator) {
  TORCH_CHECK_VALUE(generator.device().type() == kType, "expected a generator of sim, got one of ", generator.device());
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu();
}

at::Generator for_kernel(at::Generator generator) {
  auto cpu = on_host(std::move(generator));
  std::lock_guard<std::mutex> lock(cpu.mutex());
  return at::detail::createCPUGenerator(at::check_generator<at::CPUGeneratorImpl>(cpu)->random64());
}

}  // namespace sim
