// SPDX-License-Identifier: BSD-3-Clause
// sd_notify(3) without the library: one datagram to the service manager that started us.
#pragma once

#include <string>
#include <string_view>

namespace rtrsnbd::daemon {

class Notifier {
 public:
  // socket: the value of NOTIFY_SOCKET, or null: nobody wants to know.
  explicit Notifier(const char* socket) : socket_(socket == nullptr ? "" : socket) {}
  // "READY=1", "STATUS=...", several separated by newlines. Failure is no concern of ours.
  void send(std::string_view state) const;

 private:
  std::string socket_;
};

}  // namespace rtrsnbd::daemon
