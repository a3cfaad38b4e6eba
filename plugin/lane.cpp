// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/lane.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>

namespace rtrsnbd::plugin {

namespace {

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, const timespec* limit) {
  static_assert(sizeof(word) == sizeof(uint32_t));
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, limit, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

}  // namespace

void Operation::on_done(int error) {
  lane_->completed(*this, error);
}

void Lane::link(Operation& operation) {
  operation.linked_ = true;
  operation.previous_ = last_;
  operation.next_ = nullptr;
  (last_ != nullptr ? last_->next_ : first_) = &operation;
  last_ = &operation;
}

void Lane::unlink(Operation& operation) {
  operation.linked_ = false;
  (operation.previous_ != nullptr ? operation.previous_->next_ : first_) = operation.next_;
  (operation.next_ != nullptr ? operation.next_->previous_ : last_) = operation.previous_;
  if (gatherer_ == &operation) {
    gatherer_ = nullptr;
    gathered_ = 0;
  }
}

// Called by whoever has the lead of this connection, or ends the path.
void Lane::completed(Operation& operation, int error) {
  operation.error_ = error;
  auto& word = operation.state_;
  uint32_t before;
  {
    const Lock lock(mutex_);
    leader_receives_ =
        housekeeper_leads_;  // a request thread is awake now, and sends before it sleeps again
    if (operation.linked_) {
      unlink(operation);
      ++expected_;
    }
    before = word.exchange(Operation::done, std::memory_order_acq_rel);
  }
  // The thread may return, and the operation be gone, as soon as it reads `done`; a wake-up that
  // then hits the stale address is harmless, every sleeper looks at its word again.
  if (before == Operation::asleep) futex_wake(word);
}

void Lane::wait(Operation& operation) {
  Lock lock(mutex_);
  if (operation.state_.load(std::memory_order_acquire) == Operation::done) return;
  if (expected_ != 0) --expected_;
  if (path_.connection_closed(cid_)) {
    link(operation);  // until the last connection of the path is closed
    lock.unlock();
    return sleep(operation);
  }
  if (led_ && !leader_receives_) {
    link(operation);  // the leader is awake and sends it
    lock.unlock();
    return sleep(operation);
  }
  if (expected_ != 0 && gathered_ < gather_max && may_gather()) {
    link(operation);
    const bool first = gatherer_ == nullptr;
    if (first) gatherer_ = &operation;
    ++gathered_;
    lock.unlock();
    return first ? gather(operation) : sleep(operation);
  }
  if (gatherer_ != nullptr) {  // we are the last of them
    gatherer_ = nullptr;
    gathered_ = 0;
    penalty_ /= 2;
  }
  if (!led_) {
    led_ = true;
    return lead(lock, operation);
  }
  link(operation);
  lock.unlock();
  send();
  sleep(operation);
}

bool Lane::may_gather() {
  if (housekeeper_leads_) return false;
  if (gatherer_ != nullptr || skip_ == 0) return true;
  --skip_;
  return false;
}

void Lane::sleep(Operation& operation) {
  for (;;) {
    uint32_t state = Operation::waiting;
    operation.state_.compare_exchange_strong(state, Operation::asleep, std::memory_order_acq_rel);
    state = operation.state_.load(std::memory_order_acquire);
    if (state == Operation::asleep) futex_wait(operation.state_, Operation::asleep, nullptr);
    state = operation.state_.load(std::memory_order_acquire);
    if (state == Operation::done) return;
    if (state == Operation::told_to_lead) {
      Lock lock(mutex_);
      return lead(lock, operation);
    }
  }
}

// Sleeps like the others, but only as long as more of them come: what they have queued is not sent
// yet.
void Lane::gather(Operation& operation) {
  const timespec limit{0, std::chrono::nanoseconds(gather_limit).count()};
  uint32_t state = Operation::waiting;
  operation.state_.compare_exchange_strong(state, Operation::asleep, std::memory_order_acq_rel);
  state = operation.state_.load(std::memory_order_acquire);
  uint32_t before = 1;
  Lock lock(mutex_, std::defer_lock);
  for (;;) {
    if (state == Operation::asleep) futex_wait(operation.state_, Operation::asleep, &limit);
    lock.lock();
    if (gatherer_ != &operation) {  // somebody has sent it
      lock.unlock();
      return sleep(operation);
    }
    if (gathered_ == before) break;
    before = gathered_;
    lock.unlock();
  }
  gatherer_ = nullptr;
  gathered_ = 0;
  expected_ = 0;
  penalty_ = std::min(penalty_ * 2 + 1, gather_penalty_max);
  skip_ = penalty_;
  if (!led_ && !path_.connection_closed(cid_)) {
    unlink(operation);
    led_ = true;
    return lead(lock, operation);
  }
  lock.unlock();
  send();
  sleep(operation);
}

// The caller has the lead. Returns without it, and without the lock, when the operation is done.
void Lane::lead(Lock& lock, Operation& operation) {
  auto& endpoint = path_.endpoint(cid_);
  while (operation.state_.load(std::memory_order_acquire) != Operation::done) {
    if (path_.connection_closed(cid_)) {
      // Nothing comes here any more; the operation is done when the last connection of the path is
      // closed.
      led_ = false;
      operation.state_.store(Operation::waiting, std::memory_order_release);
      link(operation);
      lock.unlock();
      return sleep(operation);
    }
    gatherer_ = nullptr;  // whatever is queued goes out now
    gathered_ = 0;
    leader_receives_ = true;
    lock.unlock();
    endpoint.flush(fabric::Wait::yes);
    endpoint.progress(fabric::Wait::yes, Clock::now());
    lock.lock();
    leader_receives_ = false;
  }
  if (expected_ != 0) ++expected_;  // one of a batch; we, too, may come back at once
  // The longest waiting follower leads next, if there is still something to receive.
  if (first_ == nullptr || path_.connection_closed(cid_)) {
    led_ = false;
    return;
  }
  Operation& next = *first_;
  unlink(next);
  auto& word = next.state_;
  const uint32_t before = word.exchange(Operation::told_to_lead, std::memory_order_acq_rel);
  lock.unlock();
  if (before == Operation::asleep) futex_wake(word);
}

bool Lane::take_lead() {
  const Lock lock(mutex_);
  if (led_) return false;
  led_ = true;
  housekeeper_leads_ = true;
  leader_receives_ = true;  // the housekeeper does not send for others
  return true;
}

}  // namespace rtrsnbd::plugin
