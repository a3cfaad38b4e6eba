// SPDX-License-Identifier: BSD-3-Clause
// One client session. A housekeeper thread connects, drives the service connection, beats, and
// notices what takes too long. The IO connections have no thread of their own: the request threads
// drive them (lane.h).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tl/expected.hpp>
#include <vector>

#include "plugin/lane.h"
#include "plugin/parameters.h"
#include "protocol/base/log.h"
#include "protocol/fabric/fabric.h"
#include "protocol/rtrs/client.h"
#include "protocol/rtrs/permits.h"

namespace rtrsnbd::plugin {

class Session {
 public:
  // Resolves, connects, exchanges SESS_INFO. The error is a sentence that names the server.
  static tl::expected<std::shared_ptr<Session>, std::string> connect(const Parameters& parameters,
                                                                     LogSink log);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  [[nodiscard]] const rtrs::Geometry& geometry() const { return path_->geometry(); }
  [[nodiscard]] const std::string& server() const { return server_text_; }
  [[nodiscard]] bool usable() const { return path_->state() == rtrs::ClientPath::State::connected; }
  [[nodiscard]] std::string failure() const { return path_->failure(); }

  // IO lanes are 1..lane_count(); 0 is for administration.
  [[nodiscard]] uint32_t lane_count() const { return static_cast<uint32_t>(lanes_.size()) - 1; }

  // Takes a permit and queues the request. With wait_for_permit false it may return false: no
  // permit now. If the session is lost the operation is done at once with rtrs::path_lost. After
  // true, wait() must follow.
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
  bool connect_path(fabric::Fabric& fabric, const fabric::Address& target,
                    const fabric::Address* source);
  bool connect_target(const fabric::Address& target, const fabric::Address* source,
                      std::string& error);
  void drive_all(bool until_connected, Duration limit);
  void check_overdue();

  const Parameters parameters_;
  const std::string server_text_;
  LogSink log_;
  const std::unique_ptr<fabric::Fabric> soft_;
  const std::unique_ptr<fabric::Fabric> rdma_;
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
