// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/soft/listener.h"

#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "protocol/fabric/soft/endpoint.h"

namespace rtrsnbd::fabric::soft {

namespace {

class SoftConnectRequest final : public ConnectRequest {
 public:
  SoftConnectRequest(const Options& options, std::shared_ptr<KeyTable> keys, Socket socket,
                     const MpaReader& reader)
      : options_(options),
        keys_(std::move(keys)),
        socket_(std::move(socket)),
        reader_(reader),
        local_(local_address_of(socket_.get())),
        peer_(peer_address_of(socket_.get())) {}

  [[nodiscard]] std::span<const std::byte> private_data() const override {
    return reader_.private_data();
  }
  [[nodiscard]] Address local_address() const override { return local_; }
  [[nodiscard]] Address peer_address() const override { return peer_; }

  [[nodiscard]] Capabilities capabilities() const override { return soft::capabilities; }
  [[nodiscard]] std::unique_ptr<Domain> make_domain() const override {
    return std::make_unique<SoftDomain>(keys_);
  }

  std::unique_ptr<Endpoint> make_endpoint(Domain& domain, const QueueSizes&) override {
    assert(socket_);
    return std::make_unique<SoftEndpoint>(options_, dynamic_cast<SoftDomain&>(domain),
                                          std::move(socket_), reader_.terms());
  }

  void reject(std::span<const std::byte> private_data) override {
    assert(socket_);
    MpaFrame frame;
    iovec vector{frame.data(), make_mpa_reject(frame, reader_.terms(), private_data)};
    // The first bytes of a fresh socket find room; a peer that is gone needs no answer.
    (void)send(socket_.get(), {&vector, 1}, MSG_DONTWAIT);
    socket_.close();
  }

 private:
  const Options options_;
  const std::shared_ptr<KeyTable> keys_;
  Socket socket_;
  MpaReader reader_;
  Address local_, peer_;
};

[[noreturn]] void fail(const char* what, const Address& address) {
  throw std::system_error(errno, std::generic_category(), std::string(what) + " " + address.text());
}

bool add_to_epoll(int epoll, int fd, void* tag) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = tag;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

bool is_unspecified(const Address& address) {
  if (address.family() != AF_INET6) return false;
  sockaddr_in6 v6;
  std::memcpy(&v6, address.get(), sizeof v6);
  return IN6_IS_ADDR_UNSPECIFIED(&v6.sin6_addr);
}

}  // namespace

SoftListener::SoftListener(const Options& options, std::shared_ptr<KeyTable> keys,
                           const Address& address)
    : options_(options), keys_(std::move(keys)) {
  epoll_ = Socket(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) fail("epoll for", address);
  socket_ = Socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_) fail("socket for", address);
  const int fd = socket_.get();
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.family() == AF_INET6) {
    // "Any address" means that of both families, whatever the system's default.
    const int only = is_unspecified(address) ? 0 : 1;
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof only);
  }
  if (::bind(fd, address.get(), address.length()) != 0) fail("cannot listen on", address);
  if (::listen(fd, backlog) != 0) fail("cannot listen on", address);
  if (!add_to_epoll(epoll_.get(), fd, nullptr)) fail("epoll for", address);
  accepting_ = true;
}

void SoftListener::log(LogLevel level, const std::string& line) const {
  if (options_.log) options_.log(level, line);
}

void SoftListener::drop(Pending& pending, std::string_view why) {
  log(LogLevel::info, "connection from " + pending.peer.text() + " dropped: " + std::string(why));
  pending.socket.close();
  pending.done = true;
}

void SoftListener::progress(TimePoint now, const OnRequest& on_request) {
  std::array<epoll_event, 64> events;
  const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  bool acceptable = false;
  for (int i = 0; i < count; ++i) {
    const auto& event = events[static_cast<size_t>(i)];
    if (event.data.ptr == nullptr)
      acceptable = true;
    else
      read_request(*static_cast<Pending*>(event.data.ptr), on_request);
  }
  for (Pending& pending : pending_)
    if (!pending.done && now - pending.since >= options_.request_limit)
      drop(pending, "no complete connection request in time");
  pending_.remove_if([](const Pending& pending) { return pending.done; });
  if (acceptable) accept_some(now, on_request);
  listen_while_room(now);
}

void SoftListener::accept_some(TimePoint now, const OnRequest& on_request) {
  for (int i = 0; i < accepts_per_turn; ++i) {
    if (pending_.size() >= options_.pending_max) {
      Pending& oldest = pending_.front();
      if (now - oldest.since < options_.crowding_grace) return;
      drop(oldest, "too many connections in set-up");
      pending_.pop_front();
    }
    sockaddr_storage storage{};
    socklen_t length = sizeof storage;
    Socket socket(
        accept4(socket_.get(), reinterpret_cast<sockaddr*>(&storage), &length, SOCK_CLOEXEC));
    if (!socket) {
      switch (errno) {
        case EAGAIN:
          return;
        case EMFILE:
        case ENFILE:
        case ENOBUFS:
        case ENOMEM:
          log(LogLevel::warning, "cannot accept connections on " + address().text() +
                                     " now: " + std::generic_category().message(errno));
          paused_until_ = now + accept_pause;
          return;
        default:
          continue;  // that connection failed, or a signal came; the next may be good
      }
    }
    prepare_connection(socket.get());
    const Address peer(reinterpret_cast<sockaddr*>(&storage), length);
    make_room(peer, now);
    Pending& pending = pending_.emplace_back();
    pending.socket = std::move(socket);
    pending.peer = peer;
    pending.since = now;
    // The request is mostly there already.
    read_request(pending, on_request);
    if (pending.done)
      pending_.pop_back();
    else if (!add_to_epoll(epoll_.get(), pending.socket.get(), &pending)) {
      drop(pending, "out of resources");
      pending_.pop_back();
    }
  }
}

// One source may not crowd out the others.
void SoftListener::make_room(const Address& peer, TimePoint now) {
  size_t slow = 0;
  auto oldest = pending_.end();
  for (auto i = pending_.begin(); i != pending_.end(); ++i) {
    if (now - i->since < options_.crowding_grace || !i->peer.same_host(peer)) continue;
    if (oldest == pending_.end()) oldest = i;
    ++slow;
  }
  if (slow < options_.pending_per_source_max) return;
  drop(*oldest, "too many connections in set-up from its address");
  pending_.erase(oldest);
}

void SoftListener::read_request(Pending& pending, const OnRequest& on_request) {
  MpaReader& reader = pending.reader;
  while (reader.state() == MpaReader::State::reading) {
    const auto buffer = reader.buffer();
    const iovec vector{buffer.data(), buffer.size()};
    const ssize_t count = receive(pending.socket.get(), {&vector, 1}, MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (count <= 0) return drop(pending, "closed before its connection request was complete");
    reader.received(static_cast<size_t>(count));
  }
  pending.done = true;
  switch (reader.state()) {
    case MpaReader::State::complete:
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, pending.socket.get(), nullptr);
      on_request(
          std::make_unique<SoftConnectRequest>(options_, keys_, std::move(pending.socket), reader));
      return;
    case MpaReader::State::refused: {
      MpaFrame frame;
      iovec vector{frame.data(), make_mpa_reject(frame, reader.terms(), {})};
      (void)send(pending.socket.get(), {&vector, 1}, MSG_DONTWAIT);
      // Its private data has not been read; closing now would reset the connection and with it the
      // answer.
      ::shutdown(pending.socket.get(), SHUT_WR);
      std::array<std::byte, wire::iwarp::mpa_frame_max> rest;
      const iovec room{rest.data(), rest.size()};
      (void)receive(pending.socket.get(), {&room, 1}, MSG_DONTWAIT);
      return drop(pending, reader.why());
    }
    default:
      return drop(pending, reader.why());
  }
}

// Takes the listening socket out of the epoll set while there is no room, so that nobody spins on
// it; the backlog keeps the connections meanwhile.
void SoftListener::listen_while_room(TimePoint now) {
  if (paused_until_ && now >= *paused_until_) paused_until_.reset();
  const bool full = pending_.size() >= options_.pending_max &&
                    now - pending_.front().since < options_.crowding_grace;
  const bool wanted = !paused_until_ && !full;
  if (wanted == accepting_) return;
  if (wanted)
    accepting_ = add_to_epoll(epoll_.get(), socket_.get(), nullptr);
  else if (epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket_.get(), nullptr) == 0)
    accepting_ = false;
}

}  // namespace rtrsnbd::fabric::soft
