// SPDX-License-Identifier: BSD-3-Clause
// Is the peer of a path alive? The same rule at both ends, each end for itself (docs/protocol.md,
// "Heartbeats"): once per interval a beat is sent unless one is unanswered; any traffic from the
// peer is a sign of life; too many intervals without one and the path is dead.
#pragma once

#include <atomic>
#include <cstdint>

#include "protocol/base/time.h"
#include "protocol/rtrs/limits.h"

namespace rtrsnbd::rtrs {

class Heartbeat {
 public:
  enum class Action : uint8_t { none, send, dead };

  // The first beat is due one interval after start, when the path became connected.
  Heartbeat(const HeartbeatTiming& timing, TimePoint start)
      : timing_(timing), next_(start + timing.interval) {}

  // One thread at a time. Does nothing before next(); at most one step per call however late the
  // call is, so a host that was suspended does not count the time it slept as silence of the peer.
  Action tick(TimePoint now) {
    if (now < next_) return Action::none;
    next_ += timing_.interval;
    if (next_ <= now) next_ = now + timing_.interval;

    uint32_t missed = missed_.load(std::memory_order_relaxed);
    if (missed > timing_.missed_max) return Action::dead;
    // A sign of life that comes in between must win over the increment.
    if (missed != 0) {
      missed_.compare_exchange_strong(missed, missed + 1, std::memory_order_relaxed);
      return Action::none;
    }
    missed_.store(1, std::memory_order_relaxed);
    return Action::send;
  }

  [[nodiscard]] TimePoint next() const { return next_; }

  // Something arrived on a connection of the path. Any thread; costs a load when nothing was
  // missed.
  void sign_of_life() {
    if (missed_.load(std::memory_order_relaxed) != 0) missed_.store(0, std::memory_order_relaxed);
  }

 private:
  const HeartbeatTiming timing_;
  TimePoint next_;
  std::atomic<uint32_t> missed_{0};  // beats and intervals since the last sign of life
};

}  // namespace rtrsnbd::rtrs
