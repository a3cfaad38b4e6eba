#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
"""What was acknowledged is there: kill -9 of each part at random moments, SIGTERM in a burst, and flushes that
reach the device, for each command x flag x number of connections."""

import os
import random
import signal
import socket
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import (KIB, MIB, PATIENCE, SLOW, Background, Daemon, Nbdkit, equal, main, nbd_connect, requires_nbd_module,  # noqa: E402
                     true, volume, wait_until)

SEED = int(os.environ.get("RTRS_TEST_SEED", time.time_ns() % 1000000))
FUA, NO_HOLE = 1, 2
BLOCK = 4096


def content(number):
    """A block that can be told from every other, and whose halves cannot be mixed."""
    return number.to_bytes(8, "big") * (BLOCK // 8)


class Burst:
    """Threads that write blocks until something breaks, and remember what was acknowledged."""

    def __init__(self, uri, command, durability, connections, seed, blocks=256):
        self.command, self.durability, self.stop = command, durability, False
        self.acknowledged, self.submitted, self.durable = {}, {}, {}
        self.lock = threading.Lock()
        self.handles = [nbd_connect(uri) for _ in range(connections)]
        self.blocks, self.connections = blocks, connections
        self.threads = [Background(self.run, number, seed) for number in range(connections)]

    def run(self, number, seed):
        import nbd
        source, handle, serial = random.Random(seed * 100 + number), self.handles[number], number
        flags = FUA if self.durability == "fua" else 0
        try:
            while not self.stop:
                block = source.randrange(self.blocks // self.connections) * self.connections + number
                serial += self.connections
                command = self.command if self.command == "pwrite" or source.random() < 0.5 else "pwrite"
                value = content(serial) if command == "pwrite" else bytes(BLOCK)
                self.submitted[block] = value
                if command == "pwrite":
                    handle.pwrite(value, block * BLOCK, flags=flags)
                elif command == "zero":
                    handle.zero(BLOCK, block * BLOCK, flags=flags | source.choice((0, NO_HOLE)))
                else:
                    handle.trim(BLOCK, block * BLOCK, flags=flags)
                self.acknowledged[block] = value
                if flags:
                    self.durable[block] = value
                elif self.durability == "flush" and source.random() < 0.2:
                    before = dict(self.acknowledged)  # of all connections: that is what multi-conn promises
                    handle.flush()
                    self.durable.update({b: v for b, v in before.items() if b % self.connections == number})
        except nbd.Error:
            pass  # the kill

    def finish(self):
        self.stop = True
        for thread in self.threads:
            thread.finish(30)
        for handle in self.handles:  # nbdkit ends when its last client has left
            try:
                handle.shutdown()
            except Exception:
                pass

    def check(self, read_block):
        """Every block holds what was acknowledged last, or the request that was under way."""
        for block, value in self.acknowledged.items():
            now = read_block(block)
            if now not in (value, self.submitted[block]):
                raise AssertionError("seed %d: block %d holds %s, acknowledged was %s, under way %s" % (
                    SEED, block, now[:8].hex(), value[:8].hex(), self.submitted[block][:8].hex()))
        return len(self.acknowledged)


def reader(path):
    file = open(path, "rb")

    def read_block(block):
        file.seek(block * BLOCK)
        return file.read(BLOCK)
    return read_block


def rounds(victims, count):
    """command x FUA/flush x connections x victim, in random order, as many rounds as asked for."""
    grid = [(command, durability, connections, victim) for command in ("pwrite", "zero", "trim")
            for durability in ("fua", "flush", "none") for connections in (1, 4) for victim in victims]
    random.Random(SEED).shuffle(grid)
    return (grid * (count // len(grid) + 1))[:count]


def test_kill_9_at_random_moments_loses_nothing_acknowledged(stack):
    requires_nbd_module()
    print("seed %d" % SEED)
    source = random.Random(SEED)
    blocks = 0
    for number, (command, durability, connections, victim) in enumerate(
            rounds(("daemon", "nbdkit", "client"), 400 if SLOW else 54)):
        backing = stack.path("v%d.img" % number)
        daemon = Daemon(stack, [volume("v1", backing, "8MiB", direct=source.choice(("auto", "off")))])
        nbdkit = Nbdkit(stack, daemon, "v1", connections=2)
        burst = Burst(nbdkit.uri, command, durability, connections, SEED + number)
        time.sleep(source.uniform(0.02, 0.25))
        if victim == "daemon":
            daemon.kill()
        elif victim == "nbdkit":
            nbdkit.kill()
        else:
            for handle in burst.handles:
                # The socket vanishes under libnbd, as it does when the client is killed.
                sock = socket.socket(fileno=os.dup(handle.aio_get_fd()))
                sock.shutdown(socket.SHUT_RDWR)
                sock.close()
        burst.finish()
        if victim == "daemon":
            daemon.wait(10)
        else:
            nbdkit.kill() if victim == "nbdkit" else nbdkit.terminate()
            daemon.terminate()
        blocks += burst.check(reader(backing))
        os.unlink(backing)
        for process in (nbdkit, daemon):
            if process.alive():
                process.terminate()
        stack.things = [thing for thing in stack.things if thing not in (nbdkit, daemon)]
    print("%d blocks checked" % blocks)
    true(blocks > 500, "only %d blocks: the bursts are too short" % blocks)


def test_killed_daemon_comes_back_and_a_new_connection_sees_the_data(stack):
    requires_nbd_module()
    backing = stack.path("v.img")
    daemon = Daemon(stack, [volume("v1", backing, "8MiB")])
    nbdkit = Nbdkit(stack, daemon, "v1")
    burst = Burst(nbdkit.uri, "pwrite", "flush", 2, SEED)
    time.sleep(0.3)
    daemon.kill()
    burst.finish()
    daemon.wait(5)
    again = Daemon(stack, [volume("v1", backing, "8MiB")], port=daemon.port)
    handle = wait_until(lambda: try_connect(nbdkit.uri), 20, "the same nbdkit serves again")
    equal(burst.check(lambda block: bytes(handle.pread(BLOCK, block * BLOCK))) > 0, True, "blocks checked")
    handle.shutdown()
    again.terminate()


def try_connect(uri):
    import nbd
    try:
        return nbd_connect(uri)
    except nbd.Error:
        return None


def test_killed_nbdkit_gives_its_volume_back_at_once(stack):
    requires_nbd_module()
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "8MiB")])
    for _ in range(10):
        nbdkit = Nbdkit(stack, daemon, "v1")
        burst = Burst(nbdkit.uri, "pwrite", "none", 2, SEED)
        time.sleep(0.05)
        nbdkit.kill()
        burst.finish()
        heir = Nbdkit(stack, daemon, "v1")
        wait_until(lambda: try_connect(heir.uri), 5, "the volume can be opened for writing again")
        heir.terminate()


def test_sigterm_of_the_daemon_in_a_burst_drains_and_exits_0(stack):
    """20 random moments: acknowledged writes are in the file, the exit status is 0, within the limit."""
    requires_nbd_module()
    source = random.Random(SEED)
    slowest = 0
    for number in range(20):
        backing = stack.path("v%d.img" % number)
        daemon = Daemon(stack, [volume("v1", backing, "8MiB")], drain_timeout="10s")
        nbdkit = Nbdkit(stack, daemon, "v1")
        burst = Burst(nbdkit.uri, source.choice(("pwrite", "zero")), source.choice(("none", "fua")), 4, SEED + number)
        time.sleep(source.uniform(0.02, 0.2))
        start = time.monotonic()
        daemon.terminate(seconds=12)
        slowest = max(slowest, time.monotonic() - start)
        burst.finish()
        burst.check(reader(backing))
        nbdkit.terminate()
    print("slowest stop %.1f s" % slowest)
    true(slowest < 6 * PATIENCE, "stopping took %.1f s" % slowest)


def test_sigterm_of_nbdkit_in_a_burst_ends_it_in_order(stack):
    requires_nbd_module()
    backing = stack.path("v.img")
    daemon = Daemon(stack, [volume("v1", backing, "8MiB")])
    for number in range(10):
        nbdkit = Nbdkit(stack, daemon, "v1")
        burst = Burst(nbdkit.uri, "pwrite", "none", 3, SEED + number)
        time.sleep(0.1)
        os.kill(nbdkit.pid, signal.SIGTERM)
        time.sleep(0.1)
        burst.finish()
        nbdkit.terminate(seconds=10)
        burst.check(reader(backing))


def flushes(device):
    with open("/sys/block/%s/stat" % os.path.basename(device)) as stat:
        return int(stat.read().split()[15])


def test_flush_and_fua_of_every_command_reach_the_device(stack):
    """A loop device counts the flushes it was asked for: one per FLUSH, one per FUA write, zero and trim, and
    none for commands without. On one connection and on another than the one that wrote."""
    requires_nbd_module()
    device = stack.loop(stack.file("loop.img", 16 * MIB))
    for direct in ("auto", "off"):
        daemon = Daemon(stack, [volume("v1", device, direct=direct)])
        nbdkit = Nbdkit(stack, daemon, "v1")
        one, two = nbd_connect(nbdkit.uri), nbd_connect(nbdkit.uri)
        true(one.can_fua() and one.can_flush() and one.can_multi_conn(), "capabilities")
        cases = {
            "flush": lambda: one.flush(),
            "flush on another connection": lambda: two.flush(),
            "pwrite with FUA": lambda: one.pwrite(content(1), 0, flags=FUA),
            "unaligned pwrite with FUA": lambda: one.pwrite(b"x" * 100, 1000, flags=FUA),
            "zero with FUA": lambda: one.zero(64 * KIB, 1 * MIB, flags=FUA),
            "zero without a hole with FUA": lambda: one.zero(64 * KIB, 1 * MIB, flags=FUA | NO_HOLE),
            "unaligned zero with FUA": lambda: one.zero(1000, 1 * MIB + 100, flags=FUA),
            "trim with FUA": lambda: one.trim(64 * KIB, 2 * MIB, flags=FUA),
            "large pwrite with FUA": lambda: one.pwrite(b"y" * MIB, 4 * MIB, flags=FUA),
        }
        for name, call in cases.items():
            one.pwrite(content(2), 8 * MIB)  # something to flush, from the other connection too
            before = flushes(device)
            call()
            true(flushes(device) > before, "%s (direct %s) did not flush the device" % (name, direct))
        one.flush()
        before = flushes(device)
        for _ in range(20):
            one.pwrite(content(3), 0)
            one.pread(BLOCK, 0)
        true(flushes(device) <= before + 1, "plain writes flush the device (direct %s)" % direct)
        one.shutdown()
        two.shutdown()
        nbdkit.terminate()
        daemon.terminate()


def test_stopped_daemon_and_nbdkit_go_on_after_sigcont(stack):
    """SIGSTOP of either or both during verified IO is a pause."""
    requires_nbd_module()
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "8MiB")])
    nbdkit = Nbdkit(stack, daemon, "v1", connections=2)
    stop, counts = [], []

    def client(number):
        handle, source, shadow = nbd_connect(nbdkit.uri), random.Random(number), {}
        while not stop:
            block = source.randrange(200) * 4 + number
            if block in shadow and source.random() < 0.5:
                equal(bytes(handle.pread(BLOCK, block * BLOCK)), shadow[block], "block %d" % block)
            else:
                shadow[block] = source.randbytes(BLOCK)
                handle.pwrite(shadow[block], block * BLOCK)
            counts.append(1)
    threads = [Background(client, number) for number in range(4)]
    for victims in ((daemon,), (nbdkit,), (daemon, nbdkit)):
        for seconds in (0.1, 1.5) if not SLOW else (0.1, 1.5, 20):
            for victim in victims:
                os.kill(victim.pid, signal.SIGSTOP)
            time.sleep(seconds)
            for victim in victims:
                os.kill(victim.pid, signal.SIGCONT)
            before = len(counts)
            wait_until(lambda: len(counts) > before + 20, 10, "IO goes on after SIGCONT")
    stop.append(True)
    for thread in threads:
        thread.finish()


def test_hanging_daemon_is_given_up_after_the_configured_time(stack):
    """SIGSTOP for good: EIO after io-timeout or the heartbeat limit, a message, and nbdkit ends normally."""
    nbd = requires_nbd_module()
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "8MiB")])
    for named, low, high in (({"io_timeout": "2s", "heartbeat_interval": "60s"}, 1.5, 6),
                             ({"io_timeout": "600s", "heartbeat_interval": "500ms"}, 1.5, 6)):
        nbdkit = Nbdkit(stack, daemon, "v1", **named)
        handle = nbd_connect(nbdkit.uri)
        handle.pwrite(content(1), 0)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            try:
                handle.pread(BLOCK, 0)
                raise AssertionError("a stopped daemon answered")
            except nbd.Error as error:
                equal(error.errno, "EIO", "errno")
            took = time.monotonic() - start
            true(low < took < high * 3, "%s: given up after %.1f s" % (named, took))
            true("v1" in nbdkit.log() and "127.0.0.1" in nbdkit.log(), "server and volume in: " + nbdkit.log())
            handle.shutdown()
            start = time.monotonic()
            nbdkit.terminate(seconds=10)
            true(time.monotonic() - start < 8 * PATIENCE, "ending nbdkit took %.1f s" % (time.monotonic() - start))
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        # The daemon finds the connections closed and is as good as new.
        wait_until(lambda: "rw" not in holders(daemon), 10, "the volume is given back")


def holders(daemon):
    opened = daemon.log().count("opened read-write")
    closed = daemon.log().count("closed, was device")
    return ["rw"] * (opened - closed)


if __name__ == "__main__":
    main(globals())
