// SPDX-License-Identifier: BSD-3-Clause
// Requests that fail, and requests that must not.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <fstream>
#include <mutex>
#include <thread>
#include <vector>

#include "daemon/store_device.h"
#include "tests/unit/daemon/support.h"

using namespace rtrsnbd;
using namespace rtrsnbd::daemon;
using namespace rtrsnbd::daemon::test;
using wire::RnbdOp;

namespace {

// Fails what it is told to fail.
class Failing final : public SystemCalls {
 public:
  std::atomic<int> sync_error{0};
  std::atomic<int> write_error{0};
  std::atomic<int> ring_write_error{0};
  std::atomic<int> range_error{0};
  std::atomic<int> syncs{0};
  std::atomic<int> ranges{0};

  int fdatasync(int fd) override {
    ++syncs;
    if (sync_error != 0) return fail(sync_error);
    return SystemCalls::fdatasync(fd);
  }
  ssize_t pwritev2(int fd, const iovec& piece, uint64_t offset, int flags) override {
    if (write_error != 0) return fail(write_error);
    return SystemCalls::pwritev2(fd, piece, offset, flags);
  }
  int ring_result(bool write, int result) override {
    return write && ring_write_error != 0 ? -ring_write_error : result;
  }
  int fallocate(int fd, int mode, uint64_t offset, uint64_t length) override {
    ++ranges;
    if (range_error != 0) return fail(range_error);
    return SystemCalls::fallocate(fd, mode, offset, length);
  }

 private:
  static int fail(int error) {
    errno = error;
    return -1;
  }
};

struct Opened {
  Opened(StoreRig& rig, const config::Volume& volume, SystemCalls& calls = kernel()) {
    auto opened = Backing::open(volume, rig.log.sink(), calls);
    REQUIRE_MESSAGE(opened.has_value(), opened.error());
    backing = *opened;
    device = std::make_unique<StoreDevice>(backing, rig.reactor, rig.files);
  }
  std::shared_ptr<Backing> backing;
  std::unique_ptr<StoreDevice> device;
};

config::Volume on_disk(const TemporaryDirectory& directory, config::Direct direct) {
  config::Volume volume = volume_at(directory / "image");
  if (access(volume.path.c_str(), F_OK) != 0) REQUIRE(make_file(volume.path, 1 << 20));
  volume.direct = direct;
  return volume;
}

}  // namespace

TEST_CASE("a-failed-flush-is-forgotten") {
  const TemporaryDirectory directory("/var/tmp");
  for (const config::Direct direct : {config::Direct::off, config::Direct::on}) {
    Failing calls;
    StoreRig rig;
    const Opened volume(rig, on_disk(directory, direct), calls);
    StoreDevice& device = *volume.device;
    CHECK(rig.run(device, RnbdOp::write, 0, 65536) == 0);
    CHECK(rig.run(device, RnbdOp::flush, 0, 0) == 0);
    calls.sync_error = EIO;
    CHECK(rig.run(device, RnbdOp::flush, 0, 0) == EIO);
    calls.sync_error = 0;  // the disk is well again, the writes are not
    const int syncs = calls.syncs;
    CHECK(rig.run(device, RnbdOp::flush, 0, 0) == EIO);
    CHECK(rig.run(device, RnbdOp::write, 0, 4096, true) == EIO);
    CHECK(rig.run(device, RnbdOp::write, 0, 4096) == EIO);
    CHECK(rig.run(device, RnbdOp::write_zeroes, 0, 4096) == EIO);
    CHECK(rig.run(device, RnbdOp::discard, 0, 4096, true) == EIO);
    CHECK(rig.run(device, RnbdOp::read, 0, 4096) == 0);
    CHECK(calls.syncs == syncs);
    CHECK(rig.log.count(LogLevel::error) == 1);
    CHECK(rig.log.count(LogLevel::error, "volume v: FAILED: fdatasync") == 1);
    // For every session, not only for the one that asked.
    StoreDevice other(volume.backing, rig.reactor, rig.files);
    CHECK(rig.run(other, RnbdOp::flush, 0, 0) == EIO);
  }
}

TEST_CASE("a-flush-beside-the-failing-one-reports-success") {
  // The kernel reports a lost write to one fdatasync only. Many ask at once, one call fails.
  class FailsOnce final : public SystemCalls {
   public:
    int fdatasync(int) override {
      if (++calls == 2) {
        errno = EIO;
        return -1;
      }
      return 0;
    }
    std::atomic<int> calls{0};
  };
  const TemporaryDirectory directory("/var/tmp");
  FailsOnce calls;
  StoreRig rig;
  const Opened volume(rig, on_disk(directory, config::Direct::off), calls);
  CHECK(rig.run(*volume.device, RnbdOp::flush, 0, 0) == 0);
  std::vector<std::unique_ptr<Request>> requests;
  std::vector<Request*> pointers;
  for (int i = 0; i < 32; ++i) {
    requests.push_back(std::make_unique<Request>());
    requests.back()->op = RnbdOp::flush;
    pointers.push_back(requests.back().get());
  }
  rig.run(*volume.device, pointers);
  for (const auto& request : requests) CHECK(request->error == EIO);
}

TEST_CASE("flushes-that-could-share-one-fdatasync-do-not-or-share-one-that-began-too-early") {
  class Gated final : public SystemCalls {
   public:
    int fdatasync(int) override {
      std::unique_lock lock(mutex);
      ++started;
      changed.notify_all();
      changed.wait(lock, [this] { return open; });
      return 0;
    }
    void set_open(bool value) {
      const std::lock_guard lock(mutex);
      open = value;
      changed.notify_all();
    }
    void wait_until_started(int count) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return started >= count; });
    }
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;
    int started = 0;
  };
  const TemporaryDirectory directory("/var/tmp");
  Gated calls;
  StoreRig rig;
  const Opened volume(rig, on_disk(directory, config::Direct::off), calls);
  std::thread first([&] { CHECK(volume.backing->flush() == 0); });
  calls.wait_until_started(1);
  // These come while it runs: it may have begun before their writes, so it does not count for them,
  // but one more can serve them all.
  std::atomic<int> entered{0};
  std::vector<std::thread> others;
  for (int i = 0; i < 8; ++i) {
    others.emplace_back([&] {
      ++entered;
      CHECK(volume.backing->flush() == 0);
    });
  }
  while (entered < 8) usleep(1000);
  usleep(100000);
  calls.set_open(true);
  first.join();
  for (std::thread& other : others) other.join();
  CHECK(calls.started >= 2);
  CHECK(calls.started <=
        4);  // 2, unless this machine kept a thread waiting for a tenth of a second
}

TEST_CASE("a-durable-write-that-failed-leaves-the-volume-trusted") {
  const TemporaryDirectory directory("/var/tmp");
  {
    Failing calls;
    StoreRig rig;
    const Opened volume(rig, on_disk(directory, config::Direct::off), calls);
    calls.ring_write_error = EIO;
    CHECK(rig.run(*volume.device, RnbdOp::write, 0, 4096, true) == EIO);
    calls.ring_write_error = 0;
    CHECK(rig.run(*volume.device, RnbdOp::flush, 0, 0) == EIO);
    CHECK(rig.log.count(LogLevel::error, "FAILED") == 1);
  }
  {
    // Past the page cache a bad block is that block's problem, as long as the device can flush.
    Failing calls;
    StoreRig rig;
    const Opened volume(rig, on_disk(directory, config::Direct::on), calls);
    calls.ring_write_error = EIO;
    CHECK(rig.run(*volume.device, RnbdOp::write, 0, 4096, true) == EIO);
    calls.ring_write_error = 0;
    CHECK(calls.syncs == 1);
    CHECK(rig.run(*volume.device, RnbdOp::flush, 0, 0) == 0);
    CHECK(rig.run(*volume.device, RnbdOp::write, 0, 4096, true) == 0);
    calls.ring_write_error = EIO;
    calls.sync_error = EIO;
    CHECK(rig.run(*volume.device, RnbdOp::write, 0, 4096, true) == EIO);
    calls.ring_write_error = calls.sync_error = 0;
    CHECK(rig.run(*volume.device, RnbdOp::flush, 0, 0) == EIO);
  }
}

TEST_CASE("durability-of-zero-and-discard-is-not-flushed") {
  const TemporaryDirectory directory("/var/tmp");
  Failing calls;
  StoreRig rig;
  const Opened volume(rig, on_disk(directory, config::Direct::on), calls);
  int expected = calls.syncs;
  for (const RnbdOp op : {RnbdOp::discard, RnbdOp::write_zeroes}) {
    CHECK(rig.run(*volume.device, op, 0, 8192) == 0);
    CHECK(calls.syncs == expected);
    CHECK(rig.run(*volume.device, op, 0, 8192, true) == 0);
    CHECK(calls.syncs == ++expected);
  }
  // And a preflush comes first, once.
  Request request;
  request.op = RnbdOp::write;
  request.preflush = true;
  request.length = 4096;
  request.data = rig.memory();
  CHECK(rig.run(*volume.device, request) == 0);
  CHECK(calls.syncs == ++expected);
  calls.sync_error = EIO;
  Request second = Request();
  second.op = RnbdOp::read;
  second.preflush = true;
  second.length = 4096;
  second.data = rig.memory();
  CHECK(rig.run(*volume.device, second) == EIO);
}

TEST_CASE("an-error-of-the-disk-turns-into-another-or-is-lost") {
  const TemporaryDirectory directory("/var/tmp");
  for (const config::Direct direct : {config::Direct::off, config::Direct::on}) {
    Failing calls;
    StoreRig rig;
    const Opened volume(rig, on_disk(directory, direct), calls);
    for (const auto& [given, expected] :
         {std::pair{EIO, EIO}, {ENOSPC, ENOSPC}, {EDQUOT, ENOSPC}, {EINVAL, EIO}}) {
      calls.ring_write_error = given;
      calls.write_error = given;
      // EINVAL of a call that may not sleep means "not that way"; then the ring says it.
      CHECK(rig.run(*volume.device, RnbdOp::write, 0, 4096) == expected);
      calls.ring_write_error = calls.write_error = 0;
      CHECK(rig.run(*volume.device, RnbdOp::write, 0, 4096) == 0);
      calls.range_error = given;
      CHECK(rig.run(*volume.device, RnbdOp::write_zeroes, 0, 4096) == expected);
      CHECK(rig.run(*volume.device, RnbdOp::discard, 0, 4096) == expected);
      calls.range_error = 0;
    }
    CHECK(rig.log.count(LogLevel::warning, "volume v: write of 4096 bytes at 0 failed") >= 3);
    CHECK(rig.log.count(LogLevel::error) == 0);
  }
}

TEST_CASE("zeroing-without-help-of-the-filesystem-fails-or-keeps-asking-for-it") {
  const TemporaryDirectory directory("/var/tmp");
  for (const config::Direct direct : {config::Direct::off, config::Direct::on}) {
    Failing calls;
    StoreRig rig;
    const Opened volume(rig, on_disk(directory, direct), calls);
    std::memset(rig.memory(), 0x55, 65536);
    CHECK(rig.run(*volume.device, RnbdOp::write, 0, 65536) == 0);
    calls.range_error = EOPNOTSUPP;
    CHECK(rig.run(*volume.device, RnbdOp::write_zeroes, 512, 65536 - 1024) == 0);
    const int ranges = calls.ranges;
    CHECK(rig.run(*volume.device, RnbdOp::write_zeroes, 512, 4096) == 0);
    CHECK(calls.ranges == ranges);
    CHECK(rig.run(*volume.device, RnbdOp::read, 0, 65536) == 0);
    CHECK(std::count(rig.memory(), rig.memory() + 65536, std::byte{0x55}) == 1024);
    CHECK(std::count(rig.memory(), rig.memory() + 65536, std::byte{0}) == 65536 - 1024);
    // It was advertised: from now on a discard does nothing, quietly, rather than fail a
    // filesystem.
    CHECK(rig.run(*volume.device, RnbdOp::discard, 0, 4096) == 0);
    CHECK(rig.run(*volume.device, RnbdOp::discard, 0, 4096) == 0);
    CHECK(rig.log.count(LogLevel::warning, "does not support discard") == 1);
  }
}

TEST_CASE("a-file-that-somebody-cut-is-read-as-garbage") {
  const TemporaryDirectory directory("/var/tmp");
  for (const config::Direct direct : {config::Direct::off, config::Direct::on}) {
    StoreRig rig;
    const Opened volume(rig, on_disk(directory, direct));
    REQUIRE(truncate(volume.backing->path().c_str(), 8192) == 0);
    CHECK(rig.run(*volume.device, RnbdOp::read, 0, 8192) == 0);
    CHECK(rig.run(*volume.device, RnbdOp::read, 4096, 8192) == EIO);
    CHECK(rig.run(*volume.device, RnbdOp::read, 65536, 4096) == EIO);
    REQUIRE(truncate(volume.backing->path().c_str(), 1 << 20) == 0);
  }
}

TEST_CASE("a-request-outside-the-volume-or-misaligned-reaches-the-file") {
  const TemporaryDirectory directory("/dev/shm");
  REQUIRE(make_file(directory / "image", 65536));
  StoreRig rig;
  const Opened volume(rig, volume_at(directory / "image"));
  struct Range {
    uint64_t offset;
    uint64_t length;
  };
  for (const RnbdOp op : {RnbdOp::read, RnbdOp::write, RnbdOp::discard, RnbdOp::write_zeroes}) {
    for (const Range range : {Range{65536, 512},
                              {65024, 1024},
                              {0, 66048},
                              {UINT64_MAX - 511, 512},
                              {UINT64_MAX - 511, 1024},
                              {1, 512},
                              {0, 511},
                              {512, UINT64_MAX - 1023}}) {
      CAPTURE(range.offset);
      CAPTURE(range.length);
      CHECK(rig.run(*volume.device, op, range.offset, range.length) == EINVAL);
    }
    CHECK(rig.run(*volume.device, op, 65536, 0) == 0);
    CHECK(rig.run(*volume.device, op, 0, 0, true) == 0);
  }
  struct stat status {};
  REQUIRE(stat((directory / "image").c_str(), &status) == 0);
  CHECK(status.st_size == 65536);
}

TEST_CASE("a-zero-length-request-hangs-or-reaches-the-disk") {
  const TemporaryDirectory directory("/var/tmp");
  Failing calls;
  StoreRig rig;
  const Opened volume(rig, on_disk(directory, config::Direct::on), calls);
  calls.write_error = calls.ring_write_error = calls.range_error = EIO;
  for (const RnbdOp op : {RnbdOp::read, RnbdOp::write, RnbdOp::discard, RnbdOp::write_zeroes}) {
    for (const bool preflush : {false, true}) {
      const int before = calls.syncs;
      Request request;
      request.op = op;
      request.fua = true;
      request.preflush = preflush;
      request.data = rig.memory();
      CHECK(rig.run(*volume.device, request) == 0);
      CHECK(calls.syncs - before == (preflush ? 1 : 0));
    }
  }
}

TEST_CASE("a-read-only-volume-is-changed") {
  const TemporaryDirectory directory("/var/tmp");
  config::Volume description = on_disk(directory, config::Direct::automatic);
  description.read_only = true;
  StoreRig rig;
  const Opened volume(rig, description);
  for (const RnbdOp op :
       {RnbdOp::write, RnbdOp::discard, RnbdOp::write_zeroes, RnbdOp::secure_erase}) {
    CHECK(rig.run(*volume.device, op, 0, 4096) == EPERM);
  }
  CHECK(rig.run(*volume.device, RnbdOp::read, 0, 4096) == 0);
  CHECK(rig.run(*volume.device, RnbdOp::flush, 0, 0) == 0);
}

TEST_CASE("secure-erase-is-pretended") {
  const TemporaryDirectory directory("/var/tmp");
  StoreRig rig;
  const Opened volume(rig, on_disk(directory, config::Direct::automatic));
  CHECK(rig.run(*volume.device, RnbdOp::secure_erase, 0, 4096) == EOPNOTSUPP);
}

TEST_CASE("memory-that-is-not-aligned-fails-a-direct-transfer") {
  const TemporaryDirectory directory("/var/tmp");
  StoreRig rig;
  const Opened volume(rig, on_disk(directory, config::Direct::on));
  std::vector<std::byte> expected(65536);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] = static_cast<std::byte>(i * 7);
  for (const size_t shift : {1U, 3U, 511U}) {
    std::byte* const data = rig.memory() + shift;
    std::copy(expected.begin(), expected.end(), data);
    for (const RnbdOp op : {RnbdOp::write, RnbdOp::read}) {
      Request request;
      request.op = op;
      request.fua = op == RnbdOp::write;
      request.length = expected.size();
      request.data = data;
      CHECK(rig.run(*volume.device, request) == 0);
      if (op == RnbdOp::write) std::memset(data, 0, expected.size());
    }
    CHECK(std::equal(expected.begin(), expected.end(), data));
  }
}

TEST_CASE("a-full-filesystem-is-reported-as-anything-but-enospc") {
  const PrivateTmpfs small("64m");
  if (!small) {
    MESSAGE("skipped: no right to mount a tmpfs here");
    return;
  }
  StoreRig rig;
  config::Volume description = volume_at(small / "image");
  description.size = uint64_t{256} << 20;
  const Opened volume(rig, description);
  CHECK(volume.backing->transfer() == Transfer::memory);
  std::memset(rig.memory(), 0x77, 1 << 20);
  uint64_t full_at = 0;
  for (uint64_t offset = 0; offset < description.size; offset += 1 << 20) {
    const int error = rig.run(*volume.device, RnbdOp::write, offset, 1 << 20);
    if (error == 0) continue;
    CHECK(error == ENOSPC);
    full_at = offset;
    break;
  }
  REQUIRE(full_at > 0);
  // What was written is there, and space that is given back can be used again.
  CHECK(rig.run(*volume.device, RnbdOp::read, full_at - (1 << 20), 1 << 20) == 0);
  CHECK(std::count(rig.memory(), rig.memory() + (1 << 20), std::byte{0x77}) == 1 << 20);
  CHECK(rig.run(*volume.device, RnbdOp::discard, 0, uint64_t{8} << 20) == 0);
  CHECK(rig.run(*volume.device, RnbdOp::write, full_at, 1 << 20) == 0);
  CHECK(rig.run(*volume.device, RnbdOp::flush, 0, 0) == 0);
  CHECK(rig.log.count(LogLevel::error) == 0);
}

TEST_CASE("a-block-device-that-returns-eio-is-not-reported-or-spoils-its-neighbours") {
  const PrivateTmpfs small("4m");
  if (!small) {
    MESSAGE("skipped: no right to mount a tmpfs here");
    return;
  }
  // The file under the loop device is larger than the room it has: writes beyond that fail with
  // EIO.
  REQUIRE(make_file(small / "disk", uint64_t{16} << 20));
  const LoopDevice device(small / "disk", 512);
  if (!device) {
    MESSAGE("skipped: no right to make loop devices here");
    return;
  }
  StoreRig rig;
  const Opened volume(rig, volume_at(device.path()));
  std::memset(rig.memory(), 0x33, 1 << 20);
  CHECK(rig.run(*volume.device, RnbdOp::write, 0, 1 << 20, true) == 0);
  int failed = 0;
  for (uint64_t offset = 1 << 20; offset < uint64_t{16} << 20; offset += 1 << 20) {
    const int error = rig.run(*volume.device, RnbdOp::write, offset, 1 << 20);
    if (error != 0) ++failed;
    CHECK((error == 0 || error == EIO || error == ENOSPC));
  }
  CHECK(failed > 0);
  CHECK(rig.run(*volume.device, RnbdOp::read, 0, 1 << 20) == 0);
  CHECK(std::count(rig.memory(), rig.memory() + (1 << 20), std::byte{0x33}) == 1 << 20);
  CHECK(rig.run(*volume.device, RnbdOp::flush, 0, 0) == 0);
}

TEST_CASE("a-durable-command-does-not-flush-the-device-or-one-that-is-not-does") {
  const TemporaryDirectory directory("/var/tmp");
  REQUIRE(make_file(directory / "disk", 1 << 20));
  const LoopDevice device(directory / "disk", 512);
  if (!device) {
    MESSAGE("skipped: no right to make loop devices here");
    return;
  }
  const auto flushes = [&] {
    std::ifstream statistics("/sys/block/" + device.path().substr(5) + "/stat");
    uint64_t value = 0;
    for (int field = 0; field < 16; ++field) REQUIRE(static_cast<bool>(statistics >> value));
    return value;  // the sixteenth: flush requests completed
  };
  for (const config::Direct direct : {config::Direct::on, config::Direct::off}) {
    StoreRig rig;
    config::Volume description = volume_at(device.path());
    description.direct = direct;
    const Opened volume(rig, description);
    for (const RnbdOp op : {RnbdOp::write, RnbdOp::write_zeroes, RnbdOp::discard}) {
      CAPTURE(static_cast<int>(op));
      const uint64_t before = flushes();
      CHECK(rig.run(*volume.device, op, 0, 65536) == 0);
      const uint64_t between = flushes();
      CHECK(between == before);
      CHECK(rig.run(*volume.device, op, 0, 65536, true) == 0);
      CHECK(flushes() > between);
    }
    const uint64_t before = flushes();
    CHECK(rig.run(*volume.device, RnbdOp::flush, 0, 0) == 0);
    CHECK(flushes() > before);
  }
}

TEST_CASE("ranges-beyond-two-gibibytes-are-cut") {
  const TemporaryDirectory directory("/var/tmp");
  config::Volume description = volume_at(directory / "image");
  description.size = uint64_t{10} << 30;
  StoreRig rig;
  const Opened volume(rig, description);
  std::memset(rig.memory(), 0x11, 1 << 20);
  const uint64_t gibibyte = uint64_t{1} << 30;
  for (const uint64_t length :
       {2 * gibibyte - 512, 2 * gibibyte, 2 * gibibyte + 512, 4 * gibibyte - 512}) {
    for (const RnbdOp op : {RnbdOp::discard, RnbdOp::write_zeroes}) {
      const uint64_t begin = 4096;
      // Marks at both ends, inside and outside.
      const uint64_t marks[] = {begin - 512, begin, begin + length - 512, begin + length};
      for (const uint64_t mark : marks)
        CHECK(rig.run(*volume.device, RnbdOp::write, mark, 512) == 0);
      CHECK(rig.run(*volume.device, op, begin, length) == 0);
      for (const uint64_t mark : marks) {
        const bool inside = mark >= begin && mark < begin + length;
        CHECK(rig.run(*volume.device, RnbdOp::read, mark, 512) == 0);
        CHECK(std::count(rig.memory(), rig.memory() + 512, std::byte{0x11}) == (inside ? 0 : 512));
        std::memset(rig.memory(), 0x11, 512);
      }
    }
  }
  struct stat status {};
  REQUIRE(stat(description.path.c_str(), &status) == 0);
  CHECK(status.st_blocks * 512 < 1 << 20);  // nothing of all that takes space
}

TEST_CASE("more-requests-than-the-ring-has-entries-are-lost") {
  const TemporaryDirectory directory("/var/tmp");
  StoreRig rig;
  const Opened volume(rig, on_disk(directory, config::Direct::on));
  std::vector<std::unique_ptr<Request>> requests;
  std::vector<Request*> pointers;
  for (uint64_t i = 0; i < 1000; ++i) {
    requests.push_back(std::make_unique<Request>());
    Request& request = *requests.back();
    request.op = i % 3 == 0 ? RnbdOp::read : i % 3 == 1 ? RnbdOp::write : RnbdOp::flush;
    request.offset = request.op == RnbdOp::flush ? 0 : i % 256 * 4096;
    request.length = request.op == RnbdOp::flush ? 0 : 4096;
    request.data = rig.memory() + i * 4096;
    pointers.push_back(&request);
  }
  rig.run(*volume.device, pointers);
  for (const auto& request : requests) {
    CHECK(request->completions == 1);
    CHECK(request->error == 0);
  }
  CHECK(rig.reactor.counters().backlogged < 2000);
}

TEST_CASE("one-volume-that-hangs-holds-up-another") {
  class Hanging final : public SystemCalls {
   public:
    int fdatasync(int) override {
      std::unique_lock lock(mutex);
      ++waiting;
      released.wait(lock, [this] { return free; });
      return 0;
    }
    int fallocate(int fd, int mode, uint64_t offset, uint64_t length) override {
      std::unique_lock lock(mutex);
      ++waiting;
      released.wait(lock, [this] { return free; });
      return SystemCalls::fallocate(fd, mode, offset, length);
    }
    std::mutex mutex;
    std::condition_variable released;
    bool free = true;
    int waiting = 0;
  };
  const TemporaryDirectory directory("/var/tmp");
  REQUIRE(make_file(directory / "good", 1 << 20));
  Hanging calls;
  StoreRig rig;
  const Opened stuck(rig, on_disk(directory, config::Direct::off), calls);
  const Opened good(rig, volume_at(directory / "good", "good"));
  calls.free = false;
  std::vector<std::unique_ptr<Request>> requests;
  rig.reactor.post([&] {
    for (int i = 0; i < 64; ++i) {
      requests.push_back(std::make_unique<Request>());
      requests.back()->op = i % 2 == 0 ? RnbdOp::flush : RnbdOp::discard;
      requests.back()->length = i % 2 == 0 ? 0 : 4096;
      stuck.device->submit(*requests.back());
    }
  });
  for (const RnbdOp op : {RnbdOp::write, RnbdOp::read, RnbdOp::discard, RnbdOp::write_zeroes}) {
    CHECK(rig.run(*good.device, op, 0, 4096, true) == 0);
  }
  CHECK(rig.run(*good.device, RnbdOp::flush, 0, 0) == 0);
  CHECK(stuck.device->in_flight() == 64);
  {
    const std::lock_guard lock(calls.mutex);
    calls.free = true;
  }
  calls.released.notify_all();
  size_t left = requests.size();
  rig.reactor.post([&] {
    for (const auto& request : requests) {
      if (request->completions > 0) --left;
      request->on_complete = [&] {
        if (--left == 0) rig.reactor.stop();
      };
    }
    if (left == 0) rig.reactor.stop();
  });
  rig.reactor.run();
  CHECK(stuck.device->in_flight() == 0);
}
