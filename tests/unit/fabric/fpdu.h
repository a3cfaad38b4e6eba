// SPDX-License-Identifier: BSD-3-Clause
// FPDUs made by hand, so that the tests can also make wrong ones, and a Receiver fed with them.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "protocol/fabric/soft/receiver.h"
#include "protocol/wire/crc32c.h"
#include "protocol/wire/iwarp.h"

namespace rtrsnbd::fabric::soft {

using Bytes = std::vector<std::byte>;

inline Bytes& operator+=(Bytes& to, const Bytes& more) {
  const size_t length = to.size();
  to.resize(length + more.size());
  std::copy(more.begin(), more.end(), to.begin() + static_cast<ptrdiff_t>(length));
  return to;
}

// Pad and checksum behind header and payload; the length field is left as it is.
inline Bytes sealed(Bytes fpdu) {
  fpdu.resize((fpdu.size() + 3) & ~size_t{3});
  const uint32_t crc = wire::crc32c(fpdu);
  fpdu.resize(fpdu.size() + wire::iwarp::fpdu_crc_size);
  wire::iwarp::store_crc(fpdu.data() + fpdu.size() - wire::iwarp::fpdu_crc_size, crc);
  return fpdu;
}

template <typename Header>
Bytes with_payload(Header header, const Bytes& payload) {
  header.length =
      static_cast<uint16_t>(sizeof header - wire::iwarp::fpdu_length_size + payload.size());
  const auto bytes = wire::bytes_of(header);
  Bytes fpdu(bytes.begin(), bytes.end());
  fpdu += payload;
  return fpdu;
}

struct Write {
  uint32_t key = 0;
  uint64_t offset = 0;
  Bytes payload;
  bool last = true;
  wire::iwarp::Opcode opcode = wire::iwarp::Opcode::write;
  operator Bytes() const { return sealed(unsealed()); }
  [[nodiscard]] Bytes unsealed() const {
    wire::iwarp::TaggedHeader header;
    if (last) header.ddp_control |= wire::iwarp::ddp_last;
    header.rdmap_control |= static_cast<uint8_t>(opcode);
    header.stag = key;
    header.offset = offset;
    return with_payload(header, payload);
  }
};

struct Message {
  wire::iwarp::Opcode opcode = wire::iwarp::Opcode::send;
  uint32_t number = 1;
  Bytes payload;
  bool last = true;
  uint32_t offset = 0;
  uint32_t upper_layer = 0;
  uint32_t queue = 0;
  operator Bytes() const { return sealed(unsealed()); }
  [[nodiscard]] Bytes unsealed() const {
    wire::iwarp::UntaggedHeader header;
    if (last) header.ddp_control |= wire::iwarp::ddp_last;
    header.rdmap_control |= static_cast<uint8_t>(opcode);
    header.upper_layer = upper_layer;
    header.queue_number = queue;
    header.message_number = number;
    header.message_offset = offset;
    return with_payload(header, payload);
  }
};

inline Bytes counting(size_t length, unsigned first = 0) {
  Bytes bytes(length);
  for (size_t i = 0; i < length; ++i) bytes[i] = static_cast<std::byte>(first + i + (i >> 8));
  return bytes;
}

class Collector : public Receiver::Sink {
 public:
  bool on_completion(const Completion& completion) override {
    completions.push_back(completion);
    return completions.size() < stop_after;
  }
  std::vector<Completion> completions;
  size_t stop_after = SIZE_MAX;
};

// Feeds bytes as a socket would, `step(n)` of the n that are offered at a time, until the receiver
// has enough or the bytes are gone.
template <typename Step>
Receiver::Status feed(Receiver& receiver, Receiver::Sink& sink, std::span<const std::byte> bytes,
                      Step step) {
  while (!bytes.empty() && receiver.status() == Receiver::Status::running) {
    const auto vectors = receiver.begin();
    if (vectors.empty()) break;
    size_t offered = 0;
    for (const iovec& vector : vectors) offered += vector.iov_len;
    const size_t count = std::min(step(offered), std::min(offered, bytes.size()));
    size_t done = 0;
    for (const iovec& vector : vectors) {
      const size_t part = std::min(count - done, vector.iov_len);
      if (part > 0) std::memcpy(vector.iov_base, bytes.data() + done, part);
      done += part;
    }
    receiver.end(count, sink);
    bytes = bytes.subspan(count);
  }
  return receiver.status();
}

}  // namespace rtrsnbd::fabric::soft
