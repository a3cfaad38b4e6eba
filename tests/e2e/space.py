#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
"""Full disks, broken disks, holes: ENOSPC and EIO reach the client as such and nobody else; trim gives space
back, zeroes take none, and a failed fsync is not forgotten."""

import os
import random
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import (KIB, MIB, PATIENCE, Background, Daemon, Nbdkit, Skip, allocated, equal, expect_nbd_error, main,  # noqa: E402
                     nbd_connect, requires_nbd_module, requires_tool, run, true, volume, wait_until)

FUA, NO_HOLE, FAST_ZERO = 1, 2, 16


def fill(handle, start, end, piece=256 * KIB):
    """Writes until an error; returns (offset reached, errno or None)."""
    nbd = requires_nbd_module()
    for at in range(start, end, piece):
        try:
            handle.pwrite(b"\x5a" * piece, at)
        except nbd.Error as error:
            return at, error.errno
    return end, None


def test_full_disk_is_enospc_for_its_volume_only_and_heals(stack):
    nbd = requires_nbd_module()
    directory = stack.tmpfs(16 * MIB)
    daemon = Daemon(stack, [volume("small", directory + "/small.img", "64MiB"),
                            volume("other", stack.path("other.img"), "16MiB")])
    nbdkit = Nbdkit(stack, daemon, None)
    small, other = nbd_connect(nbdkit.export_uri("small")), nbd_connect(nbdkit.export_uri("other"))
    stop = []

    def bystander():  # twenty at least, however long that takes on a busy machine
        source, shadow, count = random.Random(1), {}, 0
        while not stop or count < 20:
            block = source.randrange(1000)
            if block in shadow:
                equal(bytes(other.pread(4096, block * 4096)), shadow[block], "the other volume")
            shadow[block] = source.randbytes(4096)
            other.pwrite(shadow[block], block * 4096)
            count += 1
        return count
    thread = Background(bystander)
    reached, error = fill(small, 0, 64 * MIB)
    equal(error, "ENOSPC", "errno of the write that found no space")
    true(reached >= 12 * MIB, "only %d bytes were written" % reached)
    for _ in range(5):  # and it stays so, without harm
        equal(expect_nbd_error(small.pwrite, b"\1" * MIB, 40 * MIB), "ENOSPC", "errno")
        equal(expect_nbd_error(small.zero, 8 * MIB, 40 * MIB, NO_HOLE), "ENOSPC", "errno of zeroes that want space")
    small.pread(4096, 0)
    small.flush()
    small.zero(8 * MIB, 40 * MIB)  # a hole costs nothing
    small.trim(8 * MIB, 0)
    true(allocated(directory + "/small.img") <= reached - 7 * MIB, "trim gave nothing back")
    small.pwrite(b"\2" * (4 * MIB), 48 * MIB)
    equal(bytes(small.pread(4096, 48 * MIB)), b"\2" * 4096, "data written after the space came back")
    equal(bytes(small.pread(4096, 10 * MIB)), b"\x5a" * 4096, "data written before")
    stop.append(True)
    thread.finish()
    try:
        small.flush()
    except nbd.Error as error:
        raise AssertionError("flush after the space came back: %s" % error)


def broken_loop(stack, good, bad):
    """A loop device whose tail cannot be read: its file was cut under it."""
    path = stack.file("broken.img", good + bad)
    with open(path, "r+b") as image:
        image.write(os.urandom(good))
    device = stack.loop(path)
    os.truncate(path, good)
    return device


def test_read_errors_hit_exactly_the_requests_that_touch_them(stack):
    requires_nbd_module()
    good, bad = 2 * MIB, 1 * MIB
    device = broken_loop(stack, good, bad)
    daemon = Daemon(stack, [volume("v1", device), volume("fine", stack.path("fine.img"), "4MiB")], max_io_size="64KiB")
    nbdkit = Nbdkit(stack, daemon, None)
    handle, fine = nbd_connect(nbdkit.export_uri("v1")), nbd_connect(nbdkit.export_uri("fine"))
    fine.pwrite(b"\xaa" * (4 * MIB), 0)  # the chunks are full of foreign bytes now
    with open(stack.path("broken.img"), "rb") as image:
        data = image.read()
    for at, length, works in ((0, 4096, True), (good - 4096, 4096, True), (good - 4096, 8192, False), (good, 4096, False),
                              (good + bad - 512, 512, False), (0, good, True), (0, good + 4096, False),
                              (good - 100, 100, True), (good - 100, 200, False), (good - 300 * KIB, 300 * KIB, True)):
        if works:
            true(handle.pread(length, at) == data[at:at + length], "%d bytes at %d" % (length, at))
        else:
            equal(expect_nbd_error(handle.pread, length, at), "EIO", "errno of %d bytes at %d" % (length, at))
        true(fine.pread(512, 0) == b"\xaa" * 512, "the other volume")


def test_copy_tools_end_with_an_error_when_reads_fail(stack):
    requires_tool("nbdcopy", "qemu-img")
    device = broken_loop(stack, 2 * MIB, 1 * MIB)
    daemon = Daemon(stack, [volume("v1", device)])
    nbdkit = Nbdkit(stack, daemon, "v1")
    run("nbdcopy", nbdkit.uri, stack.path("out1.img"), status=1)
    run("qemu-img", "convert", "-f", "raw", "-O", "raw", nbdkit.uri, stack.path("out2.img"), status=1)


def full_loop(stack, size, room):
    """A loop device whose file lies on a file system without room: writes fail, reads work."""
    directory = stack.tmpfs(room)
    path = directory + "/disk.img"
    with open(path, "wb") as image:
        image.truncate(size)
    return stack.loop(path), directory


def test_write_errors_of_a_device_reach_the_client(stack):
    requires_nbd_module()
    device, _ = full_loop(stack, 16 * MIB, 4 * MIB)
    daemon = Daemon(stack, [volume("v1", device), volume("fine", stack.path("fine.img"), "4MiB")])
    nbdkit = Nbdkit(stack, daemon, None)
    handle, fine = nbd_connect(nbdkit.export_uri("v1")), nbd_connect(nbdkit.export_uri("fine"))
    reached, error = fill(handle, 0, 16 * MIB)
    true(error in ("EIO", "ENOSPC"), "errno of a write that the device refused: %s" % error)
    true(2 * MIB <= reached <= 5 * MIB, "error after %d bytes" % reached)
    equal(bytes(handle.pread(4096, 0)), b"\x5a" * 4096, "what was written before")
    fine.pwrite(b"f" * 4096, 0)
    fine.flush()
    handle.shutdown()


def test_failed_fsync_is_not_forgotten(stack):
    """Buffered backing: writes are acknowledged from the page cache, the device refuses them, flush says so. The
    kernel reports that once and drops the pages, so a second flush must not claim success."""
    requires_nbd_module()
    device, directory = full_loop(stack, 16 * MIB, 4 * MIB)
    daemon = Daemon(stack, [volume("v1", device, direct="off"), volume("fine", stack.path("fine.img"), "4MiB")])
    nbdkit = Nbdkit(stack, daemon, None)
    handle, fine = nbd_connect(nbdkit.export_uri("v1")), nbd_connect(nbdkit.export_uri("fine"))
    reached, error = fill(handle, 0, 12 * MIB)
    if error is not None:
        raise Skip("the device refused a buffered write at once, after %d bytes" % reached)
    true(expect_nbd_error(handle.flush) in ("EIO", "ENOSPC"), "the first flush must fail")
    run("mount", "-o", "remount,size=%d" % (32 * MIB), directory)  # the device is well again
    time.sleep(0.1)
    for _ in range(3):
        true(expect_nbd_error(handle.flush) in ("EIO", "ENOSPC"), "a later flush must fail as well: data was lost")
    fine.pwrite(b"f" * 4096, 0)
    fine.flush()
    daemon.says("v1")
    handle.shutdown()


def frozen(stack):
    """A file system of its own that can be frozen; thawed at the end in any case."""
    requires_tool("mkfs.ext4", "mount", "fsfreeze")
    image, where = stack.file("fs.img", 64 * MIB), stack.directory()
    run("mkfs.ext4", "-q", "-F", image)
    device = stack.loop(image)
    try:
        run("mount", device, where)
    except AssertionError as error:
        raise Skip("ext4 cannot be mounted: %s" % str(error).splitlines()[-1]) from None
    stack.call(lambda: run("umount", "-l", where))
    stack.call(lambda: run("fsfreeze", "-u", where, status=None))
    return where


def test_hanging_backing_stops_neither_other_volumes_nor_the_stop(stack):
    """One volume's file system is frozen: its requests wait, the other volume goes on, new clients get in, and
    SIGTERM ends after drain-timeout with the name of the volume that did not."""
    requires_nbd_module()
    where = frozen(stack)
    daemon = Daemon(stack, [volume("stuck", where + "/v.img", "16MiB"), volume("fine", stack.path("f.img"), "16MiB")],
                    drain_timeout="2s")
    stuck_disk, fine_disk = Nbdkit(stack, daemon, "stuck"), Nbdkit(stack, daemon, "fine")
    stuck, fine = nbd_connect(stuck_disk.uri), nbd_connect(fine_disk.uri)
    stuck.pwrite(b"a" * 4096, 0)
    run("fsfreeze", "-f", where)
    nbd = requires_nbd_module()

    def wait_for_ever():
        try:
            stuck.pwrite(b"b" * MIB, 1 * MIB)
        except nbd.Error:
            pass
    waiting = [Background(wait_for_ever)]
    time.sleep(0.3)
    shadow = {}
    start = time.monotonic()
    for number in range(200):
        shadow[number] = os.urandom(4096)
        fine.pwrite(shadow[number], number * 4096, flags=FUA if number % 10 == 0 else 0)
    fine.flush()
    true(time.monotonic() - start < 10 * PATIENCE, "the other volume took %.1f s" % (time.monotonic() - start))
    reader_disk = Nbdkit(stack, daemon, "fine", access="ro")
    equal(bytes(nbd_connect(reader_disk.uri).pread(4096, 0)), shadow[0], "what a newcomer reads")
    daemon.kill(signal.SIGTERM)
    try:
        wait_until(lambda: "stuck" in daemon.log()[daemon.log().find("SIGTERM"):], 10, "the log names the stuck volume")
        time.sleep(2.5)
    finally:
        run("fsfreeze", "-u", where)
    code = daemon.wait(10)
    equal(code, 75, "exit status; log: " + daemon.log()[-1500:])
    with open(stack.path("f.img"), "rb") as image:
        for number, data in shadow.items():
            image.seek(number * 4096)
            equal(image.read(4096), data, "acknowledged block %d" % number)
    for thread in waiting:
        thread.finish(40)


def test_trim_and_zero_of_a_fresh_volume_allocate_nothing(stack):
    """Nothing to do is not an error, however often."""
    requires_nbd_module()
    backing = stack.path("v.img")
    daemon = Daemon(stack, [volume("v1", backing, "512MiB")])
    handle = nbd_connect(Nbdkit(stack, daemon, "v1").uri)
    for _ in range(2):
        handle.trim(512 * MIB, 0)
        handle.zero(512 * MIB, 0)
        handle.zero(100, 7)
        handle.trim(100, 7)
    handle.flush()
    true(allocated(backing) <= 1 * MIB, "%d bytes allocated" % allocated(backing))
    equal(bytes(handle.pread(1 * MIB, 0)), bytes(1 * MIB), "content")


def test_holes_where_asked_for_and_allocation_where_asked_for(stack):
    requires_nbd_module()
    backing = stack.path("v.img")
    daemon = Daemon(stack, [volume("v1", backing, "64MiB")])
    handle = nbd_connect(Nbdkit(stack, daemon, "v1").uri)
    handle.zero(16 * MIB, 0, flags=NO_HOLE)
    true(allocated(backing) >= 16 * MIB, "NO_HOLE zeroes left a hole: %d bytes" % allocated(backing))
    handle.zero(16 * MIB, 0)
    true(allocated(backing) <= 1 * MIB, "zeroes that may punch did not: %d bytes" % allocated(backing))
    handle.pwrite(b"d" * (16 * MIB), 0)
    handle.trim(8 * MIB, 4 * MIB)
    true(allocated(backing) <= 9 * MIB, "trim freed nothing: %d bytes" % allocated(backing))
    handle.pwrite(b"d" * (16 * MIB), 0)
    handle.zero(8 * MIB, 4 * MIB, flags=NO_HOLE)
    true(allocated(backing) >= 16 * MIB, "NO_HOLE zeroes over data gave space back")
    equal(bytes(handle.pread(8 * MIB, 4 * MIB)), bytes(8 * MIB), "zeroes")
    equal(bytes(handle.pread(4096, 12 * MIB)), b"d" * 4096, "neighbour")


def test_trim_changes_whole_blocks_inside_the_range_only(stack):
    """Random trims down to one byte on a file and on loop devices; neighbours keep their pattern."""
    requires_nbd_module()
    source = random.Random(3)
    size = 2 * MIB
    for kind in ("file", "loop512", "loop4096"):
        path = stack.file(kind + ".img", size)
        backing = path if kind == "file" else stack.loop(path, int(kind[4:]))
        daemon = Daemon(stack, [volume("v1", backing)])
        handle = nbd_connect(Nbdkit(stack, daemon, "v1").uri)
        pattern = source.randbytes(size).replace(b"\0", b"\1")
        for _ in range(25):
            handle.pwrite(pattern, 0)
            length = source.choice((1, 511, 512, 513, 4095, 4096, 10000, source.randrange(1, size)))
            at = source.randrange(0, size - length + 1)
            handle.trim(length, at)
            now = bytes(handle.pread(size, 0))
            true(now[:at] == pattern[:at] and now[at + length:] == pattern[at + length:],
                 "%s: trim of %d bytes at %d touched its neighbours" % (kind, length, at))
            changed = [i for i in range(at, at + length) if now[i] != pattern[i]]
            true(all(now[i] == 0 for i in changed[:1000]), "trimmed bytes are neither old nor zero")


def test_backing_that_cannot_punch_holes(stack):
    """A file system without holes (vfat): trim is not offered or does nothing quietly; zeroes are zeroes."""
    nbd = requires_nbd_module()
    requires_tool("mkfs.vfat", "mount")
    image = stack.file("vfat.img", 64 * MIB)
    run("mkfs.vfat", image)
    device, where = stack.loop(image), stack.directory()
    try:
        run("mount", "-t", "vfat", device, where)
    except AssertionError as error:
        raise Skip("vfat cannot be mounted: %s" % str(error).splitlines()[-1]) from None
    stack.call(lambda: run("umount", "-l", where))
    daemon = Daemon(stack, [volume("v1", where + "/v.img", "8MiB")])
    handle = nbd_connect(Nbdkit(stack, daemon, "v1").uri)
    handle.pwrite(b"n" * (2 * MIB), 0)
    if handle.can_trim():
        handle.trim(1 * MIB, 0)
    if handle.can_fast_zero():
        try:
            handle.zero(65536, 0, flags=FAST_ZERO)
        except nbd.Error as error:
            true(error.errno in ("ENOTSUP", "EOPNOTSUPP"), "fast zero: %s" % error)
    handle.zero(1 * MIB, 0)
    handle.zero(1 * MIB, 4 * MIB, flags=NO_HOLE)
    equal(bytes(handle.pread(2 * MIB, 0)), bytes(1 * MIB) + b"n" * MIB, "zeroes and neighbour")
    handle.shutdown()


if __name__ == "__main__":
    main(globals())
