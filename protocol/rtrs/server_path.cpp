// SPDX-License-Identifier: BSD-3-Clause
// A path: its connections arrive one by one (CONNECTING), INFO_REQ makes it CONNECTED, anything out
// of order closes it (CLOSING), and when its last connection is gone it is CLOSED. It never comes
// back: a client that reconnects gets a new one.
#include <cassert>
#include <cerrno>

#include "protocol/rtrs/server_session.h"

namespace rtrsnbd::rtrs {

using fabric::SendKind;
using fabric::SendRequest;

namespace {

enum class ReceiveId : uint64_t { info_request = 1, empty = 2 };

// Bytes of a message besides its payload, on any transport.
constexpr size_t wire_overhead_max = 64;

// An answer is three messages at most (specification 3.2); besides them, heartbeats.
fabric::QueueSizes queue_sizes(uint32_t cid, uint32_t queue_depth) {
  const uint32_t requests = cid == 0 ? wire::service_queue_depth : queue_depth;
  return {.sends = 3 * requests + 2, .receives = requests + 1};
}

}  // namespace

// --- Connection

void Connection::on_completion(const fabric::Completion& completion) {
  path_.completion(*this, completion);
}

void Connection::on_disconnected(fabric::DisconnectReason reason, std::string_view detail) {
  path_.connection_gone(*this, reason, detail);
}

// A client has at most queue_depth requests outstanding, so no more answers than that can wait for
// it, each of at most three messages. More means that it takes nothing and yet asks for more, and
// memory is not given to that. The endpoint knows bytes, not messages: if what waits is more than
// the last so many messages can have cost, older ones wait, too.
bool Connection::post(const SendRequest& request) {
  if (!endpoint_->post_send(request)) return false;
  recent_bytes_ += wire_overhead_max;
  for (const auto& segment : request.segments)
    recent_bytes_ += segment.length + segment.length / 64;
  if (++recent_messages_ < 4 * path_.queue_depth() + 64) return true;
  const bool read = endpoint_->unsent_bytes() <= recent_bytes_;
  recent_bytes_ = 0;
  recent_messages_ = 0;
  if (!read)
    path_.close(Path::Close::at_once, LogLevel::warning,
                "the client asks, but does not take the answers");
  return read;
}

// --- Coming up

Path::Path(Session& session, const wire::ConnectRequest& request,
           const fabric::ConnectRequest& from)
    : session_(session),
      core_(session.core()),
      uuid_(request.path_uuid),
      peer_(from.peer_address()),
      local_(from.local_address()),
      created_(core_.now),
      new_rkey_(core_.limits.always_invalidate && from.capabilities().fresh_rkey),
      any_local_(from.capabilities().any_local),
      connections_(request.cid_num) {
  ++core_.half_open_paths;
}

Path::~Path() {
  assert(state_ == State::closed);
}

void Path::add_connection(const wire::ConnectRequest& request, fabric::ConnectRequest& from) {
  const uint32_t cid = request.cid;
  assert(state_ == State::connecting && !has_connection(cid));
  auto connection = std::make_unique<Connection>(*this, cid);
  if (!domain_) domain_ = from.make_domain();
  connection->endpoint_ = from.make_endpoint(*domain_, queue_sizes(cid, core_.limits.queue_depth));
  Connection& added = *(connections_[cid] = std::move(connection));
  ++present_;
  ++alive_;

  fabric::Endpoint& endpoint = *added.endpoint_;
  endpoint.set_handler(&added);
  if (cid == 0)
    endpoint.post_receive(static_cast<uint64_t>(ReceiveId::info_request),
                          reinterpret_cast<std::byte*>(&added.info_memory_),
                          sizeof added.info_memory_);
  core_.environment.attach(endpoint);

  wire::ConnectResponse response;
  response.queue_depth = static_cast<uint16_t>(core_.limits.queue_depth);
  response.max_io_size = core_.limits.max_io_size;
  response.max_hdr_size = core_.limits.max_header_size;
  response.flags = new_rkey_ ? wire::connect_flag_new_rkey : 0;
  endpoint.accept(wire::bytes_of(response));
  core_.environment.want_flush(endpoint);
}

void Path::info_request(Connection& connection, const fabric::Completion& completion) {
  if (completion.id != static_cast<uint64_t>(ReceiveId::info_request) || completion.has_immediate ||
      completion.invalidated_rkey != 0)
    return violation("something else than INFO_REQ came first");
  if (present_ != connections_.size())
    return violation("INFO_REQ before all connections are there");
  wire::InfoRequest copy;
  const auto name = wire::parse_info_request(
      wire::bytes_of(connection.info_memory_).first(completion.byte_count), copy);
  if (!name) return violation("malformed INFO_REQ");
  try {
    become_connected(*name);
  } catch (const std::exception& failure) {
    close(Close::at_once, LogLevel::error, std::string("setting up the path: ") + failure.what());
  }
}

void Path::become_connected(std::string_view name) {
  if (std::string reason; !session_.introduce(name, reason)) {
    // RTRS has no negative answer at this point; the client sees a closed connection.
    close(Close::orderly, LogLevel::warning, reason);
    return;
  }
  const auto& limits = core_.limits;
  if (limits.always_invalidate && !new_rkey_)
    core_.log(LogLevel::notice, session_.label() + ": path from " + peer_.text() +
                                    ": its device cannot renew keys, so 'always-invalidate' is "
                                    "off; its keys are good for its own session only");
  if (new_rkey_) {
    regions_.reserve(limits.queue_depth);
    for (uint32_t id = 0; id < limits.queue_depth; ++id) {
      const auto chunk = session_.chunk(id);
      regions_.push_back(
          domain_->register_region(chunk.data(), chunk.size(), fabric::Access::remote_write));
    }
  } else {
    const auto memory = session_.memory();
    regions_.push_back(
        domain_->register_region(memory.data(), memory.size(), fabric::Access::remote_write));
  }

  for (const auto& connection : connections_)
    connection->endpoint_->post_empty_receives(
        static_cast<uint64_t>(ReceiveId::empty),
        connection->cid_ == 0 ? wire::service_queue_depth : limits.queue_depth);

  state_ = State::connected;
  --core_.half_open_paths;
  session_.path_connected();
  heartbeat_.emplace(limits.heartbeat, core_.now);
  send_info_response();
  core_.log(LogLevel::info, session_.label() + ": path from " + peer_.text() + " connected, " +
                                std::to_string(connections_.size()) + " connections");
}

void Path::send_info_response() {
  wire::InfoResponseHeader header;
  header.descriptor_count = static_cast<uint16_t>(regions_.size());
  info_response_.resize(sizeof header + regions_.size() * sizeof(wire::Descriptor));
  wire::store(info_response_.data(), header);
  std::byte* next = info_response_.data() + sizeof header;
  for (const auto& region : regions_) {
    wire::Descriptor descriptor;
    descriptor.address = region->remote_address();
    descriptor.key = region->rkey();
    descriptor.length = static_cast<uint32_t>(session_.memory().size() / regions_.size());
    wire::store(next, descriptor);
    next += sizeof descriptor;
  }
  if (!any_local_)
    info_response_local_ = domain_->register_local(info_response_.data(), info_response_.size());
  const fabric::Segment segment{info_response_.data(), info_response_.size(),
                                info_response_local_.get()};
  SendRequest send;
  send.kind = SendKind::send;
  send.segments = {&segment, 1};
  Connection& connection = *connections_[0];
  if (!connection.post(send))
    return close(Close::at_once, LogLevel::warning, "INFO_RSP could not be sent");
  core_.environment.want_flush(*connection.endpoint_);
}

// --- Traffic

void Path::completion(Connection& connection, const fabric::Completion& completion) {
  if (state_ == State::connecting) return info_request(connection, completion);
  if (state_ != State::connected) return;  // the rest of a batch that contained the reason to close

  // After INFO_REQ a client only writes, with immediate. A SEND would eat receives that answers to
  // others need, and no client has a reason to invalidate our keys.
  if (!completion.has_immediate || completion.byte_count != 0 || completion.invalidated_rkey != 0)
    return violation("SEND after INFO_REQ");
  connection.endpoint_->post_empty_receives(static_cast<uint64_t>(ReceiveId::empty), 1);
  heartbeat_->sign_of_life();

  switch (static_cast<wire::ImmediateType>(wire::immediate_type(completion.immediate))) {
    case wire::ImmediateType::io_request:
      return request_arrived(connection, completion.immediate);
    case wire::ImmediateType::heartbeat:
      // At once, because the client may choose its paths by how long we take.
      if (acks_left_ != 0) {
        --acks_left_;
        send_service(wire::heartbeat_ack_immediate);
      }
      return;
    case wire::ImmediateType::heartbeat_ack:
      return;
    case wire::ImmediateType::io_response:
    case wire::ImmediateType::io_response_invalidated:
      break;
  }
  // As the kernel does it: not for us, but harmless. One line per path, so that nobody fills our
  // log.
  if (unknown_immediate_logged_) return;
  unknown_immediate_logged_ = true;
  core_.log(LogLevel::warning, session_.label() + ": path from " + peer_.text() +
                                   ": ignoring immediate of type " +
                                   std::to_string(wire::immediate_type(completion.immediate)));
}

void Path::request_arrived(Connection& connection, uint32_t immediate) {
  const auto& limits = core_.limits;
  const auto where = wire::IoRequestImmediate::decode(immediate, limits.queue_depth);
  if (where.chunk_id >= limits.queue_depth || where.offset >= limits.chunk_size())
    return violation("request outside the chunks");
  // Told to stop: what was not begun is not begun, and as we close in a moment the client knows
  // that it must ask somebody else.
  if (core_.draining) return;
  // NEW_RKEY mode: from here until the answer nobody writes into this chunk by this path's key.
  if (new_rkey_ && !region(where.chunk_id).invalidate())
    return violation("write into a chunk whose request was sent already");
  if (const char* const wrong = session_.slot(where.chunk_id).arrived(connection, where.offset))
    violation(wrong);
}

void Path::send_service(uint32_t immediate) {
  Connection& connection = *connections_[0];
  SendRequest send;
  send.kind = SendKind::write_immediate;  // of no bytes, so address and key do not matter
  send.immediate = immediate;
  if (!connection.post(send))
    return close(Close::at_once, LogLevel::warning, "a heartbeat could not be sent");
  core_.environment.want_flush(*connection.endpoint_);
}

void Path::tick(TimePoint now) {
  for (const auto& connection : connections_)
    if (connection && !connection->gone_) connection->endpoint_->tick(now);

  if (state_ == State::connecting && now - created_ >= core_.limits.handshake_timeout) {
    const auto seconds =
        std::chrono::duration_cast<std::chrono::seconds>(core_.limits.handshake_timeout);
    return close(Close::at_once, LogLevel::warning,
                 "no INFO_REQ within " + std::to_string(seconds.count()) + " s (" +
                     std::to_string(present_) + " of " + std::to_string(connections_.size()) +
                     " connections arrived)");
  }
  if (state_ != State::connected) return;

  // A peer that does not take its acks is owed no more of them.
  if (!connections_[0]->endpoint_->wants_write()) acks_left_ = heartbeat_acks_per_tick;
  switch (heartbeat_->tick(now)) {
    case Heartbeat::Action::none:
      return;
    case Heartbeat::Action::send:
      return send_service(wire::heartbeat_immediate);
    case Heartbeat::Action::dead:
      return close(Close::at_once, LogLevel::warning, "peer does not answer heartbeats");
  }
}

// --- Going down

void Path::violation(std::string_view what) {
  close(Close::at_once, LogLevel::warning, "protocol violation: " + std::string(what));
}

void Path::close(Close how, LogLevel level, std::string_view why) {
  if (state_ == State::closing || state_ == State::closed) return;
  const bool was_connected = state_ == State::connected;
  if (!was_connected) --core_.half_open_paths;
  state_ = State::closing;
  core_.log(level,
            session_.label() + ": path from " + peer_.text() + " closed: " + std::string(why));
  session_.path_closing(*this, was_connected);
  for (const auto& connection : connections_) {
    if (!connection || connection->gone_) continue;
    if (how == Close::orderly)
      connection->endpoint_->disconnect(core_.now);
    else
      connection->endpoint_->abort();
  }
  finish_if_quiet();
}

void Path::connection_gone(Connection& connection, fabric::DisconnectReason reason,
                           std::string_view detail) {
  assert(!connection.gone_);
  connection.gone_ = true;
  --alive_;
  core_.environment.detach(*connection.endpoint_);

  const bool orderly = reason == fabric::DisconnectReason::closed_by_peer;
  std::string why =
      "connection " + std::to_string(connection.cid_) + ": " + std::string(to_string(reason));
  if (!detail.empty()) why += " (" + printable(detail) + ")";
  close(orderly ? Close::orderly : Close::at_once, orderly ? LogLevel::info : LogLevel::warning,
        why);
  finish_if_quiet();
}

void Path::abandon() {
  for (const auto& connection : connections_) {
    if (!connection || connection->gone_) continue;
    connection->gone_ = true;
    core_.environment.detach(*connection->endpoint_);
  }
  state_ = State::closed;
}

void Path::finish_if_quiet() {
  if (state_ != State::closing || alive_ != 0) return;
  state_ = State::closed;
  core_.garbage = true;
  session_.path_closed();
}

}  // namespace rtrsnbd::rtrs
