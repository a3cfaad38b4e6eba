// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/log.h"

#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <utility>

namespace rtrsnbd::daemon {

namespace {

constexpr std::string_view words[] = {"error", "warning", "notice", "info", "debug"};
constexpr int priorities[] = {3, 4, 5, 6, 7};  // syslog's

// What two lines with the same cause have in common: the text without its numbers.
std::string cause_of(LogLevel level, std::string_view line) {
  std::string cause(1, static_cast<char>('0' + static_cast<int>(level)));
  bool in_number = false;
  for (const char character : line) {
    const bool digit = character >= '0' && character <= '9';
    if (digit && in_number) continue;
    in_number = digit;
    cause += digit ? '#' : character;
  }
  return cause;
}

}  // namespace

std::optional<LogLevel> parse_log_level(std::string_view word) {
  for (size_t i = 0; i < std::size(words); ++i) {
    if (words[i] == word) return static_cast<LogLevel>(i);
  }
  return std::nullopt;
}

bool is_journal(int fd, const char* journal_stream) {
  if (journal_stream == nullptr) return false;
  const std::string_view text(journal_stream);
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) return false;
  uint64_t device = 0;
  uint64_t inode = 0;
  const char* const end = text.data() + text.size();
  if (std::from_chars(text.data(), text.data() + colon, device).ec != std::errc()) return false;
  if (std::from_chars(text.data() + colon + 1, end, inode).ec != std::errc()) return false;
  struct stat status {};
  return fstat(fd, &status) == 0 && status.st_dev == device && status.st_ino == inode;
}

bool RepeatFilter::admit(LogLevel level, std::string_view line, TimePoint now) {
  if (level == LogLevel::debug) return true;  // who asks for it gets it
  if (now - window_begin_ >= window) {
    window_begin_ = now;
    window_lines_ = 0;
  }
  const std::string key = cause_of(level, line);
  auto found = causes_.find(key);
  if (found == causes_.end()) {
    if (causes_.size() >= causes_max || window_lines_ >= lines_per_window) {
      ++overflow_;
      return false;
    }
    found = causes_.emplace(key, Cause{now, 0, 0, level, {}}).first;
  }
  Cause& cause = found->second;
  const uint32_t written_max = level <= LogLevel::warning ? problems_per_window : events_per_window;
  if (cause.written < written_max && window_lines_ < lines_per_window) {
    ++cause.written;
    ++window_lines_;
    return true;
  }
  ++cause.held_back;
  cause.last.assign(line);
  return false;
}

std::vector<std::pair<LogLevel, std::string>> RepeatFilter::due(TimePoint now, bool everything) {
  std::vector<std::pair<LogLevel, std::string>> lines;
  for (auto entry = causes_.begin(); entry != causes_.end();) {
    Cause& cause = entry->second;
    if (!everything && now - cause.begin < window) {
      ++entry;
      continue;
    }
    if (cause.held_back == 0) {
      entry = causes_.erase(entry);
      continue;
    }
    std::string text = std::move(cause.last);
    if (cause.held_back > 1)
      text += " (and " + std::to_string(cause.held_back - 1) + " more like it)";
    lines.emplace_back(cause.level, std::move(text));
    // It goes on: from now on the summary is the line of the minute.
    cause = Cause{now, UINT32_MAX, 0, cause.level, {}};
    ++entry;
  }
  if (overflow_ > 0 && (everything || now - window_begin_ >= window)) {
    lines.emplace_back(LogLevel::warning,
                       "log: left out " + std::to_string(overflow_) + " lines of too many kinds");
    overflow_ = 0;
  }
  return lines;
}

Log::Log(int fd, bool journal, LogLevel level)
    : fd_(fd), journal_(journal), level_(level), thread_([this] { run(); }) {}

Log::~Log() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wanted_.notify_one();
  thread_.join();
}

bool Log::finish(Duration timeout) {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  wanted_.notify_one();
  return written_.wait_for(lock, timeout, [this] { return ended_; });
}

LogSink Log::sink() {
  return [this](LogLevel level, std::string_view line) { write(level, line); };
}

void Log::write(LogLevel level, std::string_view line) {
  if (level > level_.load(std::memory_order_relaxed)) return;
  {
    const std::lock_guard lock(mutex_);
    if (queue_.size() >= queued_lines_max) {
      ++lost_;
      return;
    }
    queue_.push_back({level, std::string(line)});
    ++queued_;
  }
  wanted_.notify_one();
}

void Log::flush(Duration timeout) {
  std::unique_lock lock(mutex_);
  const uint64_t target = queued_;
  written_.wait_for(lock, timeout, [&] { return finished_ >= target; });
}

void Log::run() {
  pthread_setname_np(pthread_self(), "rtrsd-log");
  constexpr Duration check_interval = std::chrono::seconds(5);
  std::unique_lock lock(mutex_);
  for (;;) {
    wanted_.wait_for(lock, check_interval, [this] { return !queue_.empty() || stopping_; });
    std::deque<Line> lines;
    lines.swap(queue_);
    const uint64_t lost = std::exchange(lost_, 0);
    const bool last = stopping_;
    lock.unlock();
    for (const Line& line : lines) {
      if (filter_.admit(line.level, line.text, Clock::now())) put(line.level, line.text);
    }
    if (lost > 0)
      put(LogLevel::warning, "log: lost " + std::to_string(lost) + " lines that came too quickly");
    for (const auto& [level, text] : filter_.due(Clock::now(), last)) put(level, text);
    lock.lock();
    finished_ += lines.size();
    ended_ = last && queue_.empty();
    written_.notify_all();
    if (ended_) return;
  }
}

void Log::put(LogLevel level, const std::string& text) const {
  const auto index = static_cast<size_t>(level);
  std::string line = journal_ ? "<" + std::to_string(priorities[index]) + ">" : "rtrsd: ";
  if (!journal_) line.append(words[index]).append(": ");
  line.append(text).append("\n");
  // One call per line, so that lines of several processes do not mix.
  for (size_t done = 0; done < line.size();) {
    const ssize_t count = ::write(fd_, line.data() + done, line.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;  // nobody listens, and there is nowhere to say so
    done += static_cast<size_t>(count);
  }
}

}  // namespace rtrsnbd::daemon
