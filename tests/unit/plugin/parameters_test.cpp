// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/parameters.h"

#include <doctest/doctest.h>

#include <string>

#include "plugin/errors.h"

using namespace rtrsnbd;
using namespace rtrsnbd::plugin;
using namespace std::chrono_literals;

TEST_CASE("a server is taken apart") {
  struct Case {
    const char* text;
    const char* host;
    uint16_t port;
    const char* source;
  };
  for (const auto& c :
       {Case{"tcp:storage1", "storage1", 1234, ""}, Case{"storage1", "storage1", 1234, ""},
        Case{"tcp:127.0.0.1:5000", "127.0.0.1", 5000, ""},
        Case{"tcp://storage1:77", "storage1", 77, ""},
        Case{"[2001:db8::1]:99", "2001:db8::1", 99, ""}, Case{"tcp:[::1]", "::1", 1234, ""},
        Case{"tcp:10.0.0.9@storage1:1235", "storage1", 1235, "10.0.0.9"}}) {
    Parameters parameters;
    CAPTURE(c.text);
    CHECK(set_parameter(parameters, "server", c.text) == "");
    REQUIRE(parameters.server);
    CHECK(parameters.server->where.host == c.host);
    CHECK(parameters.server->where.port == c.port);
    CHECK(parameters.server->source == c.source);
    CHECK(parameters.server->text == c.text);
  }
}

TEST_CASE("what cannot be meant is refused with the key, the value and the reason") {
  struct Case {
    const char* key;
    const char* value;
    const char* part;
  };
  for (const auto& c : {Case{"server", "", "host"},
                        Case{"server", "tcp:", "host"},
                        Case{"server", "rdma:", "rdma:|tcp:"},
                        Case{"server", "a:70000", "70000"},
                        Case{"server", "a:x", "x"},
                        Case{"server", "a,b", "multipath"},
                        Case{"server", "1.2.3.4:5@b", "without a port"},
                        Case{"server", "*", "host"},
                        Case{"volume", "", "254"},
                        Case{"access", "wr", "rw, ro or migration"},
                        Case{"connections", "0", "1 to 16"},
                        Case{"connections", "17", "1 to 16"},
                        Case{"connections", "2x", "1 to 16"},
                        Case{"connections", "-1", "1 to 16"},
                        Case{"session", "a/b", "no '/'"},
                        Case{"session", "a.b", "no '.'"},
                        Case{"session", "", "254"},
                        Case{"io-timeout", "fast", "not a time"},
                        Case{"io-timeout", "0", "between"},
                        Case{"io-timeout", "1h", "not a time"},
                        Case{"io-timeout", "99999999999999999999", "not a time"},
                        Case{"io-timeout", "18446744073709551615", "between"},
                        Case{"connect-timeout", "601s", "between"},
                        Case{"heartbeat-interval", "99ms", "between"},
                        Case{"crc", "yes", "auto, on or off"},
                        Case{"srever", "a", "unknown parameter"}}) {
    Parameters parameters;
    const std::string error = set_parameter(parameters, c.key, c.value);
    CAPTURE(error);
    CHECK(error.find(c.part) != std::string::npos);
    CHECK(error.find(c.key) != std::string::npos);
  }
}

TEST_CASE("a second server is refused, the first one stays") {
  Parameters parameters;
  CHECK(set_parameter(parameters, "server", "a") == "");
  CHECK(set_parameter(parameters, "server", "b") != "");
  CHECK(parameters.server->where.host == "a");
}

TEST_CASE("times have units, seconds without one") {
  Parameters parameters;
  CHECK(set_parameter(parameters, "io-timeout", "45") == "");
  CHECK(parameters.io_timeout == 45s);
  CHECK(set_parameter(parameters, "io-timeout", "2min") == "");
  CHECK(parameters.io_timeout == 2min);
  CHECK(set_parameter(parameters, "heartbeat-interval", "500ms") == "");
  CHECK(parameters.heartbeat_interval == 500ms);
}

TEST_CASE("every key is known to the help text and to the parser") {
  const std::string help = help_text();
  for (const auto& key : keys()) {
    CHECK(help.find(std::string(key.name) + "=") != std::string::npos);
    Parameters parameters;
    CHECK(set_parameter(parameters, key.name, "\x01,").find("unknown parameter") ==
          std::string::npos);
  }
  CHECK(help.back() != '\n');
}

TEST_CASE("an errno NBD does not know becomes EIO, never EINVAL") {
  for (int error = 1; error < 200; ++error) {
    const int result = nbd_error(error);
    const bool known = error == EPERM || error == EROFS || error == EIO || error == ENOMEM ||
                       error == ENOSPC || error == EFBIG || error == EDQUOT || error == EINVAL ||
                       error == ESHUTDOWN || error == ENOTSUP;
    CHECK(result == (known ? error : EIO));
  }
}
