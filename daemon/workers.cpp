// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/workers.h"

#include <pthread.h>

#include <system_error>

namespace rtrsnbd::daemon {

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wanted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool WorkerPool::submit(Job& job, Reactor& home) {
  const std::lock_guard lock(mutex_);
  if (queued_ + 1 > idle_ && threads_.size() < threads_max_) {
    try {
      threads_.emplace_back([this] { serve(); });
    } catch (const std::system_error&) {
      if (threads_.empty()) return false;  // otherwise those that are there will get to it
    }
  }
  job.home_ = &home;
  job.next_job_ = nullptr;
  (first_ == nullptr ? first_ : last_->next_job_) = &job;
  last_ = &job;
  ++queued_;
  wanted_.notify_one();
  return true;
}

void WorkerPool::serve() {
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
  std::unique_lock lock(mutex_);
  for (;;) {
    ++idle_;
    wanted_.wait(lock, [this] { return first_ != nullptr || stopping_; });
    --idle_;
    if (first_ == nullptr) return;
    Job& job = *first_;
    first_ = job.next_job_;
    --queued_;
    lock.unlock();
    job.work();
    job.home_->post(job);
    lock.lock();
  }
}

}  // namespace rtrsnbd::daemon
