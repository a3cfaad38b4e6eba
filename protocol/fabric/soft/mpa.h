// SPDX-License-Identifier: BSD-3-Clause
// MPA connection set-up without sockets: reading a request or reply frame from bytes that arrive in
// any pieces, the checks on it, and making the answers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "protocol/wire/iwarp.h"

namespace rtrsnbd::fabric::soft {

// What both ends must know of a connection once it is set up.
struct MpaTerms {
  uint8_t revision = 1;
  bool crc = false;           // the frame's C
  bool enhanced = false;      // RFC 6581
  bool peer_to_peer = false;  // A: the initiator will send a first message by itself
  bool rtr_write = false;     // C: which may be a zero-length RDMA Write
};

class MpaReader {
 public:
  enum class Kind : uint8_t { request, reply };
  enum class State : uint8_t {
    reading,
    complete,
    refused,  // a request to be answered with a reject that carries no private data; then closed
    broken,   // close without a word; why() says why
  };

  explicit MpaReader(Kind kind, MpaTerms sent = {}) : kind_(kind), sent_(sent) {}

  // Where the next bytes go. Exactly as many as surely belong to this frame: what follows on the
  // stream is left alone. Not empty while reading.
  [[nodiscard]] std::span<std::byte> buffer();
  void received(size_t count);

  [[nodiscard]] State state() const { return state_; }
  [[nodiscard]] std::string_view why() const { return why_; }

  // The rest once complete or, but for private data, refused.
  [[nodiscard]] const MpaTerms& terms() const { return terms_; }
  [[nodiscard]] bool rejected() const { return rejected_; }  // of a reply
  [[nodiscard]] std::span<const std::byte> private_data() const;

 private:
  void check_header();
  void check_enhanced();
  void break_off(std::string_view why);

  Kind kind_;
  State state_ = State::reading;
  MpaTerms sent_;  // of our request, when reading the reply to it
  MpaTerms terms_;
  bool rejected_ = false;
  std::string_view why_;
  size_t have_ = 0;
  size_t need_ = sizeof(wire::iwarp::MpaHeader);
  std::array<std::byte, wire::iwarp::mpa_frame_max> frame_{};
};

// These write a frame and return its length. Private data: at most what mpa_private_data_max leaves
// beside the four bytes of RFC 6581.
using MpaFrame = std::array<std::byte, wire::iwarp::mpa_frame_max>;
inline constexpr size_t private_data_max =
    wire::iwarp::mpa_private_data_max - sizeof(wire::iwarp::MpaEnhanced);
size_t make_mpa_request(MpaFrame& frame, bool crc, std::span<const std::byte> private_data);
// `crc` is that of the connection: either end's wish.
size_t make_mpa_accept(MpaFrame& frame, const MpaTerms& request, bool crc,
                       std::span<const std::byte> private_data);
size_t make_mpa_reject(MpaFrame& frame, const MpaTerms& request,
                       std::span<const std::byte> private_data);

}  // namespace rtrsnbd::fabric::soft
