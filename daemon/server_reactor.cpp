// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/server_reactor.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <exception>

#include "protocol/rnbd/server.h"
#include "protocol/wire/rtrs.h"

namespace rtrsnbd::daemon {

namespace {

// Endpoints and listeners want to be called every half second; a session's server may want it more
// often.
constexpr Duration tick_interval_max = std::chrono::milliseconds(500);
constexpr Duration tick_interval_min = std::chrono::milliseconds(5);
// While it shuts down, it looks for the end more often.
constexpr Duration tick_interval_shutting_down = std::chrono::milliseconds(10);
// Calls of progress() in a row before the other endpoints get their turn.
constexpr uint32_t progress_calls_max = 16;
// Posted bytes that are not left for the end of the turn: about a quarter of a second-level cache.
constexpr size_t early_flush_bytes = 512 * 1024;

}  // namespace

struct ServerReactor::Line {
  fabric::Endpoint* endpoint = nullptr;  // null: detached
  Watch::Pointer watch;
  bool to_flush = false;
  bool to_serve = false;
};

class ServerReactor::Ticker final : public Timer {
 public:
  explicit Ticker(ServerReactor& owner) : owner_(owner) {}
  void on_timer(TimePoint now) override { owner_.tick(now); }

 private:
  ServerReactor& owner_;
};

class ServerReactor::Handover final : public Message {
 public:
  Handover(ServerReactor& target, std::unique_ptr<fabric::ConnectRequest> request)
      : target_(target), request_(std::move(request)) {}
  void run() override {
    const std::unique_ptr<Handover> self(this);
    target_.server_->on_connect_request(std::move(request_), target_.reactor_.now());
  }
  void drop() override { delete this; }

 private:
  ServerReactor& target_;
  std::unique_ptr<fabric::ConnectRequest> request_;
};

ServerReactor::ServerReactor(Shared& shared, uint32_t index, const RingOptions& ring)
    : shared_(shared),
      index_(index),
      reactor_(ring),
      files_(reactor_),
      chunks_(reactor_, shared.budget, shared.volumes.any_through_ring(), shared.log),
      ticker_(std::make_unique<Ticker>(*this)),
      server_(std::make_unique<rtrs::Server>(shared.directory, index, shared.limits, *this,
                                             shared.log)) {
  reactor_.set_turn_end([this] { return end_turn(); });
}

ServerReactor::~ServerReactor() {
  server_.reset();  // detaches what is left
  listening_.clear();
  drop_detached();
}

void ServerReactor::listen(std::vector<std::unique_ptr<fabric::Listener>> listeners,
                           std::vector<ServerReactor*> peers) {
  peers_ = std::move(peers);
  for (auto& listener : listeners) {
    fabric::Listener* const raw = listener.get();
    auto watch = Watch::make(reactor_, raw->fd(), [this, raw] { progress_listener(*raw); });
    listening_.push_back({std::move(listener), std::move(watch)});
  }
}

void ServerReactor::run() {
  reactor_.arm(*ticker_, reactor_.now());
  reactor_.run();
}

void ServerReactor::request_shut_down() {
  reactor_.post([this] {
    if (shutting_down_) return;
    shutting_down_ = true;
    listening_.clear();
    server_->shut_down(reactor_.now());
    tick(reactor_.now());
  });
}

void ServerReactor::tick(TimePoint now) {
  server_->tick(now);
  // A tick may detach this endpoint or others.
  std::vector<fabric::Endpoint*> endpoints;
  endpoints.reserve(lines_.size());
  for (const auto& [endpoint, line] : lines_) endpoints.push_back(endpoint);
  for (fabric::Endpoint* endpoint : endpoints) {
    if (lines_.contains(endpoint)) endpoint->tick(now);
  }
  for (const Listening& listening : listening_) progress_listener(*listening.listener);
  if (shutting_down_ && server_->idle() && lines_.empty()) {
    reactor_.stop();
    return;
  }
  const Duration interval =
      shutting_down_ ? tick_interval_shutting_down
                     : std::clamp(server_->tick_interval(), tick_interval_min, tick_interval_max);
  reactor_.arm(*ticker_, now + interval);
}

void ServerReactor::progress_listener(fabric::Listener& listener) {
  listener.progress(reactor_.now(), [this](std::unique_ptr<fabric::ConnectRequest> request) {
    on_connect_request(std::move(request));
  });
}

void ServerReactor::on_connect_request(std::unique_ptr<fabric::ConnectRequest> request) {
  const std::string peer = request->peer_address().text();
  const auto message = wire::parse_connect_request(request->private_data());
  int error = message ? 0 : message.error();
  std::optional<uint32_t> target;
  if (message) target = shared_.directory.route(*message, error);
  if (!target) {
    wire::ConnectResponse response{};
    response.error = static_cast<uint16_t>(-error);
    request->reject(wire::bytes_of(response));
    std::string why = "its RTRS connection request is malformed";
    if (message && error == EUSERS) {
      why =
          "there are " + std::to_string(shared_.directory.session_count()) +
          " sessions, the limit is 'max-sessions: " + std::to_string(shared_.limits.sessions_max) +
          "'";
    } else if (message && error == ENXIO) {
      why = "it belongs to a session that is not known here";
    } else if (message) {
      why = std::strerror(error);
    }
    shared_.log(LogLevel::warning, "connection from " + peer + " refused: " + why);
    return;
  }
  if (*target == index_) {
    server_->on_connect_request(std::move(request), reactor_.now());
  } else {
    peers_[*target]->reactor_.post(*new Handover(*peers_[*target], std::move(request)));
  }
}

std::unique_ptr<rtrs::ChunkMemory> ServerReactor::allocate_chunks(size_t bytes,
                                                                  std::string& reason) {
  return chunks_.allocate(bytes, reason);
}

std::unique_ptr<rtrs::UpperSession> ServerReactor::session_up(
    const rtrs::SessionIdentity& identity) {
  return rnbd::make_server_session(identity, shared_.volumes.view(identity, reactor_, files_),
                                   shared_.log);
}

void ServerReactor::attach(fabric::Endpoint& endpoint) {
  auto line = std::make_unique<Line>();
  line->endpoint = &endpoint;
  Line* const raw = line.get();
  raw->watch = Watch::make(reactor_, endpoint.fd(), [this, raw] { serve(*raw); });
  [[maybe_unused]] const bool added = lines_.emplace(&endpoint, std::move(line)).second;
  assert(added);
  // What arrived together with the connection request does not announce itself again.
  raw->to_serve = true;
  to_serve_.push_back(raw);
}

void ServerReactor::detach(fabric::Endpoint& endpoint) {
  const auto found = lines_.find(&endpoint);
  if (found == lines_.end()) return;
  Line& line = *found->second;
  line.endpoint = nullptr;
  line.watch.reset();
  if (recent_ == &line) recent_ = nullptr;
  detached_.push_back(std::move(found->second));
  lines_.erase(found);
}

ServerReactor::Line* ServerReactor::find(fabric::Endpoint& endpoint) {
  if (recent_ != nullptr && recent_->endpoint == &endpoint) return recent_;
  const auto found = lines_.find(&endpoint);
  if (found == lines_.end()) return nullptr;
  recent_ = found->second.get();
  return recent_;
}

void ServerReactor::want_flush(fabric::Endpoint& endpoint) {
  Line* const line = find(endpoint);
  if (line == nullptr) {
    endpoint.flush(fabric::Wait::no);  // not attached (any more): there is no turn to wait for
    return;
  }
  // Large answers go out while their data is still in the cache, and the client gets to work
  // meanwhile.
  if (endpoint.unsent_bytes() >= early_flush_bytes && !endpoint.wants_write())
    endpoint.flush(fabric::Wait::no);
  if (line->to_flush) return;
  line->to_flush = true;
  to_flush_.push_back(line);
}

void ServerReactor::serve(Line& line) {
  line.to_serve = false;
  recent_ = &line;
  bool last_call = false;
  for (uint32_t calls = 0; line.endpoint != nullptr; ++calls) {
    if (calls == progress_calls_max) {
      line.to_serve = true;
      to_serve_.push_back(&line);
      return;
    }
    if (line.endpoint->progress(fabric::Wait::no, reactor_.now())) continue;
    // A short read empties the socket, except of the end of the stream: one more call finds that.
    if (line.endpoint == nullptr || !line.watch->hung_up() || last_call) break;
    last_call = true;
  }
  if (line.endpoint != nullptr && line.endpoint->wants_write()) line.watch->want_output();
}

// Everything that was posted in this turn goes out now, each endpoint with as few system calls as
// it can.
bool ServerReactor::end_turn() {
  if (!to_serve_.empty()) {
    std::vector<Line*> again;
    again.swap(to_serve_);
    for (Line* line : again) {
      if (line->endpoint != nullptr && line->to_serve) serve(*line);
    }
  }
  // A flush may find the connection gone and post nothing more, but callbacks may want further
  // flushes.
  flushing_.clear();
  flushing_.swap(to_flush_);
  for (Line* line : flushing_) {
    line->to_flush = false;
    if (line->endpoint == nullptr) continue;
    line->endpoint->flush(fabric::Wait::no);
    if (line->endpoint != nullptr && line->endpoint->wants_write()) line->watch->want_output();
  }
  flushing_.clear();
  const bool more = !to_serve_.empty() || !to_flush_.empty();
  if (!more) drop_detached();
  return more;
}

void ServerReactor::drop_detached() {
  if (detached_.empty()) return;
  detached_.clear();
}

}  // namespace rtrsnbd::daemon
