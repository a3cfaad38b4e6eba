// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/parameters.h"

#include <algorithm>
#include <charconv>

#include "protocol/wire/rtrs.h"

namespace rtrsnbd::plugin {

namespace {

constexpr Key key_table[] = {
    {"server", "[rdma:|tcp:][SRC@]HOST[:PORT]",
     "storage host that runs rtrsd (required; port 1234)"},
    {"volume", "NAME", "volume to attach (default: the NBD export name)"},
    {"access", "rw|ro|migration", "how to open it (default: rw, or ro with nbdkit -r)"},
    {"connections", "1..16", "connections for IO (default: one per CPU, at most 4)"},
    {"session", "NAME", "session name shown at the server (default: HOSTNAME-PID)"},
    {"io-timeout", "TIME", "give up on an unanswered request (default: 30s)"},
    {"connect-timeout", "TIME", "give up on connecting (default: 10s)"},
    {"heartbeat-interval", "TIME", "beat, and notice a dead server after 6 of them (default: 5s)"},
    {"crc", "auto|on|off", "CRC32C on the wire (default: auto, off on loopback)"},
};

// "30", "30s", "500ms", "2min": seconds without a unit.
std::string parse_time(std::string_view text, std::chrono::milliseconds low,
                       std::chrono::milliseconds high, std::chrono::milliseconds& result) {
  uint64_t number = 0;
  const auto [rest, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view unit(rest, static_cast<size_t>(text.data() + text.size() - rest));
  uint64_t scale = 0;
  if (unit.empty() || unit == "s") scale = 1000;
  if (unit == "ms") scale = 1;
  if (unit == "min") scale = 60000;
  const auto limits =
      "between " + std::to_string(low.count()) + "ms and " + std::to_string(high.count()) + "ms";
  if (status != std::errc() || scale == 0)
    return "is not a time such as 30s, 500ms or 2min (" + limits + ")";
  if (number > static_cast<uint64_t>(high.count()) / scale ||
      number * scale < static_cast<uint64_t>(low.count())) {
    return "must be " + limits;
  }
  result = std::chrono::milliseconds(number * scale);
  return {};
}

std::string parse_server(std::string_view value, Server& server) {
  server.text = value;
  std::string_view rest = value;
  server.transport = Server::Transport::automatic;
  if (rest.starts_with("rdma:")) {
    server.transport = Server::Transport::rdma;
    rest.remove_prefix(5);
  } else if (rest.starts_with("tcp:")) {
    server.transport = Server::Transport::tcp;
    rest.remove_prefix(4);
  }
  if (server.transport != Server::Transport::automatic && rest.starts_with("//"))
    rest.remove_prefix(2);
  if (const auto at = rest.find('@'); at != std::string_view::npos) {
    const auto source = fabric::parse_host_port(rest.substr(0, at), 0);
    if (!source || source->port != 0 || source->host.empty()) {
      return "the source address in front of '@' must be a host or address without a port";
    }
    server.source = source->host;
    rest.remove_prefix(at + 1);
  }
  if (rest.find(',') != std::string_view::npos) {
    return "several addresses (multipath) are not supported by this version; give one";
  }
  const auto where = fabric::parse_host_port(rest, wire::default_port);
  if (!where) return where.error();
  if (where->host.empty() || where->host == "*") return "needs a host: [rdma:|tcp:]HOST[:PORT]";
  server.where = *where;
  return {};
}

}  // namespace

std::span<const Key> keys() {
  return key_table;
}

std::string help_text() {
  size_t name_width = 0;
  size_t value_width = 0;
  for (const auto& key : key_table) {
    name_width = std::max(name_width, key.name.size() + 1);
    value_width = std::max(value_width, key.value.size());
  }
  std::string text;
  for (const auto& key : key_table) {
    std::string line(key.name);
    line += '=';
    line.resize(name_width, ' ');
    line += ' ';
    line += key.value;
    line.resize(name_width + value_width + 1, ' ');
    line += "  ";
    line += key.meaning;
    text += line + "\n";
  }
  text.pop_back();  // nbdkit ends the text itself
  return text;
}

std::string set_parameter(Parameters& parameters, std::string_view key, std::string_view value) {
  const auto complain = [&](std::string_view reason) {
    return std::string(key) + "=" + std::string(value) + ": " + std::string(reason);
  };
  using std::chrono::milliseconds;

  std::string error;
  if (key == "server") {
    if (parameters.server)
      return complain("server= was given before; this version attaches to one storage host");
    Server server;
    error = parse_server(value, server);
    if (error.empty()) parameters.server = server;
  } else if (key == "volume") {
    if (value.empty() || value.size() > wire::device_name_max) {
      error = "a volume name has 1 to 254 bytes";
    } else {
      parameters.volume = value;
    }
  } else if (key == "access") {
    if (value == "rw") {
      parameters.access = wire::AccessMode::read_write;
    } else if (value == "ro") {
      parameters.access = wire::AccessMode::read_only;
    } else if (value == "migration") {
      parameters.access = wire::AccessMode::migration;
    } else {
      error = "must be rw, ro or migration";
    }
  } else if (key == "connections") {
    uint32_t number = 0;
    const auto [rest, status] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (status != std::errc() || rest != value.data() + value.size() || number < 1 ||
        number > connections_max) {
      error = "must be a number from 1 to " + std::to_string(connections_max);
    } else {
      parameters.connections = number;
    }
  } else if (key == "session") {
    if (!wire::session_name_allowed(value)) {
      error = "a session name has 1 to 254 bytes, no '/' and no '.'";
    } else {
      parameters.session = value;
    }
  } else if (key == "io-timeout") {
    error = parse_time(value, milliseconds(1000), milliseconds(3600000), parameters.io_timeout);
  } else if (key == "connect-timeout") {
    error = parse_time(value, milliseconds(100), milliseconds(600000), parameters.connect_timeout);
  } else if (key == "heartbeat-interval") {
    error =
        parse_time(value, milliseconds(100), milliseconds(60000), parameters.heartbeat_interval);
  } else if (key == "crc") {
    if (value == "auto") {
      parameters.crc = fabric::soft::Crc::automatic;
    } else if (value == "on") {
      parameters.crc = fabric::soft::Crc::on;
    } else if (value == "off") {
      parameters.crc = fabric::soft::Crc::off;
    } else {
      error = "must be auto, on or off";
    }
  } else {
    std::string known;
    for (const auto& entry : key_table)
      known += (known.empty() ? "" : ", ") + std::string(entry.name);
    return "unknown parameter '" + std::string(key) + "'; the keys are: " + known;
  }
  return error.empty() ? error : complain(error);
}

}  // namespace rtrsnbd::plugin
