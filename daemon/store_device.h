// SPDX-License-Identifier: BSD-3-Clause
// A volume as one session has it open: block requests become system calls, ring operations or jobs
// for the volume's workers, whichever is quickest and does not block the reactor.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "daemon/backing.h"
#include "daemon/reactor.h"
#include "protocol/rnbd/block_device.h"

namespace rtrsnbd::daemon {

// The backings in use on one reactor, each with its slot among the ring's registered files.
class RingFiles {
 public:
  explicit RingFiles(Reactor& reactor) : reactor_(reactor) {}
  int acquire(const Backing& backing);  // slot, or -1: use the descriptor
  void release(const Backing& backing);

 private:
  struct Use {
    int slot = -1;
    uint32_t count = 0;
  };
  Reactor& reactor_;
  std::unordered_map<const Backing*, Use> uses_;
};

class StoreDevice final : public rnbd::OpenDevice {
 public:
  StoreDevice(std::shared_ptr<Backing> backing, Reactor& reactor, RingFiles& files);
  ~StoreDevice() override;

  [[nodiscard]] const rnbd::DeviceProperties& properties() const override {
    return backing_->properties();
  }
  void submit(rnbd::BlockRequest& request) override;

  // Requests that were submitted and are not complete. From any thread.
  [[nodiscard]] uint32_t in_flight() const { return in_flight_.load(std::memory_order_relaxed); }

 private:
  class Task;

  void finish(rnbd::BlockRequest& request, int error);
  void answer(rnbd::BlockRequest& request, int error);
  bool submit_inline(rnbd::BlockRequest& request, uint64_t& done);
  Task& take_task();
  void give_back(Task& task) { free_tasks_.push_back(&task); }
  void report(const rnbd::BlockRequest& request, int error) const;

  const std::shared_ptr<Backing> backing_;
  Reactor& reactor_;
  RingFiles& files_;
  const int file_slot_;
  // Written by the reactor's thread only, so that counting costs no locked instruction.
  std::atomic<uint32_t> in_flight_{0};
  // Made when first needed and used again: at most as many as the session has requests in flight.
  std::vector<std::unique_ptr<Task>> tasks_;
  std::vector<Task*> free_tasks_;
};

}  // namespace rtrsnbd::daemon
