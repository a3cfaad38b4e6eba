#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
"""Every errno a server can answer with, and what the NBD client gets for it."""

import errno
import os
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "hostile"))
import rawserver  # noqa: E402
import wire  # noqa: E402
from harness import Nbdkit, equal, expect_nbd_error, main, nbd_connect, requires_nbd_module, true  # noqa: E402

# NBD knows few errors, and nbdkit sends "Invalid argument" for all others. The plugin must not blame the client.
EXPECTED = {errno.EPERM: "EPERM", errno.EROFS: "EPERM", errno.EIO: "EIO", errno.ENOMEM: "ENOMEM", errno.EINVAL: "EINVAL",
            errno.ENOSPC: "ENOSPC", errno.EFBIG: "ENOSPC", errno.EDQUOT: "ENOSPC", errno.ESHUTDOWN: "ESHUTDOWN"}


class ErrorServer(rawserver.Server):
    """Answers IO with the errno set from outside, and everything else well."""
    error = 0

    def execute(self, connection, is_read, user, data, descriptor):
        if struct.unpack_from("<H", user)[0] == wire.IO and self.error:
            return self.error, b""
        return super().execute(connection, is_read, user, data, descriptor)


def test_errno_of_every_command(stack):
    requires_nbd_module()
    for flags in (0, wire.NEW_RKEY):
        server = type("S", (ErrorServer,), {"flags": flags})()
        nbdkit = Nbdkit(stack, "tcp:127.0.0.1:%d" % server.port, "v1", connections=2)
        handle = nbd_connect(nbdkit.uri)
        calls = {"pread": lambda: handle.pread(4096, 0), "pwrite": lambda: handle.pwrite(bytes(4096), 0),
                 "flush": lambda: handle.flush(), "large pread": lambda: handle.pread(1 << 20, 0),
                 "unaligned pwrite": lambda: handle.pwrite(b"x" * 100, 7), "trim": lambda: handle.trim(4096, 0)}
        for number in list(range(1, 134)) + [255, 256, 511]:
            server.error = number
            for name, call in calls.items():
                expected = EXPECTED.get(number, "EIO")
                if number == errno.EOPNOTSUPP and name == "trim":
                    call()  # trim is advice: what cannot be done is quietly not done
                    continue
                equal(expect_nbd_error(call), expected, "errno %d of %s" % (number, name))
        server.error = 0
        handle.pread(4096, 0)
        handle.flush()
        equal(server.violations, [], "violations of the protocol by the client")
        handle.shutdown()
        nbdkit.terminate()
        server.stop()


def test_zero_falls_back_to_writing_when_the_server_cannot(stack):
    """EOPNOTSUPP for WRITE_ZEROES: the client's zero works, a fast zero is refused as such."""
    nbd = requires_nbd_module()

    class Server(rawserver.Server):
        def execute(self, connection, is_read, user, data, descriptor):
            kind, _, _, _, rw = struct.unpack_from("<HHIQI", user.ljust(24, b"\0"))
            if kind == wire.IO and rw & 0xFF == wire.WRITE_ZEROES:
                return errno.EOPNOTSUPP, b""
            return super().execute(connection, is_read, user, data, descriptor)
    server = Server()
    handle = nbd_connect(Nbdkit(stack, "tcp:127.0.0.1:%d" % server.port, "v1").uri)
    handle.pwrite(b"a" * (1 << 20), 0)
    if handle.can_fast_zero():
        true(expect_nbd_error(lambda: handle.zero(65536, 0, flags=16)) in ("ENOTSUP", "EOPNOTSUPP"), "fast zero")
    try:
        handle.zero(65536, 0)
        equal(bytes(handle.pread(65536, 0)), bytes(65536), "zeroed range")
    except nbd.Error as error:
        raise AssertionError("zero does not fall back: %s" % error)
    server.stop()


def test_server_without_any_optional_feature(stack):
    """A 6.1 kernel server offers no write-zeroes; a store without discard or write cache offers less still."""
    requires_nbd_module()

    class Bare(rawserver.Server):
        def open_payload(self, device):
            return wire.open_response(device, self.volume_size // 512, write_zeroes=0, discard=0, policy=0)
    server = Bare()
    handle = nbd_connect(Nbdkit(stack, "tcp:127.0.0.1:%d" % server.port, "v1").uri)
    equal(handle.can_trim(), False, "can_trim")
    equal(handle.can_fast_zero(), False, "can_fast_zero")
    handle.pwrite(b"q" * 8192, 0)
    handle.zero(4096, 0)  # nbdkit writes zeroes itself
    handle.flush()
    equal(bytes(handle.pread(8192, 0)), bytes(4096) + b"q" * 4096, "content")
    equal(server.violations, [], "violations of the protocol by the client")
    server.stop()


def test_server_with_small_limits_for_discard_and_zeroes(stack):
    """Requests above the peer's limits are cut."""
    requires_nbd_module()
    seen = []

    class Small(rawserver.Server):
        def open_payload(self, device):
            return wire.open_response(device, self.volume_size // 512, write_zeroes=128, discard=64)

        def execute(self, connection, is_read, user, data, descriptor):
            kind, _, _, _, rw, size = struct.unpack_from("<HHIQII", user.ljust(24, b"\0"))
            if kind == wire.IO and rw & 0xFF in (wire.DISCARD, wire.WRITE_ZEROES):
                seen.append((rw & 0xFF, size))
            return super().execute(connection, is_read, user, data, descriptor)
    server = Small()
    handle = nbd_connect(Nbdkit(stack, "tcp:127.0.0.1:%d" % server.port, "v1").uri)
    handle.pwrite(b"q" * (1 << 20), 0)
    handle.trim(1 << 20, 0)
    handle.pwrite(b"q" * (1 << 20), 0)
    handle.zero(1 << 20, 0)
    equal(bytes(handle.pread(1 << 20, 0)), bytes(1 << 20), "zeroed range")
    true(seen and all(size <= (64 if op == wire.DISCARD else 128) * 512 for op, size in seen), "sizes: %s" % seen[:5])
    server.stop()


def test_server_with_odd_geometry(stack):
    """Chunks that are no power of two, depth 1, a maximum below a page."""
    requires_nbd_module()
    for depth, io, header in ((1, 4096, 4096), (500, 126976, 4096), (3, 65536, 65536), (7, 10000, 5000)):
        server = type("S", (rawserver.Server,), {"queue_depth": depth, "max_io_size": io, "max_hdr_size": header})()
        nbdkit = Nbdkit(stack, "tcp:127.0.0.1:%d" % server.port, "v1", connections=2)
        handle = nbd_connect(nbdkit.uri)
        data = os.urandom(300000)
        handle.pwrite(data, 12345)
        true(handle.pread(len(data), 12345) == data, "depth %d, max IO %d" % (depth, io))
        equal(server.violations, [], "violations of the protocol by the client")
        handle.shutdown()
        nbdkit.terminate()
        server.stop()


if __name__ == "__main__":
    main(globals())
