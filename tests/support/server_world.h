// SPDX-License-Identifier: BSD-3-Clause
// A Server over the in-memory fabric, with the reactor played by the test: what is attached makes
// progress, what asked for it is flushed, and time is a number.
#pragma once

#include <algorithm>
#include <cassert>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "protocol/rtrs/server.h"
#include "tests/support/memory_fabric.h"

namespace rtrsnbd::test {

inline constexpr const char* server_host = "10.0.0.1";

// An upper layer that keeps what comes in until the test answers it.
struct RecordingUpper final : rtrs::UpperSession {
  struct Log {
    std::vector<rtrs::ServerRequest*> waiting;
    int downs = 0;
    int destroyed = 0;
    uint64_t requests = 0;
    bool answer_at_once = false;
    int error = 0;
    std::function<void(rtrs::ServerRequest&)> on_request;

    void answer_all(int with = 0) {
      for (auto* request : std::exchange(waiting, {})) request->respond(with);
    }
  };
  explicit RecordingUpper(Log& log_in) : log(log_in) {}
  ~RecordingUpper() override { ++log.destroyed; }
  void on_request(rtrs::ServerRequest& request) override {
    ++log.requests;
    if (log.on_request) return log.on_request(request);
    if (log.answer_at_once) return request.respond(log.error);
    log.waiting.push_back(&request);
  }
  void on_session_down() override { ++log.downs; }
  Log& log;
};

class ServerWorld : public rtrs::ServerEnvironment {
 public:
  static rtrs::ServerLimits small_limits() {
    rtrs::ServerLimits limits;
    limits.queue_depth = 8;
    limits.max_io_size = 16384;
    return limits;
  }

  explicit ServerWorld(const rtrs::ServerLimits& limits_in = small_limits(),
                       const MemoryFabricOptions& options = {})
      : limits(limits_in),
        fabric(options),
        directory(1, limits_in.sessions_max),
        listener(fabric.listen(memory_address(server_host, 1234))) {
    make_server();
  }
  ~ServerWorld() override {
    server.reset();
    assert(attached.empty());
  }

  void make_server() {
    server = std::make_unique<rtrs::Server>(directory, 0, limits, *this,
                                            [this](LogLevel level, std::string_view line) {
                                              log.emplace_back(line);
                                              if (level <= LogLevel::warning)
                                                warnings.emplace_back(line);
                                            });
  }

  // --- ServerEnvironment
  std::unique_ptr<rtrs::ChunkMemory> allocate_chunks(size_t bytes, std::string& reason) override {
    if (allocation_throws) throw std::bad_alloc();
    if (allocated + bytes > memory_max) {
      reason = "chunk memory: " + std::to_string(allocated) + " + " + std::to_string(bytes) +
               " of " + std::to_string(memory_max) + " bytes";
      return nullptr;
    }
    return std::make_unique<Chunks>(*this, bytes);
  }
  std::unique_ptr<rtrs::UpperSession> session_up(const rtrs::SessionIdentity& identity) override {
    identities.push_back(identity);
    if (make_upper) return make_upper(identity);
    return std::make_unique<RecordingUpper>(upper);
  }
  void attach(fabric::Endpoint& endpoint) override {
    if (contains(attached, endpoint)) throw std::logic_error("attached twice");
    attached.push_back(&endpoint);
  }
  void detach(fabric::Endpoint& endpoint) override {
    if (std::erase(attached, &endpoint) == 0) throw std::logic_error("detached without attach");
    std::erase(wanted, &endpoint);
  }
  void want_flush(fabric::Endpoint& endpoint) override {
    if (!contains(attached, endpoint))
      throw std::logic_error("flush of an endpoint that is not attached");
    if (!contains(wanted, endpoint)) wanted.push_back(&endpoint);
  }

  // --- The reactor

  // One turn of the loop. True if anything happened.
  bool turn() {
    bool moved = false;
    listener->progress(now, [this, &moved](std::unique_ptr<fabric::ConnectRequest> request) {
      moved = true;
      server->on_connect_request(std::move(request), now);
    });
    for (fabric::Endpoint* endpoint : std::vector(attached)) {
      if (!contains(attached, *endpoint)) continue;
      auto& memory = dynamic_cast<MemoryEndpoint&>(*endpoint);
      const uint64_t before = memory.deliveries();
      memory.progress(fabric::Wait::no, now);
      moved = moved || memory.deliveries() != before;
    }
    for (fabric::Endpoint* endpoint : std::exchange(wanted, {})) {
      endpoint->flush(fabric::Wait::no);
      moved = true;
    }
    return moved;
  }

  void tick() { server->tick(now); }

  static bool contains(const std::vector<fabric::Endpoint*>& list,
                       const fabric::Endpoint& endpoint) {
    return std::find(list.begin(), list.end(), &endpoint) != list.end();
  }

  class Chunks final : public rtrs::ChunkMemory {
   public:
    Chunks(ServerWorld& world, size_t size) : world_(world), bytes_(size) {
      world_.allocated += size;
    }
    ~Chunks() override { world_.allocated -= bytes_.size(); }
    std::span<std::byte> bytes() override { return bytes_; }
    [[nodiscard]] int registered_index() const override { return 7; }

   private:
    ServerWorld& world_;
    std::vector<std::byte> bytes_;
  };

  TimePoint now{};
  rtrs::ServerLimits limits;
  MemoryFabric fabric;
  rtrs::Directory directory;
  size_t allocated = 0, memory_max = SIZE_MAX;
  bool allocation_throws = false;
  std::vector<std::string> log, warnings;
  std::vector<rtrs::SessionIdentity> identities;
  RecordingUpper::Log upper;
  std::function<std::unique_ptr<rtrs::UpperSession>(const rtrs::SessionIdentity&)> make_upper;
  std::vector<fabric::Endpoint*> attached, wanted;  // in the order of their coming
  std::unique_ptr<fabric::Listener> listener;
  std::unique_ptr<rtrs::Server> server;
};

}  // namespace rtrsnbd::test
