#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
"""NBD clients that break the rules (libnbd with its strict mode off): every bad request gets a definite
answer, the connection and everybody else's IO go on."""

import os
import socket
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import (GIB, MIB, Daemon, Nbdkit, equal, expect_nbd_error, main, nbd_connect, requires_nbd_module,  # noqa: E402
                     stat_of, true, volume, wait_until)


def disk(stack, size=4 * MIB, **named):
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), size, **named)])
    nbdkit = Nbdkit(stack, daemon, "v1")
    return daemon, nbdkit, nbd_connect(nbdkit.uri)


def still_good(handle, at=0):
    data = os.urandom(4096)
    handle.pwrite(data, at)
    equal(bytes(handle.pread(4096, at)), data, "IO after the bad request")


def test_ranges_beyond_the_end(stack):
    requires_nbd_module()
    for block in (512, 4096):
        size = 4 * MIB + block
        daemon, nbdkit, handle = disk(stack, size, block_size=block) if block == 512 else disk(stack, size)
        for at, length in ((size, 512), (size - 511, 512), (size + 1, 1), (1 << 40, 4096), ((1 << 63) - 512, 512),
                           ((1 << 63) - 1, 1)):
            for call in (lambda: handle.pread(length, at), lambda: handle.pwrite(bytes(length), at),
                         lambda: handle.trim(length, at), lambda: handle.zero(length, at)):
                expect_nbd_error(call, errno_names=("EINVAL", "ENOSPC"))
                # libnbd itself closes nothing; nbdkit must not either
            still_good(handle)
        handle.pwrite(b"z", size - 1)
        equal(bytes(handle.pread(1, size - 1)), b"z", "the last byte")
        handle.shutdown()
        nbdkit.terminate()
        daemon.terminate()
        os.unlink(stack.path("v.img"))


def test_requests_of_length_0(stack):
    nbd = requires_nbd_module()
    _, _, handle = disk(stack)
    size = handle.get_size()
    calls = {"pread": lambda at: handle.pread(0, at), "pwrite": lambda at: handle.pwrite(b"", at),
             "zero": lambda at: handle.zero(0, at), "trim": lambda at: handle.trim(0, at),
             "cache": lambda at: handle.cache(0, at)}
    for at in (0, size // 2, size, size + 1, 1 << 62):
        for name, call in calls.items():
            try:
                call(at)
            except nbd.Error as error:
                true(error.errno in ("EINVAL", "ENOSPC", "EOPNOTSUPP", "ENOTSUP"), "%s(0, %d): %s" % (name, at, error))
            still_good(handle)


def test_requests_larger_than_anything(stack):
    """nbdkit takes 64 MiB; more is refused by it, and the connection is usable after or cleanly closed."""
    nbd = requires_nbd_module()
    _, nbdkit, handle = disk(stack, 256 * MIB)
    data = bytes(range(256)) * (64 * MIB // 256)
    handle.pwrite(data, 512)
    true(handle.pread(64 * MIB, 512) == data, "64 MiB differ")
    for call in (lambda: handle.pread(64 * MIB + 512, 0), lambda: handle.pwrite(bytes(64 * MIB + 512), 0)):
        try:
            call()
            raise AssertionError("64 MiB + 512 succeeded")
        except nbd.Error:
            pass
        if handle.aio_is_dead() or handle.aio_is_closed():
            handle = nbd_connect(nbdkit.uri)
        still_good(handle)


def test_unknown_flags_and_commands(stack):
    nbd = requires_nbd_module()
    _, nbdkit, handle = disk(stack)
    for flags in (2, 4, 8, 16, 32, 0x8000):
        for call in (lambda: handle.pread(512, 0, flags=flags), lambda: handle.pwrite(bytes(512), 0, flags=flags),
                     lambda: handle.trim(512, 0, flags=flags), lambda: handle.flush(flags=flags)):
            try:
                call()
            except (nbd.Error, ValueError):
                pass
            if handle.aio_is_dead() or handle.aio_is_closed():
                handle = nbd_connect(nbdkit.uri)
        still_good(handle)


def test_fast_zero_is_refused_at_once_or_done(stack):
    nbd = requires_nbd_module()
    _, _, handle = disk(stack)
    true(handle.can_fast_zero(), "fast zero is offered")
    handle.pwrite(b"a" * 65536, 0)
    for at, length in ((0, 32768), (32768 + 100, 1000), (1, 511)):
        try:
            handle.zero(length, at, flags=16)  # LIBNBD_CMD_FLAG_FAST_ZERO
            equal(bytes(handle.pread(length, at)), bytes(length), "zeroed range")
        except nbd.Error as error:
            true(error.errno in ("ENOTSUP", "EOPNOTSUPP"), "fast zero: %s" % error)
            equal(bytes(handle.pread(length, at)), b"a" * length, "range of a refused fast zero")


def raw_nbd(path):
    """A connection past the newstyle negotiation, without libnbd."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(path)
    receive(sock, 18)
    sock.sendall(struct.pack(">I", 3))
    sock.sendall(struct.pack(">QII", 0x49484156454F5054, 1, 0))  # EXPORT_NAME, empty
    receive(sock, 10)
    return sock


def receive(sock, count):
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def request(command, cookie, at, length, flags=0, magic=0x25609513):
    return struct.pack(">IHHQQI", magic, flags, command, cookie, at, length)


def test_raw_nonsense_on_the_nbd_socket(stack):
    """Wrong magic, unknown commands, half requests, a hang-up with requests in flight."""
    _, nbdkit, handle = disk(stack)
    for bad in (b"\xff" * 28, request(0, 1, 0, 512, magic=0x12345678), request(99, 1, 0, 512), request(0, 1, 0, 0xFFFFFFFF),
                request(1, 1, 0, 0xFFFFFFFF), request(1, 1, 0, 4096) + bytes(100), request(0, 1, 0, 512)[:11],
                b"".join(request(0, i, 4096 * i, 4096) for i in range(200)),
                b"".join(request(1, i, 4096 * i, 4096) + bytes(4096) for i in range(200)), request(3, 1, 7, 7),
                request(5, 1, 0, 1 << 30), request(4, 1, 1 << 62, 0xFFFFFFFF)):
        sock = raw_nbd(nbdkit.socket)
        sock.sendall(bad)
        sock.close()
        still_good(handle)
    before = stat_of(nbdkit.pid)["fds"]
    for cut in range(0, 40, 3):  # leaving in the middle of the negotiation
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(nbdkit.socket)
        sock.sendall((struct.pack(">I", 3) + struct.pack(">QII", 0x49484156454F5054, 7, 6) + bytes(6) + bytes(40))[:cut])
        sock.close()
    still_good(handle)
    # Nbdkit's own thread of each connection closes the socket when it finds the peer gone.
    wait_until(lambda: stat_of(nbdkit.pid)["fds"] <= before, 10, "descriptors of connections that left")


def test_export_names_of_every_kind(stack):
    """Refused by rule, escaped in both logs, never a path."""
    nbd = requires_nbd_module()
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "1MiB")])
    nbdkit = Nbdkit(stack, daemon, None, options=["-v"])
    for name in ("", "V1", "x" * 254, "x" * 255, "x" * 256, "x" * 4096, "../v.img", "/etc/passwd", "//v1", "v1/", "./v1",
                 "%n%n%s", "a\nforged: line", "\x1b[31mred", "v1 ", " v1", "\xe4\xf6", "v1\t"):
        handle = nbd.NBD()
        handle.set_strict_mode(0)
        try:
            handle.set_export_name(name)
            handle.connect_unix(nbdkit.socket)
            raise AssertionError("export %r was served" % name)
        except nbd.Error:
            pass
    handle = nbd.NBD()
    handle.set_export_name("v1")
    handle.connect_unix(nbdkit.socket)
    equal(handle.get_size(), MIB, "size")
    true("\x1b" not in daemon.log(), "the daemon's log carries an escape sequence")
    true("\nforged" not in daemon.log(), "the daemon's log carries a forged line")


def test_trims_and_zeroes_above_2_gib(stack):
    requires_nbd_module()
    size = 10 * GIB
    backing = stack.path("v.img")
    daemon = Daemon(stack, [volume("v1", backing, size)])
    handle = nbd_connect(Nbdkit(stack, daemon, "v1").uri)
    for length in ((1 << 31) - 512, 1 << 31, (1 << 31) + 512, (1 << 32) - 512):
        for call in (handle.trim, handle.zero):
            start = 1 * GIB
            for at in (start - 512, start, start + length - 512, start + length):
                handle.pwrite(b"m" * 512, at)
            call(length, start)
            equal(bytes(handle.pread(512, start - 512)), b"m" * 512, "neighbour in front")
            equal(bytes(handle.pread(512, start + length)), b"m" * 512, "neighbour behind")
            if call == handle.zero:
                equal(bytes(handle.pread(512, start)), bytes(512), "first block of %d zeroed bytes" % length)
                equal(bytes(handle.pread(512, start + length - 512)), bytes(512), "last block")
    true(os.stat(backing).st_blocks * 512 < 64 * MIB, "zeroing allocated space")


if __name__ == "__main__":
    main(globals())
