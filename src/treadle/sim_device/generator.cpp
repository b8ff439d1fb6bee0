#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include <array>
#include <cstring>
#include <random>

#include "device.h"

namespace sim {
namespace {

// A seed, and an offset that each kernel advances. Its state is both, as that of CUDA's generator.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex index)
      : GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK_VALUE(
        state.device_type() == c10::DeviceType::CPU && state.numel() * state.itemsize() == kStateBytes,
        "the state of a generator of sim is ", kStateBytes, " bytes on the CPU");
    std::array<uint64_t, 2> both{};
    std::memcpy(both.data(), state.data(), kStateBytes);
    seed_ = both[0];
    offset_ = both[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({kStateBytes}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::array<uint64_t, 2> both{seed_, offset_};
    std::memcpy(state.mutable_data_ptr(), both.data(), kStateBytes);
    return state.getIntrusivePtr();
  }

  at::Generator take() {
    std::seed_seq mixed{uint32_t(seed_), uint32_t(seed_ >> 32), uint32_t(offset_), uint32_t(offset_ >> 32)};
    std::array<uint32_t, 2> seed{};
    mixed.generate(seed.begin(), seed.end());
    offset_ += kNumbersPerKernel;
    return at::detail::createCPUGenerator(uint64_t(seed[0]) << 32 | seed[1]);
  }

 private:
  static constexpr int64_t kStateBytes = 16;
  static constexpr uint64_t kNumbersPerKernel = 4;

  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
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

at::Generator for_kernel(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  TORCH_CHECK_VALUE(generator.device().type() == kType, "expected a generator of sim, got one of ", generator.device());
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->take();
}

}  // namespace sim
