// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/access_rules.h"

#include <arpa/inet.h>
#include <fnmatch.h>
#include <netinet/in.h>

#include <charconv>
#include <cstring>

namespace rtrsnbd::daemon {

namespace {

constexpr uint32_t v4_prefix_bits = 96;  // ::ffff:0:0/96

std::array<std::byte, 16> mapped(const in_addr& address) {
  std::array<std::byte, 16> bytes{};
  bytes[10] = bytes[11] = std::byte{0xff};
  std::memcpy(bytes.data() + 12, &address, 4);
  return bytes;
}

}  // namespace

tl::expected<Network, std::string> Network::parse(std::string_view text) {
  const auto wrong = [&] {
    return tl::unexpected("'" + std::string(text) +
                          "' is not an address or a network like 192.0.2.0/24");
  };
  const size_t slash = text.find('/');
  const std::string host(text.substr(0, slash));
  Network network;
  uint32_t width = 0;
  in_addr v4{};
  in6_addr v6{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) {
    network.prefix_ = mapped(v4);
    width = 32;
  } else if (inet_pton(AF_INET6, host.c_str(), &v6) == 1) {
    std::memcpy(network.prefix_.data(), &v6, 16);
    width = 128;
  } else {
    return wrong();
  }
  uint32_t bits = width;
  if (slash != std::string_view::npos) {
    const std::string_view length = text.substr(slash + 1);
    const auto [end, error] = std::from_chars(length.data(), length.data() + length.size(), bits);
    if (error != std::errc() || end != length.data() + length.size() || bits > width)
      return wrong();
  }
  network.bits_ = width == 32 ? v4_prefix_bits + bits : bits;
  return network;
}

bool Network::contains(const fabric::Address& address) const {
  std::array<std::byte, 16> bytes{};
  if (address.family() == AF_INET) {
    bytes = mapped(reinterpret_cast<const sockaddr_in*>(address.get())->sin_addr);
  } else if (address.family() == AF_INET6) {
    std::memcpy(bytes.data(), &reinterpret_cast<const sockaddr_in6*>(address.get())->sin6_addr, 16);
  } else {
    return false;
  }
  const size_t whole = bits_ / 8;
  if (std::memcmp(bytes.data(), prefix_.data(), whole) != 0) return false;
  const uint32_t rest = bits_ % 8;
  if (rest == 0) return true;
  return ((bytes[whole] ^ prefix_[whole]) >> (8 - rest)) == std::byte{0};
}

tl::expected<AccessRules, std::string> AccessRules::make(
    const std::vector<config::AccessRule>& rules) {
  AccessRules result;
  for (const config::AccessRule& given : rules) {
    Rule rule;
    if (!given.address.empty()) {
      auto network = Network::parse(given.address);
      if (!network) return tl::unexpected(network.error());
      rule.any_address = false;
      rule.network = *network;
    }
    rule.session_pattern = given.session;
    result.rules_.push_back(std::move(rule));
  }
  return result;
}

bool AccessRules::allow(const fabric::Address& peer, const std::string& session_name) const {
  if (rules_.empty()) return true;
  for (const Rule& rule : rules_) {
    if (!rule.any_address && !rule.network.contains(peer)) continue;
    if (!rule.session_pattern.empty() &&
        fnmatch(rule.session_pattern.c_str(), session_name.c_str(), 0) != 0)
      continue;
    return true;
  }
  return false;
}

}  // namespace rtrsnbd::daemon
