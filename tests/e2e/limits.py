#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
"""Memory, descriptors, CPU when idle, and an environment that says no: locked memory, io_uring forbidden,
few descriptors. Works, or one line with cause, limit and remedy."""

import ctypes
import os
import platform
import resource
import socket
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "hostile"))
import rawclient  # noqa: E402
import wire  # noqa: E402
from harness import (KIB, MIB, RTRSD, SANITIZER, SLOW, Background, Daemon, Nbdkit, Skip, equal, listening, main,  # noqa: E402
                     nbd_connect, requires, requires_nbd_module, requires_root, stat_of, true, volume, wait_until)


def raw(daemon, **named):
    return rawclient.Session((daemon.host, daemon.port), **named).establish()


def settled(pid, key, at_most, seconds=15):
    wait_until(lambda: stat_of(pid)[key] <= at_most, seconds, "%s of pid %d is %s, should be %s again" % (
        key, pid, stat_of(pid)[key], at_most))


def test_connects_and_disconnects_leave_nothing_behind(stack):
    """At NBD level and at RTRS level, clean, cut and reset, in every stage."""
    nbd = requires_nbd_module()
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "8MiB"), volume("v2", stack.path("w.img"), "8MiB")],
                    heartbeat_interval="500ms")
    nbdkit = Nbdkit(stack, daemon, "v1")

    def nbd_round():
        handle = nbd_connect(nbdkit.uri)
        handle.pwrite(b"x" * 5000, 3)
        handle.shutdown()
        for length in (0, 1, 4, 20):  # out of the middle of the negotiation
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(nbdkit.socket)
            sock.sendall((struct.pack(">I", 3) + struct.pack(">QII", 0x49484156454F5054, 7, 6))[:length])
            sock.close()

    def rtrs_round(number):
        session = raw(daemon, connections=3)
        device = session.open("v2", wire.MIGRATION if number % 2 else wire.RO)
        image = session.post(session.io_read_image(device, 0, 65536))
        if number % 3 == 0:
            session.wait(image)
            session.close_device(device)
        for connection in session.connections:
            connection.reset_close() if number % 3 == 1 else connection.close()
        whole = wire.mpa_frame(wire.connect_request(os.urandom(16), os.urandom(16)))
        sock = socket.create_connection((daemon.host, daemon.port))
        sock.sendall(whole[:number % (len(whole) + 1)])
        sock.close()
    for number in range(40):
        nbd_round()
        rtrs_round(number)
    time.sleep(1)
    base = {process: stat_of(process.pid) for process in (daemon, nbdkit)}
    for number in range(3000 if SLOW else 250):
        nbd_round()
        rtrs_round(number)
    for process in (daemon, nbdkit):
        settled(process.pid, "fds", base[process]["fds"])
        settled(process.pid, "threads", base[process]["threads"])
        if not SANITIZER:
            settled(process.pid, "rss", base[process]["rss"] + 6 * MIB)


def test_nbd_connections_in_parallel_and_again(stack):
    """9 threads connecting and leaving at once."""
    requires_nbd_module()
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "8MiB")])
    nbdkit = Nbdkit(stack, daemon, "v1")

    def client():
        for _ in range(500 if SLOW else 40):
            handle = nbd_connect(nbdkit.uri)
            handle.get_size()
            handle.shutdown()
    for thread in [Background(client) for _ in range(9)]:
        thread.finish()
    base = stat_of(nbdkit.pid)
    for thread in [Background(client) for _ in range(9)]:
        thread.finish()
    wait_until(lambda: stat_of(nbdkit.pid)["fds"] <= base["fds"] + 2, 10, "descriptors of nbdkit")
    wait_until(lambda: daemon.log().count("opened read-write") == daemon.log().count("closed, was device"), 5, "closed")


def test_memory_of_an_idle_session_is_its_chunks_and_at_most_1_mib(stack):
    requires(not SANITIZER, "sanitizers need memory of their own")
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "8MiB")], queue_depth=32, max_io_size="128KiB")
    warm = [raw(daemon, connections=5) for _ in range(3)]
    time.sleep(0.5)
    base = stat_of(daemon.pid)["rss"]
    sessions = [raw(daemon, connections=5) for _ in range(20)]
    for session in sessions:
        session.sess_info()
        session.open("v1", wire.RO)
    time.sleep(0.5)
    chunks = 32 * (128 + 4) * KIB
    extra = (stat_of(daemon.pid)["rss"] - base) / len(sessions)
    print("an idle session costs %.2f MiB, of which chunk memory at most %.2f" % (extra / MIB, chunks / MIB))
    true(extra <= chunks + 1 * MIB, "%.2f MiB" % (extra / MIB))
    del warm


def test_100_idle_volumes_stay_under_64_mib_and_burn_no_cpu(stack):
    requires(not SANITIZER, "sanitizers need memory of their own")
    daemon = Daemon(stack, [volume("v%d" % i, stack.path("v%d.img" % i), "16MiB") for i in range(100)])
    time.sleep(0.5)
    idle = stat_of(daemon.pid)
    print("rtrsd with 100 idle volumes: %.1f MiB, %d threads, %d descriptors" % (idle["rss"] / MIB, idle["threads"],
                                                                                idle["fds"]))
    true(idle["rss"] < 64 * MIB, "%.1f MiB" % (idle["rss"] / MIB))
    nbdkit = Nbdkit(stack, daemon, "v0")
    handle = nbd_connect(nbdkit.uri)
    sessions = []
    for _ in range(24):
        sessions.append(raw(daemon))
        for session in sessions:  # answers heartbeats: on a busy machine this takes longer than a few of them
            session.pump(0)
    seconds = 60 if SLOW else 6
    before = {process: stat_of(process.pid) for process in (daemon, nbdkit)}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for session in sessions:
            session.pump(0)
        time.sleep(0.2)
    for process, name in ((daemon, "rtrsd, 24 sessions"), (nbdkit, "nbdkit")):
        now = stat_of(process.pid)
        cpu = (now["cpu"] - before[process]["cpu"]) / seconds
        print("%s idle: %.2f %% of a CPU, %d descriptors" % (name, 100 * cpu, now["fds"]))
        true(cpu < 0.03, "%s idle uses %.1f %% of a CPU" % (name, 100 * cpu))
    handle.shutdown()


# --- environment

def limited_user(memlock):
    """Without CAP_IPC_LOCK, so that the limit counts."""
    def limit():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    return limit


def for_nobody(stack):
    os.chmod(stack.base, 0o777)
    directory = stack.directory()
    os.chmod(directory, 0o777)
    # Is the program within reach of another user?
    if os.fork() == 0:
        reachable = False
        try:
            limited_user(64 * KIB)()
            reachable = os.access(RTRSD, os.X_OK)
        finally:
            os._exit(0 if reachable else 1)
    _, status = os.wait()
    if status:
        raise Skip("the build folder cannot be reached by another user")
    return directory


def test_locked_memory_limit_small_as_an_ordinary_user(stack):
    """64 KiB and 8 MiB: serves (perhaps without registered buffers, and says so), or says need, limit, remedy."""
    requires_root()
    requires_nbd_module()
    directory = for_nobody(stack)
    for memlock in (64 * KIB, 8 * MIB):
        daemon = Daemon(stack, [volume("v%d" % i, directory + "/v%d-%d.img" % (i, memlock), "8MiB") for i in range(4)],
                        wait=False, preexec=limited_user(memlock))
        wait_until(lambda: not daemon.alive() or listening(daemon.pid, daemon.port), 10, "rtrsd starts or ends")
        if not daemon.alive():
            daemon.expected_dead = True
            equal(daemon.child.returncode, 71, "exit status; log: " + daemon.log())
            daemon.says("memlock")
            continue
        for i in range(4):
            handle = nbd_connect(Nbdkit(stack, daemon, "v%d" % i).uri)
            handle.pwrite(b"m" * 300000, 1000)
            equal(bytes(handle.pread(300000, 1000)), b"m" * 300000, "data under the limit")
        said = [line for line in daemon.log().splitlines() if "memlock" in line.lower() or "lock" in line.lower()]
        print("memlock %d KiB: %s" % (memlock // KIB, said[0] if said else "no word in the log"))
        true(len(said) <= 6, "the log repeats itself:\n" + "\n".join(said))
        daemon.terminate()


def forbid(*numbers):
    """A seccomp filter as containers have it: these system calls give EPERM."""
    def install():
        libc = ctypes.CDLL(None, use_errno=True)
        code = [(0x20, 0, 0, 0)]  # load the system call number
        for number in numbers:
            code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 1)]  # equal: return EPERM
        code.append((0x06, 0, 0, 0x7FFF0000))
        program = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
        buffer = ctypes.create_string_buffer(program)

        class Program(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
        argument = Program(len(code), ctypes.addressof(buffer))
        libc.prctl(38, 1, 0, 0, 0)
        if libc.prctl(22, 2, ctypes.byref(argument), 0, 0):
            os._exit(126)
    return install


def test_io_uring_forbidden_by_seccomp_is_one_line_with_the_remedy(stack):
    requires(platform.machine() == "x86_64", "system call numbers are those of x86_64")
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "8MiB")], wait=False, preexec=forbid(425))
    try:
        code = daemon.wait(5)
    except AssertionError:
        # A stated fallback would be right as well; then it must work.
        daemon.says("io_uring")
        nbd_connect(Nbdkit(stack, daemon, "v1").uri).pwrite(b"x", 0)
        return
    daemon.expected_dead = True
    if code == 126:
        raise Skip("seccomp filters cannot be installed here")
    equal(code, 71, "exit status; log: " + daemon.log())
    daemon.says("io_uring", "seccomp")
    lines = [line for line in daemon.log().splitlines() if line.strip()]
    true(len(lines) <= 3, "more than one line:\n" + daemon.log())


def test_kernel_without_newer_io_uring_registration_still_serves(stack):
    """io_uring_register forbidden: no registered buffers, no probe. Serves, or says what is missing."""
    requires(platform.machine() == "x86_64", "system call numbers are those of x86_64")
    requires_nbd_module()
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "8MiB")], wait=False, preexec=forbid(427))
    wait_until(lambda: not daemon.alive() or listening(daemon.pid, daemon.port), 10, "rtrsd starts or ends")
    if daemon.alive():
        handle = nbd_connect(Nbdkit(stack, daemon, "v1").uri)
        handle.pwrite(b"r" * 70000, 512)
        equal(bytes(handle.pread(70000, 512)), b"r" * 70000, "data")
        handle.shutdown()
        daemon.terminate()
    else:
        daemon.expected_dead = True
        if daemon.child.returncode == 126:
            raise Skip("seccomp filters cannot be installed here")
        equal(daemon.child.returncode, 71, "exit status; log: " + daemon.log())
        daemon.says("io_uring")


def test_few_descriptors_refuse_newcomers_only(stack):
    requires(not SANITIZER, "UBSan looks at memory through a pipe, and takes no descriptor for a finding")
    requires_nbd_module()
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "8MiB")],
                    preexec=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96)))
    nbdkit = Nbdkit(stack, daemon, "v1")
    handle = nbd_connect(nbdkit.uri)
    sessions = []
    try:
        for _ in range(40):
            sessions.append(rawclient.Session((daemon.host, daemon.port), connections=4, timeout=2))
            sessions[-1].establish()
    except (rawclient.ConnectionClosed, rawclient.Rejected, rawclient.TimedOut, OSError):
        pass
    before = stat_of(daemon.pid)["cpu"]
    time.sleep(1)
    true(stat_of(daemon.pid)["cpu"] - before < 0.5, "the listener spins when no descriptor is left")
    handle.pwrite(b"d" * 4096, 0)
    equal(bytes(handle.pread(4096, 0)), b"d" * 4096, "data of the client that was there before")
    for session in sessions:
        session.close()
    newcomer = wait_until(lambda: try_raw(daemon), 15, "newcomers get in again")
    newcomer.close()
    true(daemon.log().count("\n") < 400, "%d log lines" % daemon.log().count("\n"))


def try_raw(daemon):
    try:
        return rawclient.Session((daemon.host, daemon.port), timeout=2).establish()
    except (rawclient.ConnectionClosed, rawclient.Rejected, rawclient.TimedOut, OSError):
        return None


def test_port_in_use_is_said_with_exit_status_69(stack):
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "8MiB")])
    second = Daemon(stack, [volume("v2", stack.path("w.img"), "8MiB")], port=daemon.port, wait=False)
    equal(second.wait(10), 69, "exit status; log: " + second.log())
    second.expected_dead = True
    second.says(str(daemon.port), "in use")


def test_log_stays_short_when_a_client_is_refused_again_and_again(stack):
    """The same refusal 500 times: the log counts instead of repeating."""
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "8MiB")])
    before = daemon.log().count("\n")
    for _ in range(500):
        session = rawclient.Session((daemon.host, daemon.port), first_conn=False)
        try:
            session.establish()
            raise AssertionError("a session without first_conn was accepted")
        except rawclient.Rejected as rejected:
            equal(rejected.error, 6, "errno of the reject")
    lines = daemon.log().count("\n") - before
    print("%d log lines for 500 refusals" % lines)
    true(lines < 60, "%d log lines for 500 refusals" % lines)


if __name__ == "__main__":
    main(globals())
