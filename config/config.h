// SPDX-License-Identifier: BSD-3-Clause
// rtrsd.yaml as values: every key of rtrsd.yaml(5), its default and its bounds. Parsing is strict:
// an unknown or repeated key, a value of the wrong kind or out of bounds is refused with file:line,
// the key in the user's words, and a near match where there is one.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <tl/expected.hpp>
#include <vector>

namespace rtrsnbd::config {

struct Listen {
  std::string scheme = "tcp";  // "tcp": software RDMA; "rdma": hardware
  std::string host;            // empty: any address
  uint16_t port = 1234;
  std::string text;  // as written
};

enum class Crc { automatic, on, off };  // automatic: off on loopback, on otherwise

struct AccessRule {     // one entry of `allow:`; both parts must match
  std::string address;  // CIDR or single address; empty: any
  std::string session;  // shell pattern for the session name; empty: any
};

enum class Direct { automatic, on, off };  // automatic: where the backing allows

struct Volume {
  std::string name;
  std::string path;
  uint64_t size = 0;  // bytes; 0: that of the backing. A regular file is created sparse with it
  bool read_only = false;
  uint32_t block_size = 0;  // logical block, bytes: 512 or 4096; 0: that of the backing
  Direct direct = Direct::automatic;
  std::vector<AccessRule> allow;  // empty: everybody
  int line = 0;                   // where the volume starts in the file
};

struct Config {
  std::vector<Listen> listen;               // default: one, tcp, any address, port 1234
  uint32_t reactors = 0;                    // 0: one per CPU the process may use, at most 16
  uint32_t queue_depth = 128;               // chunks per session
  uint64_t max_io_size = 256 * 1024;        // bytes, multiple of 4096
  uint32_t sessions_max = 256;              // `max-sessions`
  uint64_t memory_max = uint64_t{4} << 30;  // `max-memory`: chunk memory of all sessions, bytes
  bool always_invalidate = false;           // `always-invalidate`
  std::chrono::milliseconds heartbeat_interval{5000};  // `heartbeat-interval`
  uint32_t heartbeat_missed_max = 5;                   // `heartbeat-missed-max`
  Crc crc = Crc::automatic;                            // `crc`
  std::chrono::milliseconds drain_timeout{30000};      // `drain-timeout`: SIGTERM
  std::string log_level = "info";  // `log-level`: error, warning, notice, info, debug
  std::vector<Volume> volumes;
};

struct ConfigError {
  std::string text;  // "rtrsd.yaml:12: volumes[0].pth: unknown key; did you mean 'path'?" may be
                     // several lines
};

tl::expected<Config, ConfigError> load_file(const std::string& path);
tl::expected<Config, ConfigError> parse(std::string_view text, const std::string& file_name);

// All keys, as in the man page: "listen", "volumes[].name", ... For the test that man page, example
// and parser agree.
std::vector<std::string> known_keys();

}  // namespace rtrsnbd::config
