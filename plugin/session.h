// SPDX-License-Identifier: BSD-3-Clause
// One client session and the threads that drive it.
//
// A housekeeper thread connects, drives the service connection, beats, and notices what takes too long. The
// IO connections have no thread of their own: a request thread that waits for its answer either leads (it
// receives for everybody who waits on the same connection) or follows (it sleeps until its request is done
// or it is told to lead). With one request in flight the thread that sent it also receives the answer, and
// no other thread of the process wakes up.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <tl/expected.hpp>

#include "plugin/parameters.h"
#include "protocol/base/log.h"
#include "protocol/fabric/fabric.h"
#include "protocol/rtrs/client.h"
#include "protocol/rtrs/permits.h"

namespace rtrsnbd::plugin {

class Session;

// One RTRS request and the thread that waits for it. Lives on that thread's stack.
class Operation final : public rtrs::ClientRequest {
 public:
  void on_done(int error) override;
  [[nodiscard]] int error() const { return error_; }

 private:
  friend class Session;
  friend class Lane;
  enum State : uint32_t { waiting, asleep, told_to_lead, done };

  class Lane* lane_ = nullptr;
  Session* session_ = nullptr;
  uint32_t permit_ = 0;
  int error_ = 0;
  std::atomic<uint32_t> state_{waiting};
  bool linked_ = false;  // in the lane's list of followers; under the lane's mutex
  Operation* previous_ = nullptr;
  Operation* next_ = nullptr;
};

// The threads that wait on one connection.
class Lane {
 public:
  Lane(rtrs::ClientPath& path, uint32_t cid) : path_(path), cid_(cid) {}

  // Sends what is queued, waits until the operation is done, and meanwhile leads if nobody does.
  void wait(Operation& operation);
  void completed(Operation& operation, int error);

  // For the housekeeper: takes the lead for good if it is free. False: a request thread has it.
  bool take_lead();

  [[nodiscard]] uint32_t cid() const { return cid_; }

 private:
  void lead(Operation& operation);
  void sleep(Operation& operation);
  void link(Operation& operation);
  void unlink(Operation& operation);

  rtrs::ClientPath& path_;
  const uint32_t cid_;
  std::mutex mutex_;
  bool led_ = false;
  bool housekeeper_leads_ = false;
  bool leader_receives_ = false;  // the leader may be asleep: whoever queues must send for himself
  uint32_t woken_ = 0;            // followers woken since the leader last received
  Operation* first_ = nullptr;    // followers, oldest first
  Operation* last_ = nullptr;
};

class Session {
 public:
  // Resolves, connects, exchanges SESS_INFO. The error is a sentence that names the server.
  static tl::expected<std::shared_ptr<Session>, std::string> connect(const Parameters& parameters, LogSink log);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  [[nodiscard]] const rtrs::Geometry& geometry() const { return path_->geometry(); }
  [[nodiscard]] const std::string& server() const { return server_text_; }
  [[nodiscard]] bool usable() const { return path_->state() == rtrs::ClientPath::State::connected; }
  [[nodiscard]] std::string failure() const { return path_->failure(); }

  // IO lanes are 1..lane_count(); 0 is for administration.
  [[nodiscard]] uint32_t lane_count() const { return static_cast<uint32_t>(lanes_.size()) - 1; }

  // Takes a permit and queues the request. With wait_for_permit false it may return false: no permit now.
  // If the session is lost the operation is done at once with rtrs::path_lost. After true, wait() must follow.
  bool start(uint32_t lane, Operation& operation, bool wait_for_permit);
  // Until it is done; gives the permit back. Returns the errno.
  int wait(Operation& operation);
  // Both for a single request.
  int run(uint32_t lane, Operation& operation) {
    start(lane, operation, true);
    return wait(operation);
  }

 private:
  Session(const Parameters& parameters, LogSink log);

  void housekeep(std::stop_token stop);
  bool connect_path(const fabric::Address& target, const fabric::Address* source);
  void drive_all(bool until_connected, Duration limit);
  void check_overdue();

  const Parameters parameters_;
  const std::string server_text_;
  LogSink log_;
  std::unique_ptr<fabric::Fabric> fabric_;
  std::unique_ptr<rtrs::ClientPath> path_;
  std::unique_ptr<rtrs::Permits> permits_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  // When each permit's request was sent, in housekeeper ticks; 0: none.
  std::vector<std::atomic<uint32_t>> sent_tick_;
  std::atomic<uint32_t> tick_{1};

  int wake_fd_ = -1;
  std::mutex mutex_;
  std::condition_variable settled_;
  bool connecting_ = true;  // under mutex_
  std::string connect_error_;
  std::jthread housekeeper_;  // last: it uses all of the above
};

}  // namespace rtrsnbd::plugin
