// SPDX-License-Identifier: BSD-3-Clause
// Admission and timers; what is inside a session is in server_session.h.
#include "protocol/rtrs/server.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "protocol/rtrs/server_session.h"

namespace rtrsnbd::rtrs {

namespace {

// Refusals that are logged in one interval; a flood of requests must not become a flood of lines.
constexpr uint32_t refusals_logged_per_interval = 8;
constexpr Duration refusal_interval = std::chrono::seconds(1);

// A path comes up within milliseconds on a local network; this long it is not asked to leave.
constexpr Duration ample_handshake_time = std::chrono::seconds(5);

constexpr Duration tick_interval_max = std::chrono::milliseconds(500);  // endpoints want no less

}  // namespace

class Server::Impl {
 public:
  Impl(Directory& directory, uint32_t reactor_index, const ServerLimits& limits,
       ServerEnvironment& environment, LogSink log)
      : core_(directory, reactor_index, limits, environment, std::move(log)) {
    if (limits.queue_depth == 0 || limits.queue_depth > wire::queue_depth_max)
      throw std::invalid_argument("queue depth is not between 1 and 65535");
    if (limits.max_io_size == 0 || limits.max_header_size < wire::header_size_min_for_kernel)
      throw std::invalid_argument("maximal sizes of data and header are too small");
    if (!wire::geometry_fits(limits.queue_depth,
                             uint64_t{limits.max_io_size} + limits.max_header_size))
      throw std::invalid_argument(
          "queue depth times maximal IO size is too large for the 28 bits of a request");
  }

  ~Impl() {
    // Nobody calls progress() any more; let go of everything as if each connection had been lost.
    core_.draining = true;
    for (auto& [uuid, session] : sessions_) session->abandon();
    sessions_.clear();
  }

  void on_connect_request(std::unique_ptr<fabric::ConnectRequest> request, TimePoint now) {
    core_.now = now;
    collect();
    const auto parsed = wire::parse_connect_request(request->private_data());
    if (!parsed) return refuse(*request, parsed.error(), "malformed connection request");
    if (core_.draining) return refuse(*request, ESHUTDOWN, "the server shuts down");
    if (parsed->cid_num > core_.limits.connections_per_path_max)
      return refuse(*request, EMFILE,
                    "path of " + std::to_string(parsed->cid_num) + " connections; the limit is " +
                        std::to_string(core_.limits.connections_per_path_max));

    Session* session = find(parsed->session_uuid);
    Path* path = nullptr;
    if (session) {
      if (session->ending()) return refuse(*request, ECONNRESET, "the session is ending");
      path = session->find_path(parsed->path_uuid);
      if (const std::string_view wrong = mismatch(*session, path, *parsed, *request);
          !wrong.empty())
        return refuse(*request, wrong == same_addresses ? EEXIST : ECONNRESET, wrong);
    } else if (!parsed->first_connection()) {
      return refuse(*request, ENXIO, "path for a session that does not exist");
    }
    if (!path && core_.half_open_paths >= core_.limits.half_open_paths_max &&
        !make_room_for(request->peer_address()))
      return refuse(*request, EAGAIN,
                    std::to_string(core_.half_open_paths) + " paths are half open; the limit is " +
                        std::to_string(core_.limits.half_open_paths_max));
    // Room may have been made by the last other path of this very session.
    if (session && session->ending()) return refuse(*request, ECONNRESET, "the session is ending");
    if (!session) {
      int error = 0;
      std::string reason;
      session = create(*parsed, *request, error, reason);
      if (!session) return refuse(*request, error, reason);
    }

    if (!path) path = &session->add_path(*parsed, *request);
    int error = ENOMEM;
    std::string what;
    try {
      path->add_connection(*parsed, *request);
      return;
    } catch (const std::system_error& failure) {
      if (failure.code().category() == std::system_category() ||
          failure.code().category() == std::generic_category())
        error = failure.code().value();
      what = failure.what();
    } catch (const std::exception& failure) {
      what = failure.what();
    }
    if (!path->has_connection(parsed->cid)) refuse(*request, error, what);
    path->close(Path::Close::at_once, LogLevel::error, "a connection could not be set up: " + what);
    collect();
  }

  void tick(TimePoint now) {
    core_.now = now;
    core_.refill_log();
    if (now - refusals_since_ >= refusal_interval) {
      if (refusals_ > refusals_logged_per_interval)
        core_.log(LogLevel::warning, std::to_string(refusals_ - refusals_logged_per_interval) +
                                         " more connection requests were refused");
      refusals_ = 0;
      refusals_since_ = now;
    }
    for (auto& [uuid, session] : sessions_) session->tick(now);
    collect();
  }

  [[nodiscard]] Duration tick_interval() const {
    return std::min<Duration>(tick_interval_max, core_.limits.heartbeat.interval / 10);
  }

  void shut_down(TimePoint now) {
    core_.now = now;
    core_.draining = true;
    for (auto& [uuid, session] : sessions_) session->drain();
    collect();
  }

  [[nodiscard]] bool idle() const {
    return std::all_of(sessions_.begin(), sessions_.end(),
                       [](const auto& entry) { return entry.second->finished(); });
  }

  [[nodiscard]] std::vector<SessionStatus> sessions() const {
    std::vector<SessionStatus> all;
    for (const auto& [uuid, session] : sessions_)
      if (session->upper() && !session->finished()) all.push_back(session->status());
    return all;
  }

 private:
  static constexpr std::string_view same_addresses =
      "another path of the session runs between the same addresses";

  Session* find(const wire::Uuid& uuid) {
    const auto found = sessions_.find(uuid);
    return found == sessions_.end() ? nullptr : found->second.get();
  }

  // What speaks against a connection of a session that exists; empty if nothing does.
  std::string_view mismatch(Session& session, Path* path, const wire::ConnectRequest& wanted,
                            const fabric::ConnectRequest& from) {
    if (!path) {
      if (session.path_count() >=
          std::min(core_.limits.paths_per_session_max, wire::paths_per_session_max))
        return "too many paths in the session";
      if (session.find_path_between(from.peer_address(), from.local_address()))
        return same_addresses;
      return {};
    }
    if (path->state() != Path::State::connecting)
      return "the path is connected already, or closing";
    if (path->expected_connections() != wanted.cid_num)
      return "connections of a path disagree about their number";
    if (path->has_connection(wanted.cid)) return "the path has this connection already";
    // Who knows a uuid may join; at least he has to come from where the path came from.
    if (!path->peer().same_host(from.peer_address()) ||
        !path->local().same_host(from.local_address()))
      return "connections of a path run between different addresses";
    return {};
  }

  // All places for half-open paths are taken. Whoever holds most of them gives up the oldest one,
  // to a host that holds fewer at once, to itself only when its client had ample time for INFO_REQ.
  // So a flood of one host does not shut out the others, and one that has stopped does not shut out
  // its own.
  bool make_room_for(const fabric::Address& newcomer) {
    std::vector<Path*> half_open;
    for (const auto& [uuid, session] : sessions_) session->append_half_open(half_open);
    const auto held_by = [&half_open](const fabric::Address& host) {
      return std::count_if(half_open.begin(), half_open.end(),
                           [&host](const Path* path) { return path->peer().same_host(host); });
    };
    Path* oldest = nullptr;
    std::ptrdiff_t most = 0;
    for (Path* const path : half_open) {
      const std::ptrdiff_t held = held_by(path->peer());
      if (held < most || (held == most && oldest && oldest->created() <= path->created())) continue;
      most = held;
      oldest = path;
    }
    if (!oldest) return false;
    const bool others_turn = most > held_by(newcomer) + 1;
    if (!others_turn && core_.now - oldest->created() < ample_handshake_time) return false;
    oldest->close(Path::Close::at_once, LogLevel::warning,
                  "no INFO_REQ yet, and others wait for the place");
    return true;
  }

  // The memory is taken here, with the first connection request, because this is the last moment at
  // which RTRS lets us say no. What strangers can take is bounded by the number of half-open paths.
  Session* create(const wire::ConnectRequest& wanted, const fabric::ConnectRequest& from,
                  int& error, std::string& reason) {
    if (!core_.directory.add(wanted.session_uuid, core_.reactor_index)) {
      const uint32_t count = core_.directory.session_count();
      // Only two connections at the same moment can have been sent to different reactors.
      const bool elsewhere = count < core_.limits.sessions_max;
      error = elsewhere ? EAGAIN : EUSERS;
      reason = elsewhere ? "the session is being set up by another reactor"
                         : std::to_string(count) + " sessions exist; the limit is " +
                               std::to_string(core_.limits.sessions_max);
      return nullptr;
    }
    try {
      auto memory = core_.environment.allocate_chunks(core_.limits.session_bytes(), reason);
      if (memory) {
        auto& session = sessions_[wanted.session_uuid];
        session = std::make_unique<Session>(core_, wanted.session_uuid, std::move(memory),
                                            from.peer_address());
        return session.get();
      }
    } catch (const std::exception& failure) {
      reason = failure.what();
    }
    sessions_.erase(wanted.session_uuid);
    core_.directory.remove(wanted.session_uuid);
    error = ENOMEM;
    return nullptr;
  }

  void refuse(fabric::ConnectRequest& request, int error, std::string_view why) {
    wire::ConnectResponse response;
    response.error = static_cast<uint16_t>(-error);
    request.reject(wire::bytes_of(response));
    if (++refusals_ > refusals_logged_per_interval) return;
    core_.log(LogLevel::warning, "connection request from " + request.peer_address().text() +
                                     " refused with errno " + std::to_string(error) + ": " +
                                     std::string(why));
  }

  // Frees what is over. No callback of an endpoint or of an upper layer is on the stack.
  void collect() {
    if (!core_.garbage) return;
    core_.garbage = false;
    for (auto& [uuid, session] : sessions_) session->collect();
    std::erase_if(sessions_, [](const auto& entry) { return entry.second->finished(); });
  }

  ServerCore core_;
  std::map<wire::Uuid, std::unique_ptr<Session>> sessions_;
  uint32_t refusals_ = 0;  // since refusals_since_
  TimePoint refusals_since_{};
};

Server::Server(Directory& directory, uint32_t reactor_index, const ServerLimits& limits,
               ServerEnvironment& environment, LogSink log)
    : impl_(std::make_unique<Impl>(directory, reactor_index, limits, environment, std::move(log))) {
}

Server::~Server() = default;

void Server::on_connect_request(std::unique_ptr<fabric::ConnectRequest> request, TimePoint now) {
  impl_->on_connect_request(std::move(request), now);
}
void Server::tick(TimePoint now) {
  impl_->tick(now);
}
Duration Server::tick_interval() const {
  return impl_->tick_interval();
}
void Server::shut_down(TimePoint now) {
  impl_->shut_down(now);
}
bool Server::idle() const {
  return impl_->idle();
}
std::vector<Server::SessionStatus> Server::sessions() const {
  return impl_->sessions();
}

}  // namespace rtrsnbd::rtrs
