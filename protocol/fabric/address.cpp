// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/address.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>

namespace rtrsnbd::fabric {

namespace {

// The 16 bytes of an address, IPv4 in its mapped form, so that both families compare.
std::array<uint8_t, 16> host_bytes(const Address& address) {
  std::array<uint8_t, 16> bytes{};
  if (address.family() == AF_INET6) {
    sockaddr_in6 v6;
    std::memcpy(&v6, address.get(), sizeof v6);
    std::memcpy(bytes.data(), &v6.sin6_addr, sizeof v6.sin6_addr);
  } else if (address.family() == AF_INET) {
    sockaddr_in v4;
    std::memcpy(&v4, address.get(), sizeof v4);
    bytes[10] = bytes[11] = 0xff;
    std::memcpy(bytes.data() + 12, &v4.sin_addr, sizeof v4.sin_addr);
  }
  return bytes;
}

bool is_mapped(const std::array<uint8_t, 16>& bytes) {
  static constexpr std::array<uint8_t, 12> prefix{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::equal(prefix.begin(), prefix.end(), bytes.begin());
}

uint32_t scope_of(const Address& address) {
  if (address.family() != AF_INET6) return 0;
  sockaddr_in6 v6;
  std::memcpy(&v6, address.get(), sizeof v6);
  return v6.sin6_scope_id;
}

bool is_internet(const Address& address) {
  return address.family() == AF_INET || address.family() == AF_INET6;
}

}  // namespace

Address::Address(const sockaddr* address, socklen_t length) {
  if (length > sizeof storage_) return;
  std::memcpy(&storage_, address, length);
  const bool whole = (storage_.ss_family == AF_INET && length >= sizeof(sockaddr_in)) ||
                     (storage_.ss_family == AF_INET6 && length >= sizeof(sockaddr_in6));
  if (whole)
    length_ = length;
  else
    storage_ = {};
}

uint16_t Address::port() const {
  if (family() == AF_INET) {
    sockaddr_in v4;
    std::memcpy(&v4, &storage_, sizeof v4);
    return ntohs(v4.sin_port);
  }
  if (family() == AF_INET6) {
    sockaddr_in6 v6;
    std::memcpy(&v6, &storage_, sizeof v6);
    return ntohs(v6.sin6_port);
  }
  return 0;
}

bool Address::is_loopback() const {
  if (!is_internet(*this)) return false;
  const auto bytes = host_bytes(*this);
  if (is_mapped(bytes)) return bytes[12] == 127;
  static constexpr std::array<uint8_t, 16> one{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  return bytes == one;
}

bool Address::same_host(const Address& other) const {
  return is_internet(*this) && is_internet(other) && host_bytes(*this) == host_bytes(other) &&
         scope_of(*this) == scope_of(other);
}

std::string Address::host_text() const {
  if (!is_internet(*this)) return "?";
  const auto bytes = host_bytes(*this);
  char text[INET6_ADDRSTRLEN] = {};
  if (is_mapped(bytes)) {
    inet_ntop(AF_INET, bytes.data() + 12, text, sizeof text);
    return text;
  }
  inet_ntop(AF_INET6, bytes.data(), text, sizeof text);
  std::string result = text;
  if (const uint32_t scope = scope_of(*this)) {
    char name[IF_NAMESIZE] = {};
    result += '%';
    result += if_indextoname(scope, name) != nullptr ? std::string(name) : std::to_string(scope);
  }
  return result;
}

std::string Address::text() const {
  if (!is_internet(*this)) return "?";
  const std::string host = host_text();
  const bool colons = host.find(':') != std::string::npos;
  return (colons ? "[" + host + "]" : host) + ":" + std::to_string(port());
}

namespace {

constexpr size_t host_length_max = 255;

tl::expected<uint16_t, std::string> parse_port(std::string_view text) {
  unsigned value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool number =
      !text.empty() && error != std::errc::invalid_argument && end == text.data() + text.size();
  if (!number) return tl::unexpected("port '" + std::string(text) + "' is not a number");
  if (error != std::errc() || value < 1 || value > 65535)
    return tl::unexpected("port " + std::string(text) + " is not between 1 and 65535");
  return static_cast<uint16_t>(value);
}

bool is_v6_literal(const std::string& text) {
  const std::string address = text.substr(0, text.find('%'));  // a zone is for getaddrinfo to judge
  in6_addr unused;
  return inet_pton(AF_INET6, address.c_str(), &unused) == 1;
}

}  // namespace

tl::expected<HostPort, std::string> parse_host_port(std::string_view text, uint16_t default_port) {
  HostPort result;
  result.port = default_port;
  std::string_view port;
  bool has_port = false;

  if (text.starts_with('[')) {
    const size_t close = text.find(']');
    if (close == std::string_view::npos) return tl::unexpected(std::string("']' is missing"));
    result.host = text.substr(1, close - 1);
    if (!is_v6_literal(result.host))
      return tl::unexpected("'" + result.host + "' in brackets is not an IPv6 address");
    const std::string_view rest = text.substr(close + 1);
    if (!rest.empty() && rest.front() != ':')
      return tl::unexpected("'" + std::string(rest) + "' after ']' is not a port");
    has_port = !rest.empty();
    if (has_port) port = rest.substr(1);
  } else {
    const size_t colon = text.find(':');
    if (colon != std::string_view::npos && text.find(':', colon + 1) != std::string_view::npos) {
      result.host = text;
      if (!is_v6_literal(result.host))
        return tl::unexpected("'" + result.host + "' is neither HOST:PORT nor an IPv6 address");
    } else {
      result.host = text.substr(0, colon);
      has_port = colon != std::string_view::npos;
      if (has_port) port = text.substr(colon + 1);
    }
  }
  if (has_port) {
    const auto number = parse_port(port);
    if (!number) return tl::unexpected(number.error());
    result.port = *number;
  }
  if (result.host == "*") result.host.clear();
  if (result.host.size() > host_length_max)
    return tl::unexpected("the host name is longer than " + std::to_string(host_length_max) +
                          " bytes");
  const auto bad = std::find_if(result.host.begin(), result.host.end(), [](char c) {
    return static_cast<unsigned char>(c) <= ' ' || c == '\x7f' || c == '/' || c == '[' || c == ']';
  });
  if (bad != result.host.end())
    return tl::unexpected(std::string("the host name has an invalid character"));
  return result;
}

tl::expected<std::vector<Address>, std::string> resolve(const HostPort& where, bool passive) {
  if (where.host.empty()) {
    if (!passive) return tl::unexpected(std::string("the host name is empty"));
    // One socket for both families where there is IPv6.
    const int probe = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (probe >= 0) {
      sockaddr_in6 any{};
      any.sin6_family = AF_INET6;
      const bool usable = ::bind(probe, reinterpret_cast<const sockaddr*>(&any), sizeof any) == 0;
      ::close(probe);
      if (usable) {
        any.sin6_port = htons(where.port);
        return std::vector<Address>{Address(reinterpret_cast<const sockaddr*>(&any), sizeof any)};
      }
    }
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_port = htons(where.port);
    return std::vector<Address>{Address(reinterpret_cast<const sockaddr*>(&any), sizeof any)};
  }

  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(where.host.c_str(), std::to_string(where.port).c_str(), &hints, &found);
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  if (error != 0) {
    const char* why = error == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(error);
    return tl::unexpected("host '" + where.host + "': " + why);
  }
  std::vector<Address> result;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    const Address address(entry->ai_addr, entry->ai_addrlen);
    if (is_internet(address)) result.push_back(address);
  }
  if (result.empty())
    return tl::unexpected("host '" + where.host + "' has no IPv4 or IPv6 address");
  return result;
}

}  // namespace rtrsnbd::fabric
