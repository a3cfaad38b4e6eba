// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/verbs/endpoint.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>

namespace rtrsnbd::fabric::verbs {

namespace {

// As the kernel's ends do (specification 2.3): nothing is read or compared remotely, and a peer
// that is out of receives is waited for.
rdma_conn_param parameters_with(std::span<const std::byte> private_data) {
  rdma_conn_param parameters{};
  parameters.private_data = private_data.data();
  parameters.private_data_len = static_cast<uint8_t>(private_data.size());
  parameters.retry_count = 7;
  parameters.rnr_retry_count = 7;
  return parameters;
}

// The reject reason that carries the peer's own words.
constexpr int reject_by_consumer = 28;
// Nobody listens.
constexpr int reject_invalid_service = 8;

int milliseconds(Duration duration) {
  return static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(duration).count());
}

std::string error_text(int error) {
  return std::strerror(error < 0 ? -error : error);
}

}  // namespace

VerbsEndpoint::VerbsEndpoint(const Options& options, VerbsDomain& domain,
                             const ConnectOptions& where, std::span<const std::byte> private_data,
                             TimePoint now)
    : options_(options),
      domain_(domain.shared()),
      queues_(where.queues),
      phase_(Phase::resolving),
      private_data_(private_data.begin(), private_data.end()),
      limit_(now + options.connect_limit) {
  manager_ = make_event_channel();
  rdma_cm_id* id = nullptr;
  if (rdma_create_id(manager_.get(), &id, nullptr, RDMA_PS_TCP) != 0)
    verbs::fail("RDMA identifier");
  id_.reset(id);
  set_up_descriptors();
  peer_ = where.target;
  int reuse = 1;
  rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &reuse, sizeof reuse);
  // librdmacm does not write to the addresses.
  auto* const source = where.source ? const_cast<sockaddr*>(where.source->get()) : nullptr;
  if (rdma_resolve_addr(id, source, const_cast<sockaddr*>(where.target.get()),
                        milliseconds(options_.connect_limit)) != 0)
    verbs::fail("no RDMA device leads to " + where.target.host_text());
}

VerbsEndpoint::VerbsEndpoint(const Options& options, VerbsDomain& domain, Owned<rdma_cm_id>& id,
                             const QueueSizes& queues)
    : options_(options), domain_(domain.shared()), queues_(queues), phase_(Phase::asked) {
  manager_ = make_event_channel();
  set_up_descriptors();
  local_ = local_address_of(*id);
  peer_ = peer_address_of(*id);
  auto queue_pair = std::make_unique<QueuePair>(*id, domain_, queues_);
  watch(queue_pair->channel_fd(), ready_completion);
  if (rdma_migrate_id(id.get(), manager_.get()) != 0) verbs::fail("RDMA identifier");
  // Nothing throws any more: until here the request keeps the id, to be rejected with.
  id_ = std::move(id);
  queue_pair_ = std::move(queue_pair);
}

VerbsEndpoint::~VerbsEndpoint() {
  if (queue_pair_ && phase_ >= Phase::open) rdma_disconnect(id_.get());
  queue_pair_.reset();
  id_.reset();
}

void VerbsEndpoint::set_up_descriptors() {
  epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (epoll_.get() < 0 || wake_.get() < 0) verbs::fail("descriptors of an RDMA connection");
  watch(manager_->fd, ready_manager);
  watch(wake_.get(), ready_wake);
  visible_fd_ = epoll_.get();
}

void VerbsEndpoint::watch(int fd, Ready kind) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u32 = kind;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    verbs::fail("watching an RDMA connection");
}

void VerbsEndpoint::make_queue_pair() {
  auto queue_pair = std::make_unique<QueuePair>(*id_, domain_, queues_);
  watch(queue_pair->channel_fd(), ready_completion);
  const std::lock_guard lock(mutex_);
  queue_pair_ = std::move(queue_pair);
  local_ = local_address_of(*id_);
}

// --- The send role

void VerbsEndpoint::accept(std::span<const std::byte> private_data) {
  assert(phase_ == Phase::asked);
  rdma_conn_param parameters = parameters_with(private_data);
  parameters.retry_count = 0;  // has no place in an answer
  if (rdma_accept(id_.get(), &parameters) != 0) return note_broken();
  phase_ = Phase::open;
  const std::lock_guard lock(mutex_);
  sendable_ = true;
}

void VerbsEndpoint::post_receive(uint64_t id, std::byte* buffer, size_t length) {
  const std::lock_guard lock(mutex_);
  if (!queue_pair_) return;
  try {
    if (queue_pair_->post_receive(id, buffer, length)) return;
  } catch (const std::exception&) {  // no memory to be registered
  }
  note_broken();
}

void VerbsEndpoint::post_empty_receives(uint64_t id, uint32_t count) {
  const std::lock_guard lock(mutex_);
  if (queue_pair_ && !queue_pair_->post_empty_receives(id, count)) note_broken();
}

bool VerbsEndpoint::post_send(const SendRequest& request) {
  const std::lock_guard lock(mutex_);
  if (!sendable_) return false;
  try {
    queue_pair_->post_send(request);
    return true;
  } catch (const std::exception&) {
    note_broken();
    return false;
  }
}

// What the device does not hold is posted by the receive role, which every completion wakes up; so
// nothing ever has to wait here.
void VerbsEndpoint::flush(Wait) {
  const std::lock_guard lock(mutex_);
  if (sendable_ && !queue_pair_->flush()) note_broken();
}

// Nobody has to wait for POLLOUT: completions make room, and they show as POLLIN.
bool VerbsEndpoint::wants_write() const {
  const std::lock_guard lock(mutex_);
  return queue_pair_ && queue_pair_->blocked();
}

size_t VerbsEndpoint::unsent_bytes() const {
  const std::lock_guard lock(mutex_);
  return queue_pair_ ? queue_pair_->unsent_bytes() : 0;
}

void VerbsEndpoint::wake() {
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

void VerbsEndpoint::note_broken() {
  broken_ = true;
  wake();
}

void VerbsEndpoint::abort() {
  {
    const std::lock_guard lock(mutex_);
    sendable_ = false;
  }
  abort_ = true;
  wake();
}

void VerbsEndpoint::disconnect(TimePoint) {
  {
    const std::lock_guard lock(mutex_);
    if (sendable_) {
      queue_pair_->post_marker();
      if (!queue_pair_->flush()) note_broken();
    }
    sendable_ = false;
  }
  leave_ = true;
  wake();
}

// --- The receive role

bool VerbsEndpoint::poll(TimePoint now) {
  if (!queue_pair_) return false;
  const bool some = queue_pair_->poll(*handler_) != 0;
  if (queue_pair_ && queue_pair_->failure()) {
    const auto failure = *queue_pair_->failure();
    finish(phase_ >= Phase::draining ? DisconnectReason::closed_by_us : failure.reason,
           failure.detail);
    return true;
  }
  if (some) check_requests(now);
  return some;
}

bool VerbsEndpoint::poll_for_a_while() {
  if (options_.busy_poll <= Duration::zero() || phase_ != Phase::open) return false;
  const auto end = Clock::now() + options_.busy_poll;
  do {
    if (poll(Clock::now())) return true;
    if (abort_ || leave_ || broken_) return false;
  } while (Clock::now() < end);
  return false;
}

bool VerbsEndpoint::progress(Wait wait, TimePoint now) {
  check_requests(now);
  if (phase_ == Phase::closed) return false;
  if (poll(now)) return phase_ != Phase::closed;
  if (wait == Wait::yes && poll_for_a_while()) return phase_ != Phase::closed;

  // Nothing there: ask to be told, and look again, as something may have come in between.
  if (queue_pair_ && !armed_) {
    if (!queue_pair_->arm()) note_broken();
    armed_ = true;
    if (poll(now)) return phase_ != Phase::closed;
  }
  const uint32_t ready =
      wait_for_events(wait == Wait::yes ? sleep_max : std::chrono::milliseconds(0));
  if ((ready & ready_wake) != 0) {
    uint64_t count = 0;
    (void)!::read(wake_.get(), &count, sizeof count);
    check_requests(now);
  }
  bool some = false;
  if ((ready & ready_completion) != 0 && queue_pair_) {
    queue_pair_->take_event();
    armed_ = false;
    // A sleeper returns to whoever wanted the first completion; others come back at once anyway.
    some = poll(now);
    if (phase_ != Phase::closed && wait == Wait::no && !armed_) {
      if (!queue_pair_->arm()) note_broken();
      armed_ = true;
      some = poll(now) || some;
    }
  }
  if ((ready & ready_manager) != 0) {
    while (phase_ != Phase::closed) {
      auto event = next_event();
      if (!event) break;
      on_event(*event, now);
      some = true;
    }
  }
  check_limits(now);
  return some && phase_ != Phase::closed;
}

void VerbsEndpoint::tick(TimePoint now) {
  check_requests(now);
  check_limits(now);
}

uint32_t VerbsEndpoint::wait_for_events(std::chrono::milliseconds limit) {
  std::array<epoll_event, 3> events;
  const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                               static_cast<int>(limit.count()));
  uint32_t ready = 0;
  for (int i = 0; i < count; ++i) ready |= events[static_cast<size_t>(i)].data.u32;
  return ready;
}

// What other threads asked for, and what has come of what we asked for.
void VerbsEndpoint::check_requests(TimePoint now) {
  if (phase_ == Phase::closed) return;
  if (abort_) return finish(DisconnectReason::closed_by_us, "");
  if (broken_) return finish(DisconnectReason::connection_lost, "the device refuses to work");
  if (!leave_) return;
  if (phase_ < Phase::open) return finish(DisconnectReason::closed_by_us, "");
  if (phase_ == Phase::open) {
    phase_ = Phase::draining;
    limit_ = now + drain_limit;
  }
  if (phase_ == Phase::draining && (now >= limit_ || queue_pair_->all_sent())) {
    phase_ = Phase::leaving;
    limit_ = now + leave_limit;
    if (rdma_disconnect(id_.get()) != 0) finish(DisconnectReason::closed_by_us, "");
  }
}

void VerbsEndpoint::check_limits(TimePoint now) {
  if (phase_ == Phase::closed || phase_ == Phase::open || phase_ == Phase::asked || now < limit_)
    return;
  if (phase_ >= Phase::draining) {
    if (phase_ == Phase::leaving) finish(DisconnectReason::closed_by_us, "");
    return;
  }
  finish(DisconnectReason::unreachable,
         "no answer within " + std::to_string(milliseconds(options_.connect_limit)) + " ms");
}

std::optional<VerbsEndpoint::Event> VerbsEndpoint::next_event() {
  rdma_cm_event* event = nullptr;
  if (rdma_get_cm_event(manager_.get(), &event) != 0) return std::nullopt;
  Event copy{event->event, event->status, {}};
  const auto* const data = static_cast<const std::byte*>(event->param.conn.private_data);
  if (data != nullptr &&
      (event->event == RDMA_CM_EVENT_ESTABLISHED || event->event == RDMA_CM_EVENT_REJECTED))
    copy.private_data.assign(data, data + event->param.conn.private_data_len);
  rdma_ack_cm_event(event);
  return copy;
}

void VerbsEndpoint::on_event(Event& event, TimePoint now) {
  switch (event.type) {
    case RDMA_CM_EVENT_ADDR_RESOLVED:
      return resolve_route();
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
      return ask();
    case RDMA_CM_EVENT_ESTABLISHED: {
      if (phase_ != Phase::asking) return;  // the passive side is open since it accepted
      phase_ = Phase::open;
      {
        const std::lock_guard lock(mutex_);
        sendable_ = true;
      }
      return handler_->on_established(event.private_data);
    }
    case RDMA_CM_EVENT_REJECTED:
      // The other end gave up before it knew that the connection was up.
      if (phase_ != Phase::asking)
        return finish(DisconnectReason::connection_lost, "given up by the peer");
      // iWARP has no reasons, only whether the peer said something.
      if (event.status == reject_by_consumer || (event.status < 0 && !event.private_data.empty())) {
        phase_ = Phase::closed;
        {
          const std::lock_guard lock(mutex_);
          queue_pair_.reset();
        }
        id_.reset();
        visible_fd_ = -1;
        return handler_->on_rejected(event.private_data);
      }
      if (event.status == reject_invalid_service)
        return finish(DisconnectReason::refused, "nobody listens there");
      return finish(DisconnectReason::refused,
                    "by the connection manager, reason " + std::to_string(event.status));
    case RDMA_CM_EVENT_ADDR_ERROR:
      return finish(DisconnectReason::unreachable,
                    "no RDMA device leads there: " + error_text(event.status));
    case RDMA_CM_EVENT_ROUTE_ERROR:
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_CONNECT_ERROR:
      return finish(DisconnectReason::unreachable,
                    std::string(rdma_event_str(event.type)) + ": " + error_text(event.status));
    case RDMA_CM_EVENT_DISCONNECTED: {
      // What it sent before it left comes first.
      while (phase_ != Phase::closed && queue_pair_->poll(*handler_) != 0) check_requests(now);
      if (phase_ == Phase::closed) return;
      // The peer waits for our answer, which finish() gives.
      const bool ours = phase_ >= Phase::draining;
      return finish(ours ? DisconnectReason::closed_by_us : DisconnectReason::closed_by_peer, "");
    }
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
      return finish(DisconnectReason::connection_lost, "the RDMA device was removed");
    case RDMA_CM_EVENT_ADDR_CHANGE:
      return finish(DisconnectReason::connection_lost,
                    "the address has moved to another RDMA device");
    default:  // e.g. TIMEWAIT_EXIT
      return;
  }
}

void VerbsEndpoint::resolve_route() {
  try {
    make_queue_pair();
  } catch (const std::exception& error) {
    return finish(DisconnectReason::unreachable, error.what());
  }
  if (rdma_resolve_route(id_.get(), milliseconds(options_.connect_limit)) != 0)
    finish(DisconnectReason::unreachable, error_text(errno));
}

void VerbsEndpoint::ask() {
  phase_ = Phase::asking;
  rdma_conn_param parameters = parameters_with(private_data_);
  if (rdma_connect(id_.get(), &parameters) != 0)
    finish(DisconnectReason::unreachable, error_text(errno));
}

// Once the queue pair is gone the device reads and writes nothing of this connection any more.
// Dropping the id tells the peer where rdma_disconnect could not, because it has not confirmed the
// connection yet.
void VerbsEndpoint::finish(DisconnectReason reason, const std::string& detail) {
  if (phase_ == Phase::closed) return;
  const bool connected = phase_ >= Phase::open;
  phase_ = Phase::closed;
  if (connected) rdma_disconnect(id_.get());
  {
    const std::lock_guard lock(mutex_);
    sendable_ = false;
    if (queue_pair_) {
      last_counters_.bytes_sent = queue_pair_->bytes_sent;
      last_counters_.bytes_received = queue_pair_->bytes_received;
      last_counters_.messages_sent = queue_pair_->messages_sent;
      last_counters_.messages_received = queue_pair_->messages_received;
      last_counters_.send_calls = queue_pair_->send_calls;
      last_counters_.receive_calls = queue_pair_->receive_calls;
    }
    queue_pair_.reset();
  }
  id_.reset();
  visible_fd_ = -1;
  handler_->on_disconnected(reason, detail);
}

Address VerbsEndpoint::local_address() const {
  const std::lock_guard lock(mutex_);
  return local_;
}

Address VerbsEndpoint::peer_address() const {
  const std::lock_guard lock(mutex_);
  return peer_;
}

Endpoint::Counters VerbsEndpoint::counters() const {
  const std::lock_guard lock(mutex_);
  if (!queue_pair_) return last_counters_;
  return {queue_pair_->bytes_sent,        queue_pair_->bytes_received, queue_pair_->messages_sent,
          queue_pair_->messages_received, queue_pair_->send_calls,     queue_pair_->receive_calls};
}

}  // namespace rtrsnbd::fabric::verbs
