// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/access_rules.h"

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>

using namespace rtrsnbd;
using namespace rtrsnbd::daemon;

namespace {

fabric::Address address(const char* text) {
  sockaddr_in v4{};
  sockaddr_in6 v6{};
  if (inet_pton(AF_INET, text, &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    return {reinterpret_cast<sockaddr*>(&v4), sizeof v4};
  }
  REQUIRE(inet_pton(AF_INET6, text, &v6.sin6_addr) == 1);
  v6.sin6_family = AF_INET6;
  return {reinterpret_cast<sockaddr*>(&v6), sizeof v6};
}

bool allowed(const std::vector<config::AccessRule>& rules, const char* peer,
             const std::string& session) {
  const auto made = AccessRules::make(rules);
  REQUIRE_MESSAGE(made.has_value(), made.error());
  return made->allow(address(peer), session);
}

}  // namespace

TEST_CASE("without-rules-somebody-is-kept-out") {
  CHECK(allowed({}, "192.0.2.1", "any"));
}

TEST_CASE("an-address-outside-the-network-gets-in") {
  CHECK(allowed({{"192.0.2.0/24", ""}}, "192.0.2.255", "s"));
  CHECK_FALSE(allowed({{"192.0.2.0/24", ""}}, "192.0.3.0", "s"));
  CHECK(allowed({{"192.0.2.128/25", ""}}, "192.0.2.200", "s"));
  CHECK_FALSE(allowed({{"192.0.2.128/25", ""}}, "192.0.2.127", "s"));
  CHECK(allowed({{"192.0.2.7", ""}}, "192.0.2.7", "s"));
  CHECK_FALSE(allowed({{"192.0.2.7", ""}}, "192.0.2.6", "s"));
  CHECK(allowed({{"0.0.0.0/0", ""}}, "203.0.113.9", "s"));
  CHECK_FALSE(allowed({{"0.0.0.0/0", ""}}, "2001:db8::1", "s"));
  CHECK(allowed({{"::/0", ""}}, "2001:db8::1", "s"));
  CHECK(allowed({{"2001:db8:4::/46", ""}}, "2001:db8:7:ffff::1", "s"));
  CHECK_FALSE(allowed({{"2001:db8:4::/46", ""}}, "2001:db8:8::1", "s"));
  CHECK(allowed({{"2001:db8::7", ""}}, "2001:db8::7", "s"));
  CHECK_FALSE(allowed({{"2001:db8::7", ""}}, "2001:db8::8", "s"));
}

TEST_CASE("an-ipv4-client-of-a-dual-stack-socket-is-taken-for-a-stranger") {
  CHECK(allowed({{"192.0.2.0/24", ""}}, "::ffff:192.0.2.9", "s"));
  CHECK_FALSE(allowed({{"192.0.2.0/24", ""}}, "::ffff:192.0.3.9", "s"));
  CHECK(allowed({{"::ffff:192.0.2.0/120", ""}}, "192.0.2.9", "s"));
}

TEST_CASE("half-a-rule-is-enough") {
  const std::vector<config::AccessRule> rules = {{"192.0.2.0/24", "web-*"}, {"", "backup"}};
  CHECK(allowed(rules, "192.0.2.1", "web-1"));
  CHECK_FALSE(allowed(rules, "192.0.2.1", "db-1"));
  CHECK_FALSE(allowed(rules, "198.51.100.1", "web-1"));
  CHECK(allowed(rules, "198.51.100.1", "backup"));
  CHECK_FALSE(allowed(rules, "198.51.100.1", "backup2"));
}

TEST_CASE("a-network-that-is-none-is-accepted") {
  for (const char* text :
       {"", "192.0.2", "192.0.2.0/33", "192.0.2.0/", "192.0.2.0/x", "192.0.2.0/8/8", "::/129",
        "example.org", "192.0.2.0/-1", " 192.0.2.1"}) {
    CAPTURE(text);
    CHECK_FALSE(Network::parse(text).has_value());
  }
}
