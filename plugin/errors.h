// SPDX-License-Identifier: BSD-3-Clause
// Which errno an NBD client gets. NBD knows few; nbdkit turns every other into "Invalid argument",
// which would blame the client for the server's trouble. So all others become EIO here, in this one
// place.
#pragma once

#include <cerrno>

namespace rtrsnbd::plugin {

constexpr int nbd_error(int error) {
  switch (error) {
    case EPERM:
    case EROFS:  // nbdkit sends EPERM
    case EIO:
    case ENOMEM:
    case ENOSPC:
    case EFBIG:   // nbdkit sends ENOSPC
    case EDQUOT:  // nbdkit sends ENOSPC
    case EINVAL:
    case ESHUTDOWN:
      return error;
    case ENOTSUP:  // tells nbdkit to fall back, or a client that a fast zero is not fast
      return ENOTSUP;
    default:
      return EIO;
  }
}

}  // namespace rtrsnbd::plugin
