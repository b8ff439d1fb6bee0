#include "collectives.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <thread>

#include "kernels.h"
#include "memory.h"

namespace sim {

using c10d::OpType;
using Tensors = SimCcl::Tensors;
using WorkPtr = SimCcl::WorkPtr;
using Begin = SimCcl::Begin;

// A communicator: gloo's backend of some ranks, and the stream on which its ops run one after the other.
class Link : public std::enable_shared_from_this<Link> {
 public:
  Link(c10::Device device, std::vector<int> ranks)
      : stream(new_stream(device.index(), true)), ranks_(std::move(ranks)) {}

  int rank_of(int rank) const { return int(std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin()); }

  // Connects on the calling thread, or, nonblocking, on one of its own.
  void connect(std::function<SimCcl::BackendPtr()> make) {
    if (!settings().nonblocking) return connected(make());
    std::thread([self = shared_from_this(), make] {
      try {
        self->connected(make());
      } catch (const std::exception& error) {
        self->fail(error.what());
      }
    }).detach();
  }

  // Waits until it is connected, and marks it so: asking alone never does.
  void use() {
    GilRelease released;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return gloo_ || aborted_ || !error_.empty(); });
    check_usable();
    used_ = true;
  }
  bool is_initialized() {
    std::lock_guard<std::mutex> lock(mutex_);
    return used_ || (gloo_ && !settings().nonblocking);
  }

  // In the stream's thread: runs an op of gloo to its end, or until this is aborted.
  void run(const Begin& begin) {
    auto work = begin(*gloo_);
    auto future = work->getFuture();
    future->addCallback([self = shared_from_this()](c10::ivalue::Future&) { self->notify(); });
    std::unique_lock<std::mutex> lock(mutex_);
    Spinning waiting;
    changed_.wait(lock, [&] { return aborted_ || future->completed(); });
    if (!future->completed()) {
      graveyard().push_back({work, gloo_});  // gloo may still write to its tensors
      return;
    }
    lock.unlock();
    work->wait();  // raises its error
  }

  // The same for sends and receives, whose works do not report their end by themselves.
  void run_messages(const std::vector<Begin>& begins) {
    std::vector<WorkPtr> works;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (aborted_) return;
      for (auto& begin : begins) works.push_back(begin(*gloo_));
      messages_ = works;
    }
    Spinning waiting;
    for (auto& work : works) {
      if (!is_aborted()) work->wait();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    messages_.clear();
  }

  // As NCCL's kernel does when its peer is lost: it never ends by itself.
  void spin(const std::string& error) {
    fail(error);
    std::unique_lock<std::mutex> lock(mutex_);
    Spinning waiting;
    changed_.wait(lock, [this] { return aborted_; });
  }

  void mark_aborted() {
    std::vector<WorkPtr> messages;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      aborted_ = true;
      messages = messages_;
    }
    changed_.notify_all();
    for (auto& message : messages) message->abort();
  }
  bool is_aborted() {
    std::lock_guard<std::mutex> lock(mutex_);
    return aborted_;
  }
  bool has_failed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return !error_.empty();
  }
  void disconnect() {
    GilRelease released;
    std::lock_guard<std::mutex> lock(mutex_);
    gloo_.reset();
  }

  const c10::Stream stream;
  MarkerPtr last;  // of the last op launched, on whatever stream
  std::map<int, uint64_t> num_sent, num_received;  // messages, by peer

 private:
  struct Unfinished {
    WorkPtr work;
    SimCcl::BackendPtr gloo;
  };
  static std::vector<Unfinished>& graveyard() {
    static auto* all = new std::vector<Unfinished>();
    return *all;
  }

  void connected(SimCcl::BackendPtr gloo) {
    std::lock_guard<std::mutex> lock(mutex_);
    gloo_ = std::move(gloo);
    changed_.notify_all();
  }
  void fail(const std::string& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_.empty()) error_ = error;
    changed_.notify_all();
  }
  void notify() {
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }
  void check_usable() const {
    TORCH_CHECK_WITH(DistBackendError, !aborted_, "the communicator was aborted");
    TORCH_CHECK_WITH(DistBackendError, gloo_, "connecting failed: ", error_);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  const std::vector<int> ranks_;
  SimCcl::BackendPtr gloo_;
  std::vector<WorkPtr> messages_;  // under way
  std::string error_;
  bool used_ = false, aborted_ = false;
};

namespace {

class SimWork final : public c10d::Work {
 public:
  SimWork(int rank, OpType type, MarkerPtr end, Tensors tensors, c10::Stream stream)
      : Work(rank, type), end_(std::move(end)), tensors_(std::move(tensors)), stream_(stream) {}

  // NCCL's watchdog lets go of the tensors of a work that nobody waited for when it has ended.
  ~SimWork() override {
    for (auto& tensor : tensors_) record_stream(tensor.storage().data_ptr(), stream_);
  }

  bool isCompleted() override { return end_->reached(); }
  bool isSuccess() const override { return end_->reached(); }
  void synchronize() override { wait(kNoTimeout); }

  bool wait(std::chrono::milliseconds timeout) override {
    auto current = current_stream(stream_.device_index());
    wait_on(current, end_);
    tensors_.clear();
    if (timeout != kNoTimeout) {
      TORCH_CHECK_WITH(DistBackendError, end_->wait_for(timeout), "the work has not ended within ", timeout.count(), " ms");
    }
    if (opType_ == OpType::BARRIER) sim::synchronize(current);
    return true;
  }

 private:
  MarkerPtr end_;
  Tensors tensors_;
  c10::Stream stream_;
};

Tensors as_cpu_list(const Tensors& tensors) {
  Tensors made;
  for (auto& tensor : tensors) made.push_back(as_cpu(tensor));
  return made;
}

std::vector<Tensors> as_cpu_lists(const std::vector<Tensors>& lists) {
  std::vector<Tensors> made;
  for (auto& list : lists) made.push_back(as_cpu_list(list));
  return made;
}

Tensors joined(Tensors all, const std::vector<Tensors>& lists) {
  for (auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

void check_tensors(const Tensors& tensors) {
  for (auto& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.is_privateuseone(), "simccl carries tensors of sim, got one on ", tensor.device());
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "Tensors must be contiguous");
    TORCH_CHECK_VALUE(tensor.device() == tensors[0].device(), "Tensors are on ", tensors[0].device(), " and ", tensor.device());
  }
}

// A send of NCCL may end before its receive has begun, and may not: half of the messages, drawn by the seed, end together.
bool ends_with_receive(uint64_t number) {
  std::seed_seq mixed{settings().seed, number};
  std::array<uint32_t, 1> drawn{};
  mixed.generate(drawn.begin(), drawn.end());
  return drawn[0] % 2 != 0;
}

// An op of a communicator is late more rarely than a kernel, and by more, as its peers are.
void start_late(uint64_t number) {
  std::seed_seq mixed{settings().seed, number};
  std::array<uint32_t, 2> drawn{};
  mixed.generate(drawn.begin(), drawn.end());
  if (drawn[0] % 6 != 0) return;
  auto longest = 24 * settings().delay_us;
  std::this_thread::sleep_for(std::chrono::microseconds(int64_t(longest * drawn[1] / 4294967296.0)));
}

constexpr int kAckTag = 1 << 24;  // added to the tag of the message

thread_local int group_depth = 0;
thread_local std::vector<c10::intrusive_ptr<SimCcl>> aborted_in_group;

}  // namespace

SimCcl::~SimCcl() {
  if (!links_.empty()) mark_aborted();
}

// -- connecting ------------------------------------------------------------------------------------------------------

void SimCcl::eagerConnectSingleDevice(at::Device device) { link_for(device); }

bool SimCcl::is_initialized() {
  auto all = links();
  if (all.empty()) return false;
  for (auto& link : all) {
    if (!link->is_initialized()) return false;
  }
  return true;
}

std::vector<std::shared_ptr<Link>> SimCcl::links() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Link>> all;
  for (auto& [name, link] : links_) all.push_back(link);
  return all;
}

std::shared_ptr<Link> SimCcl::connected(const std::string& name, const std::vector<int>& ranks, c10::Device device) {
  TORCH_CHECK_WITH(DistBackendError, !aborted_, "the communicator was aborted");
  std::shared_ptr<Link> link;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& known = links_[name];
    if (known) return known;
    link = known = std::make_shared<Link>(device, ranks);
  }
  GilRelease released;
  link->connect([connect = connect_, name, ranks] { return connect(name, ranks); });
  return link;
}

std::shared_ptr<Link> SimCcl::link_for(c10::Device device) {
  std::vector<int> all(size_);
  std::iota(all.begin(), all.end(), 0);
  return connected("all", all, device);
}

std::shared_ptr<Link> SimCcl::link_to(int peer, c10::Device device) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (links_.count("all")) return links_["all"];
  }
  auto [low, high] = std::minmax(rank_, peer);
  return connected(std::to_string(low) + ":" + std::to_string(high), {low, high}, device);
}

// -- ending ----------------------------------------------------------------------------------------------------------

c10d::ErrorType SimCcl::getError() {
  for (auto& link : links()) {
    if (link->has_failed()) return c10d::ErrorType::REMOTE_ERROR;
  }
  return c10d::ErrorType::SUCCESS;
}

void SimCcl::mark_aborted() {
  aborted_ = true;
  for (auto& link : links()) link->mark_aborted();
}

void SimCcl::await_end() {
  for (auto& link : links()) {
    if (link->last) link->last->wait();
    link->disconnect();
  }
}

void SimCcl::abort() {
  GilRelease released;
  if (group_depth > 0) {
    aborted_in_group.push_back(c10::intrusive_ptr<SimCcl>::reclaim_copy(this));
    return;
  }
  mark_aborted();
  await_end();
}

void SimCcl::group_start() { ++group_depth; }

void SimCcl::group_end() {
  if (--group_depth > 0) return;
  GilRelease released;
  auto all = std::exchange(aborted_in_group, {});
  for (auto& each : all) each->mark_aborted();
  for (auto& each : all) each->await_end();
}

void SimCcl::shutdown() {
  GilRelease released;
  await_end();
  std::lock_guard<std::mutex> lock(mutex_);
  links_.clear();
}

// -- launching -------------------------------------------------------------------------------------------------------

WorkPtr SimCcl::launch_op(OpType type, std::shared_ptr<Link> link, const Tensors& tensors, bool async, Body body) {
  link->use();
  ++sequence_;
  TORCH_CHECK_VALUE(tensors[0].device() == link->stream.device(), "the communicator is of ", link->stream.device(),
                    ", and the tensors are on ", tensors[0].device());
  auto current = current_stream(link->stream.device_index());
  auto stream = async ? link->stream : current;
  if (async) wait_on(stream, record(current));
  if (link->last) wait_on(stream, link->last);  // ops of a communicator run in the order of their launches
  launch(stream, [link, body = std::move(body), number = sequence_ * size_ + rank_] {
    if (link->is_aborted()) return;
    start_late(number);
    try {
      body(*link);
    } catch (const std::exception& error) {
      link->spin(error.what());
    }
  });
  link->last = record(stream);
  last_collective_ = c10::make_intrusive<SimWork>(rank_, type, link->last, tensors, stream);
  return last_collective_;
}

WorkPtr SimCcl::collective(OpType type, const Tensors& tensors, bool async, Begin begin) {
  return computed(type, tensors, async, [begin = std::move(begin)](Link& link) { link.run(begin); });
}

WorkPtr SimCcl::computed(OpType type, const Tensors& tensors, bool async, Body body) {
  check_tensors(tensors);
  return launch_op(type, link_for(tensors[0].device()), tensors, async, std::move(body));
}

// gloo knows no average.
SimCcl::Body SimCcl::reduction(Tensors tensors, const c10d::ReduceOp& op) const {
  bool average = op == c10d::ReduceOp::AVG;
  c10d::AllreduceOptions options;
  options.reduceOp = average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  return [tensors, average, options, size = size_](Link& link) mutable {
    link.run([&](Backend& gloo) { return gloo.allreduce(tensors, options); });
    if (!average || link.is_aborted()) return;
    for (auto& tensor : tensors) tensor.div_(size);
  };
}

// -- messages --------------------------------------------------------------------------------------------------------

WorkPtr SimCcl::message(OpType type, Tensors& tensors, int peer, int tag) {
  check_tensors(tensors);
  auto device = tensors[0].device();
  bool sends = type == OpType::SEND;
  auto link = coalescing_ ? link_for(device) : link_to(peer, device);
  int at = link->rank_of(peer);
  auto move = [at](bool send, Tensors moved, int its_tag) -> Begin {
    return [=](Backend& gloo) mutable { return send ? gloo.send(moved, at, its_tag) : gloo.recv(moved, at, its_tag); };
  };
  Message made{link, move(sends, as_cpu_list(tensors), tag), {}, tensors[0]};
  if (ends_with_receive((sends ? link->num_sent : link->num_received)[peer]++)) {
    made.ack = move(!sends, {at::zeros({1}, at::kByte)}, tag + kAckTag);
  }
  if (!coalescing_) return launch_messages(type, {made});
  coalesced_.push_back(std::move(made));
  return nullptr;
}

WorkPtr SimCcl::launch_messages(OpType type, const std::vector<Message>& messages) {
  Tensors tensors;
  std::vector<Begin> begins, acks;
  for (auto& message : messages) {
    tensors.push_back(message.tensor);
    begins.push_back(message.begin);
    if (message.ack) acks.push_back(message.ack);
  }
  return launch_op(type, messages[0].link, tensors, true, [begins, acks](Link& link) {
    link.run_messages(begins);
    link.run_messages(acks);
  });
}

WorkPtr SimCcl::send(Tensors& tensors, int to, int tag) { return message(OpType::SEND, tensors, to, tag); }

WorkPtr SimCcl::recv(Tensors& tensors, int from, int tag) { return message(OpType::RECV, tensors, from, tag); }

void SimCcl::startCoalescing() { coalescing_ = true; }

WorkPtr SimCcl::endCoalescing() {
  coalescing_ = false;
  auto messages = std::exchange(coalesced_, {});
  return messages.empty() ? last_collective_ : launch_messages(OpType::COALESCED, messages);
}

// -- collectives -----------------------------------------------------------------------------------------------------

WorkPtr SimCcl::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto own = as_cpu_list(tensors);
  return collective(OpType::BROADCAST, tensors, options.asyncOp, [=](Backend& gloo) mutable {
    return gloo.broadcast(own, options);
  });
}

WorkPtr SimCcl::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return computed(OpType::ALLREDUCE, tensors, options.asyncOp, reduction(as_cpu_list(tensors), options.reduceOp));
}

WorkPtr SimCcl::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Body> bodies;
  for (auto& tensor : tensors) bodies.push_back(reduction({as_cpu(tensor)}, options.reduceOp));
  return computed(OpType::ALLREDUCE_COALESCED, tensors, options.asyncOp, [bodies](Link& link) {
    for (auto& body : bodies) body(link);
  });
}

WorkPtr SimCcl::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  // Only the root's tensor may change.
  bool is_root = options.rootRank == rank_;
  Tensors own = as_cpu_list(tensors);
  return computed(OpType::REDUCE, tensors, options.asyncOp, [this, own, is_root, op = options.reduceOp](Link& link) {
    auto sum = is_root ? own : Tensors{own[0].clone()};
    reduction(sum, op)(link);
  });
}

WorkPtr SimCcl::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  auto to = as_cpu_lists(outputs);
  auto from = as_cpu_list(inputs);
  return collective(OpType::ALLGATHER, joined(inputs, outputs), options.asyncOp, [=](Backend& gloo) mutable {
    return gloo.allgather(to, from, options);
  });
}

WorkPtr SimCcl::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  auto to = as_cpu(output), from = as_cpu(input);
  return collective(OpType::_ALLGATHER_BASE, {input, output}, options.asyncOp, [=](Backend& gloo) mutable {
    return gloo._allgather_base(to, from, options);
  });
}

WorkPtr SimCcl::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  auto to = as_cpu(output), from = as_cpu(input);
  return computed(
      OpType::_REDUCE_SCATTER_BASE, {input, output}, options.asyncOp, [this, to, from, op = options.reduceOp](Link& link) {
        auto whole = from.clone();
        reduction({whole}, op)(link);
        if (!link.is_aborted()) to.copy_(whole.view({size_, -1})[rank_].view_as(to));
      });
}

WorkPtr SimCcl::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  auto to = as_cpu_list(outputs);
  auto from = as_cpu_lists(inputs);
  auto body = [this, to, from, op = options.reduceOp](Link& link) {
    for (int rank = 0; rank < size_; ++rank) {
      auto sum = from[0][rank].clone();
      reduction({sum}, op)(link);
      if (rank == rank_ && !link.is_aborted()) to[0].copy_(sum);
    }
  };
  return computed(OpType::REDUCE_SCATTER, joined(outputs, inputs), options.asyncOp, body);
}

WorkPtr SimCcl::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  auto to = as_cpu(output), from = as_cpu(input);
  return collective(OpType::ALLTOALL_BASE, {input, output}, options.asyncOp, [=](Backend& gloo) mutable {
    return gloo.alltoall_base(to, from, output_splits, input_splits, options);
  });
}

WorkPtr SimCcl::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  auto to = as_cpu_lists(outputs);
  auto from = as_cpu_list(inputs);
  return collective(OpType::GATHER, joined(inputs, outputs), options.asyncOp, [=](Backend& gloo) mutable {
    return gloo.gather(to, from, options);
  });
}

WorkPtr SimCcl::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  auto to = as_cpu_list(outputs);
  auto from = as_cpu_lists(inputs);
  return collective(OpType::SCATTER, joined(outputs, inputs), options.asyncOp, [=](Backend& gloo) mutable {
    return gloo.scatter(to, from, options);
  });
}

WorkPtr SimCcl::barrier(const c10d::BarrierOptions&) {
  auto device = getBoundDeviceId().value_or(c10::Device(kType, current_device()));
  auto token = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(device));
  return computed(OpType::BARRIER, {token}, true, reduction({as_cpu(token)}, c10d::ReduceOp::SUM));
}

}  // namespace sim
