// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/rnbd/access.h"

#include <doctest/doctest.h>

#include <cerrno>

using rtrsnbd::rnbd::AccessCount;
using rtrsnbd::wire::AccessMode;

TEST_CASE("any number may read, beside writers too") {
  AccessCount count;
  CHECK(count.acquire(AccessMode::read_write) == 0);
  for (int i = 0; i < 1000; ++i) CHECK(count.acquire(AccessMode::read_only) == 0);
  CHECK(count.readers() == 1000);
  CHECK(count.writers() == 1);
}

TEST_CASE("a second writer is refused until the first has left") {
  AccessCount count;
  CHECK(count.acquire(AccessMode::read_write) == 0);
  CHECK(count.acquire(AccessMode::read_write) == EPERM);
  count.release(AccessMode::read_write);
  CHECK(count.acquire(AccessMode::read_write) == 0);
}

TEST_CASE("migration lets a second writer in, and no third") {
  AccessCount count;
  CHECK(count.acquire(AccessMode::read_write) == 0);
  CHECK(count.acquire(AccessMode::migration) == 0);
  CHECK(count.acquire(AccessMode::migration) == EPERM);
  CHECK(count.acquire(AccessMode::read_write) == EPERM);
  count.release(AccessMode::read_write);
  CHECK(count.acquire(AccessMode::read_write) == EPERM);  // the migrated one still writes
  CHECK(count.acquire(AccessMode::migration) == 0);
  count.release(AccessMode::migration);
  count.release(AccessMode::migration);
  CHECK(count.writers() == 0);
}

TEST_CASE("an unknown mode is refused and not counted") {
  AccessCount count;
  CHECK(count.acquire(static_cast<AccessMode>(3)) == EINVAL);
  CHECK(count.acquire(static_cast<AccessMode>(255)) == EINVAL);
  CHECK(count.readers() == 0);
  CHECK(count.writers() == 0);
}
