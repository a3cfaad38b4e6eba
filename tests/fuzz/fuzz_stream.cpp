// SPDX-License-Identifier: BSD-3-Clause
// Any bytes as the stream behind an established iWARP connection, in any pieces.
//
// Input: one byte of choices, one byte that seeds the sizes of the pieces, then the stream.
//   bit 0: checksums on
//   bit 1: put the right checksum at the end of every FPDU first, so that mutated ones get past
//   that check bits 2, 3: after some piece the owner revokes (1), renews (2) or rebinds (3) the
//   large region
//
// Keys: 0x101 names 64 bytes, 0x201 names 20000 bytes, 0x301 memory that is closed to the peer,
// 0x401 memory of another domain, 0x501 a revoked key; addresses start at the index << 32. All
// memory is of exact size, so that the address sanitizer sees any byte placed beside it.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "protocol/fabric/soft/receiver.h"
#include "protocol/fabric/soft/send_queue.h"
#include "protocol/wire/crc32c.h"

using namespace rtrsnbd;
using namespace rtrsnbd::fabric;
using namespace rtrsnbd::fabric::soft;

namespace {

void must(bool condition) {
  if (!condition) std::abort();
}

using Bytes = std::vector<std::byte>;

struct Memory {
  explicit Memory(size_t length) : size(length), bytes(new std::byte[length]()) {}
  [[nodiscard]] bool untouched() const {
    for (size_t i = 0; i < size; ++i)
      if (bytes[i] != std::byte{0}) return false;
    return true;
  }
  size_t size;
  std::unique_ptr<std::byte[]> bytes;
};

class Collector : public Receiver::Sink {
 public:
  bool on_completion(const Completion& completion) override {
    completions.push_back(completion);
    return true;
  }
  std::vector<Completion> completions;
};

struct Run {
  static constexpr DomainId ours = 1;
  static constexpr DomainId another = 2;

  explicit Run(bool crc) : receiver(keys, ours, receives, crc) {
    add(ours, small, Access::remote_write);
    large_index = add(ours, large, Access::remote_write);
    add(ours, closed, Access::none);
    add(another, foreign, Access::remote_write);
    keys.invalidate(add(ours, revoked, Access::remote_write));
    receives.post(10, first.bytes.get(), first.size);
    receives.post_empty(11, 3);
    receives.post(12, second.bytes.get(), second.size);
    receives.post_empty(13, 2);
  }

  uint32_t add(DomainId domain, const Memory& memory, Access access) {
    return keys.allocate(domain, memory.bytes.get(), memory.size, access);
  }

  void change_large(unsigned what) {
    if (what == 1) {
      must(keys.invalidate(large_index));
      large = Memory(1);  // the old memory is gone
    } else if (what == 2) {
      keys.renew(large_index);
    } else {
      must(keys.invalidate(large_index));
      large = Memory(9000);
      keys.rebind(large_index, large.bytes.get(), large.size);
    }
  }

  // Pieces of random size; after `change_after` of them the large region changes.
  void feed(std::span<const std::byte> bytes, unsigned seed, unsigned change) {
    std::minstd_rand random(seed + 1);
    const size_t piece_max = size_t{1} << (random() % 17);
    const size_t change_after = random() % 8;
    for (size_t piece = 0; !bytes.empty(); ++piece) {
      if (change != 0 && piece == change_after) change_large(change);
      const auto vectors = receiver.begin();
      if (vectors.empty()) break;
      size_t offered = 0;
      for (const iovec& vector : vectors) {
        must(vector.iov_len > 0);
        offered += vector.iov_len;
      }
      const size_t count =
          std::min({offered, bytes.size(), seed == 0 ? SIZE_MAX : random() % piece_max + 1});
      size_t done = 0;
      for (const iovec& vector : vectors) {
        const size_t part = std::min(count - done, vector.iov_len);
        if (part > 0) std::memcpy(vector.iov_base, bytes.data() + done, part);
        done += part;
      }
      receiver.end(count, sink);
      bytes = bytes.subspan(count);
    }
  }

  void check() {
    must(closed.untouched() && foreign.untouched() && revoked.untouched());
    for (const Completion& completion : sink.completions) {
      must(completion.id >= 10 && completion.id <= 13);
      const size_t room = completion.id == 10 ? first.size : completion.id == 12 ? second.size : 0;
      must(completion.byte_count <= room);
    }
    must(sink.completions.size() <= 7);
    if (receiver.status() == Receiver::Status::failed) {
      // The Terminate must be one that we could read ourselves.
      SendQueue queue(true, segment_payload_default);
      queue.post_terminate(receiver.failure().error, receiver.failure().header_bytes());
      iovec vector{};
      size_t bytes = 0;
      must(queue.gather({&vector, 1}, bytes) == 1);
      Receiver reader(keys, ours, receives, true);
      Collector nothing;
      const auto room = reader.begin();
      must(room.size() == 1 && room[0].iov_len >= bytes);
      std::memcpy(room[0].iov_base, vector.iov_base, bytes);
      must(reader.end(bytes, nothing) == Receiver::Status::terminated);
    }
  }

  KeyTable keys;
  Memory small{64}, large{20000}, closed{32}, foreign{32}, revoked{32}, first{16}, second{100};
  uint32_t large_index = 0;
  ReceiveQueue receives;
  Collector sink;
  Receiver receiver;
};

void put_checksums(Bytes& stream) {
  using namespace wire::iwarp;
  for (size_t at = 0; at + 2 <= stream.size();) {
    const size_t total = fpdu_size(wire::load<wire::Be16>(stream.data() + at));
    if (total > stream.size() - at) return;
    store_crc(stream.data() + at + total - fpdu_crc_size,
              wire::crc32c({stream.data() + at, total - fpdu_crc_size}));
    at += total;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const bool crc = (data[0] & 1) != 0;
  const unsigned change = data[0] >> 2 & 3;
  const auto bytes = std::as_bytes(std::span(data, size)).subspan(2);
  Bytes stream(bytes.begin(), bytes.end());
  if ((data[0] & 2) != 0) put_checksums(stream);

  Run pieces(crc);
  pieces.feed(stream, data[1], change);
  pieces.check();
  if (change != 0) return 0;

  // As large pieces as it will take: the same is delivered; and if both came to a stop between
  // FPDUs, or at the same fault, the same was placed.
  Run whole(crc);
  whole.feed(stream, 0, 0);
  whole.check();
  const auto& a = pieces.sink.completions;
  const auto& b = whole.sink.completions;
  must(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i)
    must(a[i].id == b[i].id && a[i].byte_count == b[i].byte_count &&
         a[i].has_immediate == b[i].has_immediate && a[i].immediate == b[i].immediate &&
         a[i].invalidated_rkey == b[i].invalidated_rkey);
  must(pieces.receiver.fpdus() == whole.receiver.fpdus());
  const bool between = !pieces.receiver.inside_fpdu() && !whole.receiver.inside_fpdu();
  if (!crc && between) {
    must(pieces.receiver.status() == whole.receiver.status());
    for (const auto memory : {&Run::small, &Run::large, &Run::first, &Run::second})
      must(std::memcmp((pieces.*memory).bytes.get(), (whole.*memory).bytes.get(),
                       (whole.*memory).size) == 0);
  }
  return 0;
}
