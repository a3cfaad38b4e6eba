// SPDX-License-Identifier: BSD-3-Clause
// The life of one request: read out of its chunk, executed by the upper layer, answered.
#include <cassert>
#include <cerrno>
#include <cstring>

#include "protocol/rtrs/server_session.h"

namespace rtrsnbd::rtrs {

using fabric::SendKind;
using fabric::SendRequest;

std::span<std::byte> Slot::data() {
  return session_->chunk(id_).first(content_.header.data_length);
}

int Slot::registered_index() const {
  return session_->registered_index();
}

// The chunk stays writable for the peer (in plain mode it always is): header and user message are
// each copied once, and the copies are what is checked and used.
bool Slot::read_content(uint32_t offset, RequestContent& content) {
  const auto chunk = session_->chunk(id_);
  const auto header = wire::parse_io_request(chunk, offset, session_->core().limits.max_io_size);
  if (!header) return false;
  content.header = *header;
  if (header->user_length > user_message_max) return false;
  std::memcpy(content.user.data(), chunk.data() + header->data_length, header->user_length);
  return true;
}

const char* Slot::arrived(Connection& connection, uint32_t offset) {
  if (!executing_) {
    if (!read_content(offset, content_)) return "malformed request in a chunk";
    start(connection);
    return nullptr;
  }
  // A client has one permit per chunk, so on the same path this is a broken client. On another path
  // it is one that gave up the first path and sends its request again while we still work on the
  // first copy: if both ran at once, the stale one could reach the disk after the new one, and
  // after whatever the client writes next to the same place.
  if (connection_ != nullptr && &connection_->path() == &connection.path())
    return "request for a chunk that is in use";
  if (held_) return "third request for a chunk that is in use";
  auto held = std::make_unique<Held>(Held{&connection, {}});
  if (!read_content(offset, held->content)) return "malformed request in a chunk";
  held_ = std::move(held);
  return nullptr;
}

void Slot::start(Connection& connection) {
  executing_ = true;
  connection_ = &connection;
  session_->request_started(*this);
  session_->upper()->on_request(*this);
}

void Slot::path_gone(const Path& path) {
  if (connection_ != nullptr && &connection_->path() == &path) connection_ = nullptr;
  if (held_ && &held_->connection->path() == &path) held_.reset();
}

void Slot::respond(int error) {
  assert(executing_);
  // Closing the path makes this slot forget the connection.
  if (Connection* const asker = connection_; asker != nullptr && !send_response(*asker, error))
    asker->path().close(Path::Close::at_once, LogLevel::warning, "an answer could not be sent");

  executing_ = false;
  connection_ = nullptr;
  session_->request_done();
  if (!held_) return;
  const auto next = std::move(held_);
  content_ = next->content;
  start(*next->connection);
}

// The chain of work requests of one answer (docs/protocol.md, "Answers"). Each way ends in one
// message with the response immediate; what comes before it on the same connection has arrived when
// the client sees it.
bool Slot::send_response(Connection& connection, int error) {
  const auto& descriptor = content_.header.descriptor;
  // What is no errno, or does not fit in the nine bits of the wire, would be read as something
  // else.
  if (error < 0 || error > static_cast<int>(wire::errno_on_wire_max)) error = EIO;

  bool posted = true;
  if (error == 0 && content_.header.has_descriptor) {
    const fabric::Segment segment{session_->chunk(id_).data(), descriptor.length,
                                  &connection.path().region(id_)};
    posted = connection.post({.kind = SendKind::write,
                              .rkey = descriptor.key,
                              .remote_address = descriptor.address,
                              .segments = {&segment, 1}});
  }
  // A failed read needs it as much as a good one.
  const bool invalidate = content_.header.need_invalidation;
  if (invalidate) {
    SendRequest send;
    send.kind = SendKind::send_invalidate;
    send.invalidate_rkey = descriptor.key;
    posted = posted && connection.post(send);
  }

  SendRequest answer;
  answer.immediate =
      wire::IoResponseImmediate{id_, static_cast<uint32_t>(error), invalidate}.encode();
  wire::RkeyResponse response;
  fabric::Segment segment{wire::bytes_of(response).data(), sizeof response, nullptr};
  if (connection.path().new_rkey()) {
    // The chunk was closed when the request came in; it opens again under its next key, which the
    // client learns from this very message.
    response.buffer_id = static_cast<uint16_t>(id_);
    response.rkey = connection.path().region(id_).renew();
    answer.kind = SendKind::send_immediate;
    answer.copy = true;
    answer.segments = {&segment, 1};
  } else {
    answer.kind = SendKind::write_immediate;
  }
  posted = posted && connection.post(answer);
  if (posted) session_->core().environment.want_flush(*connection.endpoint());
  return posted;
}

}  // namespace rtrsnbd::rtrs
