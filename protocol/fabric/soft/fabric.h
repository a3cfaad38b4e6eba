// SPDX-License-Identifier: BSD-3-Clause
// Software RDMA: the fabric interface as iWARP over TCP, on any host. docs/software-rdma.md has the
// exact bytes.
#pragma once

#include <cstdint>
#include <memory>

#include "protocol/base/log.h"
#include "protocol/base/time.h"
#include "protocol/fabric/fabric.h"

namespace rtrsnbd::fabric::soft {

enum class Crc : uint8_t {
  automatic,  // on, unless the peer is this very host
  on,
  off,  // the peer may still ask for it
};

struct Options {
  Crc crc = Crc::automatic;
  // Payload bytes per FPDU; a multiple of 4, from 8 to 64748.
  uint32_t segment_payload = 61440;

  // Whole request after TCP accept; accept() after that.
  Duration request_limit = std::chrono::seconds(5);
  Duration accept_limit = std::chrono::seconds(5);
  // From connect() to the peer's answer, its decision included.
  Duration connect_limit = std::chrono::seconds(30);

  // Connections whose request is not complete yet, in all and of one source address. Only those
  // older than crowding_grace count for the second, and only they may be dropped to make room: many
  // good clients may well start at once from one address, and none of them is slow.
  uint32_t pending_max = 64;
  uint32_t pending_per_source_max = 16;
  Duration crowding_grace = std::chrono::milliseconds(200);

  // For what no Handler can be told: set-ups that a listener drops. May be empty.
  LogSink log = {};
};

std::unique_ptr<Fabric> make_fabric(const Options& options = {});

}  // namespace rtrsnbd::fabric::soft
