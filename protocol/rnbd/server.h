// SPDX-License-Identifier: BSD-3-Clause
// The server end of RNBD: what a session's user messages ask of its devices (docs/protocol.md,
// "RNBD messages"). One object per session, used on the session's thread only.
#pragma once

#include <memory>
#include <string>

#include "protocol/base/log.h"
#include "protocol/rnbd/block_device.h"
#include "protocol/rtrs/server.h"

namespace rtrsnbd::rnbd {

inline constexpr uint32_t devices_per_session_max = 256;

// volumes: this session's view (access list applied); must outlive the returned object, so it is
// owned by it.
std::unique_ptr<rtrs::UpperSession> make_server_session(const rtrs::SessionIdentity& identity,
                                                        std::unique_ptr<Volumes> volumes,
                                                        LogSink log);

}  // namespace rtrsnbd::rnbd
