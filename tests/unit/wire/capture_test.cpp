// SPDX-License-Identifier: BSD-3-Clause
// Sessions of the kernel's own ends, as they crossed the wire, through our parsers: the connection
// manager's private data, INFO messages, every request out of its reassembled chunk, every answer
// and key.
#include <doctest/doctest.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "protocol/wire/rnbd.h"
#include "protocol/wire/rtrs.h"

namespace rtrsnbd::wire {

namespace {

using Bytes = std::vector<std::byte>;

uint32_t big_endian(const std::byte* at, size_t bytes) {
  uint32_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value = value << 8 | std::to_integer<uint32_t>(at[i]);
  return value;
}
uint64_t big_endian64(const std::byte* at) {
  return uint64_t{big_endian(at, 4)} << 32 | big_endian(at + 4, 4);
}

constexpr uint32_t server_address = 0x0a4d0001;  // 10.77.0.1
constexpr uint32_t roce_port = 4791;

// A message of a reliable connection, put together from its packets.
struct Message {
  bool write = false;
  bool invalidates = false;
  uint64_t address = 0;
  uint32_t key = 0;
  std::optional<uint32_t> immediate;
  Bytes payload;
};

// What of a session the messages add up to.
class Replay {
 public:
  explicit Replay(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    REQUIRE_MESSAGE(file.good(), path);
    const std::vector<char> raw{std::istreambuf_iterator<char>(file), {}};
    Bytes bytes(raw.size());
    std::memcpy(bytes.data(), raw.data(), raw.size());
    for (size_t at = 24; at + 16 <= bytes.size();) {
      uint32_t length = 0;
      std::memcpy(&length, &bytes[at + 8], sizeof length);
      frame({bytes.data() + at + 16, length});
      at += 16 + length;
    }
  }

  std::optional<ConnectResponse> geometry;
  uint32_t connect_requests = 0, accepts = 0, heartbeats = 0, acknowledgements = 0, answers = 0,
           keys = 0, flushes = 0, discards = 0, fua_writes = 0, closes = 0, session_infos = 0,
           invalidations = 0;
  std::string session_name;
  std::set<uint32_t> read_sizes, write_sizes;
  std::vector<std::string> opened, refused;

 private:
  struct Pending {
    IoRequest header;
    RnbdType type{};
    std::string name;
  };

  void frame(std::span<const std::byte> frame) {
    if (frame.size() < 14 + 20 + 8 || big_endian(&frame[12], 2) != 0x0800) return;
    const auto ip = frame.subspan(14);
    const size_t header = (std::to_integer<size_t>(ip[0]) & 15) * 4;
    if (std::to_integer<int>(ip[9]) != 17) return;
    const bool from_client = big_endian(&ip[12], 4) != server_address;
    const auto udp = ip.subspan(header);
    if (big_endian(&udp[2], 2) != roce_port) return;
    const size_t length = big_endian(&udp[4], 2);
    const auto packet = udp.subspan(8, length - 8 - 4);  // without the invariant CRC
    const uint32_t opcode = big_endian(&packet[0], 1);
    const size_t pad = big_endian(&packet[1], 1) >> 4 & 3;
    const uint32_t queue_pair = big_endian(&packet[5], 3);
    auto rest = packet.subspan(12, packet.size() - 12 - pad);
    if (opcode == 100) return management(rest.subspan(8));
    if (opcode > 23 || (opcode > 11 && opcode < 22)) return;  // acknowledges

    const bool first = opcode == 0 || opcode == 4 || opcode == 5 || opcode == 6 || opcode >= 10;
    const bool last = opcode != 0 && opcode != 1 && opcode != 6 && opcode != 7;
    Message& message = open_[{from_client, queue_pair}];
    if (first) message = {};
    message.write = opcode >= 6 && opcode <= 11;
    if (opcode == 6 || opcode == 10 || opcode == 11) {
      message.address = big_endian64(&rest[0]);
      message.key = big_endian(&rest[8], 4);
      rest = rest.subspan(16);
    }
    if (opcode == 3 || opcode == 5 || opcode == 9 || opcode == 11) {
      message.immediate = big_endian(&rest[0], 4);
      rest = rest.subspan(4);
    }
    if (opcode >= 22) {
      message.invalidates = true;
      message.key = big_endian(&rest[0], 4);
      rest = rest.subspan(4);
    }
    message.payload.insert(message.payload.end(), rest.begin(), rest.end());
    if (!last) return;
    if (from_client)
      from_the_client(message);
    else
      from_the_server(message);
  }

  void management(std::span<const std::byte> datagram) {
    switch (big_endian(&datagram[16], 2)) {
      case 0x10: {  // REQ, with the addresses in front of our part
        const auto request = parse_connect_request(datagram.subspan(164 + 36, 56));
        REQUIRE(request.has_value());
        CHECK(request->cid == connect_requests);
        CHECK(request->cid_num == 3);
        CHECK(request->reconnect_count == 1);
        CHECK(request->first_connection());
        ++connect_requests;
        return;
      }
      case 0x13: {  // REP
        const auto response = parse_connect_response(datagram.subspan(60, 196));
        REQUIRE(response.has_value());
        CHECK(response->error_number() == 0);
        CHECK(geometry_acceptable(*response));
        geometry = *response;
        ++accepts;
        return;
      }
      default:
        return;
    }
  }

  [[nodiscard]] uint32_t chunk_size() const {
    return geometry->max_io_size + geometry->max_hdr_size;
  }

  void from_the_client(const Message& message) {
    if (!message.write) {  // INFO_REQ is the only one
      InfoRequest copy;
      const auto name = parse_info_request(message.payload, copy);
      REQUIRE(name.has_value());
      session_name = *name;
      return;
    }
    REQUIRE(message.immediate.has_value());  // a client writes with immediate, always
    switch (static_cast<ImmediateType>(immediate_type(*message.immediate))) {
      case ImmediateType::heartbeat:
        ++heartbeats;
        return;
      case ImmediateType::heartbeat_ack:
        ++acknowledgements;
        return;
      case ImmediateType::io_request:
        return request(message);
      default:
        FAIL("no immediate of a client");
    }
  }

  void request(const Message& message) {
    const auto where = IoRequestImmediate::decode(*message.immediate, geometry->queue_depth);
    REQUIRE(where.chunk_id < windows_.size());
    const ChunkWindow& window = windows_[where.chunk_id];
    CHECK(message.key == window.rkey);  // the key of the last answer
    REQUIRE(message.address >= window.address);
    const uint64_t offset = message.address - window.address;
    Bytes& chunk = chunks_[where.chunk_id];
    chunk.resize(chunk_size());
    REQUIRE(offset + message.payload.size() <= chunk.size());
    std::copy(message.payload.begin(), message.payload.end(),
              chunk.begin() + static_cast<std::ptrdiff_t>(offset));

    const auto header = parse_io_request(chunk, where.offset, geometry->max_io_size);
    REQUIRE(header.has_value());
    const auto user =
        std::span<const std::byte>(chunk).subspan(header->data_length, header->user_length);
    const auto type = parse_rnbd_type(user);
    REQUIRE(type.has_value());
    Pending pending{*header, *type, {}};
    switch (*type) {
      case RnbdType::session_info:
        CHECK(parse_session_info(user)->version == 2);
        ++session_infos;
        break;
      case RnbdType::open: {
        Open copy;
        const auto name = parse_open(user, copy);
        REQUIRE(name.has_value());
        pending.name = *name;
        break;
      }
      case RnbdType::close:
        REQUIRE(parse_close(user).has_value());
        ++closes;
        break;
      case RnbdType::io:
        io(*parse_io(user), *header);
        break;
      default:
        FAIL("no message of a client");
    }
    CHECK_FALSE(pending_.contains(where.chunk_id));
    pending_[where.chunk_id] = pending;
  }

  void io(const Io& message, const IoRequest& header) {
    const uint32_t flags = message.rw;
    switch (static_cast<RnbdOp>(flags & rnbd_op_mask)) {
      case RnbdOp::read:
        CHECK(header.type == RtrsType::read);
        CHECK(message.length == header.data_length);
        read_sizes.insert(message.length);
        return;
      case RnbdOp::write:
        CHECK(header.type == RtrsType::write);
        CHECK(message.length == header.data_length);
        write_sizes.insert(message.length);
        if ((flags & rnbd_flag_fua) != 0) ++fua_writes;
        return;
      case RnbdOp::flush:
        CHECK(message.sector == ~uint64_t{0});
        ++flushes;
        return;
      case RnbdOp::discard:
        CHECK(header.data_length == 0);
        ++discards;
        return;
      default:
        FAIL("an operation the session does not have");
    }
  }

  void from_the_server(const Message& message) {
    if (message.invalidates) {
      CHECK(message.payload.empty());
      ++invalidations;
      return;
    }
    if (message.write && !message.immediate) {
      placed_[message.address] = message.payload;
      return;
    }
    if (!message.immediate) {  // INFO_RSP
      windows_.resize(geometry->queue_depth);
      REQUIRE(parse_info_response(message.payload, chunk_size(), windows_) == 0);
      return;
    }
    const auto type = static_cast<ImmediateType>(immediate_type(*message.immediate));
    if (type == ImmediateType::heartbeat) return static_cast<void>(++heartbeats);
    if (type == ImmediateType::heartbeat_ack) return static_cast<void>(++acknowledgements);
    const auto answer = IoResponseImmediate::decode(*message.immediate);
    const auto found = pending_.find(answer.message_id);
    REQUIRE(found != pending_.end());
    const Pending pending = found->second;
    pending_.erase(found);
    ++answers;
    CHECK(answer.invalidated == pending.header.need_invalidation);
    if ((geometry->flags & connect_flag_new_rkey) != 0) {
      const auto key = parse_rkey_response(message.payload);
      REQUIRE(key.has_value());
      CHECK(key->buffer_id == answer.message_id);
      windows_[answer.message_id].rkey = key->rkey;
      ++keys;
    } else {
      CHECK(message.payload.empty());
    }
    if (pending.type == RnbdType::open && answer.error != 0) {
      CHECK(answer.error == ENOENT);
      refused.push_back(pending.name);
    } else if (pending.type == RnbdType::open) {
      const auto response = parse_open_response(placed_[pending.header.descriptor.address]);
      REQUIRE(response.has_value());
      opened.push_back(pending.name + " " + std::to_string(response->sector_count.get()));
    } else if (pending.type == RnbdType::session_info) {
      CHECK(parse_session_info_response(placed_[pending.header.descriptor.address])->version == 2);
    } else {
      CHECK(answer.error == 0);
    }
  }

  std::map<std::pair<bool, uint32_t>, Message> open_;
  std::vector<ChunkWindow> windows_;
  std::map<uint32_t, Bytes> chunks_;
  std::map<uint64_t, Bytes> placed_;
  std::map<uint32_t, Pending> pending_;
};

}  // namespace

TEST_CASE("captured sessions of the kernel's own ends") {
  for (const char* const kernel : {"6.1", "6.12"}) {
    for (const char* const mode : {"N", "Y"}) {
      const std::string name =
          std::string("rnbd-session-") + kernel + "-invalidate-" + mode + ".pcap";
      CAPTURE(name);
      const Replay replay(std::string(CAPTURES) + "/" + name);
      CHECK(replay.connect_requests == 3);
      CHECK(replay.accepts == 3);
      CHECK(replay.geometry->queue_depth == 512);
      CHECK(replay.geometry->max_io_size == 126976);
      CHECK(replay.geometry->flags == (*mode == 'Y' ? connect_flag_new_rkey : 0));
      CHECK_FALSE(replay.session_name.empty());
      CHECK(replay.session_infos == 1);
      CHECK(replay.opened.size() == 2);
      CHECK(replay.refused.size() == 1);
      CHECK(replay.closes == 2);
      for (const uint32_t size : {512U, 4096U, 16384U, 126976U}) {
        CHECK(replay.write_sizes.contains(size));
        CHECK(replay.read_sizes.contains(size));
      }
      CHECK(replay.flushes >= 1);
      CHECK(replay.fua_writes >= 1);
      CHECK(replay.discards >= 1);
      CHECK(replay.heartbeats >= 2);
      CHECK(replay.acknowledgements == replay.heartbeats);
      CHECK(replay.keys == (*mode == 'Y' ? replay.answers : 0));
      CHECK(replay.invalidations >= replay.read_sizes.size());
    }
  }
}

}  // namespace rtrsnbd::wire
