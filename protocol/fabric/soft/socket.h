// SPDX-License-Identifier: BSD-3-Clause
// TCP sockets as the soft fabric wants them.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <span>
#include <utility>

#include "protocol/fabric/address.h"

namespace rtrsnbd::fabric::soft {

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept;
  void close();
  [[nodiscard]] int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// How long a receive in blocking mode sleeps at most, so that its thread sees to its timers.
inline constexpr std::chrono::milliseconds sleep_max{500};
// A peer that acknowledges nothing for so long is gone. As long as RTRS's default heartbeat limit.
inline constexpr std::chrono::seconds silence_max{25};

// What a connection may have in the kernel's send queue (which doubles the number for its
// bookkeeping). The kernel would let it grow to megabytes; data that waits there has left the
// processor's cache when it is copied out at last. Covers what a local network has under way: 1 MiB
// is 100 Gbit/s over 80 us.
inline constexpr int send_buffer_bytes = 512 * 1024;

// No delay, the limits above. Errors do not matter: the connection then works less well.
void prepare_connection(int fd);

Address local_address_of(int fd);
Address peer_address_of(int fd);
// Both ends on this machine: what is sent never leaves its memory.
bool is_same_host(const Address& local, const Address& peer);

// These return bytes, or -1 with errno; never EINTR.
ssize_t receive(int fd, std::span<const iovec> vectors, int flags);
ssize_t send(int fd, std::span<iovec> vectors, int flags);
// Waits for events, at most `limit`; returns revents, 0 on timeout.
int wait_for(int fd, int events, std::chrono::milliseconds limit);

}  // namespace rtrsnbd::fabric::soft
