// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/rtrs/client.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

namespace rtrsnbd::rtrs {

namespace {

// Receives kept on the service connection, as the kernel client does; and per chunk on the others.
constexpr uint32_t service_receives = 1024;
constexpr uint32_t receives_per_chunk = 2;
constexpr uint64_t info_receive_id = ~uint64_t{0};

std::string errno_text(int error) {
  // Not strerror: inside nbdkit there are other threads, and no translations are wanted.
  const char* text = strerrordesc_np(error);
  const char* name = strerrorname_np(error);
  return std::string(text != nullptr ? text : "unknown error") + " (" +
         (name != nullptr ? std::string(name) : std::to_string(error)) + ")";
}

std::string refusal_text(int error) {
  switch (error) {
    case ENOMEM:
      return "refused by the server: its memory limit is reached (ENOMEM)";
    case EUSERS:
      return "refused by the server: its limit of sessions is reached (EUSERS)";
    case EMFILE:
      return "refused by the server: more connections than its limit for one path (EMFILE)";
    case ESHUTDOWN:
      return "refused by the server: it is shutting down (ESHUTDOWN)";
    case ECONNRESET:
      return "refused by the server: it does not accept this connection request (ECONNRESET)";
    default:
      return "refused by the server: " + errno_text(error);
  }
}

}  // namespace

ClientPath::ClientPath(fabric::Fabric& fabric, ClientOptions options, LogSink log)
    : fabric_(fabric),
      capabilities_(fabric.capabilities()),
      options_(std::move(options)),
      log_(std::move(log)),
      domain_(fabric.make_domain()) {
  assert(options_.io_connections >= 1);
  assert(options_.io_connections < wire::connections_per_path_max);
}

ClientPath::~ClientPath() {
  // Endpoints first: no receiver may place bytes while slots and buffers go.
  connections_.clear();
}

std::string ClientPath::failure() const {
  const std::lock_guard lock(failure_mutex_);
  return failure_;
}

void ClientPath::start(TimePoint now) {
  started_ = now_ = now;
  connections_.reserve(options_.io_connections + 1);
  connect_next(now);
}

// Connections are made one after the other, 0 first (specification 3.1).
void ClientPath::connect_next(TimePoint now) {
  const auto cid = connection_count();
  wire::ConnectRequest request;
  request.cid = static_cast<uint16_t>(cid);
  request.cid_num = static_cast<uint16_t>(options_.io_connections + 1);
  request.reconnect_count = options_.reconnect_count;
  request.path_uuid = options_.path_uuid;
  request.session_uuid = options_.session_uuid;
  // On a further path of a session the bit appears once connection 0 was accepted (2.7).
  request.flags = options_.first_path || cid > 0 ? 1 : 0;

  // Connection 0 carries RNBD's administration and heartbeats; its size cannot depend on the queue
  // depth, which its answer brings.
  fabric::ConnectOptions where = options_.where;
  where.queues = {.sends = service_receives, .receives = service_receives + 1};
  if (cid > 0)
    where.queues = {.sends = 2 * geometry_.queue_depth,
                    .receives = receives_per_chunk * geometry_.queue_depth};

  auto connection = std::make_unique<Connection>(*this, cid);
  try {
    connection->endpoint = fabric_.connect(*domain_, where, wire::bytes_of(request), now);
  } catch (const std::exception& error) {  // out of descriptors or memory
    return fail(error.what());
  }
  connection->endpoint->set_handler(connection.get());
  alive_.fetch_add(1, std::memory_order_relaxed);
  connections_.push_back(std::move(connection));
}

void ClientPath::established(Connection& connection, std::span<const std::byte> private_data) {
  if (failed_.load()) return;
  const auto response = wire::parse_connect_response(private_data);
  if (!response) return fail("the server's answer to the connection request is not RTRS");
  if (response->error_number() != 0) return fail(refusal_text(response->error_number()));
  if (connection.cid == 0) {
    if (!wire::geometry_acceptable(*response)) {
      return fail("the server offers an impossible geometry: queue depth " +
                  std::to_string(response->queue_depth.get()) + ", max IO size " +
                  std::to_string(response->max_io_size.get()) + ", max header size " +
                  std::to_string(response->max_hdr_size.get()));
    }
    geometry_ = {response->queue_depth, response->max_io_size, response->max_hdr_size,
                 (response->flags & wire::connect_flag_new_rkey) != 0};
    if (geometry_.max_header_size < header_stride)
      return fail("the server leaves too little room for headers");
    make_slots();
  }
  if (connection_count() <= options_.io_connections) {
    connect_next(now_);
  } else {
    send_info_request();
  }
}

void ClientPath::make_slots() {
  slots_ = std::vector<Slot>(geometry_.queue_depth);
  headers_.resize(size_t{geometry_.queue_depth} * header_stride);
  headers_local_ = domain_->register_local(headers_.data(), headers_.size());
  if (!capabilities_.rebind || !capabilities_.any_local) {
    bounce_.resize(size_t{geometry_.queue_depth} * geometry_.max_io_size);
    bounce_local_ = domain_->register_local(bounce_.data(), bounce_.size());
  }
  for (uint32_t id = 0; id < geometry_.queue_depth; ++id) {
    slots_[id].region = capabilities_.rebind
                            ? domain_->register_region(nullptr, 0, fabric::Access::remote_write)
                            : domain_->register_region(bounce_memory(id), geometry_.max_io_size,
                                                       fabric::Access::remote_write);
  }
}

void ClientPath::send_info_request() {
  auto& endpoint = *connections_[0]->endpoint;
  wire::InfoRequest request;
  if (!wire::make_info_request(options_.session_name, request))
    return fail("the session name is not allowed");
  info_memory_.resize(sizeof(wire::InfoResponseHeader) +
                      size_t{geometry_.queue_depth} * sizeof(wire::Descriptor));
  endpoint.post_receive(info_receive_id, info_memory_.data(), info_memory_.size());
  static_assert(header_stride >= sizeof request);
  wire::store(header_memory(0), request);  // no request is using it yet
  const fabric::Segment segment{header_memory(0), sizeof request, headers_local_.get()};
  fabric::SendRequest send;
  send.kind = fabric::SendKind::send;
  send.segments = {&segment, 1};
  endpoint.post_send(send);
  endpoint.flush(fabric::Wait::no);
}

void ClientPath::info_response(std::span<const std::byte> bytes) {
  std::vector<wire::ChunkWindow> windows(geometry_.queue_depth);
  if (wire::parse_info_response(bytes, geometry_.chunk_size(), windows) != 0) {
    return fail("the server's INFO response is malformed");
  }
  for (uint32_t id = 0; id < geometry_.queue_depth; ++id) {
    slots_[id].chunk_address = windows[id].address;
    slots_[id].chunk_rkey.store(windows[id].rkey, std::memory_order_relaxed);
  }
  post_steady_receives();
  heartbeat_ = std::make_unique<Heartbeat>(options_.heartbeat, now_);
  state_.store(State::connected, std::memory_order_release);
}

// From here on the server may send at any time (3.3). With new keys per IO each receive has room
// for one RKEY_RSP; its id is the index of that room.
void ClientPath::post_steady_receives() {
  for (auto& connection : connections_) {
    const uint32_t count =
        connection->cid == 0 ? service_receives : receives_per_chunk * geometry_.queue_depth;
    if (!geometry_.new_rkey) {
      connection->endpoint->post_empty_receives(0, count);
      continue;
    }
    connection->receive_memory.resize(size_t{count} * sizeof(wire::RkeyResponse));
    for (uint32_t index = 0; index < count; ++index) {
      connection->endpoint->post_receive(
          index, connection->receive_memory.data() + index * sizeof(wire::RkeyResponse),
          sizeof(wire::RkeyResponse));
    }
  }
}

bool ClientPath::submit(uint32_t cid, uint32_t permit, ClientRequest& request) {
  if (state() != State::connected) return false;
  assert(permit < geometry_.queue_depth && cid < connection_count());
  assert(request.user.size() <= client_user_length_max);
  assert(request.data_length <= geometry_.max_io_size);
  Slot& slot = slots_[permit];
  auto& endpoint = *connections_[cid]->endpoint;

  std::byte* const header = header_memory(permit);
  std::memcpy(header, request.user.data(), request.user.size());
  const auto user_length = static_cast<uint16_t>(request.user.size());
  size_t header_length = request.user.size();
  if (request.is_read) {
    wire::ReadMessage message;
    message.user_length = user_length;
    message.descriptor_count = request.data_length != 0 ? 1 : 0;
    wire::store(header + header_length, message);
    header_length += sizeof message;
    if (request.data_length != 0) {
      if (capabilities_.rebind) slot.region->rebind(request.read_data, request.data_length);
      wire::Descriptor descriptor;
      descriptor.address = slot.region->remote_address();
      descriptor.key = slot.region->rkey();
      descriptor.length = request.data_length;
      wire::store(header + header_length, descriptor);
      header_length += sizeof descriptor;
    }
  } else {
    wire::WriteMessage message;
    message.user_length = user_length;
    wire::store(header + header_length, message);
    header_length += sizeof message;
  }

  fabric::Segment segments[2];
  size_t segment_count = 0;
  if (!request.is_read && request.data_length != 0) {
    if (capabilities_.any_local) {
      segments[segment_count++] = {request.write_data, request.data_length, nullptr};
    } else {
      std::memcpy(bounce_memory(permit), request.write_data, request.data_length);
      segments[segment_count++] = {bounce_memory(permit), request.data_length, bounce_local_.get()};
    }
  }
  segments[segment_count++] = {header, header_length, headers_local_.get()};

  slot.cid.store(cid, std::memory_order_release);
  slot.request.store(&request, std::memory_order_seq_cst);
  // Pairs with fail() and complete_all(): either they see the request in its slot, or we see
  // failed_.
  if (failed_.load(std::memory_order_seq_cst)) {
    return slot.request.exchange(nullptr, std::memory_order_seq_cst) == nullptr;
  }

  const wire::IoRequestImmediate immediate{permit, request.data_length + user_length};
  fabric::SendRequest send;
  send.kind = fabric::SendKind::write_immediate;
  send.copy = segment_count == 1;
  send.immediate = immediate.encode(geometry_.queue_depth);
  send.rkey = slot.chunk_rkey.load(std::memory_order_relaxed);
  send.remote_address = slot.chunk_address + (request.is_read ? request.data_length : 0);
  send.segments = {segments, segment_count};
  endpoint.post_send(
      send);  // false: gone; its on_disconnected fails the path and completes the request
  return true;
}

void ClientPath::completion(Connection& connection, const fabric::Completion& completion) {
  if (failed_.load(std::memory_order_relaxed)) return;
  if (state_.load(std::memory_order_relaxed) == State::connecting) {
    if (connection.cid != 0 || completion.id != info_receive_id || completion.has_immediate) {
      return fail("the server sent something before its INFO response");
    }
    return info_response({info_memory_.data(), completion.byte_count});
  }
  heartbeat_->sign_of_life();
  if (!completion.has_immediate)
    return fail("the server sent a message without an immediate value");

  switch (static_cast<wire::ImmediateType>(wire::immediate_type(completion.immediate))) {
    case wire::ImmediateType::io_response:
      io_response(connection, completion);
      break;
    case wire::ImmediateType::io_response_invalidated:
      return fail("the server says it invalidated memory, which no request asked for");
    case wire::ImmediateType::heartbeat:
      // A peer that floods us without reading would make the queue of answers grow: no answer then.
      if (connection.cid == 0 && !connection.endpoint->wants_write()) {
        fabric::SendRequest acknowledgement;
        acknowledgement.kind = fabric::SendKind::write_immediate;
        acknowledgement.immediate = wire::heartbeat_ack_immediate;
        connection.endpoint->post_send(acknowledgement);
        connection.endpoint->flush(fabric::Wait::no);
      }
      break;
    case wire::ImmediateType::heartbeat_ack:
      break;
    default:
      log_(LogLevel::debug, "ignored an unassigned immediate type");
  }

  if (geometry_.new_rkey) {
    connection.endpoint->post_receive(
        completion.id,
        connection.receive_memory.data() + completion.id * sizeof(wire::RkeyResponse),
        sizeof(wire::RkeyResponse));
  } else {
    connection.endpoint->post_empty_receives(0, 1);
  }
}

void ClientPath::io_response(Connection& connection, const fabric::Completion& completion) {
  const auto response = wire::IoResponseImmediate::decode(completion.immediate);
  if (response.message_id >= geometry_.queue_depth)
    return fail("the server answered a request id out of range");
  Slot& slot = slots_[response.message_id];
  // The connection first: if it is ours, nobody but us completes what is in the slot.
  if (slot.cid.load(std::memory_order_acquire) != connection.cid) {
    return fail("the server answered on another connection than asked");
  }
  ClientRequest* const request = slot.request.load(std::memory_order_acquire);
  if (request == nullptr) return fail("the server answered a request that is not in flight");

  if (geometry_.new_rkey) {
    const auto renewal = wire::parse_rkey_response(
        {connection.receive_memory.data() + completion.id * sizeof(wire::RkeyResponse),
         completion.byte_count});
    if (!renewal || renewal->buffer_id != response.message_id)
      return fail("the server's RKEY response is malformed");
    slot.chunk_rkey.store(renewal->rkey, std::memory_order_relaxed);
  }

  if (request->is_read && request->data_length != 0) {
    if (capabilities_.rebind) {
      // Another connection still placing into an answered request breaks the protocol. The request
      // stays in its slot until all receivers have left.
      if (!slot.region->invalidate())
        return fail("the server wrote into a request it had answered");
    } else if (response.error == 0) {
      std::memcpy(request->read_data, bounce_memory(response.message_id), request->data_length);
    }
  }
  slot.request.store(nullptr, std::memory_order_release);
  request->on_done(static_cast<int>(response.error));
}

void ClientPath::tick(TimePoint now) {
  now_ = now;
  if (failed_.load()) return;
  if (state() == State::connecting) {
    if (now - started_ >= options_.connect_timeout) {
      fail(connection_count() <= 1
               ? "no answer from the server within the connect timeout"
               : "the server did not finish connecting within the connect timeout");
    }
    return;
  }
  if (disconnecting_.load()) return;
  switch (heartbeat_->tick(now)) {
    case Heartbeat::Action::none:
      break;
    case Heartbeat::Action::send: {
      fabric::SendRequest beat;
      beat.kind = fabric::SendKind::write_immediate;
      beat.immediate = wire::heartbeat_immediate;
      auto& endpoint = *connections_[0]->endpoint;
      endpoint.post_send(beat);
      endpoint.flush(fabric::Wait::no);
      break;
    }
    case Heartbeat::Action::dead:
      fail("no sign of life from the server (heartbeat)");
      break;
  }
}

Duration ClientPath::tick_interval() const {
  return std::min<Duration>(options_.heartbeat.interval / 4, std::chrono::milliseconds(500));
}

void ClientPath::fail(std::string_view reason) {
  if (failed_.exchange(true, std::memory_order_seq_cst)) return;
  {
    const std::lock_guard lock(failure_mutex_);
    failure_ = reason;
  }
  state_.store(State::failed, std::memory_order_release);
  for (auto& connection : connections_) connection->endpoint->abort();
}

void ClientPath::disconnect(TimePoint now) {
  if (disconnecting_.exchange(true)) return;
  for (auto& connection : connections_) connection->endpoint->disconnect(now);
}

void ClientPath::connection_gone(Connection& connection) {
  if (connection.closed.exchange(true, std::memory_order_acq_rel)) return;
  if (alive_.fetch_sub(1, std::memory_order_acq_rel) == 1) complete_all();
}

// The last receiver has left: nothing is placed any more, so the memory of what is in flight can go
// back to its owners.
void ClientPath::complete_all() {
  for (auto& slot : slots_) {
    ClientRequest* const request = slot.request.exchange(nullptr, std::memory_order_seq_cst);
    if (request == nullptr) continue;
    if (capabilities_.rebind) slot.region->invalidate();
    request->on_done(path_lost);
  }
}

void ClientPath::Connection::on_established(std::span<const std::byte> private_data) {
  path.established(*this, private_data);
}

void ClientPath::Connection::on_rejected(std::span<const std::byte> private_data) {
  const auto response = wire::parse_connect_response(private_data);
  path.fail(response && response->error_number() != 0 ? refusal_text(response->error_number())
                                                      : "refused by the server without a reason");
  path.connection_gone(*this);
}

void ClientPath::Connection::on_completion(const fabric::Completion& completion) {
  path.completion(*this, completion);
}

void ClientPath::Connection::on_disconnected(fabric::DisconnectReason reason,
                                             std::string_view detail) {
  if (!path.disconnecting_.load()) {
    // What a failed connect says is said by its errno alone.
    const bool errno_says_it = !detail.empty() && (reason == fabric::DisconnectReason::refused ||
                                                   reason == fabric::DisconnectReason::unreachable);
    std::string text(errno_says_it ? detail : fabric::to_string(reason));
    if (!errno_says_it && !detail.empty()) text.append(": ").append(detail);
    if (reason == fabric::DisconnectReason::refused)
      text += "; is rtrsd running and listening there?";
    path.fail(text);
  } else {
    path.failed_.store(true, std::memory_order_seq_cst);
    path.state_.store(State::failed, std::memory_order_release);
  }
  path.connection_gone(*this);
}

}  // namespace rtrsnbd::rtrs
