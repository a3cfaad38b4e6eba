// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/volumes.h"

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>

#include "tests/unit/daemon/support.h"

using namespace rtrsnbd;
using namespace rtrsnbd::daemon;
using namespace rtrsnbd::daemon::test;
using wire::AccessMode;

namespace {

rtrs::SessionIdentity identity(const char* address, const std::string& name) {
  sockaddr_in peer{};
  peer.sin_family = AF_INET;
  peer.sin_port = htons(4711);
  REQUIRE(inet_pton(AF_INET, address, &peer.sin_addr) == 1);
  return {{}, name, fabric::Address(reinterpret_cast<sockaddr*>(&peer), sizeof peer)};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

struct Rig {
  Rig() : directory("/var/tmp") {}
  config::Volume file(const std::string& name) {
    REQUIRE(make_file(directory / name, 1 << 20));
    return volume_at(directory / name, name);
  }
  TemporaryDirectory directory;
  StoreRig store;
  VolumeRegistry registry{store.log.sink()};
  std::unique_ptr<rnbd::Volumes> view(const char* address = "192.0.2.1",
                                      const std::string& name = "client") {
    return registry.view(identity(address, name), store.reactor, store.files);
  }
};

}  // namespace

TEST_CASE("the-same-backing-under-two-names-is-served-twice") {
  Rig rig;
  const config::Volume first = rig.file("first");
  REQUIRE(rig.registry.add(first).has_value());
  REQUIRE(link(first.path.c_str(), (rig.directory / "hard").c_str()) == 0);
  REQUIRE(symlink(first.path.c_str(), (rig.directory / "soft").c_str()) == 0);
  for (const char* name : {"first", "hard", "soft"}) {
    const auto again = rig.registry.add(volume_at(rig.directory / name, "second"));
    REQUIRE_FALSE(again.has_value());
    CHECK(contains(again.error(), "volume second: "));
    CHECK(contains(again.error(), "already served as volume first"));
  }
  config::Volume read_only = rig.file("shared");
  read_only.read_only = true;
  REQUIRE(rig.registry.add(read_only).has_value());
  read_only.name = "shared2";
  CHECK(rig.registry.add(read_only).has_value());
}

TEST_CASE("a-forbidden-volume-looks-different-from-one-that-does-not-exist") {
  Rig rig;
  config::Volume secret = rig.file("secret");
  secret.allow = {{"192.0.2.7", ""}};
  REQUIRE(rig.registry.add(secret).has_value());
  const auto view = rig.view();
  const auto forbidden = view->open("secret", AccessMode::read_write);
  const auto missing = view->open("nothing", AccessMode::read_write);
  REQUIRE_FALSE(forbidden.has_value());
  REQUIRE_FALSE(missing.has_value());
  CHECK(forbidden.error().error == missing.error().error);
  // The log, which the client does not see, tells them apart.
  CHECK(contains(forbidden.error().reason, "allow:"));
  CHECK(contains(forbidden.error().reason, "192.0.2.1:4711"));
  CHECK(contains(missing.error().reason, "no volume"));
  CHECK(rig.view("192.0.2.7")->open("secret", AccessMode::read_write).has_value());
}

TEST_CASE("a-name-that-is-a-path-or-a-trick-opens-something") {
  Rig rig;
  REQUIRE(rig.registry.add(rig.file("v")).has_value());
  const auto view = rig.view();
  const std::string path = rig.directory / "v";
  for (const std::string& name :
       {path, std::string("../v"), std::string("./v"), std::string("v "), std::string("V"),
        std::string(), std::string("v\0", 2), std::string("\x1b[31m\n%n"), std::string(254, 'x')}) {
    const auto opened = view->open(name, AccessMode::read_only);
    REQUIRE_FALSE(opened.has_value());
    CHECK(opened.error().error == ENOENT);
    for (const char character : opened.error().reason)
      CHECK(static_cast<unsigned char>(character) >= 0x20);
  }
}

TEST_CASE("access-modes-are-counted-per-session-or-never-given-back") {
  Rig rig;
  REQUIRE(rig.registry.add(rig.file("v")).has_value());
  const auto one = rig.view("192.0.2.1", "one");
  const auto two = rig.view("192.0.2.2", "two");
  for (int round = 0; round < 3; ++round) {
    auto writer = one->open("v", AccessMode::read_write);
    REQUIRE(writer.has_value());
    const auto second = two->open("v", AccessMode::read_write);
    REQUIRE_FALSE(second.has_value());
    CHECK(second.error().error == EPERM);
    CHECK(contains(second.error().reason, "1 have it open for writing"));
    CHECK_FALSE(one->open("v", AccessMode::read_write).has_value());
    CHECK(two->open("v", AccessMode::read_only).has_value());
    auto migrating = two->open("v", AccessMode::migration);
    REQUIRE(migrating.has_value());
    CHECK_FALSE(two->open("v", AccessMode::migration).has_value());
  }
}

TEST_CASE("a-read-only-volume-is-opened-for-writing") {
  Rig rig;
  config::Volume volume = rig.file("v");
  volume.read_only = true;
  REQUIRE(rig.registry.add(volume).has_value());
  const auto view = rig.view();
  for (const AccessMode mode : {AccessMode::read_write, AccessMode::migration}) {
    const auto opened = view->open("v", mode);
    REQUIRE_FALSE(opened.has_value());
    CHECK(opened.error().error == EROFS);
  }
  CHECK(view->open("v", AccessMode::read_only).has_value());
}

TEST_CASE("a-failed-volume-is-opened-for-writing") {
  class Failing final : public SystemCalls {
   public:
    int fdatasync(int) override {
      errno = EIO;
      return -1;
    }
  };
  Rig rig;
  Failing calls;
  REQUIRE(rig.registry.add(rig.file("v"), calls).has_value());
  const auto view = rig.view();
  {
    auto writer = view->open("v", AccessMode::read_write);
    REQUIRE(writer.has_value());
    Request flush;
    flush.op = wire::RnbdOp::flush;
    flush.on_complete = [&] { rig.store.reactor.stop(); };
    rig.store.reactor.post([&] { (*writer)->submit(flush); });
    rig.store.reactor.run();
    CHECK(flush.error == EIO);
  }
  for (const AccessMode mode : {AccessMode::read_write, AccessMode::migration}) {
    const auto opened = view->open("v", mode);
    REQUIRE_FALSE(opened.has_value());
    CHECK(opened.error().error == EIO);
    CHECK(contains(opened.error().reason, "FAILED"));
  }
  CHECK(view->open("v", AccessMode::read_only).has_value());
}

TEST_CASE("a-device-opened-for-reading-can-be-written") {
  Rig rig;
  REQUIRE(rig.registry.add(rig.file("v")).has_value());
  auto reader = rig.view()->open("v", AccessMode::read_only);
  REQUIRE(reader.has_value());
  Request request;
  request.op = wire::RnbdOp::write;
  request.length = 4096;
  request.data = rig.store.memory();
  (*reader)->submit(request);
  CHECK(request.completions == 1);
  CHECK(request.error == EPERM);
}

TEST_CASE("a-refused-volume-is-not-named") {
  Rig rig;
  config::Volume bad = volume_at(rig.directory / "none", "bad");
  auto added = rig.registry.add(bad);
  REQUIRE_FALSE(added.has_value());
  CHECK(contains(added.error(), "volume bad: "));
  CHECK(contains(added.error(), bad.path));
  bad = rig.file("rules");
  bad.allow = {{"not-an-address", ""}};
  added = rig.registry.add(bad);
  REQUIRE_FALSE(added.has_value());
  CHECK(contains(added.error(), "volume rules: allow: 'not-an-address'"));
}

TEST_CASE("a-volume-that-hangs-is-not-named-when-asked-who-is-busy") {
  class Hanging final : public SystemCalls {
   public:
    int fdatasync(int) override {
      while (!free) usleep(1000);
      return 0;
    }
    std::atomic<bool> free{false};
  };
  Rig rig;
  Hanging calls;
  REQUIRE(rig.registry.add(rig.file("good")).has_value());
  REQUIRE(rig.registry.add(rig.file("stuck"), calls).has_value());
  const auto view = rig.view();
  auto stuck = view->open("stuck", AccessMode::read_write);
  auto good = view->open("good", AccessMode::read_write);
  REQUIRE(stuck.has_value());
  REQUIRE(good.has_value());
  Request flush;
  flush.op = wire::RnbdOp::flush;
  flush.on_complete = [&] { rig.store.reactor.stop(); };
  rig.store.reactor.post([&] {
    (*stuck)->submit(flush);
    CHECK(rig.registry.busy() == std::vector<std::string>{"stuck (1 requests)"});
    calls.free = true;
  });
  rig.store.reactor.run();
  CHECK(rig.registry.busy().empty());
}
