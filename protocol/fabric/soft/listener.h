// SPDX-License-Identifier: BSD-3-Clause
// The accepting end: takes TCP connections, reads their requests as the bytes come, within limits,
// and hands the complete ones over.
#pragma once

#include <list>
#include <memory>
#include <optional>
#include <string_view>

#include "protocol/fabric/fabric.h"
#include "protocol/fabric/soft/fabric.h"
#include "protocol/fabric/soft/key_table.h"
#include "protocol/fabric/soft/mpa.h"
#include "protocol/fabric/soft/socket.h"

namespace rtrsnbd::fabric::soft {

class SoftListener final : public Listener {
 public:
  SoftListener(const Options& options, std::shared_ptr<KeyTable> keys, const Address& address);

  [[nodiscard]] int fd() const override { return epoll_.get(); }
  void progress(TimePoint now, const OnRequest& on_request) override;
  [[nodiscard]] Address address() const override { return local_address_of(socket_.get()); }

 private:
  struct Pending {
    Socket socket;
    Address peer;
    TimePoint since;
    MpaReader reader{MpaReader::Kind::request};
    bool done = false;
  };
  using PendingList = std::list<Pending>;  // oldest first; members never move

  // How many connections one progress() accepts before it lets others have their turn.
  static constexpr int accepts_per_turn = 64;
  static constexpr int backlog = 1024;
  // After running out of descriptors or memory: accepting again at once would only spin.
  static constexpr std::chrono::milliseconds accept_pause{500};

  void accept_some(TimePoint now, const OnRequest& on_request);
  void read_request(Pending& pending, const OnRequest& on_request);
  void make_room(const Address& peer, TimePoint now);
  void listen_while_room(TimePoint now);
  void drop(Pending& pending, std::string_view why);
  void log(LogLevel level, const std::string& line) const;

  const Options options_;
  const std::shared_ptr<KeyTable> keys_;
  Socket epoll_;
  Socket socket_;
  PendingList pending_;
  bool accepting_ = false;  // the listening socket is in the epoll set
  std::optional<TimePoint> paused_until_;
};

}  // namespace rtrsnbd::fabric::soft
