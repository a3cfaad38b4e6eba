// SPDX-License-Identifier: BSD-3-Clause
// A socket address, IPv4 or IPv6, as a value; and its text form.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <tl/expected.hpp>
#include <vector>

namespace rtrsnbd::fabric {

class Address {
 public:
  Address() = default;
  Address(const sockaddr* address, socklen_t length);

  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  [[nodiscard]] socklen_t length() const { return length_; }
  [[nodiscard]] int family() const { return length_ == 0 ? AF_UNSPEC : storage_.ss_family; }
  [[nodiscard]] uint16_t port() const;
  [[nodiscard]] bool is_loopback() const;
  [[nodiscard]] bool same_host(
      const Address& other) const;  // ports not compared; v4-mapped equals v4
  // "192.0.2.1:1234", "[2001:db8::1]:1234"; a v4-mapped IPv6 address prints as IPv4.
  [[nodiscard]] std::string text() const;
  [[nodiscard]] std::string host_text() const;  // without the port

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

// HOST, HOST:PORT, [V6], [V6]:PORT, V6 without a port, "*" or "" (any address; listening only).
struct HostPort {
  std::string host;
  uint16_t port = 0;
};
// The error is a sentence fragment for the user ("port 70000 is not between 1 and 65535").
tl::expected<HostPort, std::string> parse_host_port(std::string_view text, uint16_t default_port);

// Blocks in getaddrinfo. Never empty on success. passive: for listening, "" means any address.
tl::expected<std::vector<Address>, std::string> resolve(const HostPort& where, bool passive);

}  // namespace rtrsnbd::fabric
