// SPDX-License-Identifier: BSD-3-Clause
// The plugin's key=value parameters: parsing, bounds, and the one table that help text,
// --dump-plugin and the tests of the man page are made from.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "protocol/fabric/address.h"
#include "protocol/fabric/soft/fabric.h"
#include "protocol/wire/rnbd.h"

namespace rtrsnbd::plugin {

struct Server {
  enum class Transport : uint8_t {
    automatic,  // RDMA if a device leads to the server, else TCP
    tcp,        // software RDMA
    rdma,
  };
  std::string text;  // as written, for messages
  Transport transport = Transport::automatic;
  fabric::HostPort where;
  std::string source;  // host of SRC@, or empty
};

struct Parameters {
  std::optional<Server> server;
  std::string volume;                      // empty: the NBD export name
  std::optional<wire::AccessMode> access;  // unset: rw, or ro under nbdkit -r
  uint32_t connections = 0;  // IO connections; 0: one per CPU this process may use, at most 4
  std::string session;       // empty: made from the host name and the process id
  std::chrono::milliseconds io_timeout{30000};
  std::chrono::milliseconds connect_timeout{10000};
  std::chrono::milliseconds heartbeat_interval{5000};
  fabric::soft::Crc crc = fabric::soft::Crc::automatic;
};

inline constexpr uint32_t connections_max = 16;

struct Key {
  std::string_view name;
  std::string_view value;    // form of the value
  std::string_view meaning;  // one line for --help
};
std::span<const Key> keys();
std::string help_text();

// Sets one parameter. The result is an error message for the user, or empty.
std::string set_parameter(Parameters& parameters, std::string_view key, std::string_view value);

}  // namespace rtrsnbd::plugin
