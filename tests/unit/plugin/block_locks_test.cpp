// SPDX-License-Identifier: BSD-3-Clause
// A read-modify-write must neither lose a neighbour's write nor be lost itself.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "plugin/device.h"

using rtrsnbd::plugin::BlockLocks;

TEST_CASE("an exclusive holder of a block is alone on it, sharers are together") {
  constexpr uint64_t block = 4096;
  constexpr uint64_t size = 80 << 20;  // more than the stripes cover once
  BlockLocks locks;
  std::vector<std::atomic<int>> users(size / block);  // > 0: sharers, < 0: exclusive
  std::atomic<int> violations{0};
  std::vector<std::jthread> threads;
  for (unsigned thread = 0; thread < 6; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(thread);
      for (int round = 0; round < 400; ++round) {
        const bool exclusive = random() % 3 == 0;
        const uint64_t blocks =
            exclusive ? 1 : 1 + random() % (round % 50 == 0 ? size / block : 64);
        const uint64_t first = random() % (size / block - blocks + 1);
        const BlockLocks::Guard guard(locks, first * block, blocks * block, exclusive);
        for (uint64_t i = first; i < first + blocks; ++i) {
          if (exclusive ? users[i].fetch_sub(1000) != 0 : users[i].fetch_add(1) < 0) ++violations;
        }
        for (uint64_t i = first; i < first + blocks; ++i) users[i].fetch_add(exclusive ? 1000 : -1);
      }
    });
  }
  threads.clear();
  CHECK(violations == 0);
}
