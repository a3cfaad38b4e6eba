// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/reactor.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

namespace rtrsnbd::daemon {

namespace {

// Handled in one turn before what was posted is flushed: bounds the latency of the first of them.
constexpr uint32_t completions_per_turn_max = 512;
constexpr uint32_t completions_per_batch = 64;

__kernel_timespec to_timespec(TimePoint time) {
  const auto since_boot =
      std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  __kernel_timespec spec{};
  spec.tv_sec = since_boot / 1'000'000'000;
  spec.tv_nsec = since_boot % 1'000'000'000;
  return spec;
}

}  // namespace

// The read that a writer of the eventfd ends.
class Reactor::WakeUp final : public Operation {
 public:
  explicit WakeUp(Reactor& reactor) : reactor_(reactor), fd_(eventfd(0, EFD_CLOEXEC)) {
    if (fd_ < 0) throw SetUpError(std::string("cannot make an eventfd: ") + std::strerror(errno));
  }
  ~WakeUp() override { close(fd_); }
  void wake() const {
    const uint64_t one = 1;
    // Fails only if the counter is about to overflow, that is when the reactor is awake anyway.
    [[maybe_unused]] const ssize_t written = write(fd_, &one, sizeof one);
  }
  void arm() {
    if (in_flight_) return;
    in_flight_ = true;
    reactor_.start(*this);
  }
  void prepare(io_uring_sqe& entry) override {
    io_uring_prep_read(&entry, fd_, &value_, sizeof value_, 0);
  }
  void complete(int, uint32_t) override {
    in_flight_ = false;
    arm();
    reactor_.run_messages();
  }

 private:
  Reactor& reactor_;
  int fd_;
  uint64_t value_ = 0;
  bool in_flight_ = false;
};

// One timeout of the ring stands for the earliest of all timers, so that sleeping costs no timer
// set-up.
class Reactor::Timeout final : public Operation {
 public:
  void prepare(io_uring_sqe& entry) override {
    spec_ = to_timespec(deadline);
    io_uring_prep_timeout(&entry, &spec_, 0, IORING_TIMEOUT_ABS);
  }
  void complete(int, uint32_t) override { in_flight = false; }
  TimePoint deadline{};
  bool in_flight = false;

 private:
  __kernel_timespec spec_{};
};

// Moves that timeout forward. If it has fired meanwhile the update fails, and the turn arms a new
// one.
class Reactor::TimeoutUpdate final : public Operation {
 public:
  explicit TimeoutUpdate(Timeout& timeout) : timeout_(timeout) {}
  void prepare(io_uring_sqe& entry) override {
    spec_ = to_timespec(timeout_.deadline);
    io_uring_prep_timeout_update(&entry, &spec_,
                                 reinterpret_cast<uintptr_t>(static_cast<Operation*>(&timeout_)),
                                 IORING_TIMEOUT_ABS);
  }
  void complete(int, uint32_t) override { in_flight = false; }
  bool in_flight = false;

 private:
  Timeout& timeout_;
  __kernel_timespec spec_{};
};

class Reactor::FunctionMessage final : public Message {
 public:
  explicit FunctionMessage(std::function<void()> function) : function_(std::move(function)) {}
  void run() override {
    const std::unique_ptr<FunctionMessage> self(this);
    function_();
  }
  void drop() override { delete this; }

 private:
  std::function<void()> function_;
};

Reactor::Reactor(const RingOptions& options)
    : timeout_(std::make_unique<Timeout>()),
      timeout_update_(std::make_unique<TimeoutUpdate>(*timeout_)),
      wake_up_(std::make_unique<WakeUp>(*this)),
      ring_(options) {}

Reactor::~Reactor() {
  assert(!running_);
  while (messages_first_ != nullptr) {
    Message* message = messages_first_;
    messages_first_ = message->next_;
    message->drop();
  }
}

void Reactor::run() {
  thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  ring_.adopt();
  wake_up_->arm();
  running_ = true;
  now_ = Clock::now();
  while (running_) turn();
  thread_.store(std::thread::id{}, std::memory_order_relaxed);
}

void Reactor::stop() {
  running_ = false;
}

void Reactor::turn() {
  ++counters_.turns;
  const bool more = turn_end_ && turn_end_();
  arm_timeout();
  drain_backlog();
  if (!running_) return;
  const bool sleep = !more && backlog_first_ == nullptr && io_uring_cq_ready(ring_.get()) == 0;
  // With nothing to submit and nothing to wait for, only deferred completions need the kernel.
  if (sleep) {
    io_uring_submit_and_wait(ring_.get(), 1);
  } else if (ring_.deferred()) {
    io_uring_submit_and_get_events(ring_.get());
  } else {
    io_uring_submit(ring_.get());
  }
  // Errors of submission (EINTR, EAGAIN, EBUSY) leave the entries queued; the next turn tries
  // again.
  now_ = Clock::now();
  collect();
  if (!timers_.empty()) run_timers();
}

void Reactor::collect() {
  std::array<io_uring_cqe, completions_per_batch> batch;
  for (uint32_t handled = 0; handled < completions_per_turn_max;) {
    std::array<io_uring_cqe*, completions_per_batch> entries;
    const unsigned count =
        io_uring_peek_batch_cqe(ring_.get(), entries.data(), completions_per_batch);
    if (count == 0) return;
    // Copied out first: a handler that submits lets the kernel write new completions at once.
    for (unsigned i = 0; i < count; ++i) {
      batch[i].user_data = entries[i]->user_data;
      batch[i].res = entries[i]->res;
      batch[i].flags = entries[i]->flags;
    }
    io_uring_cq_advance(ring_.get(), count);
    for (unsigned i = 0; i < count; ++i) {
      reinterpret_cast<Operation*>(static_cast<uintptr_t>(batch[i].user_data))
          ->complete(batch[i].res, batch[i].flags);
    }
    counters_.operations += count;
    handled += count;
  }
}

bool Reactor::try_start(Operation& operation) {
  io_uring_sqe* entry = io_uring_get_sqe(ring_.get());
  if (entry == nullptr) {
    io_uring_submit(ring_.get());
    entry = io_uring_get_sqe(ring_.get());
    if (entry == nullptr) return false;
  }
  operation.prepare(*entry);
  entry->user_data = reinterpret_cast<uintptr_t>(&operation);
  return true;
}

void Reactor::start(Operation& operation) {
  assert(on_thread() || thread_.load() == std::thread::id{});
  // Submitting needs the thread that adopted the ring; before run() and behind others it has to
  // wait.
  if (backlog_first_ == nullptr && running_ && try_start(operation)) return;
  ++counters_.backlogged;
  operation.next_ = nullptr;
  (backlog_first_ == nullptr ? backlog_first_ : backlog_last_->next_) = &operation;
  backlog_last_ = &operation;
}

void Reactor::drain_backlog() {
  while (backlog_first_ != nullptr) {
    Operation* operation = backlog_first_;
    Operation* next =
        operation->next_;  // prepare() may not touch it, but complete() may reuse it later
    if (!try_start(*operation)) return;
    backlog_first_ = next;
  }
}

void Reactor::post(Message& message) {
  bool first = false;
  {
    const std::lock_guard lock(messages_mutex_);
    message.next_ = nullptr;
    first = messages_first_ == nullptr;
    (first ? messages_first_ : messages_last_->next_) = &message;
    messages_last_ = &message;
  }
  if (first) wake_up_->wake();  // whoever finds it empty wakes; the others ride along
}

void Reactor::post(std::function<void()> function) {
  post(*new FunctionMessage(std::move(function)));
}

void Reactor::run_messages() {
  Message* message = nullptr;
  {
    const std::lock_guard lock(messages_mutex_);
    message = std::exchange(messages_first_, nullptr);
    messages_last_ = nullptr;
  }
  while (message != nullptr) {
    Message* next = message->next_;  // run() may free or post the message again
    ++counters_.messages;
    message->run();
    message = next;
  }
}

void Reactor::arm(Timer& timer, TimePoint deadline) {
  disarm(timer);
  timer.position_ = timers_.emplace(deadline, &timer);
  timer.armed_ = true;
}

void Reactor::disarm(Timer& timer) {
  if (!timer.armed_) return;
  timers_.erase(timer.position_);
  timer.armed_ = false;
}

void Reactor::run_timers() {
  // Those that are armed again from inside on_timer wait for the next turn, even with a deadline in
  // the past.
  size_t due = 0;
  for (auto timer = timers_.begin(); timer != timers_.end() && timer->first <= now_; ++timer) ++due;
  while (due-- > 0 && !timers_.empty() && timers_.begin()->first <= now_) {
    Timer& timer = *timers_.begin()->second;
    disarm(timer);
    timer.on_timer(now_);
  }
}

void Reactor::arm_timeout() {
  if (timers_.empty()) return;
  const TimePoint earliest = timers_.begin()->first;
  if (!timeout_->in_flight) {
    timeout_->deadline = earliest;
    timeout_->in_flight = true;
    start(*timeout_);
  } else if (earliest < timeout_->deadline && !timeout_update_->in_flight) {
    timeout_->deadline = earliest;
    timeout_update_->in_flight = true;
    start(*timeout_update_);
  }
}

void Reactor::keep(std::unique_ptr<Lingering> object) {
  Lingering* key = object.get();
  lingering_.emplace(key, std::move(object));
}

void Reactor::release(Lingering* object) {
  lingering_.erase(object);
}

}  // namespace rtrsnbd::daemon
