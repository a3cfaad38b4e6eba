// SPDX-License-Identifier: BSD-3-Clause
// Numbers both ends of a session agree on or bound themselves by.
#pragma once

#include <cstdint>

#include "protocol/base/time.h"

namespace rtrsnbd::rtrs {

// Not negotiated: each side decides for itself when to beat and when to give up.
struct HeartbeatTiming {
  Duration interval = std::chrono::seconds(5);
  uint32_t missed_max = 5;  // dead when more than this many intervals passed without a sign of life
};
inline constexpr HeartbeatTiming fast_heartbeat{std::chrono::milliseconds(500), 5};

struct ServerLimits {
  uint32_t queue_depth = 128;
  uint32_t max_io_size = 256 * 1024;  // bytes of data per request
  uint32_t max_header_size = 4096;    // bytes
  bool always_invalidate = false;     // NEW_RKEY mode
  HeartbeatTiming heartbeat{};
  Duration handshake_timeout = std::chrono::seconds(30);  // first connection request to INFO_REQ
  uint32_t sessions_max = 256;
  uint32_t half_open_paths_max = 64;
  uint32_t connections_per_path_max = 128;
  uint32_t paths_per_session_max = 128;

  [[nodiscard]] uint32_t chunk_size() const { return max_io_size + max_header_size; }
  [[nodiscard]] uint64_t session_bytes() const { return uint64_t{queue_depth} * chunk_size(); }
};

}  // namespace rtrsnbd::rtrs
