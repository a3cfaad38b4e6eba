// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/soft/key_table.h"

#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <set>
#include <thread>
#include <vector>

namespace rtrsnbd::fabric::soft {

namespace error = wire::iwarp::error;
using wire::iwarp::TerminateError;

namespace {

struct Fixture {
  KeyTable keys;
  std::byte memory[100] = {};
  uint32_t index = keys.allocate(1, memory, sizeof memory, Access::remote_write);
  uint32_t key = keys.key(index);
  uint64_t base = KeyTable::base_offset(index);

  TerminateError refusal(DomainId domain, uint32_t stag, uint64_t offset, size_t length) {
    TerminateError why;
    const auto placement = keys.place(domain, stag, offset, length, why);
    REQUIRE_FALSE(placement);
    return why;
  }
  std::byte* target(uint64_t offset, size_t length) {
    TerminateError why;
    const auto placement = keys.place(1, key, offset, length, why);
    REQUIRE(placement);
    return placement.target();
  }
};

}  // namespace

TEST_CASE_FIXTURE(Fixture, "a key opens its memory up to the last byte") {
  CHECK(index != 0);
  CHECK((key >> 8) == index);
  CHECK(target(base, 100) == memory);
  CHECK(target(base + 99, 1) == memory + 99);
}

TEST_CASE_FIXTURE(Fixture, "each way to miss the memory has its own error") {
  CHECK(refusal(1, key ^ 1, base, 1) == error::invalid_stag);
  CHECK(refusal(1, 0, base, 1) == error::invalid_stag);
  CHECK(refusal(1, 0xff, base, 1) == error::invalid_stag);
  CHECK(refusal(1, key + 0x100, base, 1) == error::invalid_stag);
  CHECK(refusal(1, 0xffffffff, base, 1) == error::invalid_stag);
  CHECK(refusal(2, key, base, 1) == error::foreign_stag);
  CHECK(refusal(1, key, base + 100, 1) == error::out_of_bounds);
  CHECK(refusal(1, key, base, 101) == error::out_of_bounds);
  CHECK(refusal(1, key, base + 1, 100) == error::out_of_bounds);
  CHECK(refusal(1, key, base - 1, 1) == error::out_of_bounds);
  CHECK(refusal(1, key, 0, 1) == error::out_of_bounds);
  CHECK(refusal(1, key, UINT64_MAX, 1) == error::out_of_bounds);
  CHECK(refusal(1, key, UINT64_MAX, 2) == error::offset_wrap);
  CHECK(refusal(1, key, base, SIZE_MAX) == error::offset_wrap);
}

TEST_CASE_FIXTURE(Fixture, "memory that is closed to the peer is neither written nor invalidated") {
  const uint32_t closed = keys.allocate(1, memory, sizeof memory, Access::none);
  CHECK(refusal(1, keys.key(closed), KeyTable::base_offset(closed), 1) == error::access_rights);
  CHECK(keys.remote_invalidate(1, keys.key(closed)) == error::invalidate_not_permitted);
}

TEST_CASE_FIXTURE(Fixture, "a revoked key is dead, a renewed one lives under the next number") {
  CHECK(keys.invalidate(index));
  CHECK(refusal(1, key, base, 1) == error::invalid_stag);
  const uint32_t next = keys.renew(index);
  CHECK(next == ((key & ~0xffu) | ((key + 1) & 0xff)));
  CHECK(keys.key(index) == next);
  CHECK(refusal(1, key, base, 1) == error::invalid_stag);
  key = next;
  CHECK(target(base, 100) == memory);
  for (int i = 0; i < 256; ++i) key = keys.renew(index);
  CHECK(key == next);
}

TEST_CASE_FIXTURE(Fixture, "rebinding moves the key's slot to other memory") {
  std::byte other[10];
  keys.rebind(index, other, sizeof other);
  CHECK(refusal(1, key, base, 1) == error::invalid_stag);
  key = keys.key(index);
  CHECK(target(base, 10) == other);
  CHECK(refusal(1, key, base, 11) == error::out_of_bounds);
}

TEST_CASE_FIXTURE(Fixture, "the peer may invalidate what it may write, twice even") {
  CHECK(keys.remote_invalidate(2, key) == error::invalidate_not_permitted);
  CHECK(keys.remote_invalidate(1, key ^ 1) == error::invalidate_unknown);
  CHECK(keys.remote_invalidate(1, 0) == error::invalidate_unknown);
  CHECK(keys.remote_invalidate(1, 0xfffffff0) == error::invalidate_unknown);
  CHECK(target(base, 1) == memory);
  CHECK(keys.remote_invalidate(1, key) == std::nullopt);
  CHECK(refusal(1, key, base, 1) == error::invalid_stag);
  CHECK(keys.remote_invalidate(1, key) == std::nullopt);
  keys.release(index);
  CHECK(keys.remote_invalidate(1, key) == error::invalidate_unknown);
}

TEST_CASE_FIXTURE(Fixture,
                  "while a placement is in progress the key dies but the memory is not quiet") {
  TerminateError why;
  auto placement = keys.place(1, key, base, 10, why);
  REQUIRE(placement);
  CHECK_FALSE(keys.invalidate(index));
  CHECK(refusal(1, key, base, 1) == error::invalid_stag);
  CHECK(keys.remote_invalidate(1, key) == error::stream_catastrophic);
  placement.reset();
  CHECK(keys.invalidate(index));
}

TEST_CASE_FIXTURE(Fixture, "a released slot opens nothing and its next owner gets a new key") {
  keys.release(index);
  CHECK(refusal(1, key, base, 1) == error::invalid_stag);
  const uint32_t again = keys.allocate(2, memory, 1, Access::remote_write);
  CHECK(again == index);
  CHECK(keys.key(again) != key);
  CHECK(refusal(1, keys.key(again), base, 1) == error::foreign_stag);
}

TEST_CASE("ten thousand keys are all different and all work") {
  KeyTable keys;
  std::byte memory[1];
  std::set<uint32_t> seen;
  for (int i = 0; i < 10000; ++i) {
    const uint32_t index = keys.allocate(1, memory, 1, Access::remote_write);
    CHECK(index != 0);
    CHECK(seen.insert(index).second);
    TerminateError why;
    CHECK(keys.place(1, keys.key(index), KeyTable::base_offset(index), 1, why));
  }
}

// An owner that moves its key over freshly allocated buffers while receivers write through whatever
// key is valid: no write may hit a buffer after invalidate() called it quiet. The buffers are of
// the exact size and freed at once, so that the sanitizers see a write that is late or long.
TEST_CASE("writers race with an owner that rebinds and frees") {
  KeyTable keys;
  const uint32_t index = keys.allocate(1, nullptr, 0, Access::remote_write);
  const uint64_t base = KeyTable::base_offset(index);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> placed{0};
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 2; ++writer)
    writers.emplace_back([&keys, &stop, &placed, index, base] {
      while (!stop) {
        TerminateError why;
        const auto placement = keys.place(1, keys.key(index), base, 64, why);
        if (!placement) continue;
        // Only through an atomic may two writers meet in the same bytes.
        for (size_t i = 0; i < 64; ++i)
          std::atomic_ref(reinterpret_cast<unsigned char&>(placement.target()[i]))
              .store(1, std::memory_order_relaxed);
        ++placed;
      }
    });
  int loud = 0;
  for (int round = 0; round < 3000 || placed < 100; ++round) {
    // Sizes alternate, so that an old length with a new address would write beyond the end.
    const size_t size = round % 2 == 0 ? 64 : 16;
    auto memory = std::make_unique<std::byte[]>(size);
    keys.rebind(index, memory.get(), size);
    if (round % 16 == 0) std::this_thread::yield();
    while (!keys.invalidate(index)) ++loud;
  }
  stop = true;
  for (auto& writer : writers) writer.join();
  CHECK(placed >= 100);
}

}  // namespace rtrsnbd::fabric::soft
