// SPDX-License-Identifier: BSD-3-Clause
// The transport as RTRS sees it: verbs without the vendor. A Fabric makes Domains (protection
// domains), Listeners and Endpoints (one reliable connection each); an Endpoint takes work requests
// and yields completions. `soft` implements it as iWARP over TCP; a verbs implementation maps one
// to one.
//
// Threads. Per Endpoint there are two roles: the receive role (progress, tick) is played by one
// thread at a time; the send role (post_send, flush, disconnect) may be played by any thread at any
// time, also from inside a Handler callback of the same Endpoint. Regions are made and dropped by
// any thread. Destruction: by the owner, when no other thread is inside.
//
// Errors. Whatever goes wrong on a connection (peer gone, malformed input, key violation) ends in
// exactly one Handler::on_disconnected, after which posts are ignored. Running out of memory while
// setting up is an exception (std::bad_alloc, std::system_error); nothing else throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "protocol/base/time.h"
#include "protocol/fabric/address.h"

namespace rtrsnbd::fabric {

// What a Region lets the peer do. remote_write includes that the peer may invalidate the key.
enum class Access : uint8_t { remote_write, none };

// Local memory known to the fabric, so that it may be a source of sends (verbs: an lkey). The soft
// fabric needs none and returns an empty object.
class LocalMemory {
 public:
  virtual ~LocalMemory() = default;
  [[nodiscard]] virtual uint32_t lkey() const { return 0; }
};

// A piece of memory the peers of one Domain may write into, under a key that can be changed and
// revoked. The memory belongs to the caller and must stay until the Region is gone or invalidated.
// Until then it is local memory, too.
class Region : public LocalMemory {
 public:
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  [[nodiscard]] virtual uint32_t rkey() const = 0;
  // What the peer adds its offset to. Opaque; with software RDMA it tells nothing of the process.
  [[nodiscard]] virtual uint64_t remote_address() const = 0;

  // Revokes the key: when this returns, no byte will be placed any more. Returns false if a
  // placement is in progress on another thread's connection; the key is dead all the same, but the
  // memory is not quiet until that connection was shut down (see Endpoint::abort) and its receiver
  // has left progress().
  virtual bool invalidate() = 0;
  // A fresh key (low byte + 1) for the same memory, valid at once; the old one is dead. Takes
  // effect before any work request posted later. Only if Capabilities::fresh_rkey.
  virtual uint32_t renew() = 0;
  // The same slot over other memory with a fresh key, valid at once. Only if Capabilities::rebind.
  virtual void rebind(std::byte* memory, size_t length) = 0;

 protected:
  Region() = default;
};

struct Capabilities {
  bool rebind = false;  // Region::rebind is cheap: a client registers the caller's buffer per IO
  bool fresh_rkey = false;  // Region::renew works: a server can run with always_invalidate
  bool any_local = false;   // sources of sends need no LocalMemory
};

// What a connection must be able to hold at once. Receives are a promise of the caller not to post
// more; sends beyond their number wait in the endpoint. A fabric whose queues grow may ignore both.
struct QueueSizes {
  uint32_t sends = 1024;
  uint32_t receives = 1024;
};

// Protection domain: keys of one are worthless on endpoints of another. All endpoints and regions
// of a domain are on one device.
class Domain {
 public:
  virtual ~Domain() = default;
  // A region over [memory, memory+length). length 0 makes a slot to be rebound later.
  virtual std::unique_ptr<Region> register_region(std::byte* memory, size_t length,
                                                  Access access) = 0;
  virtual std::unique_ptr<LocalMemory> register_local(std::byte* memory, size_t length) = 0;
};

enum class SendKind : uint8_t {
  send,             // payload into the peer's next receive
  send_immediate,   // the same, with imm
  send_invalidate,  // no payload; kills invalidate_rkey at the peer
  write,            // RDMA write, no completion at the peer
  write_immediate,  // RDMA write (possibly of 0 bytes) that takes a receive at the peer, with imm
};

struct Segment {
  const std::byte* data = nullptr;
  size_t length = 0;
  const LocalMemory* local = nullptr;  // may be null where Capabilities::any_local
};

struct SendRequest {
  SendKind kind = SendKind::send;
  bool copy =
      false;  // payload is small (<= inline_max bytes in all) and copied before post_send returns
  uint32_t immediate = 0;
  uint32_t rkey = 0;
  uint64_t remote_address = 0;
  uint32_t invalidate_rkey = 0;
  std::span<const Segment> segments = {};
};
inline constexpr size_t inline_max = 512;
inline constexpr size_t segments_max = 3;

// What a receive yields. There are no send completions: memory of an uncopied segment is free again
// when the peer's answer to it has arrived, or when the Endpoint has been disconnected (RTRS needs
// no more).
struct Completion {
  uint64_t id = 0;          // of the receive
  uint32_t byte_count = 0;  // payload in the receive's buffer
  bool has_immediate = false;
  uint32_t immediate = 0;
  uint32_t invalidated_rkey = 0;  // 0: none
};

enum class DisconnectReason : uint8_t {
  closed_by_us,
  closed_by_peer,   // orderly
  connection_lost,  // reset, timeout, EOF in the middle of a message
  protocol_error,   // the peer broke a rule; we told it so
  remote_error,     // the peer says we broke a rule
  refused,          // connect: nobody listens
  unreachable,      // connect: no route, timeout
};
std::string_view to_string(DisconnectReason reason);

// Called from inside Endpoint::progress, tick and disconnect never reenter each other. A callback
// may post, flush and disconnect, but not destroy the Endpoint.
class Handler {
 public:
  virtual ~Handler() = default;
  virtual void on_established(std::span<const std::byte> private_data) = 0;  // active side only
  virtual void on_rejected(std::span<const std::byte> private_data) = 0;  // active side only; final
  virtual void on_completion(const Completion& completion) = 0;
  virtual void on_disconnected(DisconnectReason reason, std::string_view detail) = 0;  // final
};

enum class Wait : uint8_t { no, yes };

class Endpoint {
 public:
  virtual ~Endpoint() = default;
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  virtual void set_handler(Handler* handler) = 0;  // before the first progress()

  // Passive side: completes the connection. Receives may be posted before.
  virtual void accept(std::span<const std::byte> private_data) = 0;

  // The buffer belongs to the caller and stays until the completion. Length 0: an empty receive.
  // Any thread may post receives.
  virtual void post_receive(uint64_t id, std::byte* buffer, size_t length) = 0;
  // The same empty receive, count times.
  virtual void post_empty_receives(uint64_t id, uint32_t count) = 0;

  // Queues; nothing is sent before flush(). False if the connection is gone.
  virtual bool post_send(const SendRequest& request) = 0;
  // Sends what is queued, as far as the connection takes it now, in as few system calls as
  // possible. If another thread is just sending, it will take ours along and flush returns at once.
  // With Wait::yes it returns when nothing of it waits for another flush: it is sent, or the
  // receive role will send the rest without being asked, or the connection is gone.
  virtual void flush(Wait wait) = 0;

  // Readiness: wait for POLLIN on fd(), and for POLLOUT too while wants_write(). -1 when closed.
  [[nodiscard]] virtual int fd() const = 0;
  [[nodiscard]] virtual bool wants_write() const = 0;
  // Queued by post_send and not taken by the connection yet. A driver that collects posts before it
  // flushes may flush early when this grows, while the data is still in the processor's cache.
  [[nodiscard]] virtual size_t unsent_bytes() const = 0;

  // Receives what is there (at most a fair share) and calls the handler; sends what was blocked.
  // With Wait::yes it sleeps until at least one thing was received or happened, but half a second
  // at most, so that the caller sees to its timers. Returns false when there is surely nothing more
  // to receive now but the end of the stream, which shows in the readiness of fd(); true: call
  // again without waiting. A thread that sleeps here does not send what another thread's
  // flush(Wait::no) left behind: threads beside such a receiver flush with Wait::yes.
  virtual bool progress(Wait wait, TimePoint now) = 0;
  // Timers of the connection (handshake, closing). Call at least every half second.
  virtual void tick(TimePoint now) = 0;

  // Orderly: what is queued is sent, then the connection is closed; on_disconnected(closed_by_us)
  // comes from a later progress() or tick(), at most two seconds from now.
  virtual void disconnect(TimePoint now) = 0;
  // At once, from any thread; a thread that sleeps in progress() or flush() wakes up and leaves
  // with on_disconnected. Nothing that is queued is touched after the receiver has left.
  virtual void abort() = 0;

  [[nodiscard]] virtual Address local_address() const = 0;
  [[nodiscard]] virtual Address peer_address() const = 0;

  // Counters for the operator; readable from any thread.
  struct Counters {
    uint64_t bytes_sent = 0, bytes_received = 0, messages_sent = 0, messages_received = 0,
             send_calls = 0, receive_calls = 0;
  };
  [[nodiscard]] virtual Counters counters() const = 0;

 protected:
  Endpoint() = default;
};

// A connection somebody asks for. Owned by whoever got it from the Listener; may move to another
// thread. Dropping it unanswered closes it.
class ConnectRequest {
 public:
  virtual ~ConnectRequest() = default;
  [[nodiscard]] virtual std::span<const std::byte> private_data() const = 0;
  [[nodiscard]] virtual Address local_address() const = 0;
  [[nodiscard]] virtual Address peer_address() const = 0;
  // Of the device the connection comes in by; a domain for it and its like.
  [[nodiscard]] virtual Capabilities capabilities() const = 0;
  [[nodiscard]] virtual std::unique_ptr<Domain> make_domain() const = 0;
  // Makes the endpoint, to be driven by the calling thread; then post receives, then
  // Endpoint::accept. Throws std::system_error with a text for the operator if the domain is of
  // another device, or the device cannot hold one more connection of this size.
  virtual std::unique_ptr<Endpoint> make_endpoint(Domain& domain, const QueueSizes& queues) = 0;
  virtual void reject(std::span<const std::byte> private_data) = 0;
};

class Listener {
 public:
  virtual ~Listener() = default;
  [[nodiscard]] virtual int fd() const = 0;  // readable: call progress()
  using OnRequest = std::function<void(std::unique_ptr<ConnectRequest>)>;
  // Accepts, reads connection requests without blocking, drops the ones that are late or malformed.
  // Call also every half second for the time limits.
  virtual void progress(TimePoint now, const OnRequest& on_request) = 0;
  [[nodiscard]] virtual Address address() const = 0;  // with the port that was bound
};

struct ConnectOptions {
  Address target;
  std::optional<Address> source;
  QueueSizes queues = {};
};

class Fabric {
 public:
  virtual ~Fabric() = default;
  [[nodiscard]] virtual Capabilities capabilities() const = 0;
  virtual std::unique_ptr<Domain> make_domain() = 0;
  // Throws std::system_error naming the address.
  virtual std::unique_ptr<Listener> listen(const Address& address) = 0;
  // Starts connecting; the outcome comes from progress() as on_established, on_rejected or
  // on_disconnected.
  virtual std::unique_ptr<Endpoint> connect(Domain& domain, const ConnectOptions& options,
                                            std::span<const std::byte> private_data,
                                            TimePoint now) = 0;
};

}  // namespace rtrsnbd::fabric
