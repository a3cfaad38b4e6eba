// SPDX-License-Identifier: BSD-3-Clause
// One connection of the verbs fabric: the connection manager's events around a QueuePair.
//
// One epoll descriptor stands for three: the connection manager's events, the completion channel,
// and an eventfd by which other threads ask the receive role to abort or disconnect.
//
// Who touches what. The receive role owns the phase and everything of the connection manager. The
// queue pair is posted to by any thread under mutex_, which the receive role takes to end that.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "protocol/fabric/fabric.h"
#include "protocol/fabric/verbs/domain.h"
#include "protocol/fabric/verbs/fabric.h"
#include "protocol/fabric/verbs/handles.h"
#include "protocol/fabric/verbs/queue_pair.h"

namespace rtrsnbd::fabric::verbs {

class VerbsEndpoint final : public Endpoint {
 public:
  // Active: starts connecting.
  VerbsEndpoint(const Options& options, VerbsDomain& domain, const ConnectOptions& where,
                std::span<const std::byte> private_data, TimePoint now);
  // Passive: takes the id of a connection request over, if nothing throws.
  VerbsEndpoint(const Options& options, VerbsDomain& domain, Owned<rdma_cm_id>& id,
                const QueueSizes& queues);
  ~VerbsEndpoint() override;

  void set_handler(Handler* handler) override { handler_ = handler; }
  void accept(std::span<const std::byte> private_data) override;
  void post_receive(uint64_t id, std::byte* buffer, size_t length) override;
  void post_empty_receives(uint64_t id, uint32_t count) override;
  bool post_send(const SendRequest& request) override;
  void flush(Wait wait) override;
  [[nodiscard]] int fd() const override { return visible_fd_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool wants_write() const override;
  [[nodiscard]] size_t unsent_bytes() const override;
  bool progress(Wait wait, TimePoint now) override;
  void tick(TimePoint now) override;
  void disconnect(TimePoint now) override;
  void abort() override;
  [[nodiscard]] Address local_address() const override;
  [[nodiscard]] Address peer_address() const override;
  [[nodiscard]] Counters counters() const override;

 private:
  enum class Phase : uint8_t {
    resolving,  // active: address, then route
    asking,     // active: request sent
    asked,      // passive: accept() awaited
    open,
    draining,  // disconnect(): what was posted goes out
    leaving,   // the peer's answer to our good-bye is awaited
    closed,
  };
  enum Ready : uint32_t { ready_manager = 1, ready_completion = 2, ready_wake = 4 };
  // What is left of a connection manager event when it has been acknowledged.
  struct Event {
    rdma_cm_event_type type;
    int status;
    std::vector<std::byte> private_data;
  };

  static constexpr std::chrono::milliseconds sleep_max{500};
  static constexpr std::chrono::seconds drain_limit{1};
  static constexpr std::chrono::seconds leave_limit{1};

  void set_up_descriptors();
  void watch(int fd, Ready kind);
  uint32_t wait_for_events(std::chrono::milliseconds limit);
  std::optional<Event> next_event();
  void on_event(Event& event, TimePoint now);
  void resolve_route();
  void ask();
  bool poll(TimePoint now);
  bool poll_for_a_while();
  void check_requests(TimePoint now);
  void check_limits(TimePoint now);
  void make_queue_pair();
  void note_broken();  // from any thread; the receive role does the rest
  void wake();
  void finish(DisconnectReason reason, const std::string& detail);

  const Options options_;
  const std::shared_ptr<ProtectionDomain> domain_;
  const QueueSizes queues_;
  Handler* handler_ = nullptr;

  Owned<rdma_event_channel> manager_;
  Owned<rdma_cm_id> id_;
  Descriptor epoll_, wake_;
  std::atomic<int> visible_fd_{-1};

  // Receive role.
  Phase phase_;
  std::vector<std::byte> private_data_;  // of our request
  TimePoint limit_{};                    // of what the phase waits for
  bool armed_ = false;

  std::atomic<bool> abort_{false};
  std::atomic<bool> leave_{false};
  std::atomic<bool> broken_{false};

  mutable std::mutex mutex_;
  std::unique_ptr<QueuePair> queue_pair_;  // made and dropped by the receive role
  bool sendable_ = false;
  Address local_, peer_;
  Counters last_counters_;
};

}  // namespace rtrsnbd::fabric::verbs
