// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/notify.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>

namespace rtrsnbd::daemon {

void Notifier::send(std::string_view state) const {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // A path, or '@' for a name in the abstract namespace.
  if (socket_.size() < 2 || socket_.size() >= sizeof address.sun_path) return;
  if (socket_[0] != '/' && socket_[0] != '@') return;
  std::memcpy(address.sun_path, socket_.data(), socket_.size());
  if (socket_[0] == '@') address.sun_path[0] = '\0';
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return;
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + socket_.size());
  [[maybe_unused]] const ssize_t sent = sendto(fd, state.data(), state.size(), MSG_NOSIGNAL,
                                               reinterpret_cast<const sockaddr*>(&address), length);
  close(fd);
}

}  // namespace rtrsnbd::daemon
