// SPDX-License-Identifier: BSD-3-Clause
// Every parser of RTRS and RNBD messages. What a parser accepts must keep the promises its users
// rely on.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "protocol/wire/rnbd.h"
#include "protocol/wire/rtrs.h"

using namespace rtrsnbd::wire;

namespace {

void expect(bool truth) {
  if (!truth) std::abort();
}

void connecting(std::span<const std::byte> bytes) {
  if (const auto request = parse_connect_request(bytes)) {
    expect(request->cid < request->cid_num);
    expect(request->cid_num <= connections_per_path_max);
  }
  if (const auto response = parse_connect_response(bytes);
      response && geometry_acceptable(*response)) {
    const uint64_t chunk = uint64_t{response->max_io_size} + response->max_hdr_size;
    expect(response->queue_depth >= 1);
    expect(chunk * response->queue_depth <= uint64_t{1} << 28);
    const uint32_t last = response->queue_depth - 1U;
    const auto end = static_cast<uint32_t>(chunk - 1);
    const auto back = IoRequestImmediate::decode(
        IoRequestImmediate{last, end}.encode(response->queue_depth), response->queue_depth);
    expect(back.chunk_id == last && back.offset == end);
  }
}

void info(std::span<const std::byte> bytes) {
  InfoRequest copy;
  if (const auto name = parse_info_request(bytes, copy)) {
    expect(session_name_allowed(*name));
    InfoRequest again;
    expect(make_info_request(*name, again));
  }
  if (bytes.size() < 3) return;
  const uint32_t chunk_size = 1 + static_cast<uint32_t>(bytes[0]) * 4096;
  std::vector<ChunkWindow> chunks(1 + static_cast<size_t>(bytes[1]));
  if (parse_info_response(bytes.subspan(2), chunk_size, chunks) == 0)
    for (const auto& chunk : chunks) expect(chunk.address <= UINT64_MAX - chunk_size);
  if (const auto renewal = parse_rkey_response(bytes)) expect(bytes.size() >= sizeof *renewal);
}

void io_request(std::span<const std::byte> bytes) {
  if (bytes.size() < 4) return;
  const auto offset = static_cast<uint32_t>(bytes[0]) | static_cast<uint32_t>(bytes[1]) << 8;
  const auto max = static_cast<uint32_t>(bytes[2]) * 16;
  const auto chunk = bytes.subspan(3);
  const auto request = parse_io_request(chunk, offset, max);
  if (!request) return;
  expect(request->type == RtrsType::write || request->type == RtrsType::read);
  expect(request->data_length <= max);
  expect(request->data_length + request->user_length == offset);
  expect(offset < chunk.size());
  expect(!request->need_invalidation || request->has_descriptor);
  expect(!request->has_descriptor ||
         (request->type == RtrsType::read && request->descriptor.length == request->data_length));
}

void rnbd(std::span<const std::byte> bytes) {
  (void)parse_rnbd_type(bytes);
  (void)parse_session_info(bytes);
  (void)parse_session_info_response(bytes);
  Open open, again;
  if (const auto name = parse_open(bytes, open))
    expect(make_open(*name, AccessMode::read_only, again));
  (void)parse_close(bytes);
  if (const auto message = parse_io(bytes))
    expect(bytes.size() >= sizeof(Io) || message->priority == 0);
  if (const auto response = parse_open_response(bytes)) {
    expect(response->logical_block_size >= 512 && response->logical_block_size <= 32768);
    expect(response->sector_count <= UINT64_MAX / 512 / 2);
  }
}

void immediates(std::span<const std::byte> bytes) {
  if (bytes.size() < 6) return;
  const uint32_t imm = load<Le32>(bytes.data());
  const uint32_t depth = std::max<uint32_t>(1, load<Le16>(bytes.data() + 4));
  const auto request = IoRequestImmediate::decode(imm, depth);
  expect(request.offset < (uint64_t{1} << (28 - bits_for(depth))));
  expect(request.encode(depth) == immediate_payload(imm));
  const auto response = IoResponseImmediate::decode(imm);
  expect(response.error <= errno_on_wire_max);
  const auto again = IoResponseImmediate::decode(response.encode());
  expect(again.message_id == response.message_id && again.error == response.error &&
         again.invalidated == response.invalidated);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  // In memory of exactly its size, so that reading one byte too much is noticed.
  const auto copy = std::make_unique<std::byte[]>(size - 1);
  std::transform(data + 1, data + size, copy.get(),
                 [](uint8_t byte) { return static_cast<std::byte>(byte); });
  const std::span<const std::byte> bytes(copy.get(), size - 1);
  switch (data[0] % 5) {
    case 0:
      connecting(bytes);
      break;
    case 1:
      info(bytes);
      break;
    case 2:
      io_request(bytes);
      break;
    case 3:
      rnbd(bytes);
      break;
    case 4:
      immediates(bytes);
      break;
  }
  return 0;
}
