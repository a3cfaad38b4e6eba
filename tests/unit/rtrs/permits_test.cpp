// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/rtrs/permits.h"

#include <doctest/doctest.h>

#include <atomic>
#include <thread>
#include <vector>

using rtrsnbd::rtrs::Permits;

TEST_CASE("the lowest free permit is taken, and no more than there are") {
  for (const uint32_t count : {1U, 2U, 63U, 64U, 65U, 500U}) {
    Permits permits(count);
    for (uint32_t id = 0; id < count; ++id) CHECK(permits.try_acquire() == id);
    CHECK_FALSE(permits.try_acquire());
    permits.release(count - 1);
    if (count > 1) permits.release(0);
    if (count > 1) {
      CHECK(permits.try_acquire() == 0);
      CHECK(permits.try_acquire() == count - 1);
    }
  }
}

TEST_CASE("no permit is held by two threads, and waiters are woken") {
  constexpr uint32_t count = 3;
  Permits permits(count);
  std::vector<std::atomic<int>> holders(count);
  std::atomic<bool> shared{false};
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&] {
      for (int round = 0; round < 2000; ++round) {
        const uint32_t id = permits.acquire();
        if (holders[id].fetch_add(1) != 0) shared = true;
        holders[id].fetch_sub(1);
        permits.release(id);
      }
    });
  }
  threads.clear();
  CHECK_FALSE(shared);
  CHECK(permits.in_use() == 0);
}
