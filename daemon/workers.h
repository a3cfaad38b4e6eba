// SPDX-License-Identifier: BSD-3-Clause
// Threads for system calls that sleep. Each volume has its own few, made when first needed, so that
// a device that hangs holds up nobody else.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "daemon/reactor.h"

namespace rtrsnbd::daemon {

// Work for a worker that comes back, as a Message, to the reactor that sent it.
class Job : public Message {
 public:
  virtual void work() = 0;  // on a worker thread
                            // Message::run() follows on the reactor's thread.

 private:
  friend class WorkerPool;
  Reactor* home_ = nullptr;
  Job* next_job_ = nullptr;
};

class WorkerPool {
 public:
  // name: of the threads, as ps shows them; cut to 15 bytes.
  WorkerPool(std::string name, uint32_t threads_max)
      : name_(std::move(name)), threads_max_(threads_max) {}
  ~WorkerPool();  // waits for the jobs; no reactor may be running any more
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // False if not a single thread can be made; the job is then not taken.
  bool submit(Job& job, Reactor& home);

 private:
  void serve();

  const std::string name_;
  const uint32_t threads_max_;
  std::mutex mutex_;
  std::condition_variable wanted_;
  Job* first_ = nullptr;
  Job* last_ = nullptr;
  uint32_t queued_ = 0;
  uint32_t idle_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace rtrsnbd::daemon
