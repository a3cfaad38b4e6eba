// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/options.h"

#include <doctest/doctest.h>

#include <vector>

using namespace rtrsnbd::daemon;

namespace {
auto parse(std::vector<const char*> arguments) {
  return parse_options(arguments);
}
}  // namespace

TEST_CASE("the-command-line-is-misread") {
  REQUIRE(parse({}).has_value());
  CHECK(parse({})->config_path == "/etc/rtrsd/rtrsd.yaml");
  CHECK(parse({})->action == Options::Action::serve);
  CHECK(parse({"-c", "a.yaml"})->config_path == "a.yaml");
  CHECK(parse({"--config=a.yaml", "-v"})->config_path == "a.yaml");
  CHECK(parse({"--config", "a.yaml", "-v"})->verbose);
  CHECK(parse({"--check-config", "-c", "a.yaml"})->action == Options::Action::check_config);
  CHECK(parse({"-V"})->action == Options::Action::version);
  CHECK(parse({"--help"})->action == Options::Action::help);
}

TEST_CASE("a-wrong-command-line-is-accepted") {
  for (const std::vector<const char*>& arguments : std::vector<std::vector<const char*>>{
           {"-c"}, {"--config="}, {"x"}, {"-x"}, {"--check"}, {"-vV"}, {"--verbose=1"}, {""}}) {
    CAPTURE(arguments.front());
    CHECK_FALSE(parse(arguments).has_value());
  }
}

TEST_CASE("the-help-text-forgets-an-option") {
  for (const char* option : {"-c", "--check-config", "-v", "-V", "--version", "-h", "--help"}) {
    CHECK(help_text().find(option) != std::string::npos);
  }
}
