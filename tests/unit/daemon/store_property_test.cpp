// SPDX-License-Identifier: BSD-3-Clause
// The store against a shadow: whatever is written, zeroed, discarded and read, on every kind of
// backing, has to look the same as in plain memory. A failure prints its seed; RTRSD_TEST_SEED
// replays it.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "tests/unit/daemon/support.h"

using namespace rtrsnbd;
using namespace rtrsnbd::daemon;
using namespace rtrsnbd::daemon::test;
using wire::RnbdOp;

namespace {

uint64_t seed() {
  if (const char* given = std::getenv("RTRSD_TEST_SEED"); given != nullptr)
    return std::strtoull(given, nullptr, 10);
  return std::random_device{}();
}

// A kernel that does as little as it may: short transfers, interruptions, "try again".
class Reluctant final : public SystemCalls {
 public:
  Reluctant(uint64_t its_seed, uint32_t unit) : random_(its_seed), unit_(unit) {}
  ssize_t preadv2(int fd, const iovec& piece, uint64_t offset, int flags) override {
    if (refuse(flags != 0)) return -1;
    return SystemCalls::preadv2(fd, shortened(piece), offset, flags);
  }
  ssize_t pwritev2(int fd, const iovec& piece, uint64_t offset, int flags) override {
    if (refuse(flags != 0)) return -1;
    return SystemCalls::pwritev2(fd, shortened(piece), offset, flags);
  }
  int fdatasync(int fd) override {
    if (refuse(false)) return -1;
    return SystemCalls::fdatasync(fd);
  }
  uint32_t ring_length(uint32_t length) override { return shortened(length); }
  int ring_result(bool, int result) override {
    const std::lock_guard lock(mutex_);
    const auto draw = random_() % 8;
    if (draw == 0) return -EAGAIN;
    if (draw == 1) return -EINTR;
    return result;
  }
  uint64_t shortenings = 0;

 private:
  bool refuse(bool may_try_again) {
    const std::lock_guard lock(mutex_);
    const auto draw = random_() % 8;
    if (draw == 0) errno = EINTR;
    if (draw == 1 && may_try_again) errno = EAGAIN;
    return draw == 0 || (draw == 1 && may_try_again);
  }
  uint32_t shortened(uint32_t length) {
    const std::lock_guard lock(mutex_);
    if (length <= unit_ || random_() % 2 == 0) return length;
    ++shortenings;
    return static_cast<uint32_t>(1 + random_() % (length / unit_)) * unit_;
  }
  iovec shortened(const iovec& piece) {
    return {piece.iov_base, shortened(static_cast<uint32_t>(piece.iov_len))};
  }
  std::mutex mutex_;
  std::mt19937_64 random_;
  const uint32_t unit_;
};

// What every byte may be. A discarded one is old or zero, until it is read or written.
class Shadow {
 public:
  explicit Shadow(uint64_t size) : bytes_(size), discarded_(size, false) {}
  void write(uint64_t offset, const std::byte* data, uint64_t length) {
    std::copy_n(data, length, bytes_.begin() + static_cast<ptrdiff_t>(offset));
    std::fill_n(discarded_.begin() + static_cast<ptrdiff_t>(offset), length, false);
  }
  void zero(uint64_t offset, uint64_t length) {
    std::fill_n(bytes_.begin() + static_cast<ptrdiff_t>(offset), length, std::byte{0});
    std::fill_n(discarded_.begin() + static_cast<ptrdiff_t>(offset), length, false);
  }
  void discard(uint64_t offset, uint64_t length) {
    std::fill_n(discarded_.begin() + static_cast<ptrdiff_t>(offset), length, true);
  }
  // The first position that is wrong, or length.
  uint64_t differs(uint64_t offset, const std::byte* data, uint64_t length) {
    for (uint64_t i = 0; i < length; ++i) {
      if (data[i] == bytes_[offset + i]) continue;
      if (!discarded_[offset + i] || data[i] != std::byte{0}) return i;
    }
    return length;
  }

 private:
  std::vector<std::byte> bytes_;
  std::vector<bool> discarded_;
};

void fill(std::byte* data, uint64_t length, uint64_t tag) {
  // Every 8 bytes tell where and when they were written; never zero, so that a hole shows.
  for (uint64_t i = 0; i < length; i += 8) {
    const uint64_t word = ((tag << 32) ^ (i * 0x9e3779b97f4a7c15U)) | 0x0101010101010101U;
    std::memcpy(data + i, &word, std::min<uint64_t>(8, length - i));
  }
}

struct Operation {
  Request request;
  uint64_t slot = 0;
};

// steps rounds, each of up to `depth` requests in flight at once on ranges that do not overlap.
void compare_with_shadow(const config::Volume& volume, KernelLevel level, bool reluctant,
                         uint64_t its_seed, int steps) {
  CAPTURE(its_seed);
  CAPTURE(volume.path);
  constexpr uint64_t slot_bytes = 512 * 1024;
  constexpr uint64_t depth = 8;
  StoreRig rig(level, slot_bytes * depth);
  std::mt19937_64 random(its_seed);
  auto opened = Backing::open(volume, rig.log.sink());
  REQUIRE_MESSAGE(opened.has_value(), opened.error());
  const uint64_t block = (*opened)->properties().logical_block_size;
  const uint64_t size = (*opened)->properties().size_bytes;
  const bool can_discard = (*opened)->properties().discard_bytes_max > 0;
  Reluctant unwilling_by_blocks(its_seed, static_cast<uint32_t>(block));
  if (reluctant) {
    opened->reset();
    opened = Backing::open(volume, rig.log.sink(), unwilling_by_blocks);
    REQUIRE_MESSAGE(opened.has_value(), opened.error());
  }
  {
    StoreDevice device(*opened, rig.reactor, rig.files);
    Shadow shadow(size);
    // A loop device over a fresh file reads as zeroes, as a fresh file does.
    uint64_t tag = 0;
    const auto position = [&]() -> uint64_t {
      // Half of them at the edges: the ends, and around 4 KiB and the largest request.
      const uint64_t edges[] = {0,
                                block,
                                4096 - block,
                                4096,
                                4096 + block,
                                size / 2 / block * block,
                                size - std::min(size, uint64_t{4096}),
                                size - block};
      const uint64_t chosen =
          random() % 2 == 0 ? edges[random() % std::size(edges)] : random() % size;
      return std::min(chosen, size - block) / block * block;
    };
    for (int step = 0; step < steps; ++step) {
      std::vector<std::unique_ptr<Operation>> operations;
      const uint64_t wanted = 1 + random() % depth;
      for (uint64_t i = 0; i < wanted; ++i) {
        const uint64_t offset = position();
        const uint64_t lengths[] = {block, 2 * block, 4096,      4096 + block,
                                    65536, 131072,    slot_bytes};
        uint64_t length =
            random() % 2 == 0 ? lengths[random() % std::size(lengths)] : random() % slot_bytes;
        length = std::max(block, std::min({length, size - offset, slot_bytes}) / block * block);
        const bool overlaps =
            std::any_of(operations.begin(), operations.end(), [&](const auto& other) {
              return offset < other->request.offset + other->request.length &&
                     other->request.offset < offset + length;
            });
        if (overlaps) continue;
        auto operation = std::make_unique<Operation>();
        operation->slot = i;
        Request& request = operation->request;
        const RnbdOp ops[] = {RnbdOp::read,         RnbdOp::read,
                              RnbdOp::write,        RnbdOp::write,
                              RnbdOp::write_zeroes, can_discard ? RnbdOp::discard : RnbdOp::read};
        request.op = ops[random() % std::size(ops)];
        request.offset = offset;
        request.length = length;
        request.fua = request.op != RnbdOp::read && random() % 4 == 0;
        request.preflush = random() % 8 == 0;
        request.no_unmap = random() % 2 == 0;
        request.data = rig.memory() + i * slot_bytes;
        request.registered_index = random() % 2 == 0 ? rig.chunks->registered_index() : -1;
        if (request.op == RnbdOp::write) fill(request.data, length, ++tag);
        if (request.op == RnbdOp::read) std::memset(request.data, 0xaa, length);
        operations.push_back(std::move(operation));
      }
      std::vector<Request*> requests;
      for (const auto& operation : operations) requests.push_back(&operation->request);
      rig.run(device, requests);
      for (const auto& operation : operations) {
        const Request& request = operation->request;
        CAPTURE(step);
        CAPTURE(static_cast<int>(request.op));
        CAPTURE(request.offset);
        CAPTURE(request.length);
        REQUIRE(request.completions == 1);
        REQUIRE(request.error == 0);
        switch (request.op) {
          case RnbdOp::write:
            shadow.write(request.offset, request.data, request.length);
            break;
          case RnbdOp::write_zeroes:
            shadow.zero(request.offset, request.length);
            break;
          case RnbdOp::discard:
            shadow.discard(request.offset, request.length);
            break;
          default:
            REQUIRE(shadow.differs(request.offset, request.data, request.length) == request.length);
        }
      }
    }
    REQUIRE(rig.run(device, RnbdOp::flush, 0, 0) == 0);
    // As somebody else sees it who opens the file in the usual way.
    std::vector<std::byte> all(size);
    const Fd reader(open(volume.path.c_str(), O_RDONLY | O_CLOEXEC));
    REQUIRE(static_cast<bool>(reader));
    for (uint64_t done = 0; done < size;) {
      const ssize_t count =
          pread(reader.get(), all.data() + done, size - done, static_cast<off_t>(done));
      REQUIRE(count > 0);
      done += static_cast<uint64_t>(count);
    }
    CHECK(shadow.differs(0, all.data(), size) == size);
    CHECK(device.in_flight() == 0);
    struct stat status {};
    REQUIRE(fstat(reader.get(), &status) == 0);
    if (S_ISREG(status.st_mode)) CHECK(static_cast<uint64_t>(status.st_size) == size);
  }
  if (reluctant && size > block) CHECK(unwilling_by_blocks.shortenings > 0);
  opened->reset();  // its workers end before the reactor
}

constexpr uint64_t sizes[] = {4096, 65536, 3 * 4096 + 1048576, 4194304 + 8192};

void all_ways(const std::function<config::Volume(uint64_t size, int number)>& make, int steps) {
  const uint64_t first_seed = seed();
  int number = 0;
  for (const uint64_t size : sizes) {
    for (const KernelLevel level : {KernelLevel::newest, KernelLevel::v5_15}) {
      for (const bool reluctant : {false, true}) {
        compare_with_shadow(make(size, number), level, reluctant,
                            first_seed + static_cast<uint64_t>(number), steps);
        ++number;
      }
    }
  }
}

}  // namespace

TEST_CASE("a file in memory differs from its shadow") {
  const TemporaryDirectory directory("/dev/shm");
  all_ways(
      [&](uint64_t size, int number) {
        config::Volume volume = volume_at(directory / std::to_string(number));
        REQUIRE(make_file(volume.path, size + 512));  // the tail is half a page
        return volume;
      },
      60);
}

TEST_CASE("a file on disk, past the page cache, differs from its shadow") {
  const TemporaryDirectory directory("/var/tmp");
  all_ways(
      [&](uint64_t size, int number) {
        config::Volume volume = volume_at(directory / std::to_string(number));
        if (number % 2 == 1) volume.block_size = 4096;
        REQUIRE(make_file(volume.path, size));
        return volume;
      },
      40);
}

TEST_CASE("a file on disk, through the page cache, differs from its shadow") {
  const TemporaryDirectory directory("/var/tmp");
  all_ways(
      [&](uint64_t size, int number) {
        config::Volume volume = volume_at(directory / std::to_string(number));
        volume.direct = config::Direct::off;
        REQUIRE(make_file(volume.path, size + 512));
        return volume;
      },
      40);
}

TEST_CASE("a block device differs from its shadow") {
  const TemporaryDirectory directory("/dev/shm");
  struct Kind {
    uint32_t device_block;
    uint32_t volume_block;
    config::Direct direct;
  };
  for (const Kind kind :
       {Kind{512, 0, config::Direct::automatic}, Kind{4096, 0, config::Direct::automatic},
        Kind{512, 4096, config::Direct::on}, Kind{4096, 512, config::Direct::automatic},
        Kind{512, 0, config::Direct::off}}) {
    std::vector<std::unique_ptr<LoopDevice>> devices;
    bool missing = false;
    {
      const std::string probe = directory / ("probe" + std::to_string(kind.device_block) +
                                             std::to_string(kind.volume_block) +
                                             std::to_string(static_cast<int>(kind.direct)));
      REQUIRE(make_file(probe, 65536));
      const LoopDevice device(probe, kind.device_block);
      missing = !device;
    }
    if (missing) {
      MESSAGE("skipped: no right to make loop devices here");
      return;
    }
    CAPTURE(kind.device_block);
    CAPTURE(kind.volume_block);
    all_ways(
        [&](uint64_t size, int number) {
          const std::string file =
              directory /
              (std::to_string(kind.device_block) + "-" + std::to_string(kind.volume_block) + "-" +
               std::to_string(static_cast<int>(kind.direct)) + "-" + std::to_string(number));
          REQUIRE(make_file(file, size));
          devices.clear();
          devices.push_back(std::make_unique<LoopDevice>(file, kind.device_block));
          REQUIRE(static_cast<bool>(*devices.back()));
          config::Volume volume = volume_at(devices.back()->path());
          volume.block_size = kind.volume_block;
          volume.direct = kind.direct;
          return volume;
        },
        20);
  }
}
