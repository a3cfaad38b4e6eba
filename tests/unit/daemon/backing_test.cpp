// SPDX-License-Identifier: BSD-3-Clause
// What may become a volume, and what is refused with which words.
#include "daemon/backing.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>

#include <thread>

#include "tests/unit/daemon/support.h"

using namespace rtrsnbd;
using namespace rtrsnbd::daemon;
using namespace rtrsnbd::daemon::test;

namespace {

std::string refusal(const config::Volume& volume) {
  LogLines log;
  const auto backing = Backing::open(volume, log.sink(), kernel(), std::chrono::milliseconds(0));
  return backing ? "" : backing.error();
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a-size-that-cannot-be-served-whole-is-cut") {
  const TemporaryDirectory directory("/var/tmp");
  for (const uint64_t size : {1U, 511U, 513U, 4095U, 4097U, 1048576U + 333, 202893U}) {
    const std::string path = directory / std::to_string(size);
    REQUIRE(make_file(path, size));
    for (const std::string& text : {refusal(volume_at(path)), Backing::inspect(volume_at(path))}) {
      CAPTURE(text);
      CHECK(contains(text, std::to_string(size) + " bytes"));
      CHECK(contains(text, "no multiple of 512"));
      CHECK(contains(text, "truncate -s %512 " + path));
    }
  }
  // 512 divides it, 4096 does not: served whole with small blocks, refused when 4096 was asked for.
  const std::string path = directory / "tail";
  REQUIRE(make_file(path, 4096 + 512));
  LogLines log;
  {
    const auto backing = Backing::open(volume_at(path), log.sink());
    REQUIRE_MESSAGE(backing.has_value(), backing.error());
    CHECK((*backing)->properties().size_bytes == 4608);
    CHECK((*backing)->properties().logical_block_size == 512);
  }
  config::Volume large = volume_at(path);
  large.block_size = 4096;
  CHECK(contains(refusal(large), "no multiple of 4096"));
  CHECK(contains(Backing::inspect(large), "no multiple of 4096"));
}

TEST_CASE("what-is-no-file-or-device-is-served") {
  const TemporaryDirectory directory("/var/tmp");
  CHECK(
      contains(refusal(volume_at(directory.path())), "neither a regular file nor a block device"));
  CHECK(contains(refusal(volume_at("/dev/null")), "neither a regular file nor a block device"));
  REQUIRE(mkfifo((directory / "pipe").c_str(), 0600) == 0);
  CHECK(contains(refusal(volume_at(directory / "pipe")),
                 "neither a regular file nor a block device"));
  REQUIRE(make_file(directory / "empty", 0));
  CHECK(contains(refusal(volume_at(directory / "empty")), "is empty"));
  const std::string missing = refusal(volume_at(directory / "missing"));
  CHECK(contains(missing, "No such file"));
  CHECK(contains(missing, "size:"));
  CHECK_FALSE(Backing::inspect(volume_at(directory / "missing")).empty());
}

TEST_CASE("an-existing-file-is-grown-shrunk-or-overwritten") {
  const TemporaryDirectory directory("/var/tmp");
  const std::string path = directory / "image";
  config::Volume volume = volume_at(path);
  volume.size = uint64_t{10} << 30;
  CHECK(Backing::inspect(volume).empty());
  LogLines log;
  {
    const auto created = Backing::open(volume, log.sink());
    REQUIRE_MESSAGE(created.has_value(), created.error());
    CHECK((*created)->properties().size_bytes == volume.size);
    CHECK(log.count(LogLevel::notice, "created") == 1);
  }
  struct stat status {};
  REQUIRE(stat(path.c_str(), &status) == 0);
  CHECK(static_cast<uint64_t>(status.st_size) == volume.size);
  CHECK(status.st_blocks * 512 < 1048576);
  CHECK((status.st_mode & 0777) == 0600);
  CHECK(refusal(volume).empty());  // the second start finds it as it is

  for (const uint64_t other : {volume.size - 4096, volume.size + 4096}) {
    config::Volume changed = volume;
    changed.size = other;
    for (const std::string& text : {refusal(changed), Backing::inspect(changed)}) {
      CHECK(contains(text, std::to_string(volume.size)));
      CHECK(contains(text, std::to_string(other)));
    }
  }
  REQUIRE(stat(path.c_str(), &status) == 0);
  CHECK(static_cast<uint64_t>(status.st_size) == volume.size);

  // What a crash between creating and sizing leaves behind is not taken for a volume.
  config::Volume half = volume_at(directory / "half");
  REQUIRE(make_file(half.path, 0));
  half.size = 4096;
  CHECK(contains(refusal(half), "remove it if it holds nothing"));
}

TEST_CASE("a-file-is-created-where-it-should-not-be") {
  const TemporaryDirectory directory("/var/tmp");
  config::Volume volume = volume_at("/dev/rtrsd-test-no-such-disk");
  volume.size = 1 << 20;
  CHECK(contains(refusal(volume), "device nodes"));
  CHECK(access(volume.path.c_str(), F_OK) != 0);
  volume = volume_at(directory / "no/such/directory/image");
  volume.size = 1 << 20;
  CHECK_FALSE(refusal(volume).empty());
  volume = volume_at(directory / "odd");
  volume.size = 1000;
  CHECK(contains(refusal(volume), "no multiple of 512"));
  CHECK(access(volume.path.c_str(), F_OK) != 0);
  volume.size = uint64_t{1} << 62;  // beyond what ext4 or xfs can hold
  if (!refusal(volume).empty()) CHECK(access(volume.path.c_str(), F_OK) != 0);
  volume.size = 4096;
  volume.read_only = true;  // nothing could ever be written to it
  CHECK_FALSE(refusal(volume).empty());
}

TEST_CASE("one-backing-is-opened-for-writing-twice") {
  const TemporaryDirectory directory("/var/tmp");
  const std::string path = directory / "image";
  REQUIRE(make_file(path, 65536));
  REQUIRE(link(path.c_str(), (directory / "hard").c_str()) == 0);
  REQUIRE(symlink(path.c_str(), (directory / "soft").c_str()) == 0);
  config::Volume reader = volume_at(path);
  reader.read_only = true;
  LogLines log;
  {
    const auto writer = Backing::open(volume_at(path), log.sink());
    REQUIRE(writer.has_value());
    for (const char* name : {"image", "hard", "soft"}) {
      CHECK(contains(refusal(volume_at(directory / name)), "in use"));
      config::Volume also_reader = volume_at(directory / name);
      also_reader.read_only = true;
      CHECK(contains(refusal(also_reader), "in use"));
    }
  }
  const auto first = Backing::open(reader, log.sink());
  const auto second = Backing::open(reader, log.sink());
  CHECK(first.has_value());
  CHECK(second.has_value());
  CHECK(contains(refusal(volume_at(path)), "in use"));
}

TEST_CASE("another-daemon-s-lock-is-not-seen-or-outlives-it") {
  const TemporaryDirectory directory("/var/tmp");
  const std::string path = directory / "image";
  REQUIRE(make_file(path, 65536));
  int ready[2];
  REQUIRE(pipe(ready) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    LogLines log;
    const auto backing = Backing::open(volume_at(path), log.sink());
    const char result = backing ? 'y' : 'n';
    if (write(ready[1], &result, 1) != 1) _exit(1);
    for (;;) pause();
  }
  char result = 'n';
  REQUIRE(read(ready[0], &result, 1) == 1);
  CHECK(result == 'y');
  CHECK(contains(refusal(volume_at(path)), "another process"));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  CHECK(refusal(volume_at(path)).empty());
  close(ready[0]);
  close(ready[1]);
}

TEST_CASE("a-lock-that-is-just-given-up-is-not-waited-for") {
  const TemporaryDirectory directory("/var/tmp");
  REQUIRE(make_file(directory / "image", 65536));
  LogLines log;
  auto first = Backing::open(volume_at(directory / "image"), log.sink());
  REQUIRE(first.has_value());
  std::thread leaver([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    first->reset();
  });
  const auto second = Backing::open(volume_at(directory / "image"), log.sink());
  leaver.join();
  CHECK(second.has_value());
}

TEST_CASE("a-block-device-in-use-is-taken") {
  const TemporaryDirectory directory("/var/tmp");
  REQUIRE(make_file(directory / "disk", 1 << 20));
  const LoopDevice device(directory / "disk", 4096);
  if (!device) {
    MESSAGE("skipped: no right to make loop devices here");
    return;
  }
  LogLines log;
  {
    const auto backing = Backing::open(volume_at(device.path()), log.sink());
    REQUIRE_MESSAGE(backing.has_value(), backing.error());
    const rnbd::DeviceProperties& properties = (*backing)->properties();
    CHECK(properties.size_bytes == 1 << 20);
    CHECK(properties.logical_block_size == 4096);
    CHECK(properties.physical_block_size == 4096);
    CHECK((*backing)->transfer() == Transfer::direct);
    CHECK(properties.discard_bytes_max == (uint64_t{1} << 32) - 4096);
    CHECK(properties.discard_granularity > 0);
    CHECK(contains(refusal(volume_at(device.path())), "served by another rtrsd"));
  }
  {
    const Fd claim(open(device.path().c_str(), O_RDWR | O_EXCL | O_CLOEXEC));
    REQUIRE(static_cast<bool>(claim));
    CHECK(contains(refusal(volume_at(device.path())), "mounted"));
  }
  config::Volume sized = volume_at(device.path());
  sized.size = 1 << 19;
  CHECK(contains(refusal(sized), "served whole"));
  sized.size = 1 << 20;
  CHECK(refusal(sized).empty());
  config::Volume small_blocks = volume_at(device.path());
  small_blocks.block_size = 512;
  small_blocks.direct = config::Direct::on;
  CHECK(contains(refusal(small_blocks), "needs blocks of 4096"));
  small_blocks.direct = config::Direct::automatic;
  const auto backing = Backing::open(small_blocks, log.sink());
  REQUIRE(backing.has_value());
  CHECK((*backing)->transfer() == Transfer::buffered);
  CHECK((*backing)->properties().logical_block_size == 512);
  CHECK(log.count(LogLevel::notice, "page cache") == 1);
}

TEST_CASE("direct-io-is-claimed-where-there-is-none") {
  const TemporaryDirectory memory("/dev/shm");
  REQUIRE(make_file(memory / "image", 65536));
  config::Volume volume = volume_at(memory / "image");
  volume.direct = config::Direct::on;
  CHECK(contains(refusal(volume), "in memory"));
  volume.direct = config::Direct::automatic;
  LogLines log;
  {
    const auto backing = Backing::open(volume, log.sink());
    REQUIRE(backing.has_value());
    CHECK((*backing)->transfer() == Transfer::memory);
    CHECK((*backing)->properties().discard_bytes_max > 0);
  }
  const TemporaryDirectory disk("/var/tmp");
  REQUIRE(make_file(disk / "image", 65536));
  volume = volume_at(disk / "image");
  {
    const auto backing = Backing::open(volume, log.sink());
    REQUIRE(backing.has_value());
    CHECK((*backing)->transfer() == Transfer::direct);
  }
  volume.direct = config::Direct::off;
  const auto backing = Backing::open(volume, log.sink());
  REQUIRE(backing.has_value());
  CHECK((*backing)->transfer() == Transfer::buffered);
}

TEST_CASE("a-read-only-volume-offers-what-it-cannot-do") {
  const TemporaryDirectory directory("/var/tmp");
  REQUIRE(make_file(directory / "image", 65536));
  config::Volume volume = volume_at(directory / "image");
  volume.read_only = true;
  LogLines log;
  const auto backing = Backing::open(volume, log.sink());
  REQUIRE(backing.has_value());
  CHECK((*backing)->properties().read_only);
  CHECK((*backing)->properties().discard_bytes_max == 0);
  CHECK((*backing)->properties().write_zeroes_bytes_max == 0);
}

TEST_CASE("a-backing-without-holes-offers-discard") {
  class NoHoles final : public SystemCalls {
   public:
    int fallocate(int, int, uint64_t, uint64_t) override {
      errno = EOPNOTSUPP;
      return -1;
    }
  };
  NoHoles calls;
  const TemporaryDirectory directory("/var/tmp");
  REQUIRE(make_file(directory / "image", 65536));
  LogLines log;
  const auto backing = Backing::open(volume_at(directory / "image"), log.sink(), calls);
  REQUIRE(backing.has_value());
  CHECK((*backing)->properties().discard_bytes_max == 0);
  CHECK((*backing)->properties().discard_granularity == 0);
  CHECK((*backing)->properties().write_zeroes_bytes_max == slow_zeroes_bytes_max);
  CHECK((*backing)->discard(0, 4096) == EOPNOTSUPP);
  CHECK((*backing)->write_zeroes(0, 65536, false) == 0);
}

TEST_CASE("an-errno-means-something-else-at-the-client") {
  CHECK(client_errno(ENOSPC) == ENOSPC);
  CHECK(client_errno(EDQUOT) == ENOSPC);
  CHECK(client_errno(EIO) == EIO);
  CHECK(client_errno(EPERM) == EPERM);
  CHECK(client_errno(EINVAL) == EIO);
  CHECK(client_errno(EAGAIN) == EIO);
  CHECK(client_errno(512) == EIO);
  CHECK(client_errno(-5) == EIO);
  CHECK(client_errno(0) == EIO);
}
