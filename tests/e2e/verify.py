#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
"""fio --verify in the shapes that find lost, torn and misplaced writes; many clients; both key modes and CRC."""

import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import (KIB, MIB, SLOW, Background, Daemon, Nbdkit, equal, fio, main, nbd_connect,  # noqa: E402
                     requires_nbd_module, requires_tool, run, true, volume)

VERIFY = ["--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--verify_backlog=256"]
SIZE = 64 if SLOW else 12  # MiB per job


def disk(stack, jobs=4, size=SIZE, nbdkit_named=None, daemon_named=None, **volume_named):
    daemon = Daemon(stack, [volume("v1", stack.path("v1.img"), "%dMiB" % (jobs * size), **volume_named)],
                    **(daemon_named or {}))
    return Nbdkit(stack, daemon, "v1", **(nbdkit_named or {}))


def four_jobs(*options, size=SIZE):
    return ["--numjobs=4", "--iodepth=32", "--offset_increment=%dm" % size, "--size=%dm" % size, *VERIFY, *options]


def test_randrw_4k_4_jobs_depth_32(stack):
    fio(disk(stack).uri, *four_jobs("--rw=randrw", "--bs=4k"))


def test_randrw_512_to_1m_4_jobs_depth_32(stack):
    fio(disk(stack).uri, *four_jobs("--rw=randrw", "--bsrange=512-1m"))


def test_randrw_with_trims_of_the_neighbours(stack):
    """Four verifying jobs and four trimming ones in turns of 4 MiB, all at depth 32; then blocks that are trimmed
    and written, at depth 1, because fio does not keep a trim and its write apart at others."""
    nbdkit = disk(stack, 4, 8)
    with open(stack.path("job"), "w") as job:
        job.write("[global]\nioengine=nbd\nuri=%s\nbs=4k\niodepth=32\nsize=4m\nio_size=8m\n" % nbdkit.uri)
        for number in range(4):
            job.write("[verify%d]\nrw=randrw\noffset=%dm\nverify=crc32c\nverify_fatal=1\ndo_verify=1\nverify_backlog=256\n"
                      "[trim%d]\nrw=randtrim\noffset=%dm\n" % (number, number * 8, number, number * 8 + 4))
    run("fio", stack.path("job"), timeout=120, cwd=stack.directory())
    fio(nbdkit.uri, "--rw=randtrimwrite", "--bs=4k", "--iodepth=1", "--size=2m", "--numjobs=4", "--offset_increment=8m",
        *VERIFY)


def test_sequential_write_and_read_back(stack):
    fio(disk(stack).uri, *four_jobs("--rw=write", "--bs=128k"))


def test_requests_larger_than_session_maximum_and_more_pieces_than_permits(stack):
    """16 MiB requests on chunks of 64 KiB and 4 permits: one request needs more pieces than there are permits."""
    nbdkit = disk(stack, 2, 64, daemon_named={"max_io_size": "64KiB", "queue_depth": 4})
    fio(nbdkit.uri, "--numjobs=2", "--iodepth=8", "--offset_increment=64m", "--size=64m", "--rw=randrw", "--bs=16m", *VERIFY)


def test_largest_requests_in_parallel_on_four_connections(stack):
    requires_nbd_module()
    nbdkit = disk(stack, 1, 512, daemon_named={"max_io_size": "64KiB", "queue_depth": 4})
    source = random.Random(5)
    pattern = source.randbytes(1 * MIB)

    def client(number):
        handle = nbd_connect(nbdkit.uri)
        at = number * 128 * MIB
        for length in (32 * MIB, 64 * MIB - 1, 64 * MIB):
            data = (pattern[number:] + pattern[:number]) * 64
            handle.pwrite(data[:length], at)
            true(handle.pread(length, at) == data[:length], "%d bytes differ" % length)
        handle.shutdown()
    for thread in [Background(client, number) for number in range(4)]:
        thread.finish(120)


def test_core_with_always_invalidate(stack):
    fio(disk(stack, daemon_named={"always_invalidate": "true"}).uri, *four_jobs("--rw=randrw", "--bsrange=512-256k"))


def test_core_with_crc_on(stack):
    fio(disk(stack, nbdkit_named={"crc": "on"}).uri, *four_jobs("--rw=randrw", "--bsrange=512-256k"))


def test_core_with_crc_on_at_the_server_and_always_invalidate(stack):
    fio(disk(stack, daemon_named={"crc": "on", "always_invalidate": "true"}).uri,
        *four_jobs("--rw=randrw", "--bsrange=512-256k"))


def test_core_with_crc_off(stack):
    fio(disk(stack, nbdkit_named={"crc": "off"}).uri, *four_jobs("--rw=randrw", "--bs=64k"))


def test_queue_depth_1_and_one_connection(stack):
    nbdkit = disk(stack, 4, 4, {"connections": 1}, {"queue_depth": 1})
    fio(nbdkit.uri, *four_jobs("--rw=randrw", "--bsrange=512-256k", size=4))


def test_sixteen_connections_and_fourteen_jobs(stack):
    nbdkit = disk(stack, 14, 2, {"connections": 16})
    fio(nbdkit.uri, "--numjobs=14", "--iodepth=16", "--offset_increment=2m", "--size=2m", "--rw=randrw", "--bs=4k", *VERIFY)


def test_block_size_4096(stack):
    fio(disk(stack, block_size=4096).uri, *four_jobs("--rw=randrw", "--bsrange=4k-1m"))


def test_buffered_backing(stack):
    fio(disk(stack, direct="off").uri, *four_jobs("--rw=randrw", "--bsrange=512-1m"))


def test_tmpfs_backing(stack):
    directory = stack.tmpfs(100 * MIB)
    daemon = Daemon(stack, [volume("v1", directory + "/v1.img", "48MiB")])
    fio(Nbdkit(stack, daemon, "v1").uri, *four_jobs("--rw=randrw", "--bsrange=512-1m"))


def test_loop_device_backing(stack):
    for sector in (512, 4096):
        device = stack.loop(stack.file("loop%d.img" % sector, 48 * MIB), sector)
        daemon = Daemon(stack, [volume("v1", device)])
        fio(Nbdkit(stack, daemon, "v1").uri, *four_jobs("--rw=randrw", "--bsrange=4k-256k"))


def test_24_clients_on_one_daemon(stack):
    """24 nbdkit processes, a volume each, and every one sees its own data only."""
    requires_nbd_module()
    daemon = Daemon(stack, [volume("v%d" % i, stack.path("v%d.img" % i), "4MiB") for i in range(24)], queue_depth=32)
    disks = [Nbdkit(stack, daemon, "v%d" % i, connections=2) for i in range(24)]

    def client(number):
        source = random.Random(number)
        handle, shadow = nbd_connect(disks[number].uri), bytearray(4 * MIB)
        for _ in range(150):
            length = source.choice((512, 4096, 65536, 300 * KIB))
            at = source.randrange(0, (4 * MIB - length) // 512) * 512
            data = source.randbytes(length - 2) + number.to_bytes(2, "big")
            handle.pwrite(data, at)
            shadow[at:at + length] = data
            at = source.randrange(0, 4 * MIB - 4096)
            true(handle.pread(4096, at) == shadow[at:at + 4096], "client %d reads foreign data" % number)
        handle.flush()
        handle.shutdown()
        return bytes(shadow)
    threads = [Background(client, number) for number in range(24)]
    shadows = [thread.finish(120) for thread in threads]
    for number, shadow in enumerate(shadows):
        with open(stack.path("v%d.img" % number), "rb") as backing:
            true(backing.read() == shadow, "backing of volume %d differs" % number)


def test_8_volumes_over_one_nbdkit_with_ids_reused(stack):
    """One session, eight volumes opened and closed by export name; ids are given out again and again."""
    requires_nbd_module()
    names = ["v%d" % i for i in range(8)]
    daemon = Daemon(stack, [volume(name, stack.path(name), "2MiB") for name in names])
    nbdkit = Nbdkit(stack, daemon, None)

    def client(number):
        source = random.Random(number)
        fill = bytes((number + 1,))
        for _ in range(25):
            handle = nbd_connect(nbdkit.export_uri(names[number]))
            at = source.randrange(0, 2 * MIB - 70000)
            handle.pwrite(fill * 70000, at)
            data = bytes(handle.pread(2 * MIB, 0))
            true(set(data) <= {0, number + 1}, "foreign pattern in %s" % names[number])
            handle.shutdown()
    for thread in [Background(client, number) for number in range(8)]:
        thread.finish(60)
    for number, name in enumerate(names):
        with open(stack.path(name), "rb") as backing:
            true(set(backing.read()) == {0, number + 1}, "foreign pattern in the backing of " + name)


def test_two_sessions_of_one_client_host_on_different_volumes(stack):
    requires_tool("qemu-io")
    daemon = Daemon(stack, [volume("a", stack.path("a"), "8MiB"), volume("b", stack.path("b"), "8MiB")])
    for name, pattern in (("a", "0x41"), ("b", "0x42")):
        run("qemu-io", "-f", "raw", "-c", "write -P %s 0 8M" % pattern, Nbdkit(stack, daemon, name).uri)
    for name, pattern in (("a", b"A"), ("b", b"B")):
        with open(stack.path(name), "rb") as backing:
            equal(set(backing.read()), set(pattern), "bytes of " + name)


if __name__ == "__main__":
    main(globals())
