// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/options.h"

#include <string_view>

namespace rtrsnbd::daemon {

tl::expected<Options, std::string> parse_options(std::span<const char* const> arguments) {
  Options options;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view argument = arguments[i];
    if (argument == "-c" || argument == "--config") {
      if (i + 1 == arguments.size())
        return tl::unexpected(std::string(argument) + " needs a file name");
      options.config_path = arguments[++i];
    } else if (argument.starts_with("--config=")) {
      options.config_path = argument.substr(std::string_view("--config=").size());
    } else if (argument == "--check-config") {
      options.action = Options::Action::check_config;
    } else if (argument == "-v" || argument == "--verbose") {
      options.verbose = true;
    } else if (argument == "-V" || argument == "--version") {
      options.action = Options::Action::version;
      return options;
    } else if (argument == "-h" || argument == "--help") {
      options.action = Options::Action::help;
      return options;
    } else {
      return tl::unexpected("unknown argument '" + std::string(argument) + "'; see rtrsd --help");
    }
  }
  if (options.config_path.empty())
    return tl::unexpected(std::string("the name of the configuration file is empty"));
  return options;
}

std::string help_text() {
  return std::string(
             "Usage: rtrsd [-c FILE] [--check-config] [-v]\n"
             "Serves files and block devices to RTRS clients.\n"
             "\n"
             "  -c, --config FILE  configuration, default ") +
         default_config_path +
         "\n"
         "  --check-config     check it, say what is wrong, and exit\n"
         "  -v, --verbose      log everything (log-level: debug)\n"
         "  -V, --version      print the version and exit\n"
         "  -h, --help         print this text and exit\n"
         "\n"
         "rtrsd(8) explains signals and exit codes, rtrsd.yaml(5) the configuration.\n";
}

}  // namespace rtrsnbd::daemon
