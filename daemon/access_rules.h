// SPDX-License-Identifier: BSD-3-Clause
// The `allow:` list of a volume: who may open it, by address of the client and name of its session.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tl/expected.hpp>
#include <vector>

#include "config/config.h"
#include "protocol/fabric/address.h"

namespace rtrsnbd::daemon {

// "192.0.2.0/24", "2001:db8::7". IPv4 and v4-mapped IPv6 are the same thing.
class Network {
 public:
  static tl::expected<Network, std::string> parse(std::string_view text);
  [[nodiscard]] bool contains(const fabric::Address& address) const;

 private:
  std::array<std::byte, 16> prefix_{};
  uint32_t bits_ = 0;  // of 128
};

class AccessRules {
 public:
  static tl::expected<AccessRules, std::string> make(const std::vector<config::AccessRule>& rules);
  // No rules: everybody. Otherwise one rule must match in both of its parts.
  [[nodiscard]] bool allow(const fabric::Address& peer, const std::string& session_name) const;

 private:
  struct Rule {
    bool any_address = true;
    Network network;
    std::string session_pattern;  // empty: any
  };
  std::vector<Rule> rules_;
};

}  // namespace rtrsnbd::daemon
