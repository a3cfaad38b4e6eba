// SPDX-License-Identifier: BSD-3-Clause
// The remote keys (STags) of a soft fabric: which memory a key names, whose it is, and whether it
// is still good. One table serves all domains of a fabric, so that a key of another domain is told
// apart from one that never was.
//
// A key is index << 8 | low byte of the slot's generation. Receivers on many threads look keys up
// while the owners rebind and revoke them, without a lock: everything hangs on one word per slot,
// which holds generation, validity and the number of placements in progress. A placement reads the
// slot's fields and then takes its reference by compare-and-exchange on that word; a change of the
// slot first makes the word invalid, then writes the fields, then makes it valid under the next
// generation, so a placement that mixed old and new fields cannot get its reference.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "protocol/fabric/fabric.h"
#include "protocol/wire/iwarp.h"

namespace rtrsnbd::fabric::soft {

using DomainId = uint64_t;  // 0 is nobody

class KeyTable {
 public:
  KeyTable();
  ~KeyTable();
  KeyTable(const KeyTable&) = delete;
  KeyTable& operator=(const KeyTable&) = delete;

  DomainId next_domain() { return last_domain_.fetch_add(1, std::memory_order_relaxed) + 1; }

  // For the owner of a region. Calls for one index come from one thread at a time.
  uint32_t allocate(DomainId domain, std::byte* memory, size_t length,
                    Access access);  // returns index
  void release(uint32_t index);
  [[nodiscard]] uint32_t key(uint32_t index) const;
  static uint64_t base_offset(uint32_t index) { return uint64_t{index} << 32; }
  // The key is dead on return. True: no placement is in progress (a short one is waited for).
  bool invalidate(uint32_t index);
  uint32_t renew(uint32_t index);
  void rebind(uint32_t index, std::byte* memory, size_t length);

  // For receivers, on any thread.

  // A reference to a slot: as long as it lives, invalidate() of that slot returns false.
  class Placement {
   public:
    Placement() = default;
    ~Placement() { reset(); }
    Placement(Placement&& other) noexcept : state_(other.state_), target_(other.target_) {
      other.state_ = nullptr;
    }
    Placement& operator=(Placement&& other) noexcept {
      if (this != &other) {
        reset();
        state_ = other.state_;
        target_ = other.target_;
        other.state_ = nullptr;
      }
      return *this;
    }
    void reset() {
      if (state_ != nullptr) state_->fetch_sub(1, std::memory_order_release);
      state_ = nullptr;
    }
    [[nodiscard]] std::byte* target() const { return target_; }
    explicit operator bool() const { return state_ != nullptr; }

   private:
    friend class KeyTable;
    Placement(std::atomic<uint64_t>* state, std::byte* target) : state_(state), target_(target) {}
    std::atomic<uint64_t>* state_ = nullptr;
    std::byte* target_ = nullptr;
  };

  // Checks that an endpoint of `domain` may write [offset, offset + length) under this key, and
  // takes a reference. On refusal the result is empty and `error` says why.
  Placement place(DomainId domain, uint32_t stag, uint64_t offset, size_t length,
                  wire::iwarp::TerminateError& error);

  // What the peer may do to a key with Send with Invalidate; nothing: allowed. An already invalid
  // key is.
  std::optional<wire::iwarp::TerminateError> check_remote_invalidate(DomainId domain,
                                                                     uint32_t stag);
  std::optional<wire::iwarp::TerminateError> remote_invalidate(DomainId domain, uint32_t stag);

  static constexpr uint32_t index_max = (1u << 24) - 1;

 private:
  // state: generation (31 bits) | valid (1 bit) | placements in progress (32 bits).
  struct alignas(64) Slot {
    std::atomic<uint64_t> state{0};
    std::atomic<DomainId> domain{0};
    std::atomic<std::byte*> memory{nullptr};
    std::atomic<uint64_t> length{0};
    std::atomic<Access> access{Access::none};
  };

  // Chunk 0 holds indices 0..63, chunk n the 64 << (n-1) that follow: slots never move.
  static constexpr uint32_t first_chunk_bits = 6;
  static constexpr size_t chunks = 24 - first_chunk_bits + 1;
  static size_t chunk_of(uint32_t index);
  static size_t chunk_size(size_t chunk);
  static uint32_t chunk_start(size_t chunk);

  [[nodiscard]] Slot* find(uint32_t index) const;
  [[nodiscard]] Slot& slot(uint32_t index) const;
  static uint32_t make_valid(uint32_t index, Slot& slot);
  static bool wait_until_quiet(const Slot& slot);

  std::array<std::atomic<Slot*>, chunks> chunks_{};
  std::mutex mutex_;           // guards the two below and the making of chunks
  uint32_t next_index_ = 1;    // 0 names nothing
  std::deque<uint32_t> free_;  // oldest first, so that a dead key stays dead for long
  std::atomic<DomainId> last_domain_{0};
};

}  // namespace rtrsnbd::fabric::soft
