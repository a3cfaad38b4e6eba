// SPDX-License-Identifier: BSD-3-Clause
// The counting rules of RNBD access modes over all sessions of the daemon (specification 10.2, 6).
#pragma once

#include <cstdint>

#include "protocol/wire/rnbd.h"

namespace rtrsnbd::rnbd {

// Per volume. Not locked: the owner of the volume list does that.
class AccessCount {
 public:
  // read_only: always. read_write: if nobody has it open for writing. migration: if fewer than two
  // writers. Returns 0, EPERM or EINVAL (unknown mode); on 0 the opener is counted.
  int acquire(wire::AccessMode mode);
  void release(wire::AccessMode mode);
  [[nodiscard]] uint32_t readers() const { return readers_; }
  [[nodiscard]] uint32_t writers() const { return writers_; }

 private:
  uint32_t readers_ = 0;
  uint32_t writers_ = 0;
};

}  // namespace rtrsnbd::rnbd
