// SPDX-License-Identifier: BSD-3-Clause
// The server end of RTRS: sessions, paths, connections (docs/protocol.md, "Server").
//
// One Server per reactor; all paths of a session live on one reactor, so nothing in a session is
// locked. What must be known across reactors (which session lives where, names, counts) is in
// Directory. Everything but Directory is used by the reactor's thread only. Time comes in as an
// argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "protocol/base/log.h"
#include "protocol/base/time.h"
#include "protocol/fabric/fabric.h"
#include "protocol/rtrs/limits.h"
#include "protocol/wire/rtrs.h"

namespace rtrsnbd::rtrs {

// The chunks of one session: queue_depth * chunk_size bytes, zeroed. Counted against the daemon's
// memory limit for as long as it exists.
class ChunkMemory {
 public:
  virtual ~ChunkMemory() = default;
  [[nodiscard]] virtual std::span<std::byte> bytes() = 0;
  // Index of the memory among the ring's registered buffers; -1 if it is not registered.
  [[nodiscard]] virtual int registered_index() const = 0;
};

struct SessionIdentity {
  wire::Uuid uuid{};
  std::string name;  // as the client gave it in INFO_REQ: checked, but print it with printable()
  fabric::Address peer;      // of the first path
  uint32_t max_io_size = 0;  // bytes of data per request
};

// One request being executed. Belongs to the session; valid until respond().
class ServerRequest {
 public:
  virtual ~ServerRequest() = default;
  // Start of the chunk: what a write brought, where a read puts its data. Peer-writable: the client
  // may change it at any time, so decide nothing by looking at it twice.
  [[nodiscard]] virtual std::span<std::byte> data() = 0;
  [[nodiscard]] virtual std::span<const std::byte> user() const = 0;  // private copy
  [[nodiscard]] virtual bool is_read() const = 0;  // RTRS direction: the client asks for data
  [[nodiscard]] virtual bool has_descriptor() const = 0;   // a read that wants data().size() bytes
  [[nodiscard]] virtual int registered_index() const = 0;  // of the chunk memory
  // Exactly once, from the session's thread, possibly from inside on_request; error is a positive
  // errno or 0. A good read with a descriptor sends data(). The object is gone afterwards.
  virtual void respond(int error) = 0;
};

// The upper layer's end of a session. Destroyed when the session is down and its last request
// answered.
class UpperSession {
 public:
  virtual ~UpperSession() = default;
  virtual void on_request(ServerRequest& request) = 0;
  // The last path is gone: no request will come any more; those in flight must still be answered
  // (the answers go nowhere) so that the chunk memory can be freed.
  virtual void on_session_down() = 0;
};

// What the reactor provides.
class ServerEnvironment {
 public:
  virtual ~ServerEnvironment() = default;
  // Null: memory limit reached or no memory; reason says which, with numbers.
  virtual std::unique_ptr<ChunkMemory> allocate_chunks(size_t bytes, std::string& reason) = 0;
  virtual std::unique_ptr<UpperSession> session_up(const SessionIdentity& identity) = 0;
  // The reactor calls endpoint.progress() when it is ready, from attach until detach. detach may be
  // called from inside a callback of that endpoint; the endpoint is destroyed right after detach
  // returns or later, but never while progress() is on the stack.
  virtual void attach(fabric::Endpoint& endpoint) = 0;
  virtual void detach(fabric::Endpoint& endpoint) = 0;
  // Something was posted: flush at the end of this turn of the loop, once.
  virtual void want_flush(fabric::Endpoint& endpoint) = 0;
};

// Shared by the reactors; locks inside.
class Directory {
 public:
  Directory(uint32_t reactor_count, uint32_t sessions_max)
      : load_(reactor_count), sessions_max_(sessions_max) {}

  // Where the request's session lives, or a reactor for a new one. Empty: refuse (errno in error).
  std::optional<uint32_t> route(const wire::ConnectRequest& request, int& error);
  // From a reactor: a session was created / is gone.
  bool add(const wire::Uuid& session, uint32_t reactor);  // false: sessions_max reached
  void remove(const wire::Uuid& session);
  // Names are unique among sessions of different uuid. False: taken by another session.
  bool claim_name(const std::string& name, const wire::Uuid& session);
  [[nodiscard]] uint32_t session_count() const;

 private:
  struct Entry {
    uint32_t reactor = 0;
    std::string name;
  };
  mutable std::mutex mutex_;
  std::map<wire::Uuid, Entry> sessions_;
  std::map<std::string, wire::Uuid> names_;
  std::vector<uint32_t> load_;  // sessions per reactor
  uint32_t sessions_max_;
};

class Server {
 public:
  Server(Directory& directory, uint32_t reactor_index, const ServerLimits& limits,
         ServerEnvironment& environment, LogSink log);
  // Nothing may be executed any more: either idle(), or the upper layer's operations have ended.
  // Connections that are still open are cut.
  ~Server();

  // A connection request whose session Directory::route placed here.
  void on_connect_request(std::unique_ptr<fabric::ConnectRequest> request, TimePoint now);

  // Timers: heartbeats, half-open paths, closing connections. Call when next_tick says so.
  void tick(TimePoint now);
  [[nodiscard]] Duration tick_interval() const;

  // Admits nothing more, answers what is being executed, then closes all paths. Done when idle().
  void shut_down(TimePoint now);
  [[nodiscard]] bool idle() const;

  struct SessionStatus {
    std::string name;
    std::string peer;
    uint32_t paths = 0, connections = 0, in_flight = 0;
    uint64_t reads = 0, writes = 0;
  };
  [[nodiscard]] std::vector<SessionStatus> sessions() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace rtrsnbd::rtrs
