// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/ring.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

namespace rtrsnbd::daemon {

namespace {

// linux/io_uring.h of the oldest build machine may lack names the running kernel knows.
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

// What fits into 64 KiB of locked memory, once the usual limit.
constexpr uint32_t small_entries = 64;
constexpr uint32_t small_completion_entries = 256;

// Threads the kernel may make for transfers that sleep. Its default, four per CPU, are soon all
// taken by the requests of one filesystem that hangs, and then nobody else's transfers get one.
constexpr unsigned kernel_workers_max = 1024;

constexpr uint32_t flags_always =
    IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP | IORING_SETUP_R_DISABLED;

struct Attempt {
  KernelLevel level;
  uint32_t flags;
  const char* missing;
};
constexpr Attempt attempts[] = {
    {KernelLevel::newest,
     IORING_SETUP_SUBMIT_ALL | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, ""},
    {KernelLevel::v6_0,
     IORING_SETUP_SUBMIT_ALL | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN,
     "without DEFER_TASKRUN (Linux 6.1)"},
    {KernelLevel::v5_19, IORING_SETUP_SUBMIT_ALL | IORING_SETUP_COOP_TASKRUN,
     "without DEFER_TASKRUN (Linux 6.1), without SINGLE_ISSUER (6.0)"},
    {KernelLevel::v5_15, 0,
     "without DEFER_TASKRUN (Linux 6.1), without SINGLE_ISSUER (6.0), without COOP_TASKRUN (5.19)"},
};

std::string memlock_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return "nothing less than all of it";
  return std::to_string(limit.rlim_cur / 1024) + " KiB";
}

std::string refusal(int error) {
  std::string text = std::string("cannot set up io_uring: ") + std::strerror(error);
  switch (error) {
    case EPERM: {
      int disabled = 0;
      std::ifstream("/proc/sys/kernel/io_uring_disabled") >> disabled;
      if (disabled == 2) {
        return text + "; sysctl kernel.io_uring_disabled is 2: set it to 0";
      }
      if (disabled == 1) {
        return text +
               "; sysctl kernel.io_uring_disabled is 1: set it to 0, or put the group of rtrsd "
               "into "
               "kernel.io_uring_group";
      }
      return text +
             "; a seccomp filter forbids it: allow io_uring_setup, io_uring_enter and "
             "io_uring_register (container profile, or SystemCallFilter= of the unit)";
    }
    case ENOSYS:
      return text +
             "; the kernel is too old or built without CONFIG_IO_URING (5.15 or later is needed), "
             "or "
             "a seccomp filter hides it";
    case ENOMEM:
      return text + "; locked memory is limited to " + memlock_limit() +
             ": raise that (LimitMEMLOCK= of the unit, ulimit -l), or free memory";
    case EMFILE:
    case ENFILE:
      return text + "; raise the limit of open files (LimitNOFILE= of the unit)";
    default:
      return text;
  }
}

}  // namespace

Ring::Ring(const RingOptions& options) {
  int error = create(options, options.entries, options.completion_entries);
  if (error == ENOMEM && options.entries > small_entries) {
    error = create(options, small_entries, small_completion_entries);
    if (error == 0) {
      missing_ += std::string(missing_.empty() ? "" : ", ") +
                  "small queues, as locked memory is limited to " + memlock_limit();
    }
  }
  if (error != 0) throw SetUpError(refusal(error));
  make_tables(options);
}

// Returns 0 or an errno.
int Ring::create(const RingOptions& options, uint32_t entries, uint32_t completion_entries) {
  for (const Attempt& attempt : attempts) {
    if (attempt.level > options.level) continue;
    io_uring_params parameters{};
    parameters.flags = flags_always | attempt.flags;
    parameters.cq_entries = completion_entries;
    const int result = io_uring_queue_init_params(entries, &ring_, &parameters);
    if (result == -EINVAL) continue;  // a flag this kernel does not know
    if (result < 0) return -result;
    missing_ = attempt.missing;
    deferred_ = (attempt.flags & IORING_SETUP_DEFER_TASKRUN) != 0;
    // Completions that do not fit are kept by the kernel, sockets are waited for without a thread.
    constexpr uint32_t needed = IORING_FEAT_NODROP | IORING_FEAT_FAST_POLL;
    if ((parameters.features & needed) == needed) return 0;
    io_uring_queue_exit(&ring_);
    return ENOSYS;
  }
  return EINVAL;
}

void Ring::make_tables(const RingOptions& options) {
  // A table of empty slots. Registering -1 works since 5.5, register_files_sparse only since 5.19.
  const std::vector<int> no_files(options.file_slots, -1);
  if (io_uring_register_files(&ring_, no_files.data(), options.file_slots) == 0) {
    for (uint32_t slot = options.file_slots; slot > 0; --slot)
      free_files_.push_back(static_cast<int>(slot - 1));
  }
  int buffers = -EINVAL;
  if (options.level >= KernelLevel::v5_19)
    buffers = io_uring_register_buffers_sparse(&ring_, options.buffer_slots);
  if (buffers == 0) {
    for (uint32_t slot = options.buffer_slots; slot > 0; --slot) {
      free_buffers_.push_back(static_cast<int>(slot - 1));
    }
  } else {
    buffers_error_ = -buffers;
    if (buffers == -EINVAL)
      missing_ += std::string(missing_.empty() ? "" : ", ") + "without sparse buffer tables (5.19)";
  }
}

Ring::~Ring() {
  io_uring_queue_exit(&ring_);
}

void Ring::adopt() {
  if (!disabled_) return;
  // liburing 2.3 declares io_uring_enable_rings() but does not export it.
  if (syscall(__NR_io_uring_register, ring_.ring_fd, IORING_REGISTER_ENABLE_RINGS, nullptr, 0) <
      0) {
    throw SetUpError(refusal(errno));
  }
  unsigned workers[2] = {kernel_workers_max, 0};  // bounded work; 0: leave the other kind alone
  io_uring_register_iowq_max_workers(&ring_, workers);
  disabled_ = false;
}

int Ring::add_file(int fd) {
  if (free_files_.empty()) return -1;
  const int slot = free_files_.back();
  if (io_uring_register_files_update(&ring_, static_cast<unsigned>(slot), &fd, 1) != 1) return -1;
  free_files_.pop_back();
  return slot;
}

void Ring::remove_file(int slot) {
  const int none = -1;
  if (io_uring_register_files_update(&ring_, static_cast<unsigned>(slot), &none, 1) == 1)
    free_files_.push_back(slot);
}

int Ring::add_buffer(std::byte* memory, size_t length, int& error) {
  if (free_buffers_.empty()) {
    error = buffers_error_ != 0 ? buffers_error_ : ENOSPC;
    return -1;
  }
  const int index = free_buffers_.back();
  const iovec piece{memory, length};
  const __u64 tag = 0;
  const int result =
      io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(index), &piece, &tag, 1);
  if (result != 1) {
    error = result < 0 ? -result : EINVAL;
    return -1;
  }
  free_buffers_.pop_back();
  return index;
}

void Ring::remove_buffer(int index) {
  const iovec none{nullptr, 0};
  const __u64 tag = 0;
  if (io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(index), &none, &tag, 1) ==
      1) {
    free_buffers_.push_back(index);
  }
}

}  // namespace rtrsnbd::daemon
