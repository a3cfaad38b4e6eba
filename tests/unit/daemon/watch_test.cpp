// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/watch.h"

#include <doctest/doctest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <thread>

#include "tests/unit/daemon/support.h"

using namespace rtrsnbd;
using namespace rtrsnbd::daemon;
using namespace rtrsnbd::daemon::test;

namespace {

struct Pair {
  Pair() {
    std::array<int, 2> fds{};
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds.data()) == 0);
    near = Fd(fds[0]);
    far = Fd(fds[1]);
  }
  Fd near;
  Fd far;
};

constexpr KernelLevel levels[] = {KernelLevel::newest, KernelLevel::v5_15};

}  // namespace

TEST_CASE("input-that-arrives-again-is-not-reported") {
  for (const KernelLevel level : levels) {
    Reactor reactor({.level = level});
    const Pair sockets;
    constexpr int rounds = 50;
    int received = 0;
    auto watch = Watch::make(reactor, sockets.near.get(), [&] {
      char byte = 0;
      while (read(sockets.near.get(), &byte, 1) == 1) ++received;
      if (received == rounds) {
        reactor.stop();
      } else if (received > 0) {
        REQUIRE(write(sockets.far.get(), "x", 1) == 1);
      }
    });
    REQUIRE(write(sockets.far.get(), "x", 1) == 1);
    reactor.run();
    CHECK(received == rounds);
  }
}

TEST_CASE("room-to-write-is-not-reported") {
  Reactor reactor;
  const Pair sockets;
  std::array<char, 4096> bytes{};
  while (write(sockets.near.get(), bytes.data(), bytes.size()) > 0) {
  }
  bool told = false;
  auto watch = Watch::make(reactor, sockets.near.get(), [&] {
    told = true;
    reactor.stop();
  });
  reactor.post([&] { watch->want_output(); });
  std::thread reader([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    while (read(sockets.far.get(), bytes.data(), bytes.size()) > 0) {
    }
  });
  reactor.run();
  reader.join();
  CHECK(told);
}

TEST_CASE("a-peer-that-closes-is-not-reported") {
  Reactor reactor;
  Pair sockets;
  auto watch = Watch::make(reactor, sockets.near.get(), [&] { reactor.stop(); });
  std::thread closer([&] { sockets.far = Fd(); });
  reactor.run();
  closer.join();
}

TEST_CASE("a-watch-let-go-of-keeps-the-socket-open-or-is-freed-too-early") {
  for (const KernelLevel level : levels) {
    Reactor reactor({.entries = 8, .completion_entries = 16, .level = level});
    // Many at once, with input pending, output asked for, and from inside the handler itself.
    constexpr size_t count = 40;
    std::vector<Pair> sockets(count);
    std::vector<Watch::Pointer> watches(count);
    size_t told = 0;
    reactor.post([&] {
      for (size_t i = 0; i < count; ++i) {
        watches[i] = Watch::make(reactor, sockets[i].near.get(), [&, i] {
          ++told;
          watches[i].reset();
        });
        watches[i]->want_output();
        if (i % 2 == 0) REQUIRE(write(sockets[i].far.get(), "x", 1) == 1);
        if (i % 4 == 1) watches[i].reset();
      }
    });
    std::thread ender([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      reactor.post([&] {
        for (Pair& pair : sockets) pair.near = Fd();
        reactor.stop();
      });
    });
    reactor.run();
    ender.join();
    CHECK(told == count - count / 4);
    // The kernel has let go of every socket: the other end sees that it is closed.
    for (const Pair& pair : sockets) {
      char byte = 0;
      const ssize_t result = read(pair.far.get(), &byte, 1);
      CHECK((result == 0 || (result < 0 && errno == ECONNRESET)));
    }
  }
}

TEST_CASE("a-watch-outlives-its-reactor-s-run") {
  const Pair sockets;
  Reactor reactor;
  auto watch = Watch::make(reactor, sockets.near.get(), [] {});
  reactor.post([&] { reactor.stop(); });
  reactor.run();
  watch.reset();  // freed with the reactor: the sanitizers watch
}
