// SPDX-License-Identifier: BSD-3-Clause
// Any bytes as an MPA frame, in any pieces. Input: one byte of choices (bit 0: read it as a reply;
// bit 1: our request was an enhanced one), one byte that says how large the pieces are, then the
// bytes.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "protocol/fabric/soft/mpa.h"

using namespace rtrsnbd;
using fabric::soft::MpaFrame;
using fabric::soft::MpaReader;
using fabric::soft::MpaTerms;

namespace {

void must(bool condition) {
  if (!condition) std::abort();
}

MpaReader read(MpaReader::Kind kind, const MpaTerms& sent, std::span<const std::byte> bytes,
               size_t piece, size_t& taken) {
  MpaReader reader(kind, sent);
  taken = 0;
  while (reader.state() == MpaReader::State::reading && taken < bytes.size()) {
    const auto room = reader.buffer();
    must(!room.empty());
    const size_t count = std::min({room.size(), piece, bytes.size() - taken});
    std::memcpy(room.data(), bytes.data() + taken, count);
    reader.received(count);
    taken += count;
  }
  return reader;
}

void must_be_equal(const MpaReader& a, const MpaReader& b) {
  must(a.state() == b.state() && a.why() == b.why() && a.rejected() == b.rejected());
  const auto x = a.private_data();
  const auto y = b.private_data();
  must(std::equal(x.begin(), x.end(), y.begin(), y.end()));
}

// What we answer must be readable to ourselves.
void check_answers(const MpaReader& request) {
  const std::vector<std::byte> data(fabric::soft::private_data_max, std::byte{7});
  MpaTerms sent = request.terms();
  for (const bool accept : {true, false}) {
    MpaFrame frame;
    const size_t length = accept ? make_mpa_accept(frame, request.terms(), true, data)
                                 : make_mpa_reject(frame, request.terms(), data);
    size_t taken = 0;
    const MpaReader reply =
        read(MpaReader::Kind::reply, sent, std::span(frame).first(length), length, taken);
    must(taken == length && reply.state() == MpaReader::State::complete);
    must(reply.rejected() == !accept);
    must(reply.private_data().size() == data.size());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const auto kind = (data[0] & 1) != 0 ? MpaReader::Kind::reply : MpaReader::Kind::request;
  MpaTerms sent;
  if ((data[0] & 2) != 0) {
    sent.revision = 2;
    sent.enhanced = true;
  }
  const auto bytes = std::as_bytes(std::span(data, size)).subspan(2);
  size_t taken = 0;
  size_t taken_in_pieces = 0;
  const MpaReader whole = read(kind, sent, bytes, SIZE_MAX, taken);
  const MpaReader pieces = read(kind, sent, bytes, size_t{data[1]} + 1, taken_in_pieces);
  must_be_equal(whole, pieces);
  must(taken == taken_in_pieces);
  if (kind == MpaReader::Kind::request &&
      (whole.state() == MpaReader::State::complete || whole.state() == MpaReader::State::refused))
    check_answers(whole);
  return 0;
}
