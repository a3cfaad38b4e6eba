// SPDX-License-Identifier: BSD-3-Clause
// rtrsd put together: volumes, reactors and listeners made from the configuration, then signals
// until the end.
#pragma once

#include <functional>
#include <string>

#include "config/config.h"
#include "daemon/exit_code.h"
#include "daemon/log.h"
#include "daemon/notify.h"

namespace rtrsnbd::daemon {

// Blocks the signals the daemon waits for, in this thread and those it makes later; SIGPIPE is
// ignored. Before the first thread is made.
void block_signals();

// What --check-config finds wrong beyond the syntax, one line each, without opening or creating
// anything. file: for the text.
std::vector<std::string> check(const config::Config& configuration, const std::string& file);

// Serves until SIGTERM or SIGINT. After drain_timeout, threads may still be inside system calls
// that do not end: the caller then leaves with _exit().
ExitCode serve(const config::Config& configuration, Log& log, const Notifier& notifier);

}  // namespace rtrsnbd::daemon
