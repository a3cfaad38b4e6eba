// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/soft/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>

namespace rtrsnbd::fabric::soft {

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void Socket::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void prepare_connection(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  const auto silence = static_cast<unsigned>(
      std::chrono::duration_cast<std::chrono::milliseconds>(silence_max).count());
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &silence, sizeof silence);
  timeval sleep{};
  sleep.tv_usec = static_cast<suseconds_t>(std::chrono::microseconds(sleep_max).count());
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &sleep, sizeof sleep);
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &send_buffer_bytes, sizeof send_buffer_bytes);
}

namespace {

template <typename Call>
Address address_by(Call call, int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (call(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0) return {};
  return {reinterpret_cast<sockaddr*>(&storage), length};
}

}  // namespace

Address local_address_of(int fd) {
  return address_by(getsockname, fd);
}
Address peer_address_of(int fd) {
  return address_by(getpeername, fd);
}

bool is_same_host(const Address& local, const Address& peer) {
  return peer.is_loopback() || local.same_host(peer);
}

ssize_t receive(int fd, std::span<const iovec> vectors, int flags) {
  ssize_t count = 0;
  do {
    if (vectors.size() == 1) {
      count = ::recv(fd, vectors[0].iov_base, vectors[0].iov_len, flags);
    } else {
      msghdr message{};
      message.msg_iov = const_cast<iovec*>(vectors.data());
      message.msg_iovlen = vectors.size();
      count = ::recvmsg(fd, &message, flags);
    }
  } while (count < 0 && errno == EINTR);
  return count;
}

ssize_t send(int fd, std::span<iovec> vectors, int flags) {
  ssize_t count = 0;
  do {
    if (vectors.size() == 1) {
      count = ::send(fd, vectors[0].iov_base, vectors[0].iov_len, flags | MSG_NOSIGNAL);
    } else {
      msghdr message{};
      message.msg_iov = vectors.data();
      message.msg_iovlen = vectors.size();
      count = ::sendmsg(fd, &message, flags | MSG_NOSIGNAL);
    }
  } while (count < 0 && errno == EINTR);
  return count;
}

int wait_for(int fd, int events, std::chrono::milliseconds limit) {
  pollfd entry{fd, static_cast<short>(events), 0};
  const int count = ::poll(&entry, 1, static_cast<int>(limit.count()));
  return count > 0 ? entry.revents : 0;
}

}  // namespace rtrsnbd::fabric::soft
