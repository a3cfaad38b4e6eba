// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cerrno>

#include "protocol/rtrs/server.h"

namespace rtrsnbd::rtrs {

std::optional<uint32_t> Directory::route(const wire::ConnectRequest& request, int& error) {
  const std::lock_guard lock(mutex_);
  if (const auto found = sessions_.find(request.session_uuid); found != sessions_.end())
    return found->second.reactor;
  // Only somebody who says that he starts from nothing may start: a client that merely adds a path
  // to a session we lost must learn that it is lost.
  if (!request.first_connection()) {
    error = ENXIO;
    return std::nullopt;
  }
  if (sessions_.size() >= sessions_max_) {
    error = EUSERS;
    return std::nullopt;
  }
  return static_cast<uint32_t>(std::min_element(load_.begin(), load_.end()) - load_.begin());
}

bool Directory::add(const wire::Uuid& session, uint32_t reactor) {
  const std::lock_guard lock(mutex_);
  if (sessions_.size() >= sessions_max_) return false;
  const bool added = sessions_.try_emplace(session, Entry{reactor, {}}).second;
  if (added) ++load_[reactor];
  return added;
}

void Directory::remove(const wire::Uuid& session) {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return;
  --load_[found->second.reactor];
  if (!found->second.name.empty()) names_.erase(found->second.name);
  sessions_.erase(found);
}

bool Directory::claim_name(const std::string& name, const wire::Uuid& session) {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return false;
  // Each path of a session brings the name again.
  if (!found->second.name.empty()) return found->second.name == name;
  if (!names_.try_emplace(name, session).second) return false;
  found->second.name = name;
  return true;
}

uint32_t Directory::session_count() const {
  const std::lock_guard lock(mutex_);
  return static_cast<uint32_t>(sessions_.size());
}

}  // namespace rtrsnbd::rtrs
