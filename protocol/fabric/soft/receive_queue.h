// SPDX-License-Identifier: BSD-3-Clause
// Posted receives, in order. Posted by any thread, taken by the receiver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>

#include "protocol/fabric/soft/ring.h"

namespace rtrsnbd::fabric::soft {

struct Receive {
  uint64_t id = 0;
  std::byte* buffer = nullptr;
  size_t length = 0;
};

class ReceiveQueue {
 public:
  void post(uint64_t id, std::byte* buffer, size_t length) {
    if (length == 0) return post_empty(id, 1);
    const std::lock_guard lock(mutex_);
    entries_.push_back({{id, buffer, length}, 1});
  }
  // Many at once are one entry, and join an equal one at the end.
  void post_empty(uint64_t id, uint32_t count) {
    if (count == 0) return;
    const std::lock_guard lock(mutex_);
    if (!entries_.empty() && entries_.back().receive.length == 0 &&
        entries_.back().receive.id == id)
      entries_.back().count += count;
    else
      entries_.push_back({{id, nullptr, 0}, count});
  }
  std::optional<Receive> take() {
    const std::lock_guard lock(mutex_);
    if (entries_.empty()) return std::nullopt;
    Entry& oldest = entries_.front();
    const Receive receive = oldest.receive;
    if (--oldest.count == 0) entries_.pop_front();
    return receive;
  }

 private:
  struct Entry {
    Receive receive;
    uint64_t count = 0;
  };
  std::mutex mutex_;
  Ring<Entry> entries_;
};

}  // namespace rtrsnbd::fabric::soft
