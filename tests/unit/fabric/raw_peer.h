// SPDX-License-Identifier: BSD-3-Clause
// A peer that is only a TCP socket, to do what an endpoint never would.
#pragma once

#include <doctest/doctest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "protocol/fabric/soft/mpa.h"
#include "tests/unit/fabric/pair.h"

namespace rtrsnbd::fabric {

class RawPeer {
 public:
  explicit RawPeer(int fd) : fd_(fd) {}
  RawPeer(RawPeer&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  RawPeer& operator=(RawPeer&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~RawPeer() { close(); }

  static int connect(const Address& address) {
    const int fd = ::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(fd >= 0);
    REQUIRE(::connect(fd, address.get(), address.length()) == 0);
    return fd;
  }

  void send(const std::vector<std::byte>& bytes) {
    REQUIRE(::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
            static_cast<ssize_t>(bytes.size()));
  }
  // What is there, after waiting for it; empty at the end of the stream.
  std::vector<std::byte> receive() {
    std::vector<std::byte> bytes(65536);
    const ssize_t count = ::recv(fd_, bytes.data(), bytes.size(), 0);
    bytes.resize(count > 0 ? static_cast<size_t>(count) : 0);
    return bytes;
  }
  std::vector<std::byte> receive_exactly(size_t length) {
    std::vector<std::byte> bytes(length);
    REQUIRE(::recv(fd_, bytes.data(), length, MSG_WAITALL) == static_cast<ssize_t>(length));
    return bytes;
  }
  [[nodiscard]] bool readable() const {
    pollfd entry{fd_, POLLIN, 0};
    return ::poll(&entry, 1, 0) == 1;
  }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  void reset() {
    const linger now{1, 0};
    setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    close();
  }
  [[nodiscard]] int fd() const { return fd_; }

 private:
  int fd_;
};

class RawListener {
 public:
  RawListener() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const Address any = any_loopback_port();
    REQUIRE(::bind(fd_, any.get(), any.length()) == 0);
    REQUIRE(::listen(fd_, 16) == 0);
  }
  ~RawListener() { ::close(fd_); }
  RawListener(const RawListener&) = delete;
  RawListener& operator=(const RawListener&) = delete;

  [[nodiscard]] Address address() const {
    sockaddr_storage storage{};
    socklen_t length = sizeof storage;
    REQUIRE(getsockname(fd_, reinterpret_cast<sockaddr*>(&storage), &length) == 0);
    return {reinterpret_cast<sockaddr*>(&storage), length};
  }
  [[nodiscard]] RawPeer accept() const {
    return RawPeer(::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC));
  }

 private:
  int fd_;
};

inline std::vector<std::byte> raw_request(size_t private_data) {
  soft::MpaFrame frame;
  const std::vector<std::byte> data(private_data);
  const size_t length = soft::make_mpa_request(frame, false, data);
  return {frame.begin(), frame.begin() + static_cast<ptrdiff_t>(length)};
}

inline std::vector<std::byte> raw_reply(size_t private_data) {
  soft::MpaFrame frame;
  const std::vector<std::byte> data(private_data);
  const size_t length = soft::make_mpa_accept(frame, {}, false, data);
  return {frame.begin(), frame.begin() + static_cast<ptrdiff_t>(length)};
}

}  // namespace rtrsnbd::fabric
