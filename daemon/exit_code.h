// SPDX-License-Identifier: BSD-3-Clause
// Exit codes of rtrsd, as in rtrsd(8). They follow sysexits.h, so that `systemctl status` prints a
// word that fits.
#pragma once

#include <sysexits.h>

namespace rtrsnbd::daemon {

enum class ExitCode : int {
  success = 0,
  failure = 1,              // something that should not happen; the log says what
  usage = EX_USAGE,         // 64: wrong command line
  volume = EX_NOINPUT,      // 66: a volume cannot be opened
  listen = EX_UNAVAILABLE,  // 69: an address cannot be listened on
  environment = EX_OSERR,   // 71: io_uring or another thing of the system is missing or forbidden
  drain_timeout = EX_TEMPFAIL,  // 75: stopped with requests that did not end in time
  configuration = EX_CONFIG,    // 78: rtrsd.yaml is wrong
};

}  // namespace rtrsnbd::daemon
