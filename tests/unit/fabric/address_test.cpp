// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/address.h"

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>

#include <cstring>

namespace rtrsnbd::fabric {

namespace {

Address v4(const char* text, uint16_t port = 0) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  REQUIRE(inet_pton(AF_INET, text, &address.sin_addr) == 1);
  return {reinterpret_cast<const sockaddr*>(&address), sizeof address};
}

Address v6(const char* text, uint16_t port = 0, uint32_t scope = 0) {
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_port = htons(port);
  address.sin6_scope_id = scope;
  REQUIRE(inet_pton(AF_INET6, text, &address.sin6_addr) == 1);
  return {reinterpret_cast<const sockaddr*>(&address), sizeof address};
}

}  // namespace

TEST_CASE("addresses print as people write them") {
  CHECK(v4("192.0.2.1", 1234).text() == "192.0.2.1:1234");
  CHECK(v6("2001:db8::1", 1234).text() == "[2001:db8::1]:1234");
  CHECK(v6("::ffff:192.0.2.1", 1234).text() == "192.0.2.1:1234");
  CHECK(v6("::ffff:192.0.2.1", 1234).host_text() == "192.0.2.1");
  CHECK(v6("fe80::1", 1, 1).host_text() == "fe80::1%lo");
  CHECK(Address().text() == "?");
  CHECK(v4("192.0.2.1", 65535).port() == 65535);
  CHECK(v6("::", 7).port() == 7);
}

TEST_CASE("a mapped IPv4 address is the same host as the plain one, on any port") {
  CHECK(v4("192.0.2.1", 1).same_host(v6("::ffff:192.0.2.1", 2)));
  CHECK_FALSE(v4("192.0.2.1").same_host(v4("192.0.2.2")));
  CHECK_FALSE(v6("fe80::1", 0, 1).same_host(v6("fe80::1", 0, 2)));
  CHECK_FALSE(Address().same_host(Address()));
  CHECK_FALSE(v6("::").same_host(v4("0.0.0.0")));
}

TEST_CASE("loopback is 127/8 and ::1") {
  CHECK(v4("127.0.0.1").is_loopback());
  CHECK(v4("127.255.0.9").is_loopback());
  CHECK(v6("::1").is_loopback());
  CHECK(v6("::ffff:127.0.0.1").is_loopback());
  CHECK_FALSE(v4("126.0.0.1").is_loopback());
  CHECK_FALSE(v6("::2").is_loopback());
  CHECK_FALSE(Address().is_loopback());
}

TEST_CASE("a socket address cut short or of another family is no address") {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  CHECK(Address(reinterpret_cast<const sockaddr*>(&address), 4).family() == AF_UNSPEC);
  address.sin_family = AF_UNIX;
  CHECK(Address(reinterpret_cast<const sockaddr*>(&address), sizeof address).family() == AF_UNSPEC);
}

TEST_CASE("HOST:PORT in all its forms") {
  struct Case {
    const char* text;
    const char* host;
    uint16_t port;
  };
  for (const Case& c : {Case{"storage1", "storage1", 1234},
                        {"storage1:99", "storage1", 99},
                        {"192.0.2.1", "192.0.2.1", 1234},
                        {"192.0.2.1:65535", "192.0.2.1", 65535},
                        {"[2001:db8::1]", "2001:db8::1", 1234},
                        {"[2001:db8::1]:7", "2001:db8::1", 7},
                        {"[fe80::1%eth0]:7", "fe80::1%eth0", 7},
                        {"2001:db8::1", "2001:db8::1", 1234},
                        {"::1", "::1", 1234},
                        {"*", "", 1234},
                        {"", "", 1234},
                        {"*:80", "", 80},
                        {":80", "", 80}}) {
    CAPTURE(c.text);
    const auto result = parse_host_port(c.text, 1234);
    REQUIRE(result);
    CHECK(result->host == c.host);
    CHECK(result->port == c.port);
  }
}

TEST_CASE("what is no HOST:PORT says why") {
  struct Case {
    const char* text;
    const char* why;
  };
  for (const Case& c :
       {Case{"host:70000", "port 70000 is not between 1 and 65535"},
        {"host:99999999999999999999", "port 99999999999999999999 is not between 1 and 65535"},
        {"host:0", "port 0 is not between 1 and 65535"},
        {"host:", "port '' is not a number"},
        {"host:-1", "port '-1' is not a number"},
        {"host:12x", "port '12x' is not a number"},
        {"[::1", "']' is missing"},
        {"[host]", "'host' in brackets is not an IPv6 address"},
        {"[::1]x", "'x' after ']' is not a port"},
        {"[::1]:", "port '' is not a number"},
        {"a:b:c", "'a:b:c' is neither HOST:PORT nor an IPv6 address"},
        {"two words", "the host name has an invalid character"}}) {
    CAPTURE(c.text);
    const auto result = parse_host_port(c.text, 1234);
    REQUIRE_FALSE(result);
    CHECK(result.error() == c.why);
  }
  CHECK_FALSE(parse_host_port(std::string(256, 'a'), 1234));
}

TEST_CASE("resolving numbers needs no name service, nonsense is an error in words") {
  const auto found = resolve({"127.0.0.1", 1234}, false);
  REQUIRE(found);
  CHECK(found->front().text() == "127.0.0.1:1234");
  const auto any = resolve({"", 1234}, true);
  REQUIRE(any);
  CHECK(any->size() == 1);
  CHECK(any->front().port() == 1234);
  CHECK_FALSE(resolve({"", 1234}, false));
  const auto nonsense = resolve({"no-such-host.invalid", 1234}, false);
  REQUIRE_FALSE(nonsense);
  CHECK(nonsense.error().starts_with("host 'no-such-host.invalid': "));
}

}  // namespace rtrsnbd::fabric
