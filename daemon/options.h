// SPDX-License-Identifier: BSD-3-Clause
// rtrsd's command line.
#pragma once

#include <span>
#include <string>
#include <tl/expected.hpp>

namespace rtrsnbd::daemon {

inline constexpr const char* default_config_path = "/etc/rtrsd/rtrsd.yaml";

struct Options {
  enum class Action { serve, check_config, version, help };
  Action action = Action::serve;
  std::string config_path = default_config_path;
  bool verbose = false;
};

// arguments: without the program's name. The error is a line for the user.
tl::expected<Options, std::string> parse_options(std::span<const char* const> arguments);
std::string help_text();

}  // namespace rtrsnbd::daemon
