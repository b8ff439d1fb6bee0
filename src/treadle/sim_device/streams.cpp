// Streams are threads, which start kernels late and in uneven pace; events are markers on them.

#include "device.h"

#include <Python.h>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>

#include "memory.h"
#include "waits.h"

namespace sim {
namespace {

Settings chosen;
std::atomic<bool> started{false}, forked{false}, leaving{false};
std::atomic<int> running{0};  // kernels that compute

std::mutex error_mutex;
std::string first_error;

double now_ms() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

void keep_error(const std::exception& error) {
  std::string text = error.what();
  text = text.substr(0, text.find("\nException raised from"));
  std::lock_guard<std::mutex> lock(error_mutex);
  if (first_error.empty()) first_error = text;
}

// How late a stream starts its kernels: stretches at full speed, between stretches in which each is late by a draw.
class Pace {
 public:
  explicit Pace(uint64_t seed) : draw_(seed) {}

  std::chrono::microseconds next() {
    if (left_ == 0) {
      left_ = 1 + draw_() % kLongestStretch;
      slow_ = draw_() % 3 == 0;
    }
    --left_;
    if (!slow_ || chosen.delay_us <= 0) return std::chrono::microseconds(0);
    std::uniform_real_distribution<> late(0, chosen.delay_us);
    return std::chrono::microseconds(static_cast<int64_t>(late(draw_)));
  }

 private:
  static constexpr int kLongestStretch = 16;
  std::mt19937_64 draw_;
  int left_ = 0;
  bool slow_ = false;
};

// What the CPU's kernel warns of is about how the device calls it.
class NoWarnings final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

class StreamThread {
 public:
  explicit StreamThread(uint64_t seed) : pace_(seed) {
    std::thread([this] { run(); }).detach();
  }

  void push(Kernel kernel, bool paced) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back({std::move(kernel), paced});
    more_.notify_one();
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty() && !busy_;
  }

 private:
  struct Task {
    Kernel kernel;
    bool paced;
  };

  Task next() {
    std::unique_lock<std::mutex> lock(mutex_);
    busy_ = false;
    more_.wait(lock, [this] { return !queue_.empty() && !leaving; });
    Task task = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    return task;
  }

  void run() {
    at::set_num_threads(1);
    NoWarnings none;
    c10::WarningUtils::set_warning_handler(&none);
    for (;;) {
      Task task = next();
      if (task.paced) std::this_thread::sleep_for(pace_.next());
      ++running;
      try {
        task.kernel();
      } catch (const std::exception& error) {
        keep_error(error);
      }
      task.kernel = nullptr;  // what it kept alive goes before the next one starts
      --running;
    }
  }

  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<Task> queue_;
  bool busy_ = false;
  Pace pace_;
};

// As CUDA's: stream 0, and two pools of 32 that are handed out in turn (c10/cuda/CUDAStream.cpp, kStreamsPerPool).
constexpr int kStreamsPerPool = 32;
constexpr int kNumStreams = 1 + 2 * kStreamsPerPool;

struct Device {
  std::mutex mutex;
  std::array<StreamThread*, kNumStreams> threads{};
  std::array<int, 2> next{};  // of each pool
};

Device& device_at(c10::DeviceIndex index) {
  static auto* devices = new std::array<Device, kMaxDevices>();  // never destroyed: threads use it
  return (*devices)[index];
}

StreamThread& thread_of(const c10::Stream& stream) {
  TORCH_CHECK(!forked, "sim cannot be used again in a forked process; start processes by 'spawn' or 'forkserver'");
  auto& device = device_at(stream.device_index());
  std::lock_guard<std::mutex> lock(device.mutex);
  auto*& thread = device.threads[stream.id()];
  if (thread == nullptr) {
    started = true;
    std::seed_seq mixed{chosen.seed, uint64_t(stream.device_index()), uint64_t(stream.id())};
    std::array<uint32_t, 1> seed{};
    mixed.generate(seed.begin(), seed.end());
    thread = new StreamThread(seed[0]);
  }
  return *thread;
}

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::array<c10::StreamId, kMaxDevices> stream_of_thread{};

c10::Stream stream_at(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

}  // namespace

const Settings& settings() { return chosen; }

void configure(const Settings& given) {
  TORCH_CHECK(!started, "sim has started; load it with these settings before its first use");
  chosen = given;
  pthread_atfork(nullptr, nullptr, [] { forked = started.load(); });
}

GilRelease::GilRelease() {
  if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}

GilRelease::~GilRelease() {
  if (state_ != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

void Marker::reach() {
  std::lock_guard<std::mutex> lock(mutex_);
  reached_ = true;
  at_ms_ = now_ms();
  changed_.notify_all();
}

bool Marker::reached() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return reached_;
}

void Marker::wait() const {
  GilRelease released;
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}

bool Marker::wait_for(std::chrono::milliseconds longest) const {
  GilRelease released;
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, longest, [this] { return reached_; });
}

double Marker::at_ms() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return at_ms_;
}

c10::DeviceIndex current_device() { return device_of_thread; }

c10::DeviceIndex or_current(c10::DeviceIndex index) { return index < 0 ? device_of_thread : index; }

void set_device(c10::DeviceIndex index) {
  if (index < 0) return;
  TORCH_CHECK_VALUE(index < chosen.num_devices, "there is no sim:", int(index), ", but ", chosen.num_devices, " of them");
  device_of_thread = index;
}

c10::Stream current_stream(c10::DeviceIndex index) {
  index = or_current(index);
  return stream_at(index, stream_of_thread[index]);
}

c10::Stream new_stream(c10::DeviceIndex index, bool urgent) {
  index = or_current(index);
  auto& device = device_at(index);
  std::lock_guard<std::mutex> lock(device.mutex);
  int at = device.next[urgent]++ % kStreamsPerPool;
  return stream_at(index, 1 + urgent * kStreamsPerPool + at);
}

void launch(const c10::Stream& stream, Kernel kernel) {
  check_error();
  thread_of(stream).push(std::move(kernel), true);
}

void enqueue(const c10::Stream& stream, Kernel kernel) { thread_of(stream).push(std::move(kernel), false); }

MarkerPtr record(const c10::Stream& stream) {
  auto marker = std::make_shared<Marker>();
  enqueue(stream, [marker] { marker->reach(); });
  return marker;
}

void wait_on(const c10::Stream& stream, MarkerPtr marker) {
  enqueue(stream, [marker] {
    Spinning waiting;
    marker->wait();
  });
}

void synchronize(const c10::Stream& stream) {
  record(stream)->wait();
  check_error();
}

void synchronize_device(c10::DeviceIndex index) {
  index = or_current(index);
  std::vector<MarkerPtr> ends;
  for (int id = 0; id < kNumStreams; ++id) {
    if (device_at(index).threads[id] != nullptr) ends.push_back(record(stream_at(index, id)));
  }
  for (auto& end : ends) end->wait();
  check_error();
}

void check_error() {
  std::lock_guard<std::mutex> lock(error_mutex);
  TORCH_CHECK(first_error.empty(), "a kernel of sim failed, and this call came after it: ", first_error);
}

Spinning::Spinning() { --running; }
Spinning::~Spinning() { ++running; }

bool is_forked() { return forked; }

void leave() {
  GilRelease released;
  leaving = true;
  for (int tries = 0; running > 0 && tries < 2000; ++tries) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

namespace {

struct Event {
  MarkerPtr at;
};

const MarkerPtr& marker_of(void* event) {
  static const MarkerPtr none;
  return event == nullptr ? none : static_cast<Event*>(event)->at;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return chosen.num_devices; }

  c10::Device getDevice() const override { return c10::Device(kType, device_of_thread); }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) device_of_thread = device.index();
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_at(or_current(device.index()), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool urgent) const override {
    return new_stream(device.index(), urgent);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return new_stream(device.index(), priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    stream_of_thread[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &thread_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return thread_of(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(const c10::DeviceIndex index) const override { synchronize_device(index); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    static_cast<Event*>(*event)->at = sim::record(stream);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    if (marker_of(event)) wait_on(stream, marker_of(event));
  }
  bool queryEvent(void* event) const override {
    check_error();
    return !marker_of(event) || marker_of(event)->reached();
  }
  void synchronizeEvent(void* event) const override {
    if (marker_of(event)) marker_of(event)->wait();
    check_error();
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(start) && queryEvent(end), "both events must be completed before their times are compared");
    return marker_of(end)->at_ms() - marker_of(start)->at_ms();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

std::mutex waits_mutex;
std::map<std::string, int> implicit_waits;
std::atomic<bool> waits_forbidden{false};

}  // namespace

void note_implicit_wait(const std::string& what) {
  TORCH_CHECK(!waits_forbidden, what, " makes the host wait for sim");
  std::lock_guard<std::mutex> lock(waits_mutex);
  ++implicit_waits[what];
}

std::map<std::string, int> take_implicit_waits() {
  std::lock_guard<std::mutex> lock(waits_mutex);
  return std::exchange(implicit_waits, {});
}

bool forbid_implicit_waits(bool forbid) { return waits_forbidden.exchange(forbid); }

}  // namespace sim
