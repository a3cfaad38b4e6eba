// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/fabric.h"

namespace rtrsnbd::fabric {

std::string_view to_string(DisconnectReason reason) {
  switch (reason) {
    case DisconnectReason::closed_by_us:
      return "closed by us";
    case DisconnectReason::closed_by_peer:
      return "closed by the peer";
    case DisconnectReason::connection_lost:
      return "connection lost";
    case DisconnectReason::protocol_error:
      return "protocol error";
    case DisconnectReason::remote_error:
      return "the peer reports an error";
    case DisconnectReason::refused:
      return "connection refused";
    case DisconnectReason::unreachable:
      return "unreachable";
  }
  return "unknown";
}

}  // namespace rtrsnbd::fabric
