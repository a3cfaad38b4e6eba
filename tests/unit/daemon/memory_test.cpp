// SPDX-License-Identifier: BSD-3-Clause
#include <doctest/doctest.h>
#include <sys/resource.h>

#include <algorithm>
#include <thread>

#include "tests/unit/daemon/support.h"

using namespace rtrsnbd;
using namespace rtrsnbd::daemon;
using namespace rtrsnbd::daemon::test;

TEST_CASE("chunk-memory-is-dirty-misaligned-or-too-short") {
  Reactor reactor;
  MemoryBudget budget(uint64_t{1} << 30);
  ChunkAllocator allocator(reactor, budget, false, [](LogLevel, std::string_view) {});
  for (const size_t bytes :
       {size_t{1}, size_t{4096}, size_t{5000}, size_t{2} << 20, size_t{17301504}}) {
    std::string reason;
    const auto chunks = allocator.allocate(bytes, reason);
    REQUIRE(chunks);
    CHECK(chunks->bytes().size() == bytes);
    CHECK(reinterpret_cast<uintptr_t>(chunks->bytes().data()) % 4096 == 0);
    CHECK(std::all_of(chunks->bytes().begin(), chunks->bytes().end(),
                      [](std::byte b) { return b == std::byte{0}; }));
    std::fill(chunks->bytes().begin(), chunks->bytes().end(), std::byte{0xaa});
  }
  CHECK(budget.used() == 0);
}

TEST_CASE("the-memory-limit-is-exceeded-or-refuses-without-numbers") {
  Reactor reactor;
  MemoryBudget budget(uint64_t{40} << 20);
  ChunkAllocator allocator(reactor, budget, false, [](LogLevel, std::string_view) {});
  std::string reason;
  auto first = allocator.allocate(size_t{16} << 20, reason);
  auto second = allocator.allocate(size_t{16} << 20, reason);
  REQUIRE(first);
  REQUIRE(second);
  CHECK_FALSE(allocator.allocate(size_t{16} << 20, reason));
  CHECK(
      reason ==
      "memory limit: the session needs 16.0 MiB, 32.0 MiB are in use and 'max-memory' is 40.0 MiB");
  first.reset();
  CHECK(allocator.allocate(size_t{16} << 20, reason));
}

TEST_CASE("two-reactors-together-exceed-the-memory-limit") {
  MemoryBudget budget(1000);
  std::atomic<uint64_t> most{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20000; ++round) {
        if (!budget.reserve(300)) continue;
        const uint64_t used = budget.used();
        if (used > most) most = used;
        budget.release(300);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(most <= 900);
  CHECK(budget.used() == 0);
}

TEST_CASE("an-absurd-size-overflows-the-budget") {
  MemoryBudget budget(1000);
  CHECK_FALSE(budget.reserve(UINT64_MAX));
  CHECK(budget.reserve(1000));
  CHECK_FALSE(budget.reserve(UINT64_MAX - 500));
  CHECK_FALSE(budget.reserve(1));
}

TEST_CASE("a-kernel-without-buffer-tables-is-reported-for-every-session") {
  LogLines log;
  Reactor reactor({.level = KernelLevel::v5_15});
  MemoryBudget budget(uint64_t{1} << 30);
  ChunkAllocator allocator(reactor, budget, true, log.sink());
  std::string reason;
  for (int i = 0; i < 3; ++i) {
    const auto chunks = allocator.allocate(1 << 20, reason);
    REQUIRE(chunks);
    CHECK(chunks->registered_index() == -1);
  }
  CHECK(log.count(LogLevel::notice, "not registered") == 1);
}
