// SPDX-License-Identifier: BSD-3-Clause
// The inside of Server: session, path, connection, and the request of each chunk. Who owns whom:
//
//   Server::Impl -> Session -> Path -> Connection -> fabric::Endpoint
//                      |-----> Slot, one per chunk
//                      |-----> UpperSession (RNBD)
//
// Nothing of this is destroyed inside a callback of an endpoint or of the upper layer: objects that
// are over are marked, and Server::Impl::collect() frees them when no such callback is on the
// stack.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "protocol/rtrs/heartbeat.h"
#include "protocol/rtrs/server.h"

namespace rtrsnbd::rtrs {

// Longest user message a request may carry; RNBD's longest, OPEN, has 264 bytes.
inline constexpr size_t user_message_max = 272;

// Answers to heartbeats per tick interval and path. A peer that beats faster is not entitled to
// more.
inline constexpr uint32_t heartbeat_acks_per_tick = 16;

class Session;
class Path;

// Whoever connects and leaves again in a loop must not fill the operator's disk with lines about
// it. Enough for every session of a large server to say good-bye at once, little enough in the long
// run.
inline constexpr uint32_t log_lines_burst = 1000;
inline constexpr uint32_t log_lines_per_second = 20;

// What sessions need of the server around them.
class ServerCore {
 public:
  ServerCore(Directory& directory_in, uint32_t reactor, const ServerLimits& limits_in,
             ServerEnvironment& environment_in, LogSink log_in)
      : directory(directory_in),
        reactor_index(reactor),
        limits(limits_in),
        environment(environment_in),
        sink_(std::move(log_in)) {}

  void log(LogLevel level, const std::string& line) {
    if (log_lines_left_ == 0) {
      ++log_lines_lost_;
      return;
    }
    --log_lines_left_;
    sink_(level, line);
  }
  // Once per tick.
  void refill_log() {
    const auto seconds = static_cast<uint64_t>(std::max<int64_t>(
        0, std::chrono::duration_cast<std::chrono::seconds>(now - log_filled_).count()));
    if (seconds == 0) return;
    log_filled_ = now;
    const uint64_t lines = log_lines_left_ + seconds * log_lines_per_second;
    log_lines_left_ = static_cast<uint32_t>(std::min<uint64_t>(lines, log_lines_burst));
    if (log_lines_lost_ == 0) return;
    sink_(LogLevel::warning, "too much happened at once: " + std::to_string(log_lines_lost_) +
                                 " lines were not written");
    log_lines_lost_ = 0;
  }

  Directory& directory;
  const uint32_t reactor_index;
  const ServerLimits limits;
  ServerEnvironment& environment;
  TimePoint now{};               // of the last event that brought one
  uint32_t half_open_paths = 0;  // CONNECTING
  bool draining = false;         // nothing new is admitted
  bool garbage = false;          // collect() has something to free

 private:
  const LogSink sink_;
  uint32_t log_lines_left_ = log_lines_burst;
  uint64_t log_lines_lost_ = 0;
  TimePoint log_filled_{};
};

// One reliable connection of a path.
class Connection final : public fabric::Handler {
 public:
  Connection(Path& path, uint32_t cid) : path_(path), cid_(cid) {}

  void on_established(std::span<const std::byte>) override {}  // active side only
  void on_rejected(std::span<const std::byte>) override {}     // active side only
  void on_completion(const fabric::Completion& completion) override;
  void on_disconnected(fabric::DisconnectReason reason, std::string_view detail) override;

  // False: the connection is gone, or goes because its peer takes nothing while more and more is
  // waiting.
  bool post(const fabric::SendRequest& request);

  [[nodiscard]] Path& path() { return path_; }
  [[nodiscard]] uint32_t cid() const { return cid_; }
  [[nodiscard]] fabric::Endpoint* endpoint() { return endpoint_.get(); }

 private:
  friend class Path;
  Path& path_;
  const uint32_t cid_;
  bool gone_ = false;
  uint32_t recent_messages_ = 0;  // posted since it was last checked that the peer takes them
  size_t recent_bytes_ = 0;       // what they cost on the wire at most
  wire::InfoRequest info_memory_;
  std::unique_ptr<fabric::Endpoint> endpoint_;
};

class Path {
 public:
  enum class State : uint8_t { connecting, connected, closing, closed };

  Path(Session& session, const wire::ConnectRequest& request, const fabric::ConnectRequest& from);
  ~Path();

  // Takes the connection in and accepts it. The checks against this path have been made.
  void add_connection(const wire::ConnectRequest& request, fabric::ConnectRequest& from);

  // Ends the path; the first call counts. orderly: what is queued is still sent.
  enum class Close : uint8_t { orderly, at_once };
  void close(Close how, LogLevel level, std::string_view why);

  void tick(TimePoint now);
  void abandon();
  void connection_gone(Connection& connection, fabric::DisconnectReason reason,
                       std::string_view detail);
  void completion(Connection& connection, const fabric::Completion& completion);

  [[nodiscard]] State state() const { return state_; }
  [[nodiscard]] const wire::Uuid& uuid() const { return uuid_; }
  [[nodiscard]] const fabric::Address& peer() const { return peer_; }
  [[nodiscard]] const fabric::Address& local() const { return local_; }
  [[nodiscard]] TimePoint created() const { return created_; }
  [[nodiscard]] uint32_t expected_connections() const {
    return static_cast<uint32_t>(connections_.size());
  }
  [[nodiscard]] uint32_t present_connections() const { return present_; }
  [[nodiscard]] bool has_connection(uint32_t cid) const { return connections_[cid] != nullptr; }
  [[nodiscard]] uint32_t queue_depth() const { return core_.limits.queue_depth; }
  [[nodiscard]] bool new_rkey() const { return new_rkey_; }
  // Of a chunk, for the path's endpoints. Once connected.
  [[nodiscard]] fabric::Region& region(uint32_t chunk_id) {
    return *regions_[new_rkey_ ? chunk_id : 0];
  }

 private:
  void info_request(Connection& connection, const fabric::Completion& completion);
  void become_connected(std::string_view name);
  void request_arrived(Connection& connection, uint32_t immediate);
  void send_info_response();
  void send_service(uint32_t immediate);
  void violation(std::string_view what);
  void finish_if_quiet();

  Session& session_;
  ServerCore& core_;
  const wire::Uuid uuid_;
  const fabric::Address peer_;
  const fabric::Address local_;
  const TimePoint created_;
  // NEW_RKEY mode: a chunk's key is good for one request. Each path has its domain, so that its
  // keys are worth nothing on the connections of another.
  const bool new_rkey_;
  const bool any_local_;
  std::unique_ptr<fabric::Domain> domain_;
  State state_ = State::connecting;
  uint32_t present_ = 0;  // connections that arrived
  uint32_t alive_ = 0;    // of these, the ones not gone yet
  uint32_t acks_left_ = heartbeat_acks_per_tick;
  bool unknown_immediate_logged_ = false;
  std::optional<Heartbeat> heartbeat_;
  // Chunk keys of this path: one region per chunk in NEW_RKEY mode, else one over all of them.
  std::vector<std::unique_ptr<fabric::Region>> regions_;
  std::vector<std::byte> info_response_;
  std::unique_ptr<fabric::LocalMemory> info_response_local_;
  std::vector<std::unique_ptr<Connection>> connections_;  // by cid; null: not arrived
};

// What a request is about; all of it copied out of the chunk.
struct RequestContent {
  wire::IoRequest header;
  std::array<std::byte, user_message_max> user;
};

// The request that uses one chunk, if any.
class Slot final : public ServerRequest {
 public:
  Slot() = default;

  [[nodiscard]] std::span<std::byte> data() override;
  [[nodiscard]] std::span<const std::byte> user() const override {
    return std::span(content_.user).first(content_.header.user_length);
  }
  [[nodiscard]] bool is_read() const override {
    return content_.header.type == wire::RtrsType::read;
  }
  [[nodiscard]] bool has_descriptor() const override { return content_.header.has_descriptor; }
  [[nodiscard]] int registered_index() const override;
  void respond(int error) override;

  // A request for this chunk came in, with its header at offset. It is executed at once, or when
  // the one of another path that uses the chunk is done. Returns what the peer did wrong, or null.
  [[nodiscard]] const char* arrived(Connection& connection, uint32_t offset);
  // The path is gone: whatever it asked for is executed to its end, but not answered, or not
  // started.
  void path_gone(const Path& path);

 private:
  friend class Session;

  struct Held {
    Connection* connection;
    RequestContent content;
  };

  [[nodiscard]] bool read_content(uint32_t offset, RequestContent& content);
  void start(Connection& connection);
  bool send_response(Connection& connection, int error);

  Session* session_ = nullptr;
  uint32_t id_ = 0;
  bool executing_ = false;
  Connection* connection_ = nullptr;  // where to answer; null: nobody waits for the answer
  RequestContent content_;
  std::unique_ptr<Held> held_;  // the same chunk, asked for on another path meanwhile
};

class Session {
 public:
  Session(ServerCore& core, const wire::Uuid& uuid, std::unique_ptr<ChunkMemory> memory,
          const fabric::Address& peer);
  ~Session();

  [[nodiscard]] ServerCore& core() { return core_; }
  [[nodiscard]] const wire::Uuid& uuid() const { return uuid_; }
  [[nodiscard]] std::span<std::byte> chunk(uint32_t id) {
    return bytes_.subspan(size_t{id} * core_.limits.chunk_size(), core_.limits.chunk_size());
  }
  [[nodiscard]] std::span<std::byte> memory() { return bytes_; }
  [[nodiscard]] int registered_index() const { return memory_->registered_index(); }
  [[nodiscard]] Slot& slot(uint32_t id) { return slots_[id]; }
  [[nodiscard]] std::string label() const;  // for log lines

  Path* find_path(const wire::Uuid& uuid);
  Path* find_path_between(const fabric::Address& peer, const fabric::Address& local);
  [[nodiscard]] size_t path_count() const { return paths_.size(); }
  void append_half_open(std::vector<Path*>& list);
  Path& add_path(const wire::ConnectRequest& request, const fabric::ConnectRequest& from);

  // A path brought its INFO_REQ: gives the session its name and its upper layer, if it is the
  // first. False: the name is not acceptable, or the upper layer wants none; reason says why.
  bool introduce(std::string_view name, std::string& reason);
  void path_connected() { ++connected_paths_; }
  // A path begins to close: nothing it asked for will be answered.
  void path_closing(const Path& path, bool was_connected);
  void path_closed();  // one of the paths has no live connection any more
  void request_started(const Slot& slot);
  void request_done();

  void tick(TimePoint now);
  void drain();
  void collect();  // frees closed paths
  void abandon();  // the server is being destroyed: lets go of everything, calls nobody but the
                   // upper layer

  // No request may come any more; joining is refused.
  [[nodiscard]] bool ending() const { return ending_; }
  [[nodiscard]] bool finished() const { return finished_; }
  [[nodiscard]] Server::SessionStatus status() const;
  [[nodiscard]] UpperSession* upper() { return upper_.get(); }

 private:
  void end(Path::Close how, std::string_view why);
  void finish_if_quiet();

  ServerCore& core_;
  const wire::Uuid uuid_;
  SessionIdentity identity_;
  std::unique_ptr<ChunkMemory> memory_;
  const std::span<std::byte> bytes_;
  std::vector<Slot> slots_;
  std::unique_ptr<UpperSession> upper_;
  std::vector<std::unique_ptr<Path>> paths_;
  uint32_t connected_paths_ = 0;
  uint32_t in_flight_ = 0;
  uint64_t reads_ = 0, writes_ = 0;
  bool ending_ = false;    // the last connected path is closing or gone
  bool down_ = false;      // all paths are closed, and the upper layer knows
  bool finished_ = false;  // and nothing is being executed any more
};

}  // namespace rtrsnbd::rtrs
