// The device's allocator gives a freed block back to its stream's pool at once and overwrites it in stream order, so
// that a kernel of another stream, which the allocator was not told of, reads NaN.

#include "memory.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

namespace sim {
namespace {

constexpr int kPoison = 0xFF;  // NaN in every floating type, -1 in every integer

size_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

bool all_reached(const std::vector<MarkerPtr>& markers) {
  for (auto& marker : markers) {
    if (!marker->reached()) return false;
  }
  return true;
}

struct Block {
  void* data;
  size_t size;
  c10::Stream home;  // the stream it was allocated on
  std::set<c10::StreamId> users{};
  std::vector<MarkerPtr> waits{};
};

// Free blocks of a stream, by size.
class Pool {
 public:
  Block* take(size_t size) {
    auto found = free_.lower_bound(size);
    if (found == free_.end() || found->first > size + size / 4) return nullptr;
    auto* block = found->second;
    free_.erase(found);
    return block;
  }
  void give_back(Block* block) { free_.emplace(block->size, block); }
  std::multimap<size_t, Block*> take_all() { return std::exchange(free_, {}); }

 private:
  std::multimap<size_t, Block*> free_;
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    check_error();
    auto home = current_stream(-1);
    if (size == 0) return {nullptr, nullptr, &release, home.device()};
    std::lock_guard<std::mutex> lock(mutex_);
    reuse_recorded();
    auto* block = block_for(rounded(size, kUnit), home);
    auto& stats = stats_[home.device_index()];
    stats.allocation[0].increase(1);
    stats.allocated_bytes[0].increase(block->size);
    stats.requested_bytes[0].increase(block->size);
    return {block->data, block, &release, home.device()};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, size_t size) const override {
    launch(current_stream(-1), [=] { std::memcpy(to, from, size); });
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() != &release || data.get_context() == nullptr) return;  // memory of somebody else
    std::lock_guard<std::mutex> lock(mutex_);
    auto* block = static_cast<Block*>(data.get_context());
    if (block->home != stream) block->users.insert(stream.id());
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < settings().num_devices; ++device) synchronize_device(device);
    std::lock_guard<std::mutex> lock(mutex_);
    reuse_recorded();
    for (auto& [stream, pool] : pools_) {
      for (auto& [size, block] : pool.take_all()) {
        stats_[block->home.device_index()].reserved_bytes[0].decrease(size);
        std::free(block->data);
        delete block;
      }
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_[or_current(device)];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t used = stats_[or_current(device)].reserved_bytes[0].current;
    return {kMemoryBytes - std::min(used, kMemoryBytes), kMemoryBytes};
  }

 private:
  static constexpr size_t kUnit = 512;  // as CUDA's (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)

  static void release(void* context);

  Block* block_for(size_t size, const c10::Stream& home) {
    if (auto* found = pools_[home].take(size)) return found;
    auto* block = new Block{std::aligned_alloc(kUnit, size), size, home};
    TORCH_CHECK_WITH(OutOfMemoryError, block->data != nullptr, "the host has no ", size, " bytes for sim");
    std::memset(block->data, kPoison, size);
    stats_[home.device_index()].reserved_bytes[0].increase(size);
    return block;
  }

  void free_block(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = stats_[block->home.device_index()];
    stats.allocation[0].decrease(1);
    stats.allocated_bytes[0].decrease(block->size);
    stats.requested_bytes[0].decrease(block->size);
    if (block->users.empty()) return poison(block);
    for (auto id : block->users) {
      block->waits.push_back(record(c10::Stream(c10::Stream::UNSAFE, block->home.device(), id)));
    }
    block->users.clear();
    recorded_.push_back(block);
  }

  void poison(Block* block) {
    enqueue(block->home, [data = block->data, size = block->size] { std::memset(data, kPoison, size); });
    pools_[block->home].give_back(block);
  }

  void reuse_recorded() {
    std::vector<Block*> waiting;
    for (auto* block : recorded_) {
      if (!all_reached(block->waits)) {
        waiting.push_back(block);
        continue;
      }
      block->waits.clear();
      poison(block);
    }
    recorded_ = std::move(waiting);
  }

  template <class Change>
  void for_each_stat(c10::DeviceIndex device, Change change) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = stats_[or_current(device)];
    for (auto* stat : {&stats.allocation, &stats.allocated_bytes, &stats.requested_bytes, &stats.reserved_bytes}) {
      change((*stat)[0]);
    }
  }

  std::mutex mutex_;
  std::unordered_map<c10::Stream, Pool> pools_;
  std::vector<Block*> recorded_;  // freed, and in use by streams that were recorded
  std::array<c10::CachingDeviceAllocator::DeviceStats, kMaxDevices> stats_;
};

DeviceMemory& the_device_memory() {
  static auto* memory = new DeviceMemory();  // never destroyed: tensors may end after it
  return *memory;
}

void DeviceMemory::release(void* context) {
  if (context == nullptr || is_forked()) return;
  the_device_memory().free_block(static_cast<Block*>(context));
}

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    std::lock_guard<std::mutex> lock(mutex_);
    reuse_copied();
    auto* room = room_for(rounded(std::max<size_t>(size, 1), kUnit));
    live_[room->data] = room;
    return {room->data, room, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }

  bool contains(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(data) != nullptr;
  }
  void record_copy(const void* data, MarkerPtr end) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto* room = find(data)) room->copies.push_back(std::move(end));
  }

 private:
  static constexpr size_t kUnit = 64;
  struct Room {
    char* data;
    size_t size;
    std::vector<MarkerPtr> copies{};
  };

  static void release(void* context);

  Room* room_for(size_t size) {
    auto found = free_.find(size);
    Room* room;
    if (found != free_.end()) {
      room = found->second;
      free_.erase(found);
    } else {
      room = new Room{static_cast<char*>(std::aligned_alloc(kUnit, size)), size};
    }
    std::memset(room->data, kPoison, size);
    return room;
  }

  void free_room(Room* room) {
    std::lock_guard<std::mutex> lock(mutex_);
    live_.erase(room->data);
    copied_.push_back(room);
  }

  void reuse_copied() {
    std::vector<Room*> waiting;
    for (auto* room : copied_) {
      if (!all_reached(room->copies)) {
        waiting.push_back(room);
        continue;
      }
      room->copies.clear();
      free_.emplace(room->size, room);
    }
    copied_ = std::move(waiting);
  }

  Room* find(const void* data) {
    auto* at = static_cast<const char*>(data);
    auto after = live_.upper_bound(const_cast<char*>(at));
    if (after == live_.begin()) return nullptr;
    auto* room = std::prev(after)->second;
    return at < room->data + room->size ? room : nullptr;
  }

  std::mutex mutex_;
  std::map<char*, Room*> live_;
  std::multimap<size_t, Room*> free_;
  std::vector<Room*> copied_;
};

PinnedMemory& the_pinned_memory() {
  static auto* memory = new PinnedMemory();
  return *memory;
}

void PinnedMemory::release(void* context) { the_pinned_memory().free_room(static_cast<Room*>(context)); }

const bool registered = (c10::SetAllocator(kType, &the_device_memory()), true);

}  // namespace

c10::DeviceAllocator& device_memory() { return the_device_memory(); }
c10::Allocator& pinned_memory() { return the_pinned_memory(); }
void record_stream(const c10::DataPtr& data, const c10::Stream& stream) { the_device_memory().recordStream(data, stream); }
bool is_pinned(const void* data) { return the_pinned_memory().contains(data); }
void record_copy(const void* pinned, MarkerPtr end) { the_pinned_memory().record_copy(pinned, std::move(end)); }

}  // namespace sim
