// SPDX-License-Identifier: BSD-3-Clause
// One thread and one io_uring. Everything a reactor does happens in run(): collect what completed,
// call the handlers, let the owner finish the turn (flush what was posted), submit and sleep with
// one system call. Nothing on this thread may block; slow work goes to a WorkerPool and comes back
// as a Message.
//
// Threads: post() may be called from anywhere; everything else belongs to the thread inside run(),
// or, as long as nobody is inside, to the owner.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "daemon/ring.h"
#include "protocol/base/time.h"

namespace rtrsnbd::daemon {

// One submission and the handler of what comes of it; its address is the user_data. The owner keeps
// it until the last complete() (the one without IORING_CQE_F_MORE in flags).
class Operation {
 public:
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  // Fills the entry; user_data is set by the reactor. May come later than start().
  virtual void prepare(io_uring_sqe& entry) = 0;
  virtual void complete(int result, uint32_t flags) = 0;

 protected:
  Operation() = default;

 private:
  friend class Reactor;
  Operation* next_ = nullptr;  // in the backlog
};

// Something to run on a reactor's thread. The sender keeps it until run() or drop().
class Message {
 public:
  virtual ~Message() = default;
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;
  virtual void run() = 0;
  virtual void drop() {}  // the reactor is gone; run() will not come

 protected:
  Message() = default;

 private:
  friend class Reactor;
  Message* next_ = nullptr;
};

class Timer {
 public:
  virtual ~Timer() = default;
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  virtual void on_timer(TimePoint now) = 0;

 protected:
  Timer() = default;

 private:
  friend class Reactor;
  bool armed_ = false;
  std::multimap<TimePoint, Timer*>::iterator position_{};
};

// Something the kernel may still refer to after its owner has let go of it.
class Lingering {
 public:
  virtual ~Lingering() = default;
};

class Reactor {
 public:
  explicit Reactor(const RingOptions& options = {});  // throws SetUpError
  ~Reactor();
  Reactor(const Reactor&) = delete;
  Reactor& operator=(const Reactor&) = delete;

  // Called at the end of every turn, before sleeping. True: there is more to do, do not sleep.
  void set_turn_end(std::function<bool()> turn_end) { turn_end_ = std::move(turn_end); }

  void run();   // until stop(); may be called again
  void stop();  // on the reactor's thread; from elsewhere by a message

  // A full submission queue is no error: the operation then waits in the backlog for the next turn.
  void start(Operation& operation);

  void post(Message& message);
  void post(std::function<void()> function);  // allocates; not for the path of an IO

  // Replaces an earlier deadline.
  void arm(Timer& timer, TimePoint deadline);
  void disarm(Timer& timer);

  // The time at which this turn began; one clock reading serves all requests of a turn.
  [[nodiscard]] TimePoint now() const { return now_; }
  [[nodiscard]] bool on_thread() const {
    return thread_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
  [[nodiscard]] Ring& ring() { return ring_; }

  // Keeps an object until release(), at most until the ring is gone.
  void keep(std::unique_ptr<Lingering> object);
  void release(Lingering* object);

  struct Counters {
    uint64_t turns = 0, operations = 0, backlogged = 0, messages = 0;
  };
  [[nodiscard]] const Counters& counters() const { return counters_; }

 private:
  class WakeUp;
  class Timeout;
  class TimeoutUpdate;
  class FunctionMessage;

  void turn();
  bool try_start(Operation& operation);
  void drain_backlog();
  void collect();
  void run_messages();
  void run_timers();
  void arm_timeout();

  std::function<bool()> turn_end_;
  TimePoint now_ = Clock::now();
  std::atomic<std::thread::id> thread_{};
  bool running_ = false;
  Counters counters_;

  // Operations that found the submission queue full, oldest first.
  Operation* backlog_first_ = nullptr;
  Operation* backlog_last_ = nullptr;

  std::multimap<TimePoint, Timer*> timers_;
  std::unique_ptr<Timeout> timeout_;
  std::unique_ptr<TimeoutUpdate> timeout_update_;

  std::unordered_map<Lingering*, std::unique_ptr<Lingering>> lingering_;

  std::unique_ptr<WakeUp> wake_up_;
  std::mutex messages_mutex_;
  Message* messages_first_ = nullptr;  // under messages_mutex_
  Message* messages_last_ = nullptr;   // under messages_mutex_

  Ring ring_;  // last, so that it goes first: until then the kernel refers to the operations above
};

}  // namespace rtrsnbd::daemon
