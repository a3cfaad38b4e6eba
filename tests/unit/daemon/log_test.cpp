// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/log.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/daemon/support.h"

using namespace rtrsnbd;
using namespace rtrsnbd::daemon;
using namespace rtrsnbd::daemon::test;
using namespace std::chrono_literals;

namespace {

struct Pipe {
  Pipe() {
    std::array<int, 2> fds{};
    REQUIRE(pipe2(fds.data(), O_CLOEXEC) == 0);
    out = Fd(fds[0]);
    in = Fd(fds[1]);
  }
  std::string read_all() {
    in = Fd();
    std::string all;
    std::array<char, 4096> bytes{};
    for (ssize_t count = 0; (count = read(out.get(), bytes.data(), bytes.size())) > 0;) {
      all.append(bytes.data(), static_cast<size_t>(count));
    }
    return all;
  }
  Fd out;
  Fd in;
};

}  // namespace

TEST_CASE("a-line-has-the-wrong-prefix-or-level") {
  Pipe plain;
  {
    Log log(plain.in.get(), false, LogLevel::info);
    log.write(LogLevel::error, "one");
    log.write(LogLevel::debug, "hidden");
    log.set_level(LogLevel::debug);
    log.write(LogLevel::debug, "two");
  }
  CHECK(plain.read_all() == "rtrsd: error: one\nrtrsd: debug: two\n");

  Pipe journal;
  {
    Log log(journal.in.get(), true, LogLevel::debug);
    log.write(LogLevel::error, "a");
    log.write(LogLevel::warning, "b");
    log.write(LogLevel::notice, "c");
    log.write(LogLevel::info, "d");
    log.write(LogLevel::debug, "e");
  }
  CHECK(journal.read_all() == "<3>a\n<4>b\n<5>c\n<6>d\n<7>e\n");
}

TEST_CASE("somebody-else-s-stream-is-taken-for-the-journal") {
  Pipe pipe;
  struct stat status {};
  REQUIRE(fstat(pipe.in.get(), &status) == 0);
  const std::string device = std::to_string(status.st_dev);
  const std::string inode = std::to_string(status.st_ino);
  CHECK(is_journal(pipe.in.get(), (device + ":" + inode).c_str()));
  CHECK_FALSE(is_journal(pipe.in.get(), (device + ":" + inode + "1").c_str()));
  CHECK_FALSE(is_journal(pipe.in.get(), nullptr));
  for (const char* text : {"", ":", "x:y", "1", "1:", ":1"})
    CHECK_FALSE(is_journal(pipe.in.get(), text));
}

TEST_CASE("a-reader-that-stopped-holds-up-the-writer") {
  signal(SIGPIPE, SIG_IGN);
  Pipe pipe;
  {
    Log log(pipe.in.get(), false, LogLevel::debug);
    const std::string line(1000, 'x');
    const TimePoint begin = Clock::now();
    for (int i = 0; i < 20000; ++i) log.write(LogLevel::debug, line);
    CHECK(Clock::now() - begin < 5s);
    CHECK_FALSE(log.finish(50ms));
    pipe.out = Fd();  // the thread's write ends with EPIPE
  }
}

TEST_CASE("the-same-line-floods-the-log") {
  RepeatFilter filter;
  TimePoint now{};
  int written = 0;
  int summaries = 0;
  std::string last;
  // A peer that tries 13 times a second, for ten minutes, each time from another port.
  for (int i = 0; i < 10 * 60 * 13; ++i) {
    now += std::chrono::milliseconds(77);
    if (filter.admit(LogLevel::warning, "peer 192.0.2.1:" + std::to_string(1000 + i) + " refused",
                     now))
      ++written;
    for (const auto& [level, text] : filter.due(now, false)) {
      CHECK(level == LogLevel::warning);
      CHECK(text.find("more like it") != std::string::npos);
      ++summaries;
    }
  }
  CHECK(written == static_cast<int>(RepeatFilter::problems_per_window));
  CHECK(summaries >= 9);
  CHECK(summaries <= 11);
  for (const auto& [level, text] : filter.due(now, true)) last = text;
  CHECK(last.find(":" + std::to_string(1000 + 10 * 60 * 13 - 1)) !=
        std::string::npos);  // the last attempt is there
  // After a quiet minute it is news again.
  now += 3min;
  CHECK(filter.due(now, false).empty());
  CHECK(filter.admit(LogLevel::warning, "peer 192.0.2.1:5 refused", now));
}

TEST_CASE("different-lines-are-taken-for-one") {
  RepeatFilter filter;
  const TimePoint now{};
  for (int i = 0; i < 50; ++i) {
    const std::string letter(1, static_cast<char>('a' + i % 26));
    CHECK(filter.admit(i < 26 ? LogLevel::warning : LogLevel::error,
                       "volume " + letter + ": failed", now));
  }
  for (int i = 0; i < 99; ++i)
    CHECK(filter.admit(LogLevel::info, "session c" + std::to_string(i) + " is up", now));
}

TEST_CASE("made-up-names-fill-the-memory-of-the-log") {
  RepeatFilter filter;
  TimePoint now{};
  int written = 0;
  std::string name = "aaaa";
  for (int i = 0; i < 100000; ++i) {
    for (char& letter : name) {
      if (++letter <= 'z') break;
      letter = 'a';
    }
    if (filter.admit(LogLevel::info, "session " + name + " refused", now)) ++written;
  }
  CHECK(written <= static_cast<int>(RepeatFilter::causes_max));
  now += 2min;
  const auto lines = filter.due(now, false);
  REQUIRE(lines.size() == 1);
  CHECK(lines[0].second.find("left out") != std::string::npos);
  CHECK(filter.admit(LogLevel::info, "session zzzzz refused", now));
}

TEST_CASE("lines-of-several-threads-are-lost-or-mixed") {
  Pipe pipe;
  std::string all;
  std::thread reader([&] {
    std::array<char, 4096> bytes{};
    for (ssize_t count = 0; (count = read(pipe.out.get(), bytes.data(), bytes.size())) > 0;) {
      all.append(bytes.data(), static_cast<size_t>(count));
    }
  });
  {
    Log log(pipe.in.get(), false, LogLevel::debug);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int line = 0; line < 200; ++line) log.write(LogLevel::debug, "0123456789");
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  pipe.in = Fd();
  reader.join();
  std::string expected;
  for (int i = 0; i < 800; ++i) expected += "rtrsd: debug: 0123456789\n";
  CHECK(all == expected);
}
