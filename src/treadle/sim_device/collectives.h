// A c10d backend for the device, with the manners of NCCL.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"

namespace sim {

class Link;  // one communicator of NCCL

// Each behaviour names the function of torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (PG) or NCCLUtils.cpp (NU) of
// torch 2.13 that it follows.
//
//   connects at first use, or by eager_connect_single_device        PG initNCCLComm, eagerConnectSingleDevice
//   a message connects its pair alone where nothing is connected    PG pointToPoint: getKeySendRecv
//   connecting holds the host, or, nonblocking, is ready by use     NU NCCLComm::create, getNcclComm, isInitialized
//   an op starts after the current stream, on a stream of its own   PG collective: syncStream, ncclStreams_
//   without asyncOp it runs on the current stream                   PG collective: asyncOp
//   `wait` holds the current stream; with a timeout also the host   PG WorkNCCL::synchronizeStream, synchronizeInternal
//   the work keeps its tensors until it is waited for or has ended  PG TensorShelf, stashed_for_allocator_safety_
//   `barrier` holds the host where it is waited for                 PG WorkNCCL::synchronizeInternal: isBarrierOp_
//   a lost peer leaves the kernel spinning, and `getError` reports  PG getError; NU checkForNcclError
//   `abort` ends spinning kernels, waits for them, voids the group  PG abort; NU NCCLComm::abort
//   between _group_start and _group_end all are aborted together    PG groupStart, groupEnd
class SimCcl final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using Begin = std::function<WorkPtr(c10d::Backend&)>;
  // Makes gloo's backend of some of the ranks under a name, which waits for them.
  using Connect = std::function<BackendPtr(const std::string& name, const std::vector<int>& ranks)>;

  SimCcl(Connect connect, int rank, int size) : Backend(rank, size), connect_(std::move(connect)) {}
  ~SimCcl() override;

  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  void eagerConnectSingleDevice(at::Device) override;
  bool is_initialized();
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  static void group_start();
  static void group_end();

  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr send(Tensors&, int to, int tag) override;
  WorkPtr recv(Tensors&, int from, int tag) override;
  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions&) override;
  WorkPtr allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  WorkPtr reduce_scatter(Tensors&, std::vector<Tensors>&, const c10d::ReduceScatterOptions&) override;
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override;
  WorkPtr alltoall_base(
      at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&, const c10d::AllToAllOptions&) override;
  WorkPtr gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  WorkPtr barrier(const c10d::BarrierOptions&) override;

 private:
  using Body = std::function<void(Link&)>;
  struct Message {
    std::shared_ptr<Link> link;
    Begin begin, ack;
    at::Tensor tensor;
  };

  std::shared_ptr<Link> link_for(c10::Device);
  std::shared_ptr<Link> link_to(int peer, c10::Device);
  std::shared_ptr<Link> connected(const std::string& name, const std::vector<int>& ranks, c10::Device);
  std::vector<std::shared_ptr<Link>> links();
  void mark_aborted();
  void await_end();
  WorkPtr collective(c10d::OpType, const Tensors&, bool async, Begin);
  WorkPtr computed(c10d::OpType, const Tensors&, bool async, Body);
  WorkPtr message(c10d::OpType, Tensors&, int peer, int tag);
  WorkPtr launch_messages(c10d::OpType, const std::vector<Message>&);
  WorkPtr launch_op(c10d::OpType, std::shared_ptr<Link>, const Tensors&, bool async, Body);
  Body reduction(Tensors, const c10d::ReduceOp&) const;

  Connect connect_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Link>> links_;  // by device, or by pair of ranks
  std::atomic<bool> aborted_{false};
  std::atomic<uint64_t> sequence_{0};
  bool coalescing_ = false;
  WorkPtr last_collective_;
  std::vector<Message> coalesced_;
};

}  // namespace sim
