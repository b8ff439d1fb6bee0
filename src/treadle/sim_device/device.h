// What the parts of the device share: settings, markers, streams.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace sim {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 64;

struct Settings {
  int num_devices = 8;
  uint64_t seed = 0;
  double delay_us = 0;       // the longest time by which a kernel starts late
  bool nonblocking = false;  // communicators connect as under TORCH_NCCL_USE_COMM_NONBLOCKING=1
};

const Settings& settings();
void configure(const Settings&);  // before the first stream is used

// Lets other Python threads run while this one waits.
class GilRelease {
 public:
  GilRelease();
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;

 private:
  void* state_ = nullptr;
};

// A point on a stream, reached once.
class Marker {
 public:
  void reach();
  bool reached() const;
  void wait() const;
  bool wait_for(std::chrono::milliseconds) const;
  double at_ms() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool reached_ = false;
  double at_ms_ = 0;
};

using MarkerPtr = std::shared_ptr<Marker>;
using Kernel = std::function<void()>;

c10::DeviceIndex current_device();
c10::DeviceIndex or_current(c10::DeviceIndex);
void set_device(c10::DeviceIndex);
c10::Stream current_stream(c10::DeviceIndex);
c10::Stream new_stream(c10::DeviceIndex, bool urgent = false);

// Enqueues a kernel, which may start late. What it throws is the device's error from then on.
void launch(const c10::Stream&, Kernel);
// Enqueues a task of the device itself, which starts at once when its turn comes.
void enqueue(const c10::Stream&, Kernel);
MarkerPtr record(const c10::Stream&);
void wait_on(const c10::Stream&, MarkerPtr);  // the stream waits, not the host
void synchronize(const c10::Stream&);         // the host waits
void synchronize_device(c10::DeviceIndex);

// Raises the first error of a kernel. As with a device-side assert of CUDA, every later call raises it again.
void check_error();

// Counts a wait of the host that its caller did not ask for by name, such as that of `item`.
void note_implicit_wait(const std::string& what);

// A part of a kernel in which it computes nothing and may never end.
class Spinning {
 public:
  Spinning();
  ~Spinning();
  Spinning(const Spinning&) = delete;
};

bool is_forked();  // this process is the fork of one whose device had started: its streams have no threads
void leave();      // the process ends: kernels that run end, none begins

}  // namespace sim
