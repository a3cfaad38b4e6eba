// SPDX-License-Identifier: BSD-3-Clause
// The data part of a connection: a queue pair, its completion queue and channel, and what is
// posted.
//
// Threads: post and flush by any thread; poll, arm and take_event by the receive role; destroyed
// when nobody is inside. What the send queue of the device does not hold waits here, in order;
// completions make room, and then poll() posts more of it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "protocol/fabric/fabric.h"
#include "protocol/fabric/verbs/bounce_pool.h"
#include "protocol/fabric/verbs/domain.h"

namespace rtrsnbd::fabric::verbs {

class QueuePair {
 public:
  // Why nothing works any more.
  struct Failure {
    DisconnectReason reason = DisconnectReason::connection_lost;
    std::string detail;
  };

  // Makes the queue pair of an id that has a device. Throws std::system_error, with the device's
  // limits in words if one of them is the reason.
  QueuePair(rdma_cm_id& id, std::shared_ptr<ProtectionDomain> domain, const QueueSizes& sizes);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  // False: the device refused; the connection is of no use any more.
  bool post_receive(uint64_t id, std::byte* buffer, size_t length);
  bool post_empty_receives(uint64_t id, uint32_t count);

  void post_send(const SendRequest& request);
  // Something that completes after all that was sent before it, and which the peer does not see.
  void post_marker();
  bool flush();
  [[nodiscard]] size_t unsent_bytes() const;
  // The last flush left something, because the device's queue is full.
  [[nodiscard]] bool blocked() const { return blocked_.load(std::memory_order_relaxed); }
  // Everything that was posted has completed; after a marker, soon true.
  [[nodiscard]] bool all_sent() const;

  [[nodiscard]] int channel_fd() const { return channel_->fd; }
  // Hands completed receives to `handler`, at most one batch. Returns how many completions there
  // were.
  uint32_t poll(Handler& handler);
  [[nodiscard]] const std::optional<Failure>& failure() const { return failure_; }
  // The next completion makes the channel readable. Look again after it: one may have come before.
  bool arm();
  void take_event();

  std::atomic<uint64_t> bytes_sent{0}, bytes_received{0}, messages_sent{0}, messages_received{0},
      send_calls{0}, receive_calls{0};

 private:
  static constexpr size_t embedded_max = 64;  // of a copied payload; the rest goes through the pool
  static constexpr int batch = 32;

  struct Pending {
    ibv_wr_opcode opcode = IBV_WR_SEND;
    uint32_t immediate = 0;  // or the key to invalidate
    uint32_t rkey = 0;
    uint64_t remote_address = 0;
    uint32_t length = 0;
    bool marker = false;
    uint8_t segment_count = 0;
    uint8_t embedded_length = 0;  // not 0: the payload is in `embedded`
    std::array<ibv_sge, segments_max> segments{};
    std::array<std::byte, embedded_max> embedded{};
    BouncePool::Piece piece;
  };
  struct Receive {
    uint64_t id = 0;
    std::byte* buffer = nullptr;
    size_t length = 0;
    BouncePool* pool = nullptr;
    BouncePool::Piece piece;
  };

  bool flush_locked();
  void sent(uint32_t count);
  void received(const ibv_wc& entry, Handler& handler);
  void fail(std::span<const ibv_wc> entries);
  void fail(const ibv_wc& entry);
  BouncePool& pool_for(size_t length);

  const std::shared_ptr<ProtectionDomain> domain_;
  uint32_t send_capacity_ = 0;
  uint32_t signal_interval_ = 1;
  uint32_t inline_capacity_ = 0;

  Owned<ibv_comp_channel> channel_;
  Owned<ibv_cq> cq_;
  rdma_cm_id& id_;  // holds the queue pair
  std::optional<Failure> failure_;
  uint32_t unacknowledged_events_ = 0;

  std::atomic<bool> blocked_{false};  // written under mutex_

  mutable std::mutex mutex_;  // guards all below
  std::deque<Pending> pending_;
  size_t pending_bytes_ = 0;
  std::deque<BouncePool::Piece> in_flight_;  // one per posted send; empty ones, too
  uint32_t unsignalled_ = 0;
  bool marked_ = false;
  BouncePool copies_;
  std::vector<std::unique_ptr<BouncePool>> receive_pools_;
  std::vector<Receive> receives_;
  std::vector<uint32_t> free_receives_;
};

}  // namespace rtrsnbd::fabric::verbs
