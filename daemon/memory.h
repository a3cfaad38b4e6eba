// SPDX-License-Identifier: BSD-3-Clause
// Chunk memory of the sessions, under one limit for the whole daemon.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "daemon/reactor.h"
#include "protocol/base/log.h"
#include "protocol/rtrs/server.h"

namespace rtrsnbd::daemon {

// Shared by the reactors.
class MemoryBudget {
 public:
  explicit MemoryBudget(uint64_t bytes_max) : bytes_max_(bytes_max) {}
  bool reserve(uint64_t bytes);
  void release(uint64_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }
  [[nodiscard]] uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  [[nodiscard]] uint64_t bytes_max() const { return bytes_max_; }

  // Locked memory has a limit too, outside of us. True for the first who meets it.
  bool give_up_registering() { return !unregistered_.exchange(true, std::memory_order_relaxed); }
  [[nodiscard]] bool registering() const { return !unregistered_.load(std::memory_order_relaxed); }

 private:
  const uint64_t bytes_max_;
  std::atomic<uint64_t> used_{0};
  std::atomic<bool> unregistered_{false};
};

// Makes the chunks of sessions on one reactor. Registers them with the ring where that helps.
class ChunkAllocator {
 public:
  // use_registered: some volume does its transfers through the ring.
  ChunkAllocator(Reactor& reactor, MemoryBudget& budget, bool use_registered, LogSink log)
      : reactor_(reactor), budget_(budget), use_registered_(use_registered), log_(std::move(log)) {}
  std::unique_ptr<rtrs::ChunkMemory> allocate(size_t bytes, std::string& reason);

 private:
  Reactor& reactor_;
  MemoryBudget& budget_;
  const bool use_registered_;
  LogSink log_;
};

}  // namespace rtrsnbd::daemon
