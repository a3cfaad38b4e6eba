// SPDX-License-Identifier: BSD-3-Clause
// The volumes of the daemon: which there are, who may open them, who has them open.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tl/expected.hpp>
#include <vector>

#include "config/config.h"
#include "daemon/access_rules.h"
#include "daemon/backing.h"
#include "daemon/reactor.h"
#include "daemon/store_device.h"
#include "protocol/base/log.h"
#include "protocol/rnbd/access.h"
#include "protocol/rnbd/block_device.h"
#include "protocol/rtrs/server.h"

namespace rtrsnbd::daemon {

// Made once at start; opening and closing by any reactor, locked inside.
class VolumeRegistry {
 public:
  explicit VolumeRegistry(LogSink log) : log_(std::move(log)) {}

  // Opens the backing. The error names volume, reason and remedy.
  tl::expected<void, std::string> add(const config::Volume& volume, SystemCalls& calls = kernel());
  [[nodiscard]] size_t size() const { return volumes_.size(); }
  [[nodiscard]] bool any_through_ring() const;

  // One session's view. reactor and files are those of the session's thread and outlive it.
  std::unique_ptr<rnbd::Volumes> view(const rtrs::SessionIdentity& identity, Reactor& reactor,
                                      RingFiles& files);

  // Volumes with requests that were not completed yet, as "NAME (N requests)", for a stop that does
  // not end.
  [[nodiscard]] std::vector<std::string> busy() const;

 private:
  class View;
  class Opened;

  struct Volume {
    std::string name;
    std::shared_ptr<Backing> backing;
    AccessRules rules;
    rnbd::AccessCount access;               // under mutex_
    std::set<const StoreDevice*> opened{};  // under mutex_
  };

  LogSink log_;
  std::map<std::string, Volume, std::less<>> volumes_;  // does not change after the start
  mutable std::mutex mutex_;
};

}  // namespace rtrsnbd::daemon
