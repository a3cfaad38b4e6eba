// SPDX-License-Identifier: BSD-3-Clause
// The system calls of the store that move or destroy data, behind one seam, so that tests can
// shorten a transfer or let one fail. The kernel is the only implementation in rtrsd.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstdint>

namespace rtrsnbd::daemon {

class SystemCalls {
 public:
  virtual ~SystemCalls() = default;
  // As the calls of these names: -1 and errno on failure.
  virtual ssize_t preadv2(int fd, const iovec& piece, uint64_t offset, int flags);
  virtual ssize_t pwritev2(int fd, const iovec& piece, uint64_t offset, int flags);
  virtual int fdatasync(int fd);
  virtual int fallocate(int fd, int mode, uint64_t offset, uint64_t length);
  virtual int ioctl_range(int fd, unsigned long request, std::array<uint64_t, 2> range);
  // Transfers through the ring: how many of `length` bytes to ask for, and what came of it.
  virtual uint32_t ring_length(uint32_t length) { return length; }
  virtual int ring_result(bool /*write*/, int result) { return result; }
};

SystemCalls& kernel();

}  // namespace rtrsnbd::daemon
