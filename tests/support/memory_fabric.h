// SPDX-License-Identifier: BSD-3-Clause
// A fabric without a network: endpoints linked by queues inside the process. Keys are real,
// receives are counted, nothing moves before the test says so, so every order of events can be made
// by hand or by a seed. Either end may be driven as a raw peer that breaks the rules: post_send
// checks nothing, the receiving side does.
//
// Payloads that were not marked `copy` are read when they are delivered, as a card would, so a
// sender that reuses or frees its memory too early is found out by the sanitizer or by the data.
//
// Works with one thread that drives everything, and with one thread per end (one lock for the
// fabric; the handlers are called without it).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "protocol/fabric/fabric.h"

namespace rtrsnbd::test {

struct MemoryFabricOptions {
  bool rebind = true;
  bool fresh_rkey = true;
  bool any_local = true;
  // What a message that finds no receive does: wait, as InfiniBand with endless retries, or cost
  // the connection, as iWARP.
  enum class NoReceive : uint8_t { waits, breaks } no_receive = NoReceive::breaks;
  // Messages under way to one endpoint before the sender has to wait; 0: no limit.
  uint32_t messages_in_flight_max = 0;
  // What one call of progress() delivers at most.
  uint32_t deliveries_per_progress = 64;
};

class MemoryEndpoint;

class MemoryFabric final : public fabric::Fabric {
 public:
  struct Core;

  explicit MemoryFabric(const MemoryFabricOptions& options = {});
  ~MemoryFabric() override;

  [[nodiscard]] fabric::Capabilities capabilities() const override;
  std::unique_ptr<fabric::Domain> make_domain() override;
  std::unique_ptr<fabric::Listener> listen(const fabric::Address& address) override;
  std::unique_ptr<fabric::Endpoint> connect(fabric::Domain& domain,
                                            const fabric::ConnectOptions& options,
                                            std::span<const std::byte> private_data,
                                            TimePoint now) override;

  // The same as connect, for a test that wants the controls of MemoryEndpoint.
  std::unique_ptr<MemoryEndpoint> connect_raw(fabric::Domain& domain,
                                              const fabric::ConnectOptions& options,
                                              std::span<const std::byte> private_data);

  // Every endpoint that was made and not destroyed yet, in order of making.
  [[nodiscard]] std::vector<MemoryEndpoint*> endpoints() const;
  // Makes progress on all endpoints until nothing moves. Returns the number of deliveries.
  size_t settle(TimePoint now);

  // Called when an endpoint would have to sleep (Wait::yes): a single-threaded test moves the other
  // end here. Without it, sleeping is real.
  std::function<void()> on_sleep;

  // Whether Region::invalidate says that a placement is in progress.
  void set_placement_in_progress(bool in_progress);

  // Regions that exist now, over all domains; 0 when everything was given back.
  [[nodiscard]] size_t region_count() const;

 private:
  std::shared_ptr<Core> core_;
};

struct MemoryDomainState;

class MemoryEndpoint final : public fabric::Endpoint {
 public:
  ~MemoryEndpoint() override;

  // --- fabric::Endpoint
  void set_handler(fabric::Handler* handler) override;
  void accept(std::span<const std::byte> private_data) override;
  void post_receive(uint64_t id, std::byte* buffer, size_t length) override;
  void post_empty_receives(uint64_t id, uint32_t count) override;
  bool post_send(const fabric::SendRequest& request) override;
  void flush(fabric::Wait wait) override;
  [[nodiscard]] int fd() const override;
  [[nodiscard]] bool wants_write() const override;
  [[nodiscard]] size_t unsent_bytes() const override;
  bool progress(fabric::Wait wait, TimePoint now) override;
  void tick(TimePoint now) override;
  void disconnect(TimePoint now) override;
  void abort() override;
  [[nodiscard]] fabric::Address local_address() const override;
  [[nodiscard]] fabric::Address peer_address() const override;
  [[nodiscard]] Counters counters() const override;

  // --- Controls of the test

  // Messages and events that wait for delivery here.
  [[nodiscard]] size_t pending() const;
  // Delivers exactly one, also while held. False if there was none, or it waits for a receive.
  bool deliver_one(TimePoint now);
  // While held, progress() delivers nothing: a slow network or a peer that does not read.
  void hold(bool held);
  // The cable is cut: both ends learn it, in their next progress.
  void drop();
  // The other end vanished without a word: from now on nothing that is sent here or from here
  // arrives.
  void go_silent();
  [[nodiscard]] bool closed() const;       // on_disconnected was, or is about to be, called
  [[nodiscard]] size_t receives() const;   // posted and not consumed
  [[nodiscard]] size_t unflushed() const;  // posted and not flushed, or flushed and not taken
  [[nodiscard]] uint64_t flushes() const;
  [[nodiscard]] uint64_t deliveries() const;   // messages and events so far
  [[nodiscard]] MemoryEndpoint* peer() const;  // null when destroyed, or not yet accepted

 private:
  friend class MemoryFabric;
  friend class MemoryConnectRequest;
  struct State;
  MemoryEndpoint(std::shared_ptr<MemoryFabric::Core> core,
                 std::shared_ptr<MemoryDomainState> domain);
  static void link(const std::shared_ptr<State>& one, const std::shared_ptr<State>& other);
  static void move_outbox(State& state);

  std::shared_ptr<MemoryFabric::Core> core_;
  std::shared_ptr<State> state_;
};

// An IPv4 address as a value: memory_address("10.0.0.1", 1234).
fabric::Address memory_address(const char* dotted, uint16_t port);

}  // namespace rtrsnbd::test
