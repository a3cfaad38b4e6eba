// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/base/log.h"

#include <doctest/doctest.h>

using rtrsnbd::printable;

TEST_CASE("printable keeps plain text and escapes the rest") {
  CHECK(printable("disk0 %n") == "disk0 %n");
  CHECK(printable("a\nb\x1b[2J\\") == "a\\x0ab\\x1b[2J\\\\");
  CHECK(printable(std::string_view("a\0b", 3)) == "a\\x00b");
  CHECK(printable("\xff") == "\\xff");
}

TEST_CASE("printable cuts long text and says so") {
  CHECK(printable(std::string(10, 'x'), 4) == "xxxx...");
  CHECK(printable(std::string(4, 'x'), 4) == "xxxx");
}
