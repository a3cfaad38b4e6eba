// SPDX-License-Identifier: BSD-3-Clause
// A session lives from the first connection request of its first path until its last connected path
// is gone and everything it asked for was executed.
#include "protocol/rtrs/server_session.h"

#include <algorithm>
#include <cassert>

namespace rtrsnbd::rtrs {

Session::Session(ServerCore& core, const wire::Uuid& uuid, std::unique_ptr<ChunkMemory> memory,
                 const fabric::Address& peer)
    : core_(core),
      uuid_(uuid),
      memory_(std::move(memory)),
      bytes_(memory_->bytes().first(core.limits.session_bytes())),
      slots_(core.limits.queue_depth) {
  identity_.uuid = uuid;
  identity_.peer = peer;
  identity_.max_io_size = core.limits.max_io_size;
  for (uint32_t id = 0; id < slots_.size(); ++id) {
    slots_[id].session_ = this;
    slots_[id].id_ = id;
  }
}

Session::~Session() {
  assert(finished_);
}

std::string Session::label() const {
  return identity_.name.empty() ? "session without a name yet"
                                : "session '" + printable(identity_.name) + "'";
}

Path* Session::find_path(const wire::Uuid& uuid) {
  for (const auto& path : paths_)
    if (path->uuid() == uuid && path->state() != Path::State::closed) return path.get();
  return nullptr;
}

Path* Session::find_path_between(const fabric::Address& peer, const fabric::Address& local) {
  for (const auto& path : paths_)
    if (path->state() != Path::State::closed && path->peer().same_host(peer) &&
        path->local().same_host(local))
      return path.get();
  return nullptr;
}

void Session::append_half_open(std::vector<Path*>& list) {
  for (const auto& path : paths_)
    if (path->state() == Path::State::connecting) list.push_back(path.get());
}

Path& Session::add_path(const wire::ConnectRequest& request, const fabric::ConnectRequest& from) {
  return *paths_.emplace_back(std::make_unique<Path>(*this, request, from));
}

bool Session::introduce(std::string_view name, std::string& reason) {
  if (ending_ || core_.draining) {
    reason = "the session is ending";
    return false;
  }
  if (!identity_.name.empty() && identity_.name != name) {
    reason = "comes with another name, '" + printable(name) + "'";
    return false;
  }
  // A client that was restarted brings its name under a new uuid while its old session may still be
  // executing writes. Those must not hit the disk after what the new session writes, so the new one
  // has to wait.
  if (!core_.directory.claim_name(std::string(name), uuid_)) {
    reason = "session name '" + printable(name) + "' is in use by another session";
    return false;
  }
  identity_.name = name;
  if (upper_) return true;
  upper_ = core_.environment.session_up(identity_);
  if (!upper_) {
    reason = "not wanted";
    return false;
  }
  core_.log(LogLevel::info, label() + " from " + identity_.peer.text() + " is up");
  return true;
}

void Session::request_started(const Slot& slot) {
  ++in_flight_;
  ++(slot.is_read() ? reads_ : writes_);
}

void Session::request_done() {
  assert(in_flight_ != 0);
  if (--in_flight_ != 0) return;
  if (core_.draining) end(Path::Close::orderly, "the server shuts down");
  finish_if_quiet();
}

void Session::path_closing(const Path& path, bool was_connected) {
  if (was_connected) {
    --connected_paths_;
    for (auto& slot : slots_) slot.path_gone(path);
  }
  if (connected_paths_ != 0) return;
  // Without a connected path the devices are closed, and a path that is still coming up would find
  // a session without them; it has to start again. Before the first path was up, the others may go
  // on.
  const bool others = std::any_of(paths_.begin(), paths_.end(), [](const auto& other) {
    return other->state() == Path::State::connecting;
  });
  if (upper_ || !others) end(Path::Close::at_once, "the last path of the session is gone");
}

void Session::path_closed() {
  finish_if_quiet();
}

void Session::end(Path::Close how, std::string_view why) {
  if (ending_) return;
  ending_ = true;
  const LogLevel level = how == Path::Close::orderly ? LogLevel::info : LogLevel::warning;
  for (const auto& path : paths_) path->close(how, level, why);
}

void Session::finish_if_quiet() {
  if (!ending_ || finished_) return;
  if (!std::all_of(paths_.begin(), paths_.end(),
                   [](const auto& path) { return path->state() == Path::State::closed; }))
    return;
  if (!down_) {
    down_ = true;
    if (in_flight_ != 0)
      core_.log(LogLevel::info,
                label() + " is down with " + std::to_string(in_flight_) + " requests in flight");
    if (upper_) upper_->on_session_down();
  }
  if (in_flight_ != 0 || finished_) return;
  finished_ = true;
  core_.garbage = true;
  core_.directory.remove(uuid_);
  if (upper_)
    core_.log(LogLevel::info, label() + " ended after " + std::to_string(reads_) + " reads and " +
                                  std::to_string(writes_) + " writes");
}

void Session::tick(TimePoint now) {
  for (const auto& path : paths_) path->tick(now);
}

void Session::drain() {
  if (in_flight_ == 0) return end(Path::Close::orderly, "the server shuts down");
  for (const auto& path : paths_)
    if (path->state() == Path::State::connecting)
      path->close(Path::Close::orderly, LogLevel::info, "the server shuts down");
}

void Session::collect() {
  std::erase_if(paths_, [](const auto& path) { return path->state() == Path::State::closed; });
}

void Session::abandon() {
  ending_ = true;
  for (const auto& path : paths_) path->abandon();
  if (!down_ && upper_) upper_->on_session_down();
  down_ = finished_ = true;
  core_.directory.remove(uuid_);
}

Server::SessionStatus Session::status() const {
  Server::SessionStatus status;
  status.name = identity_.name;
  status.peer = identity_.peer.text();
  for (const auto& path : paths_) {
    if (path->state() != Path::State::connected) continue;
    ++status.paths;
    status.connections += path->expected_connections();
  }
  status.in_flight = in_flight_;
  status.reads = reads_;
  status.writes = writes_;
  return status;
}

}  // namespace rtrsnbd::rtrs
