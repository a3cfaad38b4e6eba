// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/session.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "protocol/fabric/verbs/fabric.h"
#include "protocol/rnbd/client.h"

namespace rtrsnbd::plugin {

namespace {

constexpr uint32_t default_connections_max = 4;
constexpr auto disconnect_limit = std::chrono::seconds(2);

wire::Uuid random_uuid() {
  wire::Uuid uuid;
  if (getrandom(uuid.data(), uuid.size(), 0) != static_cast<ssize_t>(uuid.size())) {
    throw std::system_error(errno, std::generic_category(), "getrandom");
  }
  uuid[6] = (uuid[6] & std::byte{0x0f}) | std::byte{0x40};  // version 4
  uuid[8] = (uuid[8] & std::byte{0x3f}) | std::byte{0x80};  // RFC 4122 variant
  return uuid;
}

uint32_t usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return static_cast<uint32_t>(std::max(1, CPU_COUNT(&set)));
}

std::string default_session_name() {
  char host[65] = "client";
  gethostname(host, sizeof host - 1);
  std::string name(host);
  std::replace(name.begin(), name.end(), '.', '-');
  std::replace(name.begin(), name.end(), '/', '-');
  return (name.empty() ? "client" : name) + "-" + std::to_string(getpid());
}

}  // namespace

Session::Session(const Parameters& parameters, LogSink log)
    : parameters_(parameters),
      server_text_(parameters.server->text),
      log_(std::move(log)),
      soft_(fabric::soft::make_fabric({.crc = parameters.crc})),
      rdma_(fabric::verbs::make_fabric({.connect_limit = parameters.connect_timeout})) {
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

tl::expected<std::shared_ptr<Session>, std::string> Session::connect(const Parameters& parameters,
                                                                     LogSink log) {
  const auto prefix = "server " + parameters.server->text + ": ";
  try {
    std::shared_ptr<Session> session(new Session(parameters, std::move(log)));
    session->housekeeper_ =
        std::jthread([raw = session.get()](const std::stop_token& stop) { raw->housekeep(stop); });
    {
      std::unique_lock lock(session->mutex_);
      session->settled_.wait(lock, [&] { return !session->connecting_; });
      if (!session->connect_error_.empty()) return tl::unexpected(prefix + session->connect_error_);
    }

    const wire::SessionInfo request;
    wire::SessionInfo response;
    Operation operation;
    operation.is_read = true;
    operation.user = wire::bytes_of(request);
    operation.read_data = reinterpret_cast<std::byte*>(&response);
    operation.data_length = sizeof response;
    const int error = session->run(0, operation);
    if (error == rtrs::path_lost) return tl::unexpected(prefix + session->failure());
    if (error != 0 || !wire::parse_session_info_response(wire::bytes_of(response))) {
      return tl::unexpected(prefix + "speaks RTRS, but not RNBD");
    }
    return session;
  } catch (const std::exception& error) {
    return tl::unexpected(prefix + error.what());
  }
}

Session::~Session() {
  if (housekeeper_.joinable()) {
    housekeeper_.request_stop();
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = write(wake_fd_, &one, sizeof one);
    housekeeper_.join();
  }
  if (wake_fd_ >= 0) close(wake_fd_);
}

bool Session::start(uint32_t lane, Operation& operation, bool wait_for_permit) {
  operation.lane_ = lanes_[lane].get();
  operation.state_.store(Operation::waiting, std::memory_order_relaxed);
  if (wait_for_permit) {
    operation.permit_ = permits_->acquire();
  } else {
    const auto permit = permits_->try_acquire();
    if (!permit) return false;
    operation.permit_ = *permit;
  }
  sent_tick_[operation.permit_].store(tick_.load(std::memory_order_relaxed),
                                      std::memory_order_relaxed);
  if (!path_->submit(operation.lane_->cid(), operation.permit_, operation)) {
    operation.error_ = rtrs::path_lost;
    operation.state_.store(Operation::done, std::memory_order_release);
  }
  return true;
}

int Session::wait(Operation& operation) {
  operation.lane_->wait(operation);
  sent_tick_[operation.permit_].store(0, std::memory_order_relaxed);
  permits_->release(operation.permit_);
  return operation.error_;
}

// By the transports the user allows, the better one first.
bool Session::connect_target(const fabric::Address& target, const fabric::Address* source,
                             std::string& error) {
  const auto failed = [&] {
    const std::string address = target.text();
    error = (server_text_.ends_with(address) ? "" : address + ": ") + path_->failure();
    drive_all(false, disconnect_limit);
    return false;
  };
  const Server::Transport transport = parameters_.server->transport;
  if (transport != Server::Transport::tcp) {
    const auto problem = fabric::verbs::why_unreachable(target, source);
    if (!problem) {
      if (connect_path(*rdma_, target, source)) return true;
      failed();
      if (transport == Server::Transport::rdma) return false;
      log_(LogLevel::warning, "server " + server_text_ + " by RDMA: " + error + "; trying TCP");
    } else if (transport == Server::Transport::rdma) {
      error = *problem + "; tcp: works without one";
      return false;
    } else {
      log_(LogLevel::info, "server " + server_text_ + " by TCP: " + *problem);
    }
  }
  return connect_path(*soft_, target, source) || failed();
}

bool Session::connect_path(fabric::Fabric& fabric, const fabric::Address& target,
                           const fabric::Address* source) {
  rtrs::ClientOptions options;
  options.where.target = target;
  if (source != nullptr) options.where.source = *source;
  options.session_uuid = random_uuid();
  options.path_uuid = random_uuid();
  options.session_name = parameters_.session.empty() ? default_session_name() : parameters_.session;
  options.io_connections = parameters_.connections != 0
                               ? parameters_.connections
                               : std::min(usable_cpus(), default_connections_max);
  options.heartbeat.interval = parameters_.heartbeat_interval;
  options.connect_timeout = parameters_.connect_timeout;
  path_ = std::make_unique<rtrs::ClientPath>(fabric, options, log_);
  path_->start(Clock::now());
  drive_all(true, parameters_.connect_timeout + std::chrono::seconds(1));
  return usable();
}

// Drives every connection from this one thread: while connecting, and when the path ends.
// Connections led by a request thread are left to it.
void Session::drive_all(bool until_connected, Duration limit) {
  const TimePoint end = Clock::now() + limit;
  std::vector<pollfd> fds;
  std::vector<bool> ours(parameters_.connections + connections_max + 1, lanes_.empty());
  ours[0] = true;
  while (!path_->closed()) {
    bool more = false;
    const TimePoint now = Clock::now();
    path_->tick(now);
    if (until_connected && usable()) return;
    if (now >= end) path_->fail("closing took too long");
    fds.clear();
    for (uint32_t cid = 0; cid < path_->connection_count(); ++cid) {
      if (path_->connection_closed(cid)) continue;
      if (!ours[cid]) ours[cid] = lanes_[cid]->take_lead();
      if (!ours[cid]) continue;
      auto& endpoint = path_->endpoint(cid);
      more = endpoint.progress(fabric::Wait::no, now) || more;
      endpoint.tick(now);
      if (path_->connection_closed(cid) || endpoint.fd() < 0) continue;
      const auto events = static_cast<short>(POLLIN | (endpoint.wants_write() ? POLLOUT : 0));
      fds.push_back({endpoint.fd(), events, 0});
    }
    if (path_->closed() || (until_connected && usable())) continue;
    poll(fds.data(), fds.size(), more ? 0 : 20);
  }
}

void Session::check_overdue() {
  const uint32_t tick = tick_.fetch_add(1, std::memory_order_relaxed) + 1;
  const auto limit = static_cast<uint32_t>(parameters_.io_timeout / path_->tick_interval()) + 1;
  for (const auto& sent : sent_tick_) {
    const uint32_t since = sent.load(std::memory_order_relaxed);
    if (since != 0 && tick - since > limit) {
      path_->fail("a request was not answered within io-timeout=" +
                  std::to_string(parameters_.io_timeout.count()) + "ms");
      return;
    }
  }
}

void Session::housekeep(std::stop_token stop) {
  // Connecting: each address the name resolves to, in order.
  std::string error;
  try {
    const auto targets = fabric::resolve(parameters_.server->where, false);
    if (!targets) {
      error = targets.error();
    } else {
      std::vector<fabric::Address> sources;
      if (!parameters_.server->source.empty()) {
        const auto resolved = fabric::resolve({parameters_.server->source, 0}, false);
        if (resolved) {
          sources = *resolved;
        } else {
          error = "source address " + parameters_.server->source + ": " + resolved.error();
        }
      }
      for (const auto& target : *targets) {
        if (!error.empty() && parameters_.server->source.size() != 0 && sources.empty()) break;
        const fabric::Address* source = nullptr;
        for (const auto& candidate : sources) {
          if (candidate.family() == target.family()) source = &candidate;
        }
        if (!sources.empty() && source == nullptr) {
          error = "no source address of the family of " + target.text();
          continue;
        }
        if (connect_target(target, source, error)) {
          error.clear();
          break;
        }
      }
    }
  } catch (const std::exception& exception) {
    error = exception.what();
  }

  const bool connected = path_ && usable();
  if (connected) {
    permits_ = std::make_unique<rtrs::Permits>(geometry().queue_depth);
    sent_tick_ = std::vector<std::atomic<uint32_t>>(geometry().queue_depth);
    for (uint32_t cid = 0; cid < path_->connection_count(); ++cid) {
      lanes_.push_back(std::make_unique<Lane>(*path_, cid));
    }
    lanes_[0]->take_lead();
    log_(LogLevel::info, "connected to " + server_text_ + ": " + std::to_string(lane_count()) +
                             " IO connections, queue depth " +
                             std::to_string(geometry().queue_depth) + ", max IO size " +
                             std::to_string(geometry().max_io_size));
  } else if (error.empty()) {
    error = "could not connect";
  }
  {
    const std::lock_guard lock(mutex_);
    connect_error_ = error;
    connecting_ = false;
  }
  settled_.notify_all();
  if (!connected) return;

  // Connected: the service connection, timers.
  auto& service = path_->endpoint(0);
  const Duration interval = path_->tick_interval();
  TimePoint next_tick = Clock::now() + interval;
  while (!stop.stop_requested() && usable()) {
    pollfd fds[2] = {
        {service.fd(), static_cast<short>(POLLIN | (service.wants_write() ? POLLOUT : 0)), 0},
        {wake_fd_, POLLIN, 0}};
    const TimePoint before = Clock::now();
    const auto wait =
        std::chrono::duration_cast<std::chrono::milliseconds>(next_tick - before).count() + 1;
    poll(fds, 2, static_cast<int>(std::max<int64_t>(wait, 0)));
    const TimePoint now = Clock::now();
    if ((fds[0].revents & (POLLIN | POLLOUT | POLLHUP | POLLERR)) != 0) {
      while (service.progress(fabric::Wait::no, now)) continue;
    }
    if (now >= next_tick) {
      next_tick = now + interval;
      service.tick(now);
      path_->tick(now);
      check_overdue();
    }
  }

  fabric::Endpoint::Counters sum;
  for (uint32_t cid = 1; cid < path_->connection_count(); ++cid) {
    const auto counters = path_->endpoint(cid).counters();
    sum.messages_sent += counters.messages_sent;
    sum.send_calls += counters.send_calls;
    sum.messages_received += counters.messages_received;
    sum.receive_calls += counters.receive_calls;
  }
  log_(LogLevel::debug, "session of " + server_text_ + ": " + std::to_string(sum.messages_sent) +
                            " messages sent in " + std::to_string(sum.send_calls) + " calls, " +
                            std::to_string(sum.messages_received) + " received in " +
                            std::to_string(sum.receive_calls));
  if (usable()) {
    path_->disconnect(Clock::now());
  } else {
    log_(LogLevel::error, "server " + server_text_ + ": session lost: " + failure());
  }
  drive_all(false, disconnect_limit);
}

}  // namespace rtrsnbd::plugin
