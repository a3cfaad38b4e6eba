// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/system_calls.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

namespace rtrsnbd::daemon {

ssize_t SystemCalls::preadv2(int fd, const iovec& piece, uint64_t offset, int flags) {
  if (flags == 0) return ::pread(fd, piece.iov_base, piece.iov_len, static_cast<off_t>(offset));
  return ::preadv2(fd, &piece, 1, static_cast<off_t>(offset), flags);
}

ssize_t SystemCalls::pwritev2(int fd, const iovec& piece, uint64_t offset, int flags) {
  if (flags == 0) return ::pwrite(fd, piece.iov_base, piece.iov_len, static_cast<off_t>(offset));
  return ::pwritev2(fd, &piece, 1, static_cast<off_t>(offset), flags);
}

int SystemCalls::fdatasync(int fd) {
  return ::fdatasync(fd);
}

int SystemCalls::fallocate(int fd, int mode, uint64_t offset, uint64_t length) {
  return ::fallocate(fd, mode, static_cast<off_t>(offset), static_cast<off_t>(length));
}

int SystemCalls::ioctl_range(int fd, unsigned long request, std::array<uint64_t, 2> range) {
  return ::ioctl(fd, request, range.data());
}

SystemCalls& kernel() {
  static SystemCalls calls;
  return calls;
}

}  // namespace rtrsnbd::daemon
