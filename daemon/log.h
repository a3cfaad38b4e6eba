// SPDX-License-Identifier: BSD-3-Clause
// rtrsd's log: lines to standard error, written by a thread of its own, so that a reader that is
// slow or stopped never holds up a reactor. With journald at the other end each line carries its
// priority as <N>; otherwise the level as a word.
//
// A line that repeats, numbers aside, is let through a few times a minute; the last one held back
// follows with the count of the others.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "protocol/base/log.h"
#include "protocol/base/time.h"

namespace rtrsnbd::daemon {

std::optional<LogLevel> parse_log_level(std::string_view word);

// Is fd the socket that journald gave this service? (systemd.exec(5), JOURNAL_STREAM)
bool is_journal(int fd, const char* journal_stream);

// Decides which lines are one too many. Not locked; time comes in as an argument.
class RepeatFilter {
 public:
  // True: write it now.
  bool admit(LogLevel level, std::string_view line, TimePoint now);
  // Lines held back whose minute is over, ready to be written; all of them if `everything`.
  std::vector<std::pair<LogLevel, std::string>> due(TimePoint now, bool everything);

  static constexpr Duration window = std::chrono::minutes(1);
  static constexpr uint32_t problems_per_window = 3;  // warnings and errors, per cause
  static constexpr uint32_t events_per_window = 100;  // notice and info, per cause
  static constexpr uint32_t lines_per_window =
      2000;  // all causes: names a peer makes up are causes too
  static constexpr size_t causes_max = 1024;

 private:
  struct Cause {
    TimePoint begin{};
    uint32_t written = 0;
    uint32_t held_back = 0;
    LogLevel level = LogLevel::info;
    std::string last;
  };
  std::map<std::string, Cause, std::less<>> causes_;
  TimePoint window_begin_{};
  uint32_t window_lines_ = 0;
  uint64_t overflow_ = 0;  // beyond lines_per_window or causes_max
};

class Log {
 public:
  Log(int fd, bool journal, LogLevel level);
  ~Log();  // writes what is queued, however long the reader takes: see finish()
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  void set_level(LogLevel level) { level_.store(level, std::memory_order_relaxed); }
  [[nodiscard]] LogLevel level() const { return level_.load(std::memory_order_relaxed); }
  void write(LogLevel level, std::string_view line);
  [[nodiscard]] LogSink sink();
  // Waits until everything queued so far is written, at most for `timeout`.
  void flush(Duration timeout);
  // The last lines are written and the thread has ended. False: nobody reads the other end, and the
  // process should _exit() rather than wait in the destructor.
  bool finish(Duration timeout);

  static constexpr size_t queued_lines_max = 4096;

 private:
  struct Line {
    LogLevel level;
    std::string text;
  };
  void run();
  void put(LogLevel level, const std::string& text) const;

  const int fd_;
  const bool journal_;
  std::atomic<LogLevel> level_;
  std::mutex mutex_;
  std::condition_variable wanted_;
  std::condition_variable written_;
  std::deque<Line> queue_;
  uint64_t queued_ = 0;    // ever
  uint64_t finished_ = 0;  // ever
  uint64_t lost_ = 0;
  bool stopping_ = false;
  bool ended_ = false;
  RepeatFilter filter_;  // of the thread
  std::thread thread_;
};

}  // namespace rtrsnbd::daemon
