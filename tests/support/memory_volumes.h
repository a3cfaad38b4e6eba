// SPDX-License-Identifier: BSD-3-Clause
// Volumes in memory for tests of the RNBD server: operations are done at once, or wait until the
// test lets them be done.
#pragma once

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "protocol/rnbd/access.h"
#include "protocol/rnbd/block_device.h"

namespace rtrsnbd::test {

struct MemoryVolume {
  rnbd::DeviceProperties properties;
  std::vector<std::byte> bytes;
  rnbd::AccessCount access;
  bool hold = false;  // operations wait for release()
  int error = 0;      // of every operation
  std::vector<rnbd::BlockRequest*> waiting;
  int opens = 0, closes = 0;
  int flushes = 0, fuas = 0, preflushes = 0, no_unmaps = 0;
  uint64_t operations = 0;

  explicit MemoryVolume(size_t size = 1 << 20, uint32_t block = 512) : bytes(size) {
    properties.size_bytes = size;
    properties.logical_block_size = properties.physical_block_size = block;
    properties.discard_bytes_max = properties.write_zeroes_bytes_max = size;
    properties.discard_granularity = block;
  }

  void execute(rnbd::BlockRequest& request) {
    ++operations;
    // What the server must have checked.
    assert(request.offset + request.length <= bytes.size() &&
           request.offset + request.length >= request.offset);
    assert(request.offset % properties.logical_block_size == 0);
    assert(request.length % properties.logical_block_size == 0);
    fuas += request.fua;
    preflushes += request.preflush;
    no_unmaps += request.no_unmap;
    if (error == 0) {
      auto* const at = bytes.data() + request.offset;
      switch (request.op) {
        case wire::RnbdOp::read:
          std::memcpy(request.data, at, request.length);
          break;
        case wire::RnbdOp::write:
          std::memcpy(at, request.data, request.length);
          break;
        case wire::RnbdOp::flush:
          ++flushes;
          break;
        case wire::RnbdOp::discard:
        case wire::RnbdOp::write_zeroes:
          std::memset(at, 0, request.length);
          break;
        case wire::RnbdOp::secure_erase:
          assert(false);
          break;
      }
    }
    request.complete(error);
  }
  void release() {
    for (auto* request : std::exchange(waiting, {})) execute(*request);
  }
};

class MemoryVolumes final : public rnbd::Volumes {
 public:
  using Map = std::map<std::string, MemoryVolume, std::less<>>;
  explicit MemoryVolumes(Map& volumes) : volumes_(volumes) {}

  tl::expected<std::unique_ptr<rnbd::OpenDevice>, rnbd::OpenError> open(
      std::string_view name, wire::AccessMode mode) override {
    const auto found = volumes_.find(name);
    if (found == volumes_.end()) return tl::unexpected(rnbd::OpenError{ENOENT, "no such volume"});
    if (const int error = found->second.access.acquire(mode))
      return tl::unexpected(rnbd::OpenError{error, "mode not possible now"});
    ++found->second.opens;
    return std::make_unique<Device>(found->second, mode);
  }

 private:
  class Device final : public rnbd::OpenDevice {
   public:
    Device(MemoryVolume& volume, wire::AccessMode mode) : volume_(volume), mode_(mode) {}
    ~Device() override {
      ++volume_.closes;
      volume_.access.release(mode_);
    }
    [[nodiscard]] const rnbd::DeviceProperties& properties() const override {
      return volume_.properties;
    }
    void submit(rnbd::BlockRequest& request) override {
      if (volume_.hold)
        volume_.waiting.push_back(&request);
      else
        volume_.execute(request);
    }

   private:
    MemoryVolume& volume_;
    const wire::AccessMode mode_;
  };

  Map& volumes_;
};

}  // namespace rtrsnbd::test
