// SPDX-License-Identifier: BSD-3-Clause
// The request threads that wait on one connection, and how they share it.
//
// A thread that waits for its answer either leads (it receives for everybody who waits on the
// connection) or follows (it sleeps until its request is done or it is told to lead). With one
// request in flight the thread that sent it also receives the answer, and no other thread of the
// process wakes up.
//
// Sending. A system call that sends one message costs as much as one that sends sixteen. So a
// request that finds the leader awake is left for the leader, who sends before he sleeps. And when
// a batch of answers has just woken several threads, the first of them to come back with another
// request waits a moment for the rest: the last one sends for all, or the gather_max-th. If nobody
// comes for gather_limit the first one sends; each such miss makes the lane wait less often, so a
// client whose requests do not come in batches pays nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

#include "protocol/rtrs/client.h"

namespace rtrsnbd::plugin {

class Lane;

inline constexpr std::chrono::microseconds gather_limit{50};
inline constexpr uint32_t gather_max = 16;  // requests; more do not make a send call cheaper
inline constexpr uint32_t gather_penalty_max = 255;  // chances left out after a row of misses

// One RTRS request and the thread that waits for it. Lives on that thread's stack.
class Operation final : public rtrs::ClientRequest {
 public:
  void on_done(int error) override;

 private:
  friend class Lane;
  friend class Session;
  enum State : uint32_t { waiting, asleep, told_to_lead, done };

  Lane* lane_ = nullptr;
  uint32_t permit_ = 0;
  int error_ = 0;
  std::atomic<uint32_t> state_{waiting};
  bool linked_ = false;  // in the lane's list of followers; under the lane's mutex
  Operation* previous_ = nullptr;
  Operation* next_ = nullptr;
};

class Lane {
 public:
  Lane(rtrs::ClientPath& path, uint32_t cid) : path_(path), cid_(cid) {}

  // The operation was submitted on this lane's connection. Sees to it that it is sent, and returns
  // when it is done.
  void wait(Operation& operation);
  void completed(Operation& operation, int error);

  // For the housekeeper: takes the lead for good if it is free. False: a request thread has it.
  bool take_lead();

  [[nodiscard]] uint32_t cid() const { return cid_; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  void lead(Lock& lock, Operation& operation);
  void sleep(Operation& operation);
  void gather(Operation& operation);
  bool may_gather();
  void link(Operation& operation);
  void unlink(Operation& operation);
  void send() { path_.endpoint(cid_).flush(fabric::Wait::yes); }

  rtrs::ClientPath& path_;
  const uint32_t cid_;

  std::mutex mutex_;  // guards all below
  bool led_ = false;
  bool housekeeper_leads_ = false;
  bool leader_receives_ = false;  // the leader may be asleep: whoever queues must send for himself
  Operation* first_ = nullptr;    // followers, oldest first
  Operation* last_ = nullptr;
  uint32_t expected_ = 0;  // threads that got answers and may come back at once
  Operation* gatherer_ =
      nullptr;             // the follower who waits for them, and for whom some others sleep
  uint32_t gathered_ = 0;  // he and those who sleep for him
  uint32_t penalty_ = 0;
  uint32_t skip_ = 0;
};

}  // namespace rtrsnbd::plugin
