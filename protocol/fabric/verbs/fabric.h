// SPDX-License-Identifier: BSD-3-Clause
// RDMA hardware, and soft-RoCE: the fabric interface on librdmacm and libibverbs. docs/verbs.md
// says how each verb maps, and what of a device it needs.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "protocol/base/time.h"
#include "protocol/fabric/fabric.h"

namespace rtrsnbd::fabric::verbs {

struct Options {
  // From connect() to the peer's answer. Also of each step of the address resolution.
  Duration connect_limit = std::chrono::seconds(30);
  // How long progress(Wait::yes) looks for completions before it goes to sleep. More than zero
  // costs a processor for a few microseconds less.
  Duration busy_poll = Duration::zero();
};

std::unique_ptr<Fabric> make_fabric(const Options& options = {});

// Whether this host reaches `target` by an RDMA device; if not, a sentence fragment that says why.
// Asks the connection manager, and blocks for its answer, two seconds at most.
std::optional<std::string> why_unreachable(const Address& target, const Address* source);

}  // namespace rtrsnbd::fabric::verbs
