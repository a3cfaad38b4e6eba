// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/notify.h"

#include <doctest/doctest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cstddef>
#include <cstring>

#include "tests/unit/daemon/support.h"

using namespace rtrsnbd::daemon;
using namespace rtrsnbd::daemon::test;

namespace {

Fd receiver(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, name.data(), name.size());
  if (name[0] == '@') address.sun_path[0] = '\0';
  Fd fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
  REQUIRE(bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
  return fd;
}

std::string received(const Fd& fd) {
  std::array<char, 256> bytes{};
  const ssize_t count = recv(fd.get(), bytes.data(), bytes.size(), 0);
  return count < 0 ? "nothing" : std::string(bytes.data(), static_cast<size_t>(count));
}

}  // namespace

TEST_CASE("the-service-manager-is-not-told") {
  const TemporaryDirectory directory("/tmp");
  const std::string path = directory / "notify";
  const Fd by_path = receiver(path);
  Notifier(path.c_str()).send("READY=1\nSTATUS=here");
  CHECK(received(by_path) == "READY=1\nSTATUS=here");

  const std::string name = "@rtrsd-test-" + std::to_string(getpid());
  const Fd by_name = receiver(name);
  Notifier(name.c_str()).send("STOPPING=1");
  CHECK(received(by_name) == "STOPPING=1");
}

TEST_CASE("a-missing-or-senseless-notify-socket-does-harm") {
  const std::string too_long(200, 'x');
  for (const std::string& name : {std::string(), std::string("/"), std::string("relative"),
                                  "/" + too_long, std::string("/nowhere/at/all")}) {
    Notifier(name.c_str()).send("READY=1");
  }
  Notifier(nullptr).send("READY=1");
}
