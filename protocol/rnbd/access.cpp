// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/rnbd/access.h"

#include <cassert>
#include <cerrno>

namespace rtrsnbd::rnbd {

using wire::AccessMode;

int AccessCount::acquire(AccessMode mode) {
  switch (mode) {
    case AccessMode::read_only:
      ++readers_;
      return 0;
    case AccessMode::read_write:
      if (writers_ != 0) return EPERM;
      ++writers_;
      return 0;
    case AccessMode::migration:
      // Two, for as long as a virtual machine moves from one host to the other.
      if (writers_ >= 2) return EPERM;
      ++writers_;
      return 0;
  }
  return EINVAL;
}

void AccessCount::release(AccessMode mode) {
  uint32_t& count = mode == AccessMode::read_only ? readers_ : writers_;
  assert(count != 0);
  --count;
}

}  // namespace rtrsnbd::rnbd
