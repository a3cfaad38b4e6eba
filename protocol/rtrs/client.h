// SPDX-License-Identifier: BSD-3-Clause
// The client end of RTRS: a path of a session, its connections and its requests (docs/protocol.md,
// "Client").
//
// A session is its identity (name, uuid), its permits and its paths; the owner keeps the permits
// and chooses the path and connection of each request. A path is built by one thread, which calls
// start() and drives every endpoint() until state() is no longer connecting. From then on:
//   * submit() may be called by any thread that holds the permit;
//   * each endpoint is driven (progress, tick) by one thread at a time, different endpoints by
//   different ones;
//   * tick() is called by one thread;
//   * fail() may be called by any thread.
// A path that failed stays failed; its owner makes a new one.
//
// Every accepted request gets exactly one on_done. When a path fails, requests in flight are held
// until the receivers of all its connections have left, because until then the peer's bytes may
// still be placed into their memory; somebody must therefore drive each endpoint until closed().
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "protocol/base/log.h"
#include "protocol/base/time.h"
#include "protocol/fabric/fabric.h"
#include "protocol/rtrs/heartbeat.h"
#include "protocol/rtrs/limits.h"
#include "protocol/wire/rtrs.h"

namespace rtrsnbd::rtrs {

// Longest user message we send (RNBD's OPEN has 264 bytes).
inline constexpr size_t client_user_length_max = 272;

// One request. Owned by the caller, which keeps it, the user message's and the data's memory until
// on_done.
class ClientRequest {
 public:
  virtual ~ClientRequest() = default;

  bool is_read = false;                   // RTRS direction
  std::span<const std::byte> user;        // copied by submit()
  std::byte* read_data = nullptr;         // data of a read goes here
  const std::byte* write_data = nullptr;  // data of a write comes from here
  uint32_t data_length = 0;               // bytes; 0: no data (and no descriptor)

  // Exactly once, on whichever thread drives the connection or the path. error: 0, what the server
  // answered (positive errno), or path_lost. The request is the caller's again. Must not submit.
  virtual void on_done(int error) = 0;
};
inline constexpr int path_lost = ECONNABORTED;

struct ClientOptions {
  fabric::ConnectOptions where;
  wire::Uuid session_uuid{};
  wire::Uuid path_uuid{};
  std::string session_name;
  uint32_t io_connections = 1;  // besides connection 0
  bool first_path = true;       // of the session: may create it at the server
  uint16_t reconnect_count = 1;
  HeartbeatTiming heartbeat{};
  Duration connect_timeout = std::chrono::seconds(30);  // start() to connected
};

struct Geometry {
  uint32_t queue_depth = 0;
  uint32_t max_io_size = 0;      // bytes of data per request
  uint32_t max_header_size = 0;  // bytes
  bool new_rkey = false;         // each answer brings the chunk's next key
  [[nodiscard]] uint32_t chunk_size() const { return max_io_size + max_header_size; }
};

class ClientPath {
 public:
  enum class State : uint8_t { connecting, connected, failed };

  ClientPath(fabric::Fabric& fabric, ClientOptions options, LogSink log);
  ~ClientPath();
  ClientPath(const ClientPath&) = delete;
  ClientPath& operator=(const ClientPath&) = delete;

  void start(TimePoint now);
  [[nodiscard]] State state() const { return state_.load(std::memory_order_acquire); }
  // Why it failed, in words: "refused by the server: No such device or address (ENXIO)".
  [[nodiscard]] std::string failure() const;
  // All endpoints are closed and every request was completed: the path may be destroyed.
  [[nodiscard]] bool closed() const { return alive_.load(std::memory_order_acquire) == 0; }
  [[nodiscard]] const Geometry& geometry() const { return geometry_; }  // once connected
  [[nodiscard]] const ClientOptions& options() const { return options_; }

  // Connections made so far; grows while connecting. 0 is the service connection.
  [[nodiscard]] uint32_t connection_count() const {
    return static_cast<uint32_t>(connections_.size());
  }
  [[nodiscard]] fabric::Endpoint& endpoint(uint32_t cid) { return *connections_[cid]->endpoint; }
  [[nodiscard]] bool connection_closed(uint32_t cid) const {
    return connections_[cid]->closed.load(std::memory_order_acquire);
  }

  // The caller holds the permit. Queues the request on the connection; flush the endpoint
  // afterwards. False: the path is not usable; the request was not taken and gets no on_done.
  bool submit(uint32_t cid, uint32_t permit, ClientRequest& request);

  // Heartbeats and the time limit of connecting.
  void tick(TimePoint now);
  [[nodiscard]] Duration tick_interval() const;

  void fail(std::string_view reason);
  // Orderly end: no request may be in flight. Drive until closed(), at most two seconds.
  void disconnect(TimePoint now);

 private:
  struct Connection final : fabric::Handler {
    Connection(ClientPath& owner, uint32_t id) : path(owner), cid(id) {}
    void on_established(std::span<const std::byte> private_data) override;
    void on_rejected(std::span<const std::byte> private_data) override;
    void on_completion(const fabric::Completion& completion) override;
    void on_disconnected(fabric::DisconnectReason reason, std::string_view detail) override;

    ClientPath& path;
    const uint32_t cid;
    std::vector<std::byte> receive_memory;  // keys arrive here; outlives the endpoint below
    std::unique_ptr<fabric::Endpoint> endpoint;
    std::atomic<bool> closed{false};
  };

  // What belongs to the holder of permit i, and to the receiver that completes its request.
  struct Slot {
    std::atomic<ClientRequest*> request{nullptr};
    std::atomic<uint32_t> cid{0};  // the connection it is in flight on
    uint64_t chunk_address = 0;
    std::atomic<uint32_t> chunk_rkey{0};
    std::unique_ptr<fabric::Region> region;  // where the data of a read may be placed
  };

  void connect_next(TimePoint now);
  void established(Connection& connection, std::span<const std::byte> private_data);
  void send_info_request();
  void info_response(std::span<const std::byte> bytes);
  void make_slots();
  void post_steady_receives();
  void completion(Connection& connection, const fabric::Completion& completion);
  void io_response(Connection& connection, const fabric::Completion& completion);
  void connection_gone(Connection& connection);
  void complete_all();
  std::byte* header_memory(uint32_t permit) {
    return headers_.data() + size_t{permit} * header_stride;
  }
  std::byte* bounce_memory(uint32_t permit) {
    return bounce_.data() + size_t{permit} * geometry_.max_io_size;
  }

  // User message and RTRS message of one request.
  static constexpr size_t header_stride = 320;
  static_assert(header_stride >=
                client_user_length_max + sizeof(wire::ReadMessage) + sizeof(wire::Descriptor));

  fabric::Fabric& fabric_;
  const fabric::Capabilities capabilities_;
  ClientOptions options_;
  LogSink log_;

  Geometry geometry_;
  // Order matters for destruction: regions and local memory before the domain, endpoints first of
  // all.
  std::unique_ptr<fabric::Domain> domain_;
  std::vector<std::byte> headers_;
  std::vector<std::byte> bounce_;  // only where the fabric cannot register a caller's buffer per IO
  std::unique_ptr<fabric::LocalMemory> headers_local_;
  std::unique_ptr<fabric::LocalMemory> bounce_local_;
  std::vector<Slot> slots_;
  std::vector<std::byte> info_memory_;
  std::vector<std::unique_ptr<Connection>> connections_;

  std::atomic<State> state_{State::connecting};
  std::atomic<bool> failed_{false};
  std::atomic<bool> disconnecting_{false};
  std::atomic<uint32_t> alive_{0};  // connections whose receiver has not left for good
  std::unique_ptr<Heartbeat> heartbeat_;
  TimePoint started_{};
  TimePoint now_{};  // of the building thread
  mutable std::mutex failure_mutex_;
  std::string failure_;
};

}  // namespace rtrsnbd::rtrs
