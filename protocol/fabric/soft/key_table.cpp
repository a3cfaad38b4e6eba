// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/soft/key_table.h"

#include <sched.h>

#include <bit>
#include <cassert>
#include <new>

namespace rtrsnbd::fabric::soft {

namespace {

namespace error = wire::iwarp::error;

constexpr uint64_t placements_mask = 0xffffffff;
constexpr uint64_t valid_bit = uint64_t{1} << 32;
constexpr unsigned generation_shift = 33;

// A copy out of a receive buffer takes microseconds; giving the processor away this often covers
// it, also where both threads share one processor. A placement by the kernel may last as long as
// the peer likes, so nobody waits for more.
constexpr int quiet_attempts = 64;

uint8_t key_of(uint64_t state) {
  return static_cast<uint8_t>(state >> generation_shift);
}

uint64_t next_generation(uint64_t state) {
  return ((state >> generation_shift) + 1) << generation_shift;  // the top bit falls off by itself
}

uint32_t stag_of(uint32_t index, uint64_t state) {
  return index << 8 | key_of(state);
}

}  // namespace

KeyTable::KeyTable() = default;

KeyTable::~KeyTable() {
  for (auto& chunk : chunks_) delete[] chunk.load(std::memory_order_relaxed);
}

size_t KeyTable::chunk_of(uint32_t index) {
  return static_cast<size_t>(std::bit_width(index >> first_chunk_bits));
}

uint32_t KeyTable::chunk_start(size_t chunk) {
  return chunk == 0 ? 0 : 1u << (first_chunk_bits + chunk - 1);
}

size_t KeyTable::chunk_size(size_t chunk) {
  return chunk == 0 ? size_t{1} << first_chunk_bits : size_t{1} << (first_chunk_bits + chunk - 1);
}

KeyTable::Slot* KeyTable::find(uint32_t index) const {
  assert(index <= index_max);
  const size_t chunk = chunk_of(index);
  Slot* slots = chunks_[chunk].load(std::memory_order_acquire);
  return slots == nullptr ? nullptr : &slots[index - chunk_start(chunk)];
}

KeyTable::Slot& KeyTable::slot(uint32_t index) const {
  Slot* found = find(index);
  assert(index != 0 && found != nullptr);
  return *found;
}

uint32_t KeyTable::make_valid(uint32_t index, Slot& slot) {
  uint64_t state = slot.state.load(std::memory_order_relaxed);
  uint64_t next = 0;
  do {
    next = next_generation(state) | valid_bit | (state & placements_mask);
  } while (!slot.state.compare_exchange_weak(state, next, std::memory_order_acq_rel,
                                             std::memory_order_relaxed));
  return stag_of(index, next);
}

bool KeyTable::wait_until_quiet(const Slot& slot) {
  for (int attempt = 0; attempt < quiet_attempts; ++attempt) {
    if ((slot.state.load(std::memory_order_acquire) & placements_mask) == 0) return true;
    sched_yield();
  }
  return false;
}

uint32_t KeyTable::allocate(DomainId domain, std::byte* memory, size_t length, Access access) {
  uint32_t index = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      index = free_.front();
      free_.pop_front();
    } else {
      if (next_index_ > index_max) throw std::bad_alloc();
      const size_t chunk = chunk_of(next_index_);
      if (chunks_[chunk].load(std::memory_order_relaxed) == nullptr)
        chunks_[chunk].store(new Slot[chunk_size(chunk)], std::memory_order_release);
      index = next_index_++;
    }
  }
  Slot& s = slot(index);
  s.domain.store(domain, std::memory_order_release);
  s.access.store(access, std::memory_order_release);
  s.memory.store(memory, std::memory_order_release);
  s.length.store(length, std::memory_order_release);
  make_valid(index, s);
  return index;
}

void KeyTable::release(uint32_t index) {
  Slot& s = slot(index);
  s.state.fetch_and(~valid_bit, std::memory_order_acq_rel);
  s.domain.store(0, std::memory_order_release);
  s.memory.store(nullptr, std::memory_order_release);
  s.length.store(0, std::memory_order_release);
  const std::lock_guard lock(mutex_);
  free_.push_back(index);
}

uint32_t KeyTable::key(uint32_t index) const {
  return stag_of(index, slot(index).state.load(std::memory_order_acquire));
}

bool KeyTable::invalidate(uint32_t index) {
  Slot& s = slot(index);
  const uint64_t before = s.state.fetch_and(~valid_bit, std::memory_order_acq_rel);
  return (before & placements_mask) == 0 || wait_until_quiet(s);
}

uint32_t KeyTable::renew(uint32_t index) {
  return make_valid(index, slot(index));
}

void KeyTable::rebind(uint32_t index, std::byte* memory, size_t length) {
  Slot& s = slot(index);
  s.state.fetch_and(~valid_bit, std::memory_order_acq_rel);
  s.memory.store(memory, std::memory_order_release);
  s.length.store(length, std::memory_order_release);
  make_valid(index, s);
}

KeyTable::Placement KeyTable::place(DomainId domain, uint32_t stag, uint64_t offset, size_t length,
                                    wire::iwarp::TerminateError& error) {
  const uint32_t index = stag >> 8;
  Slot* s = find(index);
  const auto refuse = [&error](wire::iwarp::TerminateError why) {
    error = why;
    return Placement();
  };
  if (index == 0 || s == nullptr) return refuse(error::invalid_stag);

  uint64_t state = s->state.load(std::memory_order_acquire);
  for (;;) {
    if ((state & valid_bit) == 0 || key_of(state) != (stag & 0xff))
      return refuse(error::invalid_stag);
    // Acquire: whoever sees a field of a newer binding sees the invalid word that came before it,
    // so the exchange below fails.
    if (s->domain.load(std::memory_order_acquire) != domain) return refuse(error::foreign_stag);
    if (length > 0 && length - 1 > ~offset) return refuse(error::offset_wrap);
    const uint64_t base = base_offset(index);
    const uint64_t size = s->length.load(std::memory_order_acquire);
    if (offset < base || length > size || offset - base > size - length)
      return refuse(error::out_of_bounds);
    if (s->access.load(std::memory_order_acquire) != Access::remote_write)
      return refuse(error::access_rights);
    std::byte* memory = s->memory.load(std::memory_order_acquire);
    if (s->state.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire))
      return {&s->state, memory + (offset - base)};
  }
}

std::optional<wire::iwarp::TerminateError> KeyTable::check_remote_invalidate(DomainId domain,
                                                                             uint32_t stag) {
  const uint32_t index = stag >> 8;
  Slot* s = find(index);
  if (index == 0 || s == nullptr) return error::invalidate_unknown;
  const DomainId owner = s->domain.load(std::memory_order_acquire);
  if (owner == 0 || key_of(s->state.load(std::memory_order_acquire)) != (stag & 0xff))
    return error::invalidate_unknown;
  if (owner != domain || s->access.load(std::memory_order_acquire) != Access::remote_write)
    return error::invalidate_not_permitted;
  return std::nullopt;
}

std::optional<wire::iwarp::TerminateError> KeyTable::remote_invalidate(DomainId domain,
                                                                       uint32_t stag) {
  if (const auto refused = check_remote_invalidate(domain, stag)) return refused;
  Slot& s = slot(stag >> 8);
  uint64_t state = s.state.load(std::memory_order_acquire);
  do {
    if (key_of(state) != (stag & 0xff)) return error::invalidate_unknown;
  } while (!s.state.compare_exchange_weak(state, state & ~valid_bit, std::memory_order_acq_rel,
                                          std::memory_order_acquire));
  // A peer that still writes under the key on another connection has lost track of its own
  // requests; reporting the key as dead would let the owner reuse memory that is not quiet.
  if (!wait_until_quiet(s)) return error::stream_catastrophic;
  return std::nullopt;
}

}  // namespace rtrsnbd::fabric::soft
