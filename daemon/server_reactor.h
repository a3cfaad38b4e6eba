// SPDX-License-Identifier: BSD-3-Clause
// A reactor that serves sessions: it drives the endpoints of its RTRS server and gives that server
// memory, volumes and time. Reactor 0 owns the listeners too and hands each connection request to
// the reactor where its session lives.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "daemon/memory.h"
#include "daemon/reactor.h"
#include "daemon/store_device.h"
#include "daemon/volumes.h"
#include "daemon/watch.h"
#include "protocol/base/log.h"
#include "protocol/fabric/fabric.h"
#include "protocol/rtrs/server.h"

namespace rtrsnbd::daemon {

// What all reactors of a daemon share.
struct Shared {
  rtrs::Directory& directory;
  rtrs::ServerLimits limits;
  MemoryBudget& budget;
  VolumeRegistry& volumes;
  LogSink log;
};

class ServerReactor final : public rtrs::ServerEnvironment {
 public:
  ServerReactor(Shared& shared, uint32_t index, const RingOptions& ring);  // throws SetUpError
  ~ServerReactor() override;

  [[nodiscard]] Reactor& reactor() { return reactor_; }

  // Before run(): takes over listeners; requests go to peers[i], where this reactor is one of them.
  void listen(std::vector<std::unique_ptr<fabric::Listener>> listeners,
              std::vector<ServerReactor*> peers);

  void run();  // the reactor's thread; returns when shut down and idle

  // From any thread: admit nothing more, finish what is running, close the sessions, end run().
  void request_shut_down();

  // --- rtrs::ServerEnvironment
  std::unique_ptr<rtrs::ChunkMemory> allocate_chunks(size_t bytes, std::string& reason) override;
  std::unique_ptr<rtrs::UpperSession> session_up(const rtrs::SessionIdentity& identity) override;
  void attach(fabric::Endpoint& endpoint) override;
  void detach(fabric::Endpoint& endpoint) override;
  void want_flush(fabric::Endpoint& endpoint) override;

 private:
  struct Line;     // an attached endpoint
  class Ticker;    // calls tick() again and again
  class Handover;  // a connection request on its way to another reactor

  void tick(TimePoint now);
  bool end_turn();
  void serve(Line& line);
  void drop_detached();
  Line* find(fabric::Endpoint& endpoint);
  void on_connect_request(std::unique_ptr<fabric::ConnectRequest> request);
  void progress_listener(fabric::Listener& listener);

  Shared& shared_;
  const uint32_t index_;
  Reactor reactor_;
  RingFiles files_;
  ChunkAllocator chunks_;
  std::unordered_map<fabric::Endpoint*, std::unique_ptr<Line>> lines_;
  std::vector<std::unique_ptr<Line>> detached_;  // freed when nobody on the stack refers to them
  std::vector<Line*> to_flush_;
  std::vector<Line*> flushing_;
  std::vector<Line*> to_serve_;  // had more than their share of a turn
  Line* recent_ = nullptr;  // of the last look-up: the next one is mostly for the same endpoint
  bool shutting_down_ = false;
  std::vector<ServerReactor*> peers_;
  struct Listening {
    std::unique_ptr<fabric::Listener> listener;
    Watch::Pointer watch;
  };
  std::vector<Listening> listening_;
  std::unique_ptr<Ticker> ticker_;
  std::unique_ptr<rtrs::Server> server_;
};

}  // namespace rtrsnbd::daemon
