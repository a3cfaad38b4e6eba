#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
"""Every way to start nbdkit with the plugin, every filter that may wrap it, help and dump texts, and what the
user reads when a key or a server is wrong."""

import os
import signal
import socket
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import (MIB, PATIENCE, PLUGIN, SANITIZER, Daemon, Nbdkit, Skip, contains, environment, equal, fio,  # noqa: E402
                     free_port, main, nbd_connect, nbdkit_run, plugin_keys, preload, requires, requires_nbd_module,
                     requires_tool, run, stat_of, true, volume, wait_until)

KEYS = ("server", "volume", "access", "connections", "session", "io-timeout", "connect-timeout", "heartbeat-interval",
        "crc")


def disk(stack, size="16MiB", **named):
    return Daemon(stack, [volume("v1", stack.path("v.img"), size, **named)])


def nbdkit_status(*arguments, **kwargs):
    """nbdkit with the plugin and arguments that keep it from serving. (status, stderr)"""
    done = subprocess.run(["nbdkit", "-U", "-", *arguments], capture_output=True, text=True, timeout=60 * PATIENCE,
                          env=environment(preload()), **kwargs)
    return done.returncode, done.stderr


def test_dump_plugin_and_help_name_every_key(stack):
    text = run("nbdkit", PLUGIN, "--dump-plugin", env=preload())
    for line in ("name=rtrs", "thread_model=parallel", "has_pread=1", "has_pwrite=1", "has_flush=1", "has_trim=1",
                 "has_zero=1", "has_can_fua=1", "has_can_multi_conn=1"):
        true(line in text.splitlines(), "%s is missing in --dump-plugin:\n%s" % (line, text))
    contains(text, *KEYS)
    contains(run("nbdkit", PLUGIN, "--help", env=preload()), *("%s=" % key for key in KEYS))
    contains(run("nbdkit", PLUGIN, "--version", env=preload()), "rtrs")


def test_wrong_keys_are_refused_with_key_value_and_rule(stack):
    for argument, words in (
            ("server=tcp:host:70000", ("server", "70000")), ("server=", ("server",)), ("server=rdma:", ("rdma",)),
            ("server=a,b", ("server", "multipath")), ("access=readwrite", ("access", "rw, ro or migration")),
            ("connections=0", ("connections", "1")), ("connections=17", ("connections", "16")),
            ("connections=x", ("connections",)), ("session=a/b", ("session", "/")), ("session=", ("session",)),
            ("io-timeout=fast", ("io-timeout", "30s")), ("io-timeout=0", ("io-timeout",)),
            ("io-timeout=99999999999999999999", ("io-timeout",)), ("connect-timeout=-1", ("connect-timeout",)),
            ("heartbeat-interval=1ms", ("heartbeat-interval",)), ("crc=maybe", ("crc",)), ("volume=", ("volume",)),
            ("volume=" + "x" * 255, ("volume", "254")), ("sevrer=localhost", ("sevrer",)),
            ("bogus=1", ("bogus",))):
        arguments = [argument] if argument.startswith("server") else ["server=tcp:localhost", argument]
        status, text = nbdkit_status(PLUGIN, *arguments, "--run", "true")
        equal(status, 1, "status for %s" % argument)
        contains(text, *words)
    status, text = nbdkit_status(PLUGIN, "volume=v1", "--run", "true")
    equal(status, 1, "status without server=")
    contains(text, "server=")


def test_server_without_the_word_server(stack):
    """The magic key: nbdkit rtrs HOST volume=..."""
    requires_tool("nbdinfo")
    daemon = disk(stack)
    run("nbdkit", "-U", "-", PLUGIN, daemon.server, "volume=v1", "--run", 'unset LD_PRELOAD; nbdinfo --size "$uri"',
        env=preload())


def test_run_passes_the_exit_status_on(stack):
    daemon = disk(stack)
    for status in (0, 1, 42):
        nbdkit_run(daemon, "v1", "exit %d" % status, status=status)
    requires_tool("qemu-io")
    nbdkit_run(daemon, "v1", 'qemu-io -f raw -c "write -P 7 0 1M" -c "read -P 7 0 1M" "$uri"')
    nbdkit_run(daemon, "v1", 'qemu-io -f raw -c "read -P 7 0 1M" "$uri"', options=["--threads=1"])
    nbdkit_run(daemon, "v1", 'qemu-io -f raw -c "read -P 7 0 1M" "$uri"', options=["-t", "64"])


def test_single_connection_on_stdin_and_stdout(stack):
    """nbdkit -s, as libnbd's connect_command starts it."""
    nbd = requires_nbd_module()
    requires(not SANITIZER, "libnbd cannot preload a sanitizer for its child")
    daemon = disk(stack)
    for _ in range(5):
        handle = nbd.NBD()
        handle.connect_command(["nbdkit", "-s", PLUGIN] + plugin_keys(daemon.server, "v1"))
        handle.pwrite(b"s" * 65536, 512)
        equal(bytes(handle.pread(65536, 512)), b"s" * 65536, "data")
        handle.shutdown()
    handle = nbd.NBD()
    handle.connect_systemd_socket_activation(["nbdkit", PLUGIN] + plugin_keys(daemon.server, "v1"))
    equal(bytes(handle.pread(65536, 512)), b"s" * 65536, "data over socket activation")
    handle.shutdown()


def read_pid(path):
    """nbdkit's parent may end before the child has written it."""
    wait_until(lambda: os.path.exists(path) and os.path.getsize(path), 10, "nbdkit writes its pid")
    with open(path) as text:
        return int(text.read())


def background(stack, daemon, options=(), **popen):
    """nbdkit that forks into the background. (pid, socket)"""
    directory = stack.directory()
    sock, pid_file = os.path.join(directory, "s"), os.path.join(directory, "pid")
    subprocess.run(["nbdkit", "-U", sock, "-P", pid_file, *options, PLUGIN] + plugin_keys(daemon.server, "v1"),
                   check=True, timeout=30 * PATIENCE, env=environment(preload()), **popen)
    pid = read_pid(pid_file)

    def end():
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        wait_until(lambda: not os.path.exists("/proc/%d" % pid) or zombie(pid), 20, "nbdkit %d ends" % pid)
    stack.call(end)
    return pid, sock


def zombie(pid):
    try:
        with open("/proc/%d/stat" % pid) as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def works(sock):
    handle = nbd_connect("nbd+unix:///?socket=" + sock)
    data = os.urandom(100000)
    handle.pwrite(data, 4711)
    equal(bytes(handle.pread(len(data), 4711)), data, "data")
    handle.flush()
    handle.shutdown()


def test_background_with_pid_file(stack):
    """Threads and connections are made after the fork, or nothing would answer here."""
    requires_nbd_module()
    daemon = disk(stack)
    pid, sock = background(stack, daemon)
    works(sock)
    works(sock)
    true(stat_of(pid)["threads"] > 1, "the plugin's threads live in the forked process")
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not os.path.exists("/proc/%d" % pid) or zombie(pid), 10, "nbdkit ends on SIGTERM")


def test_no_thread_before_the_fork(stack):
    """strace: the process that forks into the background never makes a thread."""
    requires_tool("strace")
    requires(not SANITIZER, "sanitizers make threads of their own")
    daemon = disk(stack)
    trace = stack.path("trace")
    directory = stack.directory()
    pid_file = os.path.join(directory, "pid")
    done = subprocess.run(["strace", "-f", "-o", trace, "-e", "trace=clone,clone3,fork,vfork,connect", "nbdkit", "-U",
                           os.path.join(directory, "s"), "-P", pid_file, "--filter=nofilter", PLUGIN]
                          + plugin_keys(daemon.server, "v1") + ["--run", 'nbdinfo --size "$uri"'],
                          capture_output=True, text=True, timeout=60)
    if "ptrace" in done.stderr:
        raise Skip("strace may not trace here")
    equal(done.returncode, 0, "status; " + done.stderr)
    with open(trace) as lines:
        calls = [line for line in lines if "clone" in line or "fork" in line or "sa_family=AF_INET" in line]
    first_connect = next(i for i, line in enumerate(calls) if "AF_INET" in line)
    first_thread = next(i for i, line in enumerate(calls) if "CLONE_THREAD" in line)
    first_fork = next(i for i, line in enumerate(calls) if "CLONE_THREAD" not in line and "AF_INET" not in line)
    true(first_fork < first_thread and first_fork < first_connect, "threads or connections before the fork:\n"
         + "".join(calls))


def test_background_in_a_session_of_its_own_without_terminal(stack):
    requires_nbd_module()
    daemon = disk(stack)
    directory = stack.directory()
    sock, pid_file = os.path.join(directory, "s"), os.path.join(directory, "pid")
    keys = " ".join("'%s'" % key for key in plugin_keys(daemon.server, "v1"))
    script = "exec setsid nbdkit -U %s -P %s %s %s </dev/null >/dev/null 2>&1" % (sock, pid_file, PLUGIN, keys)
    subprocess.run(["sh", "-c", script], check=True, timeout=30 * PATIENCE, env=environment(preload()), cwd="/")
    pid = read_pid(pid_file)
    try:
        works(sock)
    finally:
        os.kill(pid, signal.SIGTERM)


def test_started_before_the_daemon_serves_once_it_is_there(stack):
    """An NBD client that comes too early is turned away with a reason; the next one gets in."""
    nbd = requires_nbd_module()
    port = free_port()
    nbdkit = Nbdkit(stack, "tcp:127.0.0.1:%d" % port, "v1")
    try:
        nbd_connect(nbdkit.uri)
        raise AssertionError("connected to nothing")
    except nbd.Error:
        pass
    contains(nbdkit.log(), "127.0.0.1", "refused")
    Daemon(stack, [volume("v1", stack.path("v.img"), "16MiB")], port=port)
    works(nbdkit.socket)


def test_daemon_restart_is_found_by_the_next_nbd_connection(stack):
    requires_nbd_module()
    daemon = disk(stack)
    nbdkit = Nbdkit(stack, daemon, "v1")
    works(nbdkit.socket)
    daemon.terminate()
    Daemon(stack, [volume("v1", stack.path("v.img"), "16MiB")], port=daemon.port)
    works(nbdkit.socket)


class Listener:
    """A TCP port that answers like something else."""

    def __init__(self, stack, answer=None, hold=False):
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.port = self.socket.getsockname()[1]
        self.held = []
        import threading
        self.answer, self.hold = answer, hold
        threading.Thread(target=self.serve, daemon=True).start()
        stack.call(self.socket.close)

    def serve(self):
        while True:
            try:
                sock, _ = self.socket.accept()
            except OSError:
                return
            if self.answer:
                sock.sendall(self.answer)
            if self.hold:
                self.held.append(sock)
            else:
                sock.close()


def test_servers_that_are_none(stack):
    """Refused, an NBD server, an HTTP server, silence, a name that is none: status, words, time."""
    requires_tool("nbdinfo")
    silent = Listener(stack, hold=True)
    cases = (
        ("tcp:127.0.0.1:%d" % free_port(), ("refused",)),
        ("tcp:127.0.0.1:%d" % Listener(stack, b"NBDMAGICIHAVEOPT\0\3", hold=True).port, ()),
        ("tcp:127.0.0.1:%d" % Listener(stack, b"HTTP/1.0 400 Bad\r\n\r\n").port, ()),
        ("tcp:127.0.0.1:%d" % silent.port, ("2",)),
        ("tcp:no-such-host.invalid:1234", ("no-such-host.invalid",)),
        ("tcp:[::1]:%d" % free_port(), ()),
        ("tcp:127.0.0.1:1", ()),
    )
    for server, words in cases:
        start = time.monotonic()
        nbdkit_run(server, "v1", 'nbdinfo "$uri" && exit 9; exit 3', status=3, connect_timeout="2s")
        took = time.monotonic() - start
        true(took < 15 * PATIENCE, "%s: %.1f s" % (server, took))
        contains(run.stderr, server.split(":")[1].strip("["), *words)


def test_client_that_leaves_while_the_server_is_unreachable(stack):
    """nbdkit ends within seconds although a connection attempt is under way."""
    silent = Listener(stack, hold=True)
    nbdkit = Nbdkit(stack, "tcp:127.0.0.1:%d" % silent.port, "v1", connect_timeout="3s")
    client = socket.socket(socket.AF_UNIX)
    client.connect(nbdkit.socket)
    client.recv(18)
    import struct
    client.sendall(struct.pack(">I", 3) + struct.pack(">QII", 0x49484156454F5054, 1, 0))
    time.sleep(0.3)
    client.close()
    start = time.monotonic()
    nbdkit.terminate(seconds=10)
    true(time.monotonic() - start < 8 * PATIENCE, "ending took %.1f s" % (time.monotonic() - start))


FILTERS = {
    "log": ["logfile=/dev/null"], "stats": ["statsfile=/dev/null"], "cow": [], "cache": [], "blocksize": ["minblock=4096"],
    "blocksize-policy": ["blocksize-minimum=512", "blocksize-error-policy=error"], "retry": ["retries=1"],
    "error": ["error-rate=0"], "delay": ["delay-read=1ms"], "rate": ["rate=1G"], "multi-conn": [], "readahead": [],
    "nozero": [], "nofilter": [], "truncate": ["round-up=4096"], "noparallel": [], "fua": ["fuamode=emulate"],
    "noextents": [], "nocache": [], "cacheextents": [], "checkwrite": [], "exitlast": [], "offset": ["offset=4096"],
    "swab": [], "retry-request": [], "pause": ["pause-control=%(base)s/pause"], "protect": ["protect=4096-8191"],
}


def test_filters_that_wrap_the_plugin(stack):
    """nbdinfo and verified IO through each; no assertion of nbdkit, no wrong data."""
    requires_tool("nbdinfo", "qemu-io")
    daemon = disk(stack)
    folder = run("nbdkit", "--dump-config")
    folder = [line.split("=", 1)[1] for line in folder.splitlines() if line.startswith("filterdir=")][0]
    tried = 0
    for name, keys in FILTERS.items():
        if not os.path.exists(os.path.join(folder, "nbdkit-%s-filter.so" % name)):
            continue
        tried += 1
        keys = [key % {"base": stack.base} for key in keys]
        if name == "checkwrite":  # it compares writes with what is there
            script = 'nbdinfo "$uri" && qemu-io -f raw -c "read 0 1M" "$uri"'
        elif name == "exitlast":
            script = 'nbdinfo "$uri"'
        elif name == "protect":
            script = 'nbdinfo "$uri" && qemu-io -f raw -c "write -P 3 64k 1M" -c "read -P 3 64k 1M" "$uri"'
        else:
            script = ('nbdinfo "$uri" && qemu-io -f raw -c "write -P 1 0 3M" -c "write -z 1M 1M" -c "discard 2M 512k" '
                      '-c "write -P 2 3M 512" -c flush -c "read -P 1 0 1M" -c "read -P 0 1M 1M" -c "read -P 1 2560k 512k" '
                      '-c "read -P 2 3M 512" "$uri"')
        out = nbdkit_run(daemon, "v1", script, filters=[name], filter_keys=keys)
        true("Pattern verification failed" not in out, "filter %s: wrong data:\n%s" % (name, out))
    true(tried >= 10, "only %d filters are installed" % tried)
    # A stack of them at once.
    nbdkit_run(daemon, "v1", 'qemu-io -f raw -c "write -P 9 0 2M" -c "read -P 9 0 2M" "$uri"',
               filters=["log", "stats", "retry", "readahead"], filter_keys=["logfile=/dev/null", "statsfile=/dev/null"])


def test_partition_filter_on_a_disk_with_partitions(stack):
    requires_tool("sfdisk", "qemu-io", "nbdinfo")
    image = stack.file("v.img", 16 * MIB)
    run("sfdisk", "-q", image, stdin="label: dos\nsize=4MiB\nsize=8MiB\n")
    daemon = Daemon(stack, [volume("v1", image)])
    out = nbdkit_run(daemon, "v1", 'nbdinfo --size "$uri" && qemu-io -f raw -c "write -P 5 0 8M" "$uri"',
                     filters=["partition"], filter_keys=["partition=2"])
    equal(out.splitlines()[0], str(8 * MIB), "size of partition 2")
    with open(image, "rb") as disk_file:
        disk_file.seek(5 * MIB)
        equal(set(disk_file.read(8 * MIB)), {5}, "content of partition 2")


def test_fio_through_filters(stack):
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "16MiB")])
    for filters in (["blocksize"], ["cow"], ["retry"]):
        nbdkit = Nbdkit(stack, daemon, "v1", filters=filters)
        fio(nbdkit.uri, "--rw=randrw", "--bsrange=512-64k", "--iodepth=16", "--size=4m", "--verify=crc32c", "--verify_fatal=1")
        nbdkit.terminate()


if __name__ == "__main__":
    main(globals())
