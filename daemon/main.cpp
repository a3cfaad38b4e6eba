// SPDX-License-Identifier: BSD-3-Clause
// rtrsd: see rtrsd(8).
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "config/config.h"
#include "daemon/daemon.h"
#include "daemon/exit_code.h"
#include "daemon/log.h"
#include "daemon/notify.h"
#include "daemon/options.h"

namespace {

using namespace rtrsnbd;
using daemon::ExitCode;

ExitCode check_config(const daemon::Options& options) {
  const auto configuration = config::load_file(options.config_path);
  if (!configuration) {
    std::fprintf(stderr, "%s\n", configuration.error().text.c_str());
    return ExitCode::configuration;
  }
  const auto problems = daemon::check(*configuration, options.config_path);
  for (const std::string& problem : problems) std::fprintf(stderr, "%s\n", problem.c_str());
  if (!problems.empty()) return ExitCode::volume;
  std::printf("%s: ok, %zu volumes\n", options.config_path.c_str(), configuration->volumes.size());
  return ExitCode::success;
}

ExitCode serve(const daemon::Options& options, daemon::Log& log) {
  const auto configuration = config::load_file(options.config_path);
  if (!configuration) {
    std::string_view text = configuration.error().text;
    while (!text.empty()) {
      const size_t end = std::min(text.find('\n'), text.size());
      if (end > 0) log.write(LogLevel::error, text.substr(0, end));
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    return ExitCode::configuration;
  }
  const auto level = daemon::parse_log_level(configuration->log_level);
  if (!options.verbose && level) log.set_level(*level);
  const daemon::Notifier notifier(std::getenv("NOTIFY_SOCKET"));
  return daemon::serve(*configuration, log, notifier);
}

}  // namespace

int main(int argc, char** argv) {
  const auto options =
      daemon::parse_options({argv + 1, static_cast<size_t>(argc > 0 ? argc - 1 : 0)});
  if (!options) {
    std::fprintf(stderr, "rtrsd: %s\n", options.error().c_str());
    return static_cast<int>(ExitCode::usage);
  }
  switch (options->action) {
    case daemon::Options::Action::help:
      std::fputs(daemon::help_text().c_str(), stdout);
      return 0;
    case daemon::Options::Action::version:
      std::puts("rtrsd " RTRSD_VERSION);
      return 0;
    case daemon::Options::Action::check_config:
      return static_cast<int>(check_config(*options));
    case daemon::Options::Action::serve:
      break;
  }

  daemon::block_signals();
  daemon::Log log(STDERR_FILENO, daemon::is_journal(STDERR_FILENO, std::getenv("JOURNAL_STREAM")),
                  options->verbose ? LogLevel::debug : LogLevel::info);
  const ExitCode code = serve(*options, log);
  const bool quiet = log.finish(std::chrono::seconds(1));
  // Threads that sleep in the kernel cannot be joined, neither those of a volume that hangs nor the
  // log's; after a failure some may be left.
  if (!quiet || code != ExitCode::success) _exit(static_cast<int>(code));
  return static_cast<int>(code);
}
