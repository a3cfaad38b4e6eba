// SPDX-License-Identifier: BSD-3-Clause
// The client's right to use a chunk: one permit per chunk of the session, shared by all its paths
// and connections (docs/protocol.md, "Permits"). The lowest free number is taken, so that a session
// with little in flight keeps using the same few chunks, which are then warm in both hosts' caches.
#pragma once

#include <bit>
#include <cassert>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

namespace rtrsnbd::rtrs {

// Any thread.
class Permits {
 public:
  explicit Permits(uint32_t count) : words_((count + 63) / 64), count_(count), free_(count) {
    for (uint32_t id = 0; id < count; ++id) words_[id / 64] |= uint64_t{1} << (id % 64);
  }

  std::optional<uint32_t> try_acquire() {
    const std::lock_guard lock(mutex_);
    return take();
  }

  // Waits for one. A caller that holds permits whose requests only it can complete must complete
  // those instead: everybody waiting for everybody would never end.
  uint32_t acquire() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    available_.wait(lock, [this] { return free_ != 0; });
    --waiting_;
    return *take();
  }

  void release(uint32_t id) {
    std::unique_lock lock(mutex_);
    assert(id < count_ && (words_[id / 64] & (uint64_t{1} << (id % 64))) == 0);
    words_[id / 64] |= uint64_t{1} << (id % 64);
    ++free_;
    const bool wake = waiting_ != 0;
    lock.unlock();
    if (wake) available_.notify_one();
  }

  [[nodiscard]] uint32_t count() const { return count_; }
  [[nodiscard]] uint32_t in_use() const {
    const std::lock_guard lock(mutex_);
    return count_ - free_;
  }

 private:
  std::optional<uint32_t> take() {
    if (free_ == 0) return std::nullopt;
    for (uint32_t index = 0;; ++index) {
      if (words_[index] == 0) continue;
      const auto bit = static_cast<uint32_t>(std::countr_zero(words_[index]));
      words_[index] &= words_[index] - 1;
      --free_;
      return index * 64 + bit;
    }
  }

  mutable std::mutex mutex_;
  std::condition_variable available_;
  std::vector<uint64_t> words_;  // a set bit is a free permit
  const uint32_t count_;
  uint32_t free_;
  uint32_t waiting_ = 0;
};

}  // namespace rtrsnbd::rtrs
