// SPDX-License-Identifier: BSD-3-Clause
// Connections in set-up: slow ones, too many of them, and running out of descriptors.
#include <sys/resource.h>

#include <list>

#include "tests/unit/fabric/pair.h"
#include "tests/unit/fabric/raw_peer.h"

namespace rtrsnbd::fabric {

namespace {

struct Accepting {
  explicit Accepting(const soft::Options& options = {})
      : fabric(soft::make_fabric(options)), listener(fabric->listen(any_loopback_port())) {}

  void progress(TimePoint now) {
    listener->progress(
        now, [this](std::unique_ptr<ConnectRequest> r) { requests.push_back(std::move(r)); });
  }
  [[nodiscard]] bool readable() const {
    pollfd entry{listener->fd(), POLLIN, 0};
    return ::poll(&entry, 1, 0) == 1;
  }
  RawPeer peer() const { return RawPeer(RawPeer::connect(listener->address())); }

  std::unique_ptr<Fabric> fabric;
  std::unique_ptr<Listener> listener;
  std::vector<std::unique_ptr<ConnectRequest>> requests;
  TimePoint start = Clock::now();
};

// Closed by the other end.
bool closed(RawPeer& peer) {
  return peer.readable() && peer.receive().empty();
}

}  // namespace

TEST_CASE("a request that comes byte by byte is taken if it is complete in time, dropped if not") {
  for (const bool in_time : {true, false}) {
    Accepting side;
    RawPeer peer = side.peer();
    const auto request = raw_request(56);
    // A byte at a time does not extend the limit.
    for (size_t i = 0; i < request.size(); ++i) {
      if (in_time || i + 1 < request.size()) peer.send({request[i]});
      side.progress(side.start + i * std::chrono::milliseconds(60));
    }
    CHECK(side.requests.size() == (in_time ? 1 : 0));
    side.progress(side.start + std::chrono::milliseconds(4900));
    CHECK_FALSE(peer.readable());
    side.progress(side.start + std::chrono::milliseconds(5000));
    if (!in_time) CHECK(closed(peer));
    if (!in_time) CHECK_FALSE(side.readable());
  }
}

TEST_CASE("what is no request is closed without an answer, and the next client is served") {
  Accepting side;
  RawPeer web = side.peer();
  const auto text = as_span("GET / HTTP/1.1\r\nHost: example\r\n\r\n");
  web.send({text.begin(), text.end()});
  RawPeer early = side.peer();
  early.close();
  RawPeer good = side.peer();
  good.send(raw_request(56));
  drive([&] { side.progress(Clock::now()); }, [&] { return side.requests.size() == 1; });
  drive([&] { side.progress(Clock::now()); }, [&] { return closed(web); });
  CHECK_FALSE(side.readable());
}

TEST_CASE("markers are answered by a reject") {
  Accepting side;
  RawPeer peer = side.peer();
  auto request = raw_request(0);
  request[16] = std::byte{0x80};
  peer.send(request);
  side.progress(Clock::now());
  drive([&] { side.progress(Clock::now()); }, [&] { return peer.readable(); });
  const auto answer = peer.receive();
  REQUIRE(answer.size() == 20);
  CHECK(answer[16] == std::byte{0x20});
  drive([&] { side.progress(Clock::now()); }, [&] { return closed(peer); });
  CHECK(side.requests.empty());
}

TEST_CASE("a burst of good clients from one address is served in full, whatever the limits") {
  Accepting side({.pending_max = 4, .pending_per_source_max = 2});
  // All connect before any sends, as when they are started at once.
  std::list<RawPeer> peers;
  for (int i = 0; i < 40; ++i) peers.push_back(side.peer());
  side.progress(side.start);
  for (RawPeer& peer : peers) peer.send(raw_request(56));
  drive([&] { side.progress(side.start); }, [&] { return side.requests.size() == 40; });
}

TEST_CASE("when set-ups crowd, slow ones are dropped to make room, and nobody spins meanwhile") {
  Accepting side({.pending_max = 4, .pending_per_source_max = 100});
  std::list<RawPeer> idle;
  for (int i = 0; i < 4; ++i) idle.push_back(side.peer());
  side.progress(side.start);
  RawPeer good = side.peer();
  good.send(raw_request(0));
  side.progress(side.start + std::chrono::milliseconds(100));
  CHECK(side.requests.empty());
  CHECK_FALSE(side.readable());  // full: the backlog waits
  side.progress(side.start + std::chrono::milliseconds(300));
  drive([&] { side.progress(side.start + std::chrono::milliseconds(300)); },
        [&] { return side.requests.size() == 1; });
  CHECK(closed(idle.front()));
  CHECK_FALSE(idle.back().readable());
}

TEST_CASE("one source holds no more than its share of slow set-ups") {
  Accepting side({.pending_max = 64, .pending_per_source_max = 3});
  std::list<RawPeer> idle;
  for (int i = 0; i < 3; ++i) idle.push_back(side.peer());
  side.progress(side.start);
  idle.push_back(side.peer());
  side.progress(side.start + std::chrono::seconds(1));
  CHECK(closed(idle.front()));
  idle.pop_front();
  for (RawPeer& peer : idle) CHECK_FALSE(peer.readable());
}

TEST_CASE("out of descriptors: accepting pauses without spinning, and goes on") {
  Accepting side;
  std::list<RawPeer> peers;
  peers.push_back(side.peer());
  peers.back().send(raw_request(0));
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  // Descriptors are numbered from below: none above those in use now.
  const int top = ::dup(0);
  ::close(top);
  rlimit tight = before;
  tight.rlim_cur = static_cast<rlim_t>(top);
  REQUIRE(setrlimit(RLIMIT_NOFILE, &tight) == 0);
  side.progress(side.start);
  const bool spins = side.readable();
  side.progress(side.start + std::chrono::milliseconds(100));
  const bool spins_later = side.readable();
  REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK_FALSE(spins);
  CHECK_FALSE(spins_later);
  CHECK(side.requests.empty());
  side.progress(side.start + std::chrono::milliseconds(600));
  side.progress(side.start + std::chrono::milliseconds(600));
  CHECK(side.requests.size() == 1);
}

TEST_CASE("a port in use names the address") {
  Accepting side;
  CHECK_THROWS_WITH_AS(
      side.fabric->listen(side.listener->address()),
      ("cannot listen on " + side.listener->address().text() + ": Address already in use").c_str(),
      std::system_error);
}

TEST_CASE("any address serves both families") {
  const auto fabric = soft::make_fabric();
  auto any = resolve({"", 1}, true);
  REQUIRE(any);
  // Port 0 cannot be written as HOST:PORT, so it is set by hand.
  sockaddr_storage storage{};
  std::memcpy(&storage, any->front().get(), any->front().length());
  reinterpret_cast<sockaddr_in&>(storage).sin_port = 0;  // the same place in both families
  const auto listener =
      fabric->listen({reinterpret_cast<const sockaddr*>(&storage), any->front().length()});
  std::vector<std::unique_ptr<ConnectRequest>> requests;
  const auto connect = [&](const char* host) {
    const auto target = resolve({host, listener->address().port()}, false);
    if (!target) return;
    const auto domain = fabric->make_domain();
    Recorder side;
    const auto endpoint = fabric->connect(*domain, {target->front(), {}}, {}, Clock::now());
    endpoint->set_handler(&side);
    const size_t before = requests.size();
    drive(
        [&] {
          if (endpoint->fd() >= 0) endpoint->progress(Wait::no, Clock::now());
          listener->progress(Clock::now(), [&](std::unique_ptr<ConnectRequest> r) {
            requests.push_back(std::move(r));
          });
        },
        [&] { return requests.size() > before || side.reason; });
    CHECK_FALSE(side.reason);
  };
  connect("127.0.0.1");
  REQUIRE(requests.size() == 1);
  CHECK(requests[0]->peer_address().host_text() == "127.0.0.1");
  CHECK(requests[0]->peer_address().is_loopback());
  if (any->front().family() == AF_INET6) {
    connect("::1");
    REQUIRE(requests.size() == 2);
    CHECK(requests[1]->peer_address().host_text() == "::1");
  }
}

TEST_CASE("what a listener drops is logged with the address and the reason") {
  std::vector<std::string> lines;
  Accepting side({.log = [&lines](LogLevel, std::string_view line) { lines.emplace_back(line); }});
  RawPeer peer = side.peer();
  peer.send(std::vector<std::byte>(20));
  drive([&] { side.progress(Clock::now()); }, [&] { return !lines.empty(); });
  CHECK(lines[0].find("127.0.0.1") != std::string::npos);
  CHECK(lines[0].find("not an MPA frame") != std::string::npos);
}

}  // namespace rtrsnbd::fabric
