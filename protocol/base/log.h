// SPDX-License-Identifier: BSD-3-Clause
// The log as the library sees it: a sink the program passes in. The daemon's sink adds journald
// priority prefixes, the plugin's sink calls nbdkit_debug / nbdkit_error. Lines carry no newline,
// no time (journald has it) and no unescaped peer-supplied text: pass such text through
// printable().
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace rtrsnbd {

enum class LogLevel { error, warning, notice, info, debug };  // syslog 3, 4, 5, 6, 7

// Callable from any thread that was given it; must not block for long and must not throw.
using LogSink = std::function<void(LogLevel, std::string_view line)>;

// Peer-supplied bytes as one line of printable ASCII: everything else becomes \xNN, a backslash \\.
// Cut to max_bytes of output, marked by "..." at the end.
std::string printable(std::string_view bytes, size_t max_bytes = 300);

}  // namespace rtrsnbd
