#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
"""Who may do what, and is told why not: access modes over several processes, read-only in its five forms, access
lists, limits, unknown names; and capability flags that tell the truth."""

import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import (MIB, Daemon, Nbdkit, Skip, contains, equal, expect_nbd_error, main, nbd_connect, nbdkit_run,  # noqa: E402
                     requires_nbd_module, requires_root, requires_tool, run, true, volume, wait_until)


def refused(nbdkit, *words):
    """An NBD client is turned away, and nbdkit's log says why in these words."""
    nbd = requires_nbd_module()
    before = len(nbdkit.log())
    try:
        nbd_connect(nbdkit.uri)
    except nbd.Error:
        pass
    else:
        raise AssertionError("the NBD client got in")
    message = "\n".join(line for line in nbdkit.log()[before:].splitlines() if "error" in line)
    contains(message, *words)
    return message


def test_one_writer_two_in_migration_any_number_of_readers(stack):
    """The counting rules over all sessions, each in a process of its own."""
    requires_nbd_module()
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "8MiB")])

    def process(access):
        return Nbdkit(stack, daemon, "v1", access=access)
    readers = [nbd_connect(process("ro").uri) for _ in range(3)]
    first = process("rw")
    writer = nbd_connect(first.uri)
    refused(process("rw"), "v1", "127.0.0.1", "writing", "migration")
    second = process("migration")
    migrator = nbd_connect(second.uri)
    refused(process("migration"), "v1")
    refused(process("rw"), "v1")
    readers.append(nbd_connect(process("ro").uri))
    writer.pwrite(b"a" * 512, 0)
    migrator.pwrite(b"b" * 512, 512)
    for reader in readers:
        equal(bytes(reader.pread(1024, 0)), b"a" * 512 + b"b" * 512, "what the readers see")
    # The first leaves: one place for a second writer is free again.
    writer.shutdown()
    first.terminate()
    third = process("migration")
    handle = wait_until(lambda: try_connect(third.uri), 5, "the place of the first writer is free")
    handle.shutdown()
    third.terminate()
    migrator.shutdown()
    second.terminate()
    fourth = process("rw")
    wait_until(lambda: try_connect(fourth.uri), 5, "rw is free again").pwrite(b"c" * 512, 0)


def try_connect(uri):
    import nbd
    try:
        return nbd_connect(uri)
    except nbd.Error:
        return None


def test_a_second_nbd_connection_of_one_process_is_no_second_writer(stack):
    requires_nbd_module()
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "8MiB")])
    nbdkit = Nbdkit(stack, daemon, "v1")
    handles = [nbd_connect(nbdkit.uri) for _ in range(8)]
    for number, handle in enumerate(handles):
        handle.pwrite(bytes((number,)) * 4096, number * 4096)
    for number in range(8):
        equal(bytes(handles[7 - number].pread(4096, number * 4096)), bytes((number,)) * 4096, "block %d" % number)
    daemon.says("opened read-write")
    equal(len(re.findall("opened read-write", daemon.log())), 1, "number of openings in the log")


def check_read_only(uri):
    """Advertised at connect; a write that is forced all the same gets EPERM; qemu-io cannot open it for writing."""
    handle = nbd_connect(uri)
    true(handle.is_read_only(), "read-only is not advertised")
    handle.pread(4096, 0)
    equal(expect_nbd_error(handle.pwrite, b"x" * 512, 0), "EPERM", "errno of a forced write")
    equal(expect_nbd_error(handle.zero, 512, 0), "EPERM", "errno of a forced zero")
    equal(expect_nbd_error(handle.trim, 512, 0), "EPERM", "errno of a forced trim")
    equal(bytes(handle.pread(512, 0)), b"o" * 512, "content")
    handle.shutdown()
    run("nbdinfo", "--is", "read-only", uri)
    run("nbdinfo", "--can", "write", uri, status=2)
    run("qemu-io", "-f", "raw", "-c", "write 0 512", uri, status=1)
    run("qemu-io", "-r", "-f", "raw", "-c", "read -P 0x6f 0 512", uri)


def old_content(path, size=1 * MIB):
    with open(path, "wb") as image:
        image.write(b"o" * size)
    return path


def test_access_ro_is_read_only(stack):
    requires_tool("nbdinfo", "qemu-io")
    daemon = Daemon(stack, [volume("v1", old_content(stack.path("v.img")))])
    check_read_only(Nbdkit(stack, daemon, "v1", access="ro").uri)


def test_nbdkit_r_is_read_only(stack):
    requires_tool("nbdinfo", "qemu-io")
    daemon = Daemon(stack, [volume("v1", old_content(stack.path("v.img")))])
    check_read_only(Nbdkit(stack, daemon, "v1", options=["-r"]).uri)
    # and leaves the writer's place free
    nbd_connect(Nbdkit(stack, daemon, "v1").uri).pwrite(b"x", 0)


def test_read_only_volume_refuses_rw_at_once_with_the_reason(stack):
    requires_tool("nbdinfo", "qemu-io")
    daemon = Daemon(stack, [volume("v1", old_content(stack.path("v.img")), read_only="true")])
    refused(Nbdkit(stack, daemon, "v1"), "v1", "read-only", "access=ro")
    daemon.says("read-only")
    check_read_only(Nbdkit(stack, daemon, "v1", access="ro").uri)


def test_backing_on_a_read_only_mount(stack):
    requires_tool("mount", "nbdinfo", "qemu-io")
    directory = stack.tmpfs(8 * MIB)
    old_content(directory + "/v.img")
    run("mount", "-o", "remount,ro", directory)
    daemon = Daemon(stack, [volume("v1", directory + "/v.img")], wait=False)
    equal(daemon.wait(10), 66, "exit status; log: " + daemon.log())
    daemon.expected_dead = True
    daemon.says(directory + "/v.img", "read-only: true")
    daemon = Daemon(stack, [volume("v1", directory + "/v.img", read_only="true")])
    check_read_only(Nbdkit(stack, daemon, "v1", access="ro").uri)


def as_nobody():
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)


def world_readable(stack):
    os.chmod(stack.base, 0o755)
    if not os.access(stack.base, os.X_OK):
        raise Skip("temporary folder")


def test_backing_without_the_right_to_write(stack):
    """The message names file, user and what is needed."""
    requires_root()
    world_readable(stack)
    path = old_content(stack.path("v.img"))
    os.chmod(path, 0o444)
    daemon = Daemon(stack, [volume("v1", path)], wait=False, preexec=as_nobody)
    code = daemon.wait(10)
    daemon.expected_dead = True
    if "Permission denied" in daemon.log() and path not in daemon.log():
        raise Skip("the build folder cannot be reached by another user")
    equal(code, 66, "exit status; log: " + daemon.log())
    daemon.says(path, "65534", "read and write")


def test_unknown_volume_is_refused_with_name_and_server(stack):
    daemon = Daemon(stack, [volume("secret-name", stack.path("v.img"), "1MiB")])
    message = refused(Nbdkit(stack, daemon, "secret-nam"), "secret-nam", "127.0.0.1", "no such volume")
    true("secret-name" not in message.replace("volume secret-nam:", ""), "the message gives another name away: " + message)


def test_access_list_by_address_and_session_name(stack):
    daemon = Daemon(stack, [
        volume("local", stack.path("a.img"), "1MiB", allow=[{"address": "127.0.0.0/8"}]),
        volume("far", stack.path("b.img"), "1MiB", allow=[{"address": "192.0.2.0/24"}]),
        volume("named", stack.path("c.img"), "1MiB", allow=[{"session": '"vm-*"'}]),
        volume("both", stack.path("d.img"), "1MiB", allow=[{"address": "127.0.0.1", "session": "vm-7"},
                                                            {"address": "192.0.2.1"}])])
    nbd_connect(Nbdkit(stack, daemon, "local").uri)
    refused(Nbdkit(stack, daemon, "far"), "far", "127.0.0.1")
    daemon.says("far", "allow")
    nbd_connect(Nbdkit(stack, daemon, "named", session="vm-1").uri)
    refused(Nbdkit(stack, daemon, "named", session="host-1"), "named")
    nbd_connect(Nbdkit(stack, daemon, "both", session="vm-7").uri)
    refused(Nbdkit(stack, daemon, "both", session="vm-8"), "both")


def test_two_volumes_may_not_write_one_backing(stack):
    """In one daemon, under another name of the file, and across daemons; read-only sharing is fine."""
    path = old_content(stack.path("v.img"))
    link = stack.path("link.img")
    os.link(path, link)

    def refuses(volumes, *words):
        daemon = Daemon(stack, volumes, wait=False)
        code = daemon.wait(10)
        daemon.expected_dead = True
        true(code in (66, 78), "exit status %s; log: %s" % (code, daemon.log()))
        daemon.says(*words)
    refuses([volume("a", path), volume("b", path)], "v.img", "same path")
    refuses([volume("a", path), volume("b", link)], "a", "b")
    refuses([volume("a", path), volume("b", path, read_only="true")], "v.img")
    first = Daemon(stack, [volume("a", path)])
    refuses([volume("z", path)], "z", "v.img")
    refuses([volume("z", link)], "z")
    first.terminate()
    Daemon(stack, [volume("a", path, read_only="true"), volume("b", path, read_only="true")])
    Daemon(stack, [volume("c", path, read_only="true")])


def test_capabilities_in_every_state_are_those_documented(stack):
    """All flags, raw, with and without structured replies, the same on every connection."""
    nbd = requires_nbd_module()
    device = stack.loop(stack.file("loop.img", 4 * MIB), 4096)
    daemon = Daemon(stack, [volume("file", old_content(stack.path("f.img"))), volume("loop", device),
                            volume("ro", old_content(stack.path("r.img")), read_only="true")])
    names = ("is_read_only", "can_flush", "can_fua", "can_trim", "can_zero", "can_fast_zero", "can_multi_conn", "can_cache")
    writable = dict(is_read_only=False, can_flush=True, can_fua=True, can_trim=True, can_zero=True, can_fast_zero=True,
                    can_multi_conn=True)
    # What only writers use may be on or off in a read-only state, as nbdkit sees fit; the rest is as below.
    read_only = dict(is_read_only=True, can_multi_conn=True)
    for name, access, expected in (("file", "rw", writable), ("loop", "rw", writable), ("file", "ro", read_only),
                                   ("ro", "ro", read_only)):
        nbdkit = Nbdkit(stack, daemon, name, access=access)
        seen = []
        for structured in (True, False, True):
            handle = nbd.NBD()
            handle.set_request_structured_replies(structured)
            handle.connect_uri(nbdkit.uri)
            seen.append({flag: bool(getattr(handle, flag)()) for flag in names})
            handle.shutdown()
        equal(seen[1], seen[0], "flags without structured replies")
        equal(seen[2], seen[0], "flags of another connection")
        for flag, value in expected.items():
            equal(seen[0][flag], value, "%s of %s %s" % (flag, name, access))
        nbdkit.terminate()


def test_session_limit_refuses_with_the_reason_and_lets_in_after_one_left(stack):
    requires_nbd_module()
    daemon = Daemon(stack, [volume("v%d" % i, stack.path("v%d.img" % i), "4MiB") for i in range(4)], max_sessions=3)
    disks = [Nbdkit(stack, daemon, "v%d" % i) for i in range(4)]
    handles = [nbd_connect(disk.uri) for disk in disks[:3]]
    for _ in range(10):
        refused(disks[3], "127.0.0.1", "limit")
        for handle in handles:
            handle.pwrite(os.urandom(65536), 0)
    daemon.says("3")
    handles[0].shutdown()
    disks[0].terminate()
    wait_until(lambda: try_connect(disks[3].uri), 10, "there is room for the fourth")


def test_memory_limit_refuses_with_the_reason(stack):
    requires_nbd_module()
    # 32 x (128 KiB + 4 KiB) is a bit over 4 MiB: two sessions fit in 9 MiB.
    daemon = Daemon(stack, [volume("v%d" % i, stack.path("v%d.img" % i), "4MiB") for i in range(3)], queue_depth=32,
                    max_io_size="128KiB", max_memory="9MiB")
    disks = [Nbdkit(stack, daemon, "v%d" % i) for i in range(3)]
    handles = [nbd_connect(disk.uri) for disk in disks[:2]]
    refused(disks[2], "127.0.0.1", "limit")
    daemon.says("memory")
    handles[1].shutdown()
    disks[1].terminate()
    wait_until(lambda: try_connect(disks[2].uri), 10, "there is room for the third")


def test_session_name_in_use_is_refused(stack):
    daemon = Daemon(stack, [volume("a", stack.path("a.img"), "1MiB"), volume("b", stack.path("b.img"), "1MiB")])
    first = Nbdkit(stack, daemon, "a", session="twin")
    handle = nbd_connect(first.uri)
    refused(Nbdkit(stack, daemon, "b", session="twin", connect_timeout="3s"), "127.0.0.1")
    daemon.says("twin")
    handle.pwrite(b"1", 0)


def test_read_only_attach_through_run(stack):
    requires_tool("qemu-img")
    daemon = Daemon(stack, [volume("v1", old_content(stack.path("v.img")), read_only="true")])
    nbdkit_run(daemon, "v1", 'qemu-img convert -f raw -O raw "$uri" %s' % stack.path("o.img"), access="ro")
    run("cmp", stack.path("v.img"), stack.path("o.img"))


if __name__ == "__main__":
    main(globals())
