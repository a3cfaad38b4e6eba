// SPDX-License-Identifier: BSD-3-Clause
#include "tests/support/memory_fabric.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <deque>
#include <stdexcept>

namespace rtrsnbd::test {

using fabric::Address;
using fabric::Completion;
using fabric::DisconnectReason;
using fabric::SendKind;
using fabric::Wait;

namespace {

// A key is a slot number and a generation in the low byte, as RDMA cards do it.
constexpr uint32_t generation_mask = 0xff;
// Remote addresses are offsets into a made-up space, far apart, so that nobody takes them for
// pointers.
constexpr uint64_t address_distance = uint64_t{1} << 40;

struct Slot {
  std::byte* memory = nullptr;
  size_t length = 0;
  uint32_t key = 0;
  bool valid = false;
};

}  // namespace

// Shared by everything of one fabric; outlives all of it.
struct MemoryFabric::Core {
  MemoryFabricOptions options;
  MemoryFabric* owner = nullptr;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<MemoryEndpoint*> endpoints;
  struct ListenerEntry {
    Address address;
    std::deque<std::unique_ptr<fabric::ConnectRequest>> waiting;
    int fd = -1;
  };
  std::vector<ListenerEntry*> listeners;
  uint32_t next_slot = 1;
  uint16_t next_port = 40000;
  size_t regions = 0;
  bool placement_in_progress = false;
};

struct MemoryDomainState {
  std::shared_ptr<MemoryFabric::Core> core;
  std::vector<std::pair<uint32_t, std::shared_ptr<Slot>>> slots;  // by slot number, ascending

  // Null unless the key is the one that is valid now.
  Slot* find(uint32_t key) {
    const uint32_t number = key >> 8;
    const auto found =
        std::lower_bound(slots.begin(), slots.end(), number,
                         [](const auto& slot, uint32_t n) { return slot.first < n; });
    if (found == slots.end() || found->first != number) return nullptr;
    Slot& slot = *found->second;
    return slot.valid && slot.key == key ? &slot : nullptr;
  }
};

namespace {

class MemoryRegion final : public fabric::Region {
 public:
  MemoryRegion(std::shared_ptr<MemoryDomainState> domain, std::byte* memory, size_t length)
      : domain_(std::move(domain)), slot_(std::make_shared<Slot>()) {
    const std::lock_guard lock(domain_->core->mutex);
    number_ = domain_->core->next_slot++;
    ++domain_->core->regions;
    *slot_ = {memory, length, number_ << 8, length != 0};
    domain_->slots.emplace_back(number_, slot_);
  }
  ~MemoryRegion() override {
    const std::lock_guard lock(domain_->core->mutex);
    --domain_->core->regions;
    std::erase_if(domain_->slots, [this](const auto& slot) { return slot.first == number_; });
  }
  [[nodiscard]] uint32_t rkey() const override {
    const std::lock_guard lock(domain_->core->mutex);
    return slot_->key;
  }
  [[nodiscard]] uint64_t remote_address() const override { return address_distance * number_; }
  bool invalidate() override {
    const std::lock_guard lock(domain_->core->mutex);
    slot_->valid = false;
    return !domain_->core->placement_in_progress;
  }
  uint32_t renew() override {
    const std::lock_guard lock(domain_->core->mutex);
    if (!domain_->core->options.fresh_rkey) throw std::logic_error("renew without fresh_rkey");
    return fresh_key();
  }
  void rebind(std::byte* memory, size_t length) override {
    const std::lock_guard lock(domain_->core->mutex);
    if (!domain_->core->options.rebind) throw std::logic_error("rebind without the capability");
    slot_->memory = memory;
    slot_->length = length;
    fresh_key();
  }

 private:
  uint32_t fresh_key() {
    slot_->key = (slot_->key & ~generation_mask) | ((slot_->key + 1) & generation_mask);
    slot_->valid = slot_->length != 0;
    return slot_->key;
  }

  std::shared_ptr<MemoryDomainState> domain_;
  std::shared_ptr<Slot> slot_;
  uint32_t number_ = 0;
};

class MemoryDomain final : public fabric::Domain {
 public:
  explicit MemoryDomain(std::shared_ptr<MemoryFabric::Core> core)
      : state_(std::make_shared<MemoryDomainState>()) {
    state_->core = std::move(core);
  }
  std::unique_ptr<fabric::Region> register_region(std::byte* memory, size_t length,
                                                  fabric::Access) override {
    return std::make_unique<MemoryRegion>(state_, memory, length);
  }
  std::unique_ptr<fabric::LocalMemory> register_local(std::byte*, size_t) override {
    return std::make_unique<fabric::LocalMemory>();
  }
  [[nodiscard]] const std::shared_ptr<MemoryDomainState>& state() const { return state_; }

 private:
  std::shared_ptr<MemoryDomainState> state_;
};

void signal(int fd) {
  const uint64_t one = 1;
  if (fd >= 0 && write(fd, &one, sizeof one) != sizeof one) throw std::runtime_error("eventfd");
}

void drain(int fd) {
  uint64_t value;
  if (fd >= 0 && read(fd, &value, sizeof value) < 0) assert(errno == EAGAIN);
}

}  // namespace

struct MemoryEndpoint::State {
  struct Piece {
    const std::byte* data;
    size_t length;
  };
  enum class What : uint8_t { message, established, rejected, disconnected };
  // Something under way to an endpoint.
  struct Item {
    What what = What::message;
    // message
    SendKind kind = SendKind::send;
    uint32_t immediate = 0, rkey = 0, invalidate_rkey = 0;
    uint64_t remote_address = 0;
    std::vector<std::byte> copy{};  // payload of a copied message, or private data
    std::vector<Piece> pieces{};    // payload that is read at delivery
    // disconnected
    DisconnectReason reason{};
    std::string detail{};

    [[nodiscard]] size_t length() const {
      size_t sum = copy.size();
      for (const Piece& piece : pieces) sum += piece.length;
      return sum;
    }
    void read_payload() {
      for (const Piece& piece : pieces)
        copy.insert(copy.end(), piece.data, piece.data + piece.length);
      pieces.clear();
    }
  };
  struct Receive {
    uint64_t id;
    std::byte* buffer;
    size_t length;
    uint32_t count;
  };

  // Whoever posts more receives than he announced loses them on a card.
  void check_promise() const {
    uint64_t sum = 0;
    for (const Receive& receive : receives) sum += receive.count;
    if (sum > receives_max) throw std::logic_error("more receives than the queue sizes said");
  }

  std::shared_ptr<MemoryDomainState> domain;
  std::weak_ptr<State> peer;
  MemoryEndpoint* endpoint = nullptr;  // null when destroyed
  fabric::Handler* handler = nullptr;
  Address local, remote;
  std::deque<Item> inbox, outbox;
  std::deque<Receive> receives;
  uint32_t receives_max = 0;  // what the owner promised
  Counters counters;
  uint64_t flushes = 0, deliveries = 0;
  bool held = false, silent = false;
  bool finished = false;  // on_disconnected or on_rejected was called
  bool closing = false;   // nothing more is sent or accepted for delivery
  bool delivering = false;
  mutable int fd = -1;

  void push(Item item) {
    if (finished) return;
    if (item.what == What::disconnected) {
      if (closing) return;
      closing = true;
    }
    inbox.push_back(std::move(item));
    domain->core->changed.notify_all();
    signal(fd);
  }
  // Ahead of everything that is under way, which is lost.
  void push_final(DisconnectReason reason, std::string detail) {
    if (finished) return;
    inbox.clear();
    closing = false;
    push({.what = What::disconnected, .reason = reason, .detail = std::move(detail)});
  }
  [[nodiscard]] bool gone() const { return finished || closing; }
};

namespace {

template <typename Item>
bool takes_receive(const Item& item) {
  return item.kind != SendKind::write;
}

}  // namespace

MemoryEndpoint::MemoryEndpoint(std::shared_ptr<MemoryFabric::Core> core,
                               std::shared_ptr<MemoryDomainState> domain)
    : core_(std::move(core)), state_(std::make_shared<State>()) {
  state_->domain = std::move(domain);
  state_->endpoint = this;
  core_->endpoints.push_back(this);
}

MemoryEndpoint::~MemoryEndpoint() {
  const std::lock_guard lock(core_->mutex);
  assert(!state_->delivering && "destroyed while progress() is on the stack");
  std::erase(core_->endpoints, this);
  state_->endpoint = nullptr;
  state_->handler = nullptr;
  if (!state_->finished) {
    if (const auto other = state_->peer.lock()) {
      // What this end sent and nobody read yet goes down with it.
      if (!state_->silent)
        other->push_final(DisconnectReason::connection_lost, "peer endpoint destroyed");
    }
  }
  state_->finished = true;
  state_->inbox.clear();
  state_->outbox.clear();
  if (state_->fd >= 0) close(state_->fd);
  state_->fd = -1;
  core_->changed.notify_all();
}

void MemoryEndpoint::link(const std::shared_ptr<State>& one, const std::shared_ptr<State>& other) {
  one->peer = other;
  other->peer = one;
}

void MemoryEndpoint::set_handler(fabric::Handler* handler) {
  state_->handler = handler;
}

void MemoryEndpoint::accept(std::span<const std::byte> private_data) {
  const std::lock_guard lock(core_->mutex);
  if (state_->gone() || state_->silent) return;
  if (const auto other = state_->peer.lock())
    other->push(
        {.what = State::What::established, .copy = {private_data.begin(), private_data.end()}});
}

void MemoryEndpoint::post_receive(uint64_t id, std::byte* buffer, size_t length) {
  const std::lock_guard lock(core_->mutex);
  state_->receives.push_back({id, buffer, length, 1});
  state_->check_promise();
}

void MemoryEndpoint::post_empty_receives(uint64_t id, uint32_t count) {
  const std::lock_guard lock(core_->mutex);
  if (count == 0) return;
  if (!state_->receives.empty()) {
    auto& last = state_->receives.back();
    if (last.id == id && last.buffer == nullptr) {
      last.count += count;
      return state_->check_promise();
    }
  }
  state_->receives.push_back({id, nullptr, 0, count});
  state_->check_promise();
}

bool MemoryEndpoint::post_send(const fabric::SendRequest& request) {
  const std::lock_guard lock(core_->mutex);
  if (state_->gone()) return false;
  assert(request.segments.size() <= fabric::segments_max);
  State::Item item;
  item.kind = request.kind;
  item.immediate = request.immediate;
  item.rkey = request.rkey;
  item.remote_address = request.remote_address;
  item.invalidate_rkey = request.invalidate_rkey;
  for (const auto& segment : request.segments) {
    assert(core_->options.any_local || segment.local != nullptr || request.copy);
    if (segment.length != 0) item.pieces.push_back({segment.data, segment.length});
  }
  if (request.copy) {
    assert(item.length() <= fabric::inline_max);
    item.read_payload();
  }
  state_->outbox.push_back(std::move(item));
  return true;
}

// Hands flushed messages to the peer, as far as the window allows. Under the lock.
void MemoryEndpoint::move_outbox(State& state) {
  const auto other = state.peer.lock();
  const uint32_t window = state.domain->core->options.messages_in_flight_max;
  while (!state.outbox.empty()) {
    if (other && window != 0 && other->inbox.size() >= window && !other->gone()) return;
    ++state.counters.messages_sent;
    state.counters.bytes_sent += state.outbox.front().length();
    if (other && !state.silent) other->push(std::move(state.outbox.front()));
    state.outbox.pop_front();
  }
}

void MemoryEndpoint::flush(Wait wait) {
  std::unique_lock lock(core_->mutex);
  ++state_->flushes;
  ++state_->counters.send_calls;
  move_outbox(*state_);
  while (wait == Wait::yes && !state_->outbox.empty() && !state_->gone()) {
    if (core_->owner && core_->owner->on_sleep) {
      lock.unlock();
      core_->owner->on_sleep();
      lock.lock();
    } else {
      core_->changed.wait(lock);
    }
    move_outbox(*state_);
  }
}

int MemoryEndpoint::fd() const {
  const std::lock_guard lock(core_->mutex);
  if (state_->finished) return -1;
  if (state_->fd < 0) {
    state_->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (state_->fd < 0) throw std::runtime_error("eventfd");
    if (!state_->inbox.empty()) signal(state_->fd);
  }
  return state_->fd;
}

bool MemoryEndpoint::wants_write() const {
  const std::lock_guard lock(core_->mutex);
  return !state_->outbox.empty() && !state_->gone();
}

size_t MemoryEndpoint::unsent_bytes() const {
  constexpr size_t overhead = 32;  // about what a message costs on a real wire
  const std::lock_guard lock(core_->mutex);
  size_t sum = 0;
  for (const auto& item : state_->outbox) sum += item.length() + overhead;
  return sum;
}

bool MemoryEndpoint::deliver_one(TimePoint) {
  std::unique_lock lock(core_->mutex);
  State& state = *state_;
  assert(!state.delivering && "progress() reentered");
  if (state.finished || state.inbox.empty()) return false;
  fabric::Handler* const handler = state.handler;

  const auto finish = [&](DisconnectReason reason, const std::string& detail) {
    state.finished = true;
    state.inbox.clear();
    state.outbox.clear();
    // From now on the owner may free what it sent from.
    if (const auto other = state.peer.lock())
      for (auto& under_way : other->inbox) under_way.read_payload();
    state.delivering = true;
    core_->changed.notify_all();
    signal(state.fd);
    lock.unlock();
    if (handler) handler->on_disconnected(reason, detail);
    lock.lock();
    state.delivering = false;
  };
  // The peer broke a rule; it is told, and the connection is over for both.
  const auto violation = [&](const std::string& detail) {
    const auto other = state.peer.lock();
    if (other && !state.silent) other->push_final(DisconnectReason::remote_error, detail);
    finish(DisconnectReason::protocol_error, detail);
  };

  if (state.inbox.front().what == State::What::message && takes_receive(state.inbox.front()) &&
      state.receives.empty() && core_->options.no_receive == MemoryFabricOptions::NoReceive::waits)
    return false;

  State::Item item = std::move(state.inbox.front());
  state.inbox.pop_front();
  ++state.deliveries;
  if (state.inbox.empty()) drain(state.fd);
  core_->changed.notify_all();  // room for a sender that waits

  switch (item.what) {
    case State::What::disconnected:
      finish(item.reason, item.detail);
      return true;
    case State::What::rejected:
      state.finished = true;
      state.delivering = true;
      lock.unlock();
      if (handler) handler->on_rejected(item.copy);
      lock.lock();
      state.delivering = false;
      return true;
    case State::What::established:
      state.delivering = true;
      lock.unlock();
      if (handler) handler->on_established(item.copy);
      lock.lock();
      state.delivering = false;
      return true;
    case State::What::message:
      break;
  }

  item.read_payload();
  ++state.counters.messages_received;
  state.counters.bytes_received += item.copy.size();

  if ((item.kind == SendKind::write || item.kind == SendKind::write_immediate) &&
      !item.copy.empty()) {
    Slot* const slot = state.domain->find(item.rkey);
    if (slot == nullptr) {
      violation("invalid rkey");
      return true;
    }
    const uint64_t offset = item.remote_address - address_distance * (item.rkey >> 8);
    if (offset > slot->length || item.copy.size() > slot->length - offset) {
      violation("base or bounds violation");
      return true;
    }
    std::memcpy(slot->memory + offset, item.copy.data(), item.copy.size());
  }
  if (!takes_receive(item)) return true;

  if (state.receives.empty()) {
    violation("no receive posted");
    return true;
  }
  auto& front = state.receives.front();
  const State::Receive receive = front;
  if (--front.count == 0) state.receives.pop_front();

  Completion completion;
  completion.id = receive.id;
  if (item.kind == SendKind::send || item.kind == SendKind::send_immediate) {
    if (item.copy.size() > receive.length) {
      violation("message too long for the receive");
      return true;
    }
    if (!item.copy.empty()) std::memcpy(receive.buffer, item.copy.data(), item.copy.size());
    completion.byte_count = static_cast<uint32_t>(item.copy.size());
  }
  if (item.kind == SendKind::send_invalidate) {
    Slot* const slot = state.domain->find(item.invalidate_rkey);
    if (slot == nullptr) {
      violation("invalidation of an invalid rkey");
      return true;
    }
    slot->valid = false;
    completion.invalidated_rkey = item.invalidate_rkey;
  }
  if (item.kind == SendKind::send_immediate || item.kind == SendKind::write_immediate) {
    completion.has_immediate = true;
    completion.immediate = item.immediate;
  }
  state.delivering = true;
  lock.unlock();
  if (handler) handler->on_completion(completion);
  lock.lock();
  state.delivering = false;
  return true;
}

bool MemoryEndpoint::progress(Wait wait, TimePoint now) {
  const auto ready = [this] { return !state_->inbox.empty() && !state_->held; };
  {
    std::unique_lock lock(core_->mutex);
    ++state_->counters.receive_calls;
    move_outbox(*state_);
    while (wait == Wait::yes && !state_->finished && !ready()) {
      if (core_->owner && core_->owner->on_sleep) {
        lock.unlock();
        core_->owner->on_sleep();
        lock.lock();
        break;  // the test had its chance; if nothing came of it, the caller looks at the world
                // again
      }
      core_->changed.wait(lock);
      move_outbox(*state_);
    }
    if (!ready()) return false;
  }
  for (uint32_t i = 0; i < core_->options.deliveries_per_progress; ++i) {
    if (!deliver_one(now)) return false;
    const std::lock_guard lock(core_->mutex);
    if (!ready()) return false;
  }
  return true;
}

void MemoryEndpoint::tick(TimePoint now) {
  // Only the end of a connection that we closed comes from here.
  bool due = false;
  {
    const std::lock_guard lock(core_->mutex);
    move_outbox(*state_);
    due = !state_->finished && !state_->held && state_->inbox.size() == 1 &&
          state_->inbox.front().what == State::What::disconnected;
  }
  if (due) deliver_one(now);
}

void MemoryEndpoint::disconnect(TimePoint) {
  const std::lock_guard lock(core_->mutex);
  if (state_->gone()) return;
  const auto other = state_->peer.lock();
  if (other && !state_->silent) {
    // The sender's memory may go away now; what is under way was read by the network already.
    for (auto& item : state_->outbox) other->push(std::move(item));
    for (auto& item : other->inbox) item.read_payload();
    other->push({.what = State::What::disconnected,
                 .reason = DisconnectReason::closed_by_peer,
                 .detail = "closed by peer"});
  }
  state_->outbox.clear();
  state_->push({.what = State::What::disconnected,
                .reason = DisconnectReason::closed_by_us,
                .detail = "closed"});
}

void MemoryEndpoint::abort() {
  const std::lock_guard lock(core_->mutex);
  if (state_->finished) return;
  const auto other = state_->peer.lock();
  if (other && !state_->silent)
    other->push_final(DisconnectReason::connection_lost, "aborted by peer");
  state_->outbox.clear();
  state_->push_final(DisconnectReason::closed_by_us, "aborted");
}

Address MemoryEndpoint::local_address() const {
  return state_->local;
}
Address MemoryEndpoint::peer_address() const {
  return state_->remote;
}

fabric::Endpoint::Counters MemoryEndpoint::counters() const {
  const std::lock_guard lock(core_->mutex);
  return state_->counters;
}

size_t MemoryEndpoint::pending() const {
  const std::lock_guard lock(core_->mutex);
  return state_->inbox.size();
}

void MemoryEndpoint::hold(bool held) {
  const std::lock_guard lock(core_->mutex);
  state_->held = held;
  core_->changed.notify_all();
}

void MemoryEndpoint::drop() {
  const std::lock_guard lock(core_->mutex);
  if (const auto other = state_->peer.lock())
    other->push_final(DisconnectReason::connection_lost, "connection cut by the test");
  state_->push_final(DisconnectReason::connection_lost, "connection cut by the test");
}

void MemoryEndpoint::go_silent() {
  const std::lock_guard lock(core_->mutex);
  // What an end knows already, above all that it is over, stays known.
  const auto lose_messages = [](State& state) {
    state.silent = true;
    std::erase_if(state.inbox,
                  [](const auto& item) { return item.what != State::What::disconnected; });
  };
  lose_messages(*state_);
  if (const auto other = state_->peer.lock()) lose_messages(*other);
}

bool MemoryEndpoint::closed() const {
  const std::lock_guard lock(core_->mutex);
  return state_->gone();
}

size_t MemoryEndpoint::receives() const {
  const std::lock_guard lock(core_->mutex);
  size_t sum = 0;
  for (const auto& receive : state_->receives) sum += receive.count;
  return sum;
}

size_t MemoryEndpoint::unflushed() const {
  const std::lock_guard lock(core_->mutex);
  return state_->outbox.size();
}

uint64_t MemoryEndpoint::flushes() const {
  const std::lock_guard lock(core_->mutex);
  return state_->flushes;
}

uint64_t MemoryEndpoint::deliveries() const {
  const std::lock_guard lock(core_->mutex);
  return state_->deliveries;
}

MemoryEndpoint* MemoryEndpoint::peer() const {
  const std::lock_guard lock(core_->mutex);
  const auto other = state_->peer.lock();
  return other ? other->endpoint : nullptr;
}

// --- Connecting

namespace {
fabric::Capabilities capabilities_of(const MemoryFabricOptions& options) {
  return {
      .rebind = options.rebind, .fresh_rkey = options.fresh_rkey, .any_local = options.any_local};
}
}  // namespace

class MemoryConnectRequest final : public fabric::ConnectRequest {
 public:
  MemoryConnectRequest(std::shared_ptr<MemoryFabric::Core> core,
                       std::shared_ptr<MemoryEndpoint::State> active,
                       std::span<const std::byte> private_data)
      : core_(std::move(core)),
        active_(std::move(active)),
        private_data_(private_data.begin(), private_data.end()) {}
  ~MemoryConnectRequest() override {
    if (answered_) return;
    const std::lock_guard lock(core_->mutex);
    active_->push_final(DisconnectReason::connection_lost, "request dropped");
  }
  [[nodiscard]] std::span<const std::byte> private_data() const override { return private_data_; }
  [[nodiscard]] Address local_address() const override { return active_->remote; }
  [[nodiscard]] Address peer_address() const override { return active_->local; }
  [[nodiscard]] fabric::Capabilities capabilities() const override {
    return capabilities_of(core_->options);
  }
  [[nodiscard]] std::unique_ptr<fabric::Domain> make_domain() const override {
    return std::make_unique<MemoryDomain>(core_);
  }
  std::unique_ptr<fabric::Endpoint> make_endpoint(fabric::Domain& domain,
                                                  const fabric::QueueSizes& queues) override {
    const std::lock_guard lock(core_->mutex);
    answered_ = true;
    auto endpoint = std::unique_ptr<MemoryEndpoint>(
        new MemoryEndpoint(core_, dynamic_cast<MemoryDomain&>(domain).state()));
    endpoint->state_->receives_max = queues.receives;
    endpoint->state_->local = active_->remote;
    endpoint->state_->remote = active_->local;
    MemoryEndpoint::link(endpoint->state_, active_);
    endpoint->state_->silent = active_->silent;
    if (active_->gone())
      endpoint->state_->push_final(DisconnectReason::connection_lost, "peer left while connecting");
    return endpoint;
  }
  void reject(std::span<const std::byte> private_data) override {
    const std::lock_guard lock(core_->mutex);
    answered_ = true;
    if (!active_->silent)
      active_->push({.what = MemoryEndpoint::State::What::rejected,
                     .copy = {private_data.begin(), private_data.end()}});
  }

 private:
  std::shared_ptr<MemoryFabric::Core> core_;
  std::shared_ptr<MemoryEndpoint::State> active_;
  std::vector<std::byte> private_data_;
  bool answered_ = false;
};

namespace {

class MemoryListener final : public fabric::Listener {
 public:
  MemoryListener(std::shared_ptr<MemoryFabric::Core> core, const Address& address)
      : core_(std::move(core)) {
    entry_.address = address;
    entry_.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    const std::lock_guard lock(core_->mutex);
    core_->listeners.push_back(&entry_);
  }
  ~MemoryListener() override {
    std::deque<std::unique_ptr<fabric::ConnectRequest>> dropped;
    {
      const std::lock_guard lock(core_->mutex);
      std::erase(core_->listeners, &entry_);
      dropped = std::move(entry_.waiting);
    }
    close(entry_.fd);
  }
  [[nodiscard]] int fd() const override { return entry_.fd; }
  void progress(TimePoint, const OnRequest& on_request) override {
    std::deque<std::unique_ptr<fabric::ConnectRequest>> waiting;
    {
      const std::lock_guard lock(core_->mutex);
      drain(entry_.fd);
      waiting = std::move(entry_.waiting);
      entry_.waiting.clear();
    }
    for (auto& request : waiting) on_request(std::move(request));
  }
  [[nodiscard]] Address address() const override { return entry_.address; }

 private:
  std::shared_ptr<MemoryFabric::Core> core_;
  MemoryFabric::Core::ListenerEntry entry_;
};

}  // namespace

MemoryFabric::MemoryFabric(const MemoryFabricOptions& options) : core_(std::make_shared<Core>()) {
  core_->options = options;
  core_->owner = this;
}

MemoryFabric::~MemoryFabric() {
  const std::lock_guard lock(core_->mutex);
  core_->owner = nullptr;
}

fabric::Capabilities MemoryFabric::capabilities() const {
  return capabilities_of(core_->options);
}

std::unique_ptr<fabric::Domain> MemoryFabric::make_domain() {
  return std::make_unique<MemoryDomain>(core_);
}

std::unique_ptr<fabric::Listener> MemoryFabric::listen(const Address& address) {
  return std::make_unique<MemoryListener>(core_, address);
}

std::unique_ptr<fabric::Endpoint> MemoryFabric::connect(fabric::Domain& domain,
                                                        const fabric::ConnectOptions& options,
                                                        std::span<const std::byte> private_data,
                                                        TimePoint) {
  return connect_raw(domain, options, private_data);
}

std::unique_ptr<MemoryEndpoint> MemoryFabric::connect_raw(fabric::Domain& domain,
                                                          const fabric::ConnectOptions& options,
                                                          std::span<const std::byte> private_data) {
  const std::lock_guard lock(core_->mutex);
  auto endpoint = std::unique_ptr<MemoryEndpoint>(
      new MemoryEndpoint(core_, dynamic_cast<MemoryDomain&>(domain).state()));
  auto& state = *endpoint->state_;
  const uint16_t port = core_->next_port++;
  state.receives_max = options.queues.receives;
  state.local = options.source ? *options.source : memory_address("127.0.0.1", port);
  state.remote = options.target;
  const auto found = std::find_if(
      core_->listeners.begin(), core_->listeners.end(),
      [&](const auto* listener) { return listener->address.port() == options.target.port(); });
  if (found == core_->listeners.end()) {
    state.push_final(DisconnectReason::refused, "nobody listens");
    return endpoint;
  }
  (*found)->waiting.push_back(
      std::make_unique<MemoryConnectRequest>(core_, endpoint->state_, private_data));
  signal((*found)->fd);
  core_->changed.notify_all();
  return endpoint;
}

std::vector<MemoryEndpoint*> MemoryFabric::endpoints() const {
  const std::lock_guard lock(core_->mutex);
  return core_->endpoints;
}

size_t MemoryFabric::settle(TimePoint now) {
  size_t total = 0;
  for (bool moved = true; moved;) {
    moved = false;
    for (MemoryEndpoint* endpoint : endpoints()) {
      // A handler may have destroyed endpoints of the list.
      const auto alive = endpoints();
      if (std::find(alive.begin(), alive.end(), endpoint) == alive.end()) continue;
      const std::shared_ptr<MemoryEndpoint::State> state = endpoint->state_;
      const uint64_t before = state->deliveries;
      endpoint->flush(Wait::no);
      endpoint->progress(Wait::no, now);
      total += state->deliveries - before;
      moved = moved || state->deliveries != before;
    }
  }
  return total;
}

void MemoryFabric::set_placement_in_progress(bool in_progress) {
  const std::lock_guard lock(core_->mutex);
  core_->placement_in_progress = in_progress;
}

size_t MemoryFabric::region_count() const {
  const std::lock_guard lock(core_->mutex);
  return core_->regions;
}

Address memory_address(const char* dotted, uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  if (inet_pton(AF_INET, dotted, &address.sin_addr) != 1)
    throw std::invalid_argument("not an IPv4 address");
  return {reinterpret_cast<const sockaddr*>(&address), sizeof address};
}

}  // namespace rtrsnbd::test
