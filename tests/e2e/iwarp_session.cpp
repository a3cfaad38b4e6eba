// SPDX-License-Identifier: BSD-3-Clause
// iwarp_session FILE: sessions between two endpoints of the software fabric, as a pcap file.
//
// A relay between the two records what it passes on, in both directions and as TCP segments of any
// size, so no right to capture packets is needed and the file holds the very bytes the endpoints
// wrote. Prints, one a line, what a dissector must find: NAME COUNT.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "protocol/fabric/soft/fabric.h"
#include "protocol/wire/endian.h"

using namespace rtrsnbd;
using namespace rtrsnbd::fabric;
using wire::Be16;
using wire::Be32;
using wire::Le16;
using wire::Le32;

namespace {

using Bytes = std::vector<std::byte>;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "iwarp_session: %s\n", what.c_str());
  std::exit(1);
}

// The pcap file, as raw IPv4 packets.

struct FileHeader {
  Le32 magic = 0xa1b2c3d4;
  Le16 major = 2, minor = 4;
  Le32 zone = 0, accuracy = 0, length_max = 262144, link_type = 101;  // LINKTYPE_RAW
};
struct RecordHeader {
  Le32 seconds, microseconds, captured, length;
};
struct IpHeader {
  uint8_t version_and_size = 0x45, service = 0;
  Be16 length, id, fragment = 0x4000;
  uint8_t time_to_live = 64, protocol = IPPROTO_TCP;
  Be16 checksum;
  Be32 source, target;
};
struct TcpHeader {
  Be16 source, target;
  Be32 sequence, acknowledged;
  uint8_t size = 5 << 4, flags = 0;
  Be16 window = 65535, checksum, urgent;
};
static_assert(sizeof(IpHeader) == 20 && sizeof(TcpHeader) == 20);

constexpr uint8_t tcp_fin = 1, tcp_syn = 2, tcp_push = 8, tcp_ack = 16;
constexpr size_t segment_max = 60000;

uint32_t sum_of(std::span<const std::byte> bytes) {
  uint32_t sum = 0;
  for (size_t i = 0; i < bytes.size(); ++i)
    sum += std::to_integer<uint32_t>(bytes[i]) << (i % 2 == 0 ? 8 : 0);
  return sum;
}
uint16_t folded(uint64_t sum) {
  while (sum >> 16 != 0) sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<uint16_t>(~sum);
}

class Capture {
 public:
  explicit Capture(const std::string& path) : file_(path, std::ios::binary) {
    write(FileHeader{});
    if (!file_) fail("cannot write " + path);
  }

  // One TCP connection, from port `client` to the given server port.
  struct Stream {
    uint16_t client = 0;
    std::array<uint32_t, 2> next{1000,
                                 2000};  // sequence numbers, of the initiator and the responder
  };
  void open(Stream& stream) {
    segment(stream, 0, tcp_syn, {});
    segment(stream, 1, tcp_syn | tcp_ack, {});
    segment(stream, 0, tcp_ack, {});
  }
  void data(Stream& stream, size_t from, std::span<const std::byte> bytes) {
    segment(stream, from, tcp_push | tcp_ack, bytes);
  }
  void end(Stream& stream, size_t from) { segment(stream, from, tcp_fin | tcp_ack, {}); }
  void close() {
    file_.close();
    if (!file_) fail("writing the capture failed");
  }

 private:
  static constexpr uint16_t server_port = 1234;

  template <typename T>
  void write(const T& value) {
    file_.write(reinterpret_cast<const char*>(&value), sizeof value);
  }

  void segment(Stream& stream, size_t from, uint8_t flags, std::span<const std::byte> bytes) {
    TcpHeader tcp;
    tcp.source = from == 0 ? stream.client : server_port;
    tcp.target = from == 0 ? server_port : stream.client;
    tcp.sequence = stream.next[from];
    if ((flags & tcp_ack) != 0) tcp.acknowledged = stream.next[1 - from];
    tcp.flags = flags;
    stream.next[from] +=
        static_cast<uint32_t>(bytes.size()) + ((flags & (tcp_syn | tcp_fin)) != 0 ? 1 : 0);

    IpHeader ip;
    ip.length = static_cast<uint16_t>(sizeof ip + sizeof tcp + bytes.size());
    ip.id = ++id_;
    ip.source = 0x0a000001 + static_cast<uint32_t>(from);
    ip.target = 0x0a000002 - static_cast<uint32_t>(from);
    ip.checksum = folded(sum_of(wire::bytes_of(ip)));
    const uint64_t pseudo = uint64_t{ip.source >> 16} + (ip.source & 0xffff) + (ip.target >> 16) +
                            (ip.target & 0xffff) + IPPROTO_TCP + sizeof tcp + bytes.size();
    tcp.checksum = folded(pseudo + sum_of(wire::bytes_of(tcp)) + sum_of(bytes));

    RecordHeader record;
    record.seconds = 1700000000;
    record.microseconds = time_++;
    record.captured = record.length = ip.length.get();
    write(record);
    write(ip);
    write(tcp);
    file_.write(reinterpret_cast<const char*>(bytes.data()),
                static_cast<std::streamsize>(bytes.size()));
  }

  std::ofstream file_;
  uint16_t id_ = 0;
  uint32_t time_ = 0;
};

// The relay.

Address loopback() {
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return {reinterpret_cast<const sockaddr*>(&v4), sizeof v4};
}

class Relay {
 public:
  Relay(Capture& capture, const Address& target, uint16_t client_port)
      : capture_(capture),
        target_(target),
        listening_(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0)) {
    stream_.client = client_port;
    const Address any = loopback();
    if (::bind(listening_, any.get(), any.length()) != 0 || ::listen(listening_, 1) != 0)
      fail("the relay cannot listen");
  }
  ~Relay() {
    for (const int fd : {listening_, sides_[0], sides_[1]})
      if (fd >= 0) ::close(fd);
  }
  [[nodiscard]] Address address() const {
    sockaddr_storage storage{};
    socklen_t length = sizeof storage;
    getsockname(listening_, reinterpret_cast<sockaddr*>(&storage), &length);
    return {reinterpret_cast<sockaddr*>(&storage), length};
  }
  [[nodiscard]] bool done() const { return ended_[0] && ended_[1]; }

  void step() {
    if (sides_[0] < 0) {
      sides_[0] = ::accept(listening_, nullptr, nullptr);
      if (sides_[0] < 0) return;
      sides_[1] = ::socket(AF_INET, SOCK_STREAM, 0);
      if (::connect(sides_[1], target_.get(), target_.length()) != 0)
        fail("the relay cannot connect");
      capture_.open(stream_);
    }
    for (const size_t from : {0u, 1u}) pass(from);
  }

 private:
  void pass(size_t from) {
    if (ended_[from]) return;
    const ssize_t count =
        ::recv(sides_[from], buffer_.data(), 1 + random_() % buffer_.size(), MSG_DONTWAIT);
    if (count < 0 && errno == EAGAIN) return;
    if (count <= 0) {
      ended_[from] = true;
      capture_.end(stream_, from);
      ::shutdown(sides_[1 - from], SHUT_WR);
      return;
    }
    const auto bytes = std::span(buffer_).first(static_cast<size_t>(count));
    capture_.data(stream_, from, bytes);
    // Blocks when the other side is slow; both are driven by this thread, but take more than this.
    for (size_t done = 0; done < bytes.size();) {
      const ssize_t sent =
          ::send(sides_[1 - from], bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
      if (sent <= 0) return;
      done += static_cast<size_t>(sent);
    }
  }

  Capture& capture_;
  Address target_;
  int listening_;
  std::array<int, 2> sides_{-1, -1};
  std::array<bool, 2> ended_{};
  Capture::Stream stream_;
  Bytes buffer_ = Bytes(segment_max);
  std::minstd_rand random_{7};
};

class Recorder final : public Handler {
 public:
  void on_established(std::span<const std::byte>) override { established = true; }
  void on_rejected(std::span<const std::byte>) override { rejected = true; }
  void on_completion(const Completion&) override { ++completions; }
  void on_disconnected(DisconnectReason why, std::string_view text) override {
    reason = why;
    detail = text;
  }
  bool established = false, rejected = false;
  size_t completions = 0;
  std::optional<DisconnectReason> reason;
  std::string detail;
};

// What the dissector must find.
std::map<std::string, unsigned> expected;

constexpr uint32_t segment_payload = 61440;

struct Session {
  Session(Capture& capture, const soft::Options& options, uint16_t client_port)
      : fabric(soft::make_fabric(options)),
        client_domain(fabric->make_domain()),
        server_domain(fabric->make_domain()),
        listener(fabric->listen(loopback())),
        relay(capture, listener->address(), client_port) {
    client = fabric->connect(*client_domain, {relay.address(), {}}, Bytes(56, std::byte{0x11}),
                             Clock::now());
    client->set_handler(&client_side);
    until([this] { return request != nullptr; });
    ++expected["request"];
    ++expected["reply"];
  }

  void accept() {
    server = request->make_endpoint(*server_domain, {});
    server->set_handler(&server_side);
    server->accept(Bytes(56, std::byte{0x22}));
    until([this] { return client_side.established; });
  }
  void end() {
    until([this] { return relay.done(); });
  }

  template <typename Condition>
  void until(Condition condition) {
    const TimePoint limit = Clock::now() + std::chrono::seconds(20);
    while (!condition()) {
      const TimePoint now = Clock::now();
      if (now > limit)
        fail("a step of the session did not end; " + client_side.detail + "; " +
             server_side.detail);
      listener->progress(now,
                         [this](std::unique_ptr<ConnectRequest> r) { request = std::move(r); });
      relay.step();
      for (Endpoint* endpoint : {client.get(), server.get()})
        if (endpoint != nullptr && endpoint->fd() >= 0) endpoint->progress(Wait::no, now);
    }
  }

  void post(Endpoint& from, const SendRequest& request_to_send) {
    size_t length = 0;
    for (const Segment& segment : request_to_send.segments) length += segment.length;
    const auto fpdus = static_cast<unsigned>((length + segment_payload - 1) / segment_payload);
    switch (request_to_send.kind) {
      case SendKind::send:
        expected["send"] += std::max(fpdus, 1u);
        break;
      case SendKind::send_immediate:
        expected["send-immediate"] += std::max(fpdus, 1u);
        break;
      case SendKind::send_invalidate:
        ++expected["send-invalidate"];
        break;
      case SendKind::write:
        expected["write"] += fpdus;
        break;
      case SendKind::write_immediate:
        expected["write"] += fpdus;
        ++expected["immediate"];
        break;
    }
    if (!from.post_send(request_to_send)) fail("a message was not taken");
    from.flush(Wait::no);
  }

  std::unique_ptr<Fabric> fabric;
  std::unique_ptr<Domain> client_domain, server_domain;
  std::unique_ptr<Listener> listener;
  Relay relay;
  std::unique_ptr<ConnectRequest> request;
  std::unique_ptr<Endpoint> client, server;
  Recorder client_side, server_side;
};

// Every verb, both ways, in the sizes of control messages, small and large IO.
void all_verbs(Capture& capture, soft::Crc crc, uint16_t client_port) {
  Session session(capture, {.crc = crc, .segment_payload = segment_payload}, client_port);
  session.accept();
  Bytes message(271, std::byte{0x33});
  const Segment info{message.data(), message.size(), nullptr};
  Bytes buffer(1000), target(300000), data(300000, std::byte{0x44});
  const auto chunk =
      session.server_domain->register_region(target.data(), target.size(), Access::remote_write);
  const auto region =
      session.client_domain->register_region(target.data(), target.size(), Access::remote_write);
  session.server->post_receive(1, buffer.data(), buffer.size());
  session.client->post_receive(1, buffer.data(), buffer.size());
  session.post(*session.client, {.kind = SendKind::send, .segments = {&info, 1}});
  session.until([&] { return session.server_side.completions == 1; });
  session.post(*session.server, {.kind = SendKind::send, .segments = {&info, 1}});

  size_t immediates = 0;
  for (const size_t length : {0u, 1u, 512u, 513u, 4096u, 61440u, 61441u, 200003u}) {
    const Segment piece{data.data(), length, nullptr};
    session.server->post_empty_receives(2, 1);
    session.post(*session.client, {.kind = SendKind::write_immediate,
                                   .immediate = 0x1000,
                                   .rkey = chunk->rkey(),
                                   .remote_address = chunk->remote_address() + 3,
                                   .segments = {&piece, 1}});
    session.client->post_empty_receives(2, 2);
    if (length > 0)
      session.post(*session.server, {.kind = SendKind::write,
                                     .rkey = region->rkey(),
                                     .remote_address = region->remote_address(),
                                     .segments = {&piece, 1}});
    session.post(*session.server,
                 {.kind = SendKind::send_invalidate, .invalidate_rkey = region->rkey()});
    session.post(*session.server, {.kind = SendKind::write_immediate, .immediate = 0x20000005});
    ++immediates;
    session.until([&] {
      return session.server_side.completions == 1 + immediates &&
             session.client_side.completions == 1 + 2 * immediates;
    });
    region->renew();
  }
  const Segment small{data.data(), 8, nullptr};
  session.client->post_receive(3, buffer.data(), buffer.size());
  session.post(*session.server, {.kind = SendKind::send_immediate,
                                 .copy = true,
                                 .immediate = 0x20000005,
                                 .segments = {&small, 1}});
  session.until([&] { return session.client_side.completions == 2 + 2 * immediates; });
  session.client->disconnect(Clock::now());
  session.end();
}

void rejected(Capture& capture, uint16_t client_port) {
  Session session(capture, {}, client_port);
  session.request->reject(Bytes(56, std::byte{0x55}));
  ++expected["reject"];
  session.until([&] { return session.client_side.rejected; });
  session.end();
}

void stale_key(Capture& capture, uint16_t client_port) {
  Session session(capture, {.crc = soft::Crc::on}, client_port);
  session.accept();
  Bytes data(5);
  const auto chunk =
      session.server_domain->register_region(data.data(), data.size(), Access::remote_write);
  const Segment piece{data.data(), data.size(), nullptr};
  const uint32_t stale = chunk->rkey();
  chunk->renew();
  session.post(*session.client, {.kind = SendKind::write,
                                 .rkey = stale,
                                 .remote_address = chunk->remote_address(),
                                 .segments = {&piece, 1}});
  ++expected["terminate"];
  session.until([&] { return session.client_side.reason && session.server_side.reason; });
  if (session.client_side.reason != DisconnectReason::remote_error) fail("no Terminate arrived");
  session.end();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: iwarp_session FILE\n");
    return 64;
  }
  Capture capture(argv[1]);
  all_verbs(capture, soft::Crc::on, 40001);
  rejected(capture, 40002);
  stale_key(capture, 40003);
  const auto with_checksum = expected;
  all_verbs(capture, soft::Crc::off, 40004);
  capture.close();
  for (const auto& [name, count] : expected) std::printf("%s %u\n", name.c_str(), count);
  unsigned checked = 0;
  for (const auto& [name, count] : with_checksum)
    if (name != "request" && name != "reply" && name != "reject") checked += count;
  std::printf("checksum %u\n", checked);
  return 0;
}
