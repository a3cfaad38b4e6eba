// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/reactor.h"

#include <doctest/doctest.h>

#include <atomic>
#include <thread>
#include <vector>

using namespace rtrsnbd;
using namespace rtrsnbd::daemon;

namespace {

constexpr KernelLevel levels[] = {KernelLevel::newest, KernelLevel::v6_0, KernelLevel::v5_19,
                                  KernelLevel::v5_15};

class Nop final : public Operation {
 public:
  explicit Nop(std::function<void(int)> done) : done_(std::move(done)) {}
  void prepare(io_uring_sqe& entry) override { io_uring_prep_nop(&entry); }
  void complete(int result, uint32_t) override { done_(result); }

 private:
  std::function<void(int)> done_;
};

class Alarm final : public Timer {
 public:
  explicit Alarm(std::function<void(TimePoint)> ring) : ring_(std::move(ring)) {}
  void on_timer(TimePoint now) override { ring_(now); }

 private:
  std::function<void(TimePoint)> ring_;
};

}  // namespace

TEST_CASE("operations-beyond-the-submission-queue-are-lost") {
  for (const KernelLevel level : levels) {
    Reactor reactor({.entries = 8, .completion_entries = 16, .level = level});
    constexpr size_t count = 1000;
    size_t done = 0;
    std::vector<std::unique_ptr<Nop>> operations;
    for (size_t i = 0; i < count; ++i) {
      operations.push_back(std::make_unique<Nop>([&](int result) {
        CHECK(result == 0);
        if (++done == count) reactor.stop();
      }));
    }
    reactor.post([&] {
      for (const auto& operation : operations) reactor.start(*operation);
    });
    reactor.run();
    CHECK(done == count);
  }
}

TEST_CASE("an-operation-started-from-a-completion-is-lost") {
  for (const KernelLevel level : levels) {
    Reactor reactor({.entries = 8, .completion_entries = 16, .level = level});
    int left = 500;
    std::vector<std::unique_ptr<Nop>> operations;
    for (size_t i = 0; i < 20; ++i) {
      operations.push_back(std::make_unique<Nop>([&, i](int) {
        if (--left == 0) reactor.stop();
        if (left >= 20) reactor.start(*operations[i]);
      }));
    }
    reactor.post([&] {
      for (const auto& operation : operations) reactor.start(*operation);
    });
    reactor.run();
    CHECK(left <= 0);
  }
}

TEST_CASE("messages-from-many-threads-are-lost-or-out-of-order") {
  for (const KernelLevel level : levels) {
    Reactor reactor({.level = level});
    constexpr int threads = 4;
    constexpr int messages = 2000;
    std::vector<int> last(threads, -1);
    int seen = 0;
    bool ordered = true;
    std::vector<std::thread> senders;
    for (int sender = 0; sender < threads; ++sender) {
      senders.emplace_back([&, sender] {
        for (int i = 0; i < messages; ++i) {
          reactor.post([&, sender, i] {
            ordered = ordered && last[static_cast<size_t>(sender)] == i - 1;
            last[static_cast<size_t>(sender)] = i;
            if (++seen == threads * messages) reactor.stop();
          });
        }
      });
    }
    reactor.run();
    for (std::thread& sender : senders) sender.join();
    CHECK(seen == threads * messages);
    CHECK(ordered);
  }
}

TEST_CASE("messages-left-in-a-reactor-leak") {
  auto owned = std::make_shared<int>(1);
  {
    Reactor reactor;
    reactor.post([owned] {});
    CHECK(owned.use_count() == 2);
  }
  CHECK(owned.use_count() == 1);
}

TEST_CASE("a-timer-comes-early-late-or-in-the-wrong-order") {
  for (const KernelLevel level : levels) {
    Reactor reactor({.level = level});
    std::vector<int> order;
    const TimePoint begin = Clock::now();
    bool early = false;
    std::vector<std::unique_ptr<Alarm>> alarms;
    for (const int delay : {60, 20, 40}) {
      const TimePoint due = begin + std::chrono::milliseconds(delay);
      alarms.push_back(std::make_unique<Alarm>([&, delay, due](TimePoint now) {
        early = early || now < due;
        order.push_back(delay);
        if (order.size() == 3) reactor.stop();
      }));
      reactor.arm(*alarms.back(), due);
    }
    reactor.run();
    CHECK_FALSE(early);
    CHECK(order == std::vector<int>{20, 40, 60});
    CHECK(Clock::now() - begin < std::chrono::seconds(5));
  }
}

TEST_CASE("a-deadline-moved-forward-while-sleeping-is-missed") {
  for (const KernelLevel level : levels) {
    Reactor reactor({.level = level});
    const TimePoint begin = Clock::now();
    Alarm far([&](TimePoint) { reactor.stop(); });
    Alarm near([&](TimePoint) { reactor.stop(); });
    reactor.arm(far, begin + std::chrono::hours(1));
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      reactor.post([&] { reactor.arm(near, Clock::now() + std::chrono::milliseconds(10)); });
    });
    reactor.run();
    other.join();
    CHECK(Clock::now() - begin < std::chrono::seconds(5));
    reactor.disarm(far);
    // And again, earlier and earlier, while the first change is under way.
    std::vector<std::unique_ptr<Alarm>> alarms;
    size_t fired = 0;
    for (int i = 0; i < 50; ++i) {
      alarms.push_back(std::make_unique<Alarm>([&](TimePoint) {
        if (++fired == 50) reactor.stop();
      }));
    }
    reactor.post([&] {
      for (int i = 0; i < 50; ++i) {
        reactor.arm(*alarms[static_cast<size_t>(i)],
                    Clock::now() + std::chrono::milliseconds(60 - i));
      }
    });
    reactor.run();
    CHECK(fired == 50);
  }
}

TEST_CASE("a-timer-armed-in-its-own-handler-starves-the-rest") {
  Reactor reactor;
  int fired = 0;
  int messages = 0;
  std::unique_ptr<Alarm> alarm;
  alarm = std::make_unique<Alarm>([&](TimePoint now) {
    if (++fired < 1000) reactor.arm(*alarm, now - std::chrono::seconds(1));
  });
  reactor.arm(*alarm, Clock::now());
  std::thread other([&] {
    for (int i = 0; i < 10; ++i) reactor.post([&] { ++messages; });
    reactor.post([&] { reactor.stop(); });
  });
  reactor.run();
  other.join();
  CHECK(messages == 10);
}

TEST_CASE("a-disarmed-timer-fires") {
  Reactor reactor;
  bool fired = false;
  Alarm never([&](TimePoint) { fired = true; });
  Alarm end([&](TimePoint) { reactor.stop(); });
  reactor.arm(never, Clock::now() + std::chrono::milliseconds(5));
  reactor.arm(end, Clock::now() + std::chrono::milliseconds(30));
  reactor.post([&] { reactor.disarm(never); });
  reactor.run();
  CHECK_FALSE(fired);
}

TEST_CASE("the-reactor-sleeps-although-the-turn-has-more-to-do") {
  Reactor reactor;
  int turns = 0;
  reactor.set_turn_end([&] {
    if (++turns == 100) reactor.stop();
    return true;
  });
  const TimePoint begin = Clock::now();
  reactor.run();
  CHECK(turns == 100);
  CHECK(Clock::now() - begin < std::chrono::seconds(5));
}

TEST_CASE("an-idle-reactor-spins") {
  Reactor reactor;
  Alarm end([&](TimePoint) { reactor.stop(); });
  reactor.arm(end, Clock::now() + std::chrono::milliseconds(200));
  reactor.run();
  CHECK(reactor.counters().turns < 10);
}

TEST_CASE("an-older-kernel-is-not-named") {
  for (const KernelLevel level : levels) {
    const Ring ring({.level = level});
    CAPTURE(ring.missing());
    if (level != KernelLevel::newest)
      CHECK(ring.missing().find("DEFER_TASKRUN") != std::string::npos);
    if (level == KernelLevel::v5_15)
      CHECK(ring.missing().find("sparse buffer") != std::string::npos);
  }
}

TEST_CASE("slots-for-files-and-buffers-run-out-or-leak") {
  Ring ring({.file_slots = 3, .buffer_slots = 2});
  ring.adopt();
  for (int round = 0; round < 5; ++round) {
    std::vector<int> files;
    for (int i = 0; i < 3; ++i) files.push_back(ring.add_file(0));
    CHECK(std::count(files.begin(), files.end(), -1) == 0);
    CHECK(ring.add_file(0) == -1);
    for (const int slot : files) ring.remove_file(slot);
  }
  if (!ring.missing().empty()) return;
  std::vector<std::byte> memory(3 * 4096);
  for (int round = 0; round < 5; ++round) {
    int error = 0;
    const int first = ring.add_buffer(memory.data(), 4096, error);
    const int second = ring.add_buffer(memory.data() + 4096, 4096, error);
    CHECK(first >= 0);
    CHECK(second >= 0);
    CHECK(ring.add_buffer(memory.data() + 8192, 4096, error) == -1);
    CHECK(error != 0);
    ring.remove_buffer(first);
    ring.remove_buffer(second);
  }
}
