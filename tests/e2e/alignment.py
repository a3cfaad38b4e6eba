#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
"""Edges of numbers: a property test against a copy in memory over store alignment x size x offset x length x
split x depth, unaligned neighbours written concurrently, sizes that fit no unit, and volumes of terabytes.

RTRS_TEST_SEED replays a run, RTRS_TEST_SLOW makes it long.
"""

import os
import random
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import (GIB, KIB, MIB, RTRSD, SLOW, Background, Daemon, Nbdkit, Skip, equal, main, nbd_connect,  # noqa: E402
                     requires_nbd_module, run, true, volume)

SEED = int(os.environ.get("RTRS_TEST_SEED", time.time_ns() % 1000000))
FUA, NO_HOLE, FAST_ZERO = 1, 2, 16
TIB = 1 << 40


class Shadow:
    """What the volume must hold. Requests in flight never overlap in bytes, but may share blocks."""

    def __init__(self, handle, size, source, split):
        self.handle, self.size, self.source, self.split = handle, size, source, split
        self.data = bytearray(size)
        self.flights = []

    def offset_and_length(self):
        source = self.source
        kind = source.randrange(6)
        if kind == 0:
            length = source.randrange(1, 600)
        elif kind == 1:
            length = source.randrange(1, 40) * 512
        elif kind == 2:
            length = max(1, source.choice((1, 2, 3, 5)) * self.split + source.choice((-513, -512, -1, 0, 1, 512, 513)))
        elif kind == 3:
            length = source.randrange(1, 3 * self.split)
        elif kind == 4:
            length = source.choice((1, 2, 511, 512, 513, 4095, 4096, 4097, 8191, 8193))
        else:
            length = source.randrange(1, 70000)
        length = min(length, self.size)
        place = source.randrange(5)
        if place == 0:
            offset = self.size - length                      # the tail
        elif place == 1:
            offset = source.randrange(0, self.size - length + 1) & ~4095
        elif place == 2:                                     # across a border of something
            border = source.choice((512, 4096, self.split)) * source.randrange(1, 40)
            offset = border - source.randrange(0, min(length, border) + 1)
        else:
            offset = source.randrange(0, self.size - length + 1)
        return max(0, min(offset, self.size - length)), length

    def settle(self, flight):
        kind, cookie, first, end, payload = flight
        while not self.handle.aio_command_completed(cookie):
            self.handle.poll(-1)
        if kind == "read":
            true(bytes(payload.to_bytearray()) == self.data[first:end], "seed %d: read of %d bytes at %d differs" % (
                SEED, end - first, first))
        elif kind == "write":
            self.data[first:end] = payload
        elif kind == "zero":
            self.data[first:end] = bytes(end - first)
        elif kind == "trim":  # old or zero, and then it stays so
            now = self.handle.pread(end - first, first)
            for at, byte in enumerate(now):
                if byte not in (0, self.data[first + at]):
                    raise AssertionError("seed %d: byte %d after trim is %02x" % (SEED, first + at, byte))
            self.data[first:end] = now

    def step(self, depth):
        import nbd
        source = self.source
        offset, length = self.offset_and_length()
        end = offset + length
        for flight in [f for f in self.flights if f[2] < end and offset < f[3]]:
            self.settle(flight)
            self.flights.remove(flight)
        while len(self.flights) >= depth:
            self.settle(self.flights.pop(source.randrange(len(self.flights))))
        fua = FUA if source.random() < 0.1 else 0
        choice = source.random()
        if choice < 0.45:
            data = source.randbytes(length)
            cookie = self.handle.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data)), offset, flags=fua)
            self.flights.append(("write", cookie, offset, end, data))
        elif choice < 0.75:
            buffer = nbd.Buffer(length)
            self.flights.append(("read", self.handle.aio_pread(buffer, offset), offset, end, buffer))
        elif choice < 0.88:
            flags = fua | source.choice((0, NO_HOLE))
            self.flights.append(("zero", self.handle.aio_zero(length, offset, flags=flags), offset, end, None))
        elif choice < 0.96:
            self.flights.append(("trim", self.handle.aio_trim(length, offset, flags=fua), offset, end, None))
        else:
            self.handle.flush()

    def finish(self):
        while self.flights:
            self.settle(self.flights.pop())
        self.handle.flush()
        for at in range(0, self.size, 1 * MIB):
            length = min(1 * MIB, self.size - at)
            true(self.handle.pread(length, at) == self.data[at:at + length], "seed %d: final read differs in MiB %d" % (
                SEED, at // MIB))


def property_run(nbdkit, size, split, depth, steps, seed, backing):
    requires_nbd_module()
    handle = nbd_connect(nbdkit.uri)
    equal(handle.get_size(), size, "size")
    shadow = Shadow(handle, size, random.Random(seed), split)
    for _ in range(steps):
        shadow.step(depth)
    shadow.finish()
    handle.shutdown()
    with open(backing, "rb") as file:
        true(file.read(size) == shadow.data, "seed %d: the backing differs from the copy" % seed)


def test_property_against_a_copy_in_memory(stack):
    """Alignment of the store x size x split x depth x key mode; offsets and lengths are the generator's."""
    print("seed %d" % SEED)
    steps = 20000 if SLOW else 700
    number = 0
    for block in (512, 4096):
        for size in (4 * MIB + block, 1 * MIB + 3 * 4096, block):
            for split, depth, queue_depth, mode, direct in (
                    (128 * KIB, 1, 128, "false", "auto"), (64 * KIB, 8, 4, "false", "auto"),
                    (4 * KIB, 16, 16, "true", "auto"), (64 * KIB, 8, 64, "false", "off")):
                if size == block and depth > 1:
                    continue
                number += 1
                backing = stack.path("v%d.img" % number)
                daemon = Daemon(stack, [volume("v1", backing, size, block_size=block, direct=direct)],
                                max_io_size=split, queue_depth=queue_depth, always_invalidate=mode)
                nbdkit = Nbdkit(stack, daemon, "v1", connections=3)
                property_run(nbdkit, size, split, depth, 60 if size == block else steps, SEED + number, backing)
                nbdkit.terminate()
                daemon.terminate()


def test_property_on_loop_devices(stack):
    for sector in (512, 4096):
        size = 4 * MIB + sector
        device = stack.loop(stack.file("loop%d.img" % sector, size), sector)
        daemon = Daemon(stack, [volume("v1", device)], max_io_size="64KiB")
        property_run(Nbdkit(stack, daemon, "v1"), size, 64 * KIB, 8, 20000 if SLOW else 500, SEED, device)


def test_every_split_border_of_one_request(stack):
    """Every length up to five times the session's maximum, read back whole, in pieces and across every border."""
    split = 64 * KIB
    size = 8 * split
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), size)], max_io_size=split)
    handle = nbd_connect(Nbdkit(stack, daemon, "v1").uri)
    pattern = b"".join(i.to_bytes(4, "big") for i in range(size // 4))
    step = 512 if SLOW else 512 * 13
    for start in (0, 512, split - 512, split // 2 + 1):
        for length in list(range(512, 5 * split + 1, step)) + [split, 2 * split, 3 * split, 5 * split]:
            data = pattern[length % 4096:][:length]
            handle.pwrite(data, start)
            true(handle.pread(length, start) == data, "%d bytes at %d" % (length, start))
        for border in range(0, 5 * split, split):
            at = max(start, border - 700)
            true(handle.pread(1400, at) == data[at - start:at - start + 1400], "across the border at %d" % border)


def neighbours(handles, size, stride, length, rounds, seed):
    """One thread per handle; thread t owns the pieces number n with n % threads == t. Whatever a thread was told
    is written must still be there, although its neighbours write into the same blocks all the time."""
    count = size // stride

    def writer(number):
        source, handle = random.Random(seed + number), handles[number]
        mine = {}
        owned = range(number, count, len(handles))
        for _ in range(rounds):
            piece = owned[source.randrange(len(owned))]
            data = source.randbytes(length)
            handle.pwrite(data, piece * stride)
            mine[piece] = data
            if source.random() < 0.3:
                check = source.choice(list(mine))
                true(handle.pread(length, check * stride) == mine[check], "piece %d lost an acknowledged write" % check)
        return mine
    threads = [Background(writer, number) for number in range(len(handles))]
    contents = {}
    for thread in threads:
        contents.update(thread.finish(120))
    for piece, data in contents.items():
        true(handles[0].pread(length, piece * stride) == data, "piece %d lost an acknowledged write" % piece)


ROUNDS = 3000 if SLOW else 250


def test_unaligned_neighbours_on_several_nbd_connections(stack):
    for block in (512, 4096):
        daemon = Daemon(stack, [volume("v1", stack.path("v%d.img" % block), "1MiB", block_size=block)])
        nbdkit = Nbdkit(stack, daemon, "v1", connections=3)
        for stride, length in ((100, 100), (512, 100), (700, 699), (5000, 4999), (131, 1)):
            neighbours([nbd_connect(nbdkit.uri) for _ in range(6)], 36 * KIB, stride, length, ROUNDS, SEED)


def test_unaligned_neighbours_in_flight_on_one_nbd_connection(stack):
    import nbd
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "1MiB", block_size=4096)])
    handle = nbd_connect(Nbdkit(stack, daemon, "v1", connections=2).uri)
    source = random.Random(SEED)
    expected = bytearray(16 * KIB)
    for _ in range(60):
        order = list(range(len(expected) // 128))
        source.shuffle(order)
        cookies = []
        for piece in order:
            data = source.randbytes(128)
            expected[piece * 128:piece * 128 + 128] = data
            cookies.append(handle.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data)), piece * 128))
        for cookie in cookies:
            while not handle.aio_command_completed(cookie):
                handle.poll(-1)
        true(handle.pread(len(expected), 0) == expected, "a neighbour in flight was undone")


def test_aligned_writes_survive_unaligned_ones_in_the_same_block(stack):
    """100 bytes at 4096k+1000 against 512 bytes at 4096k+3584, on one and on two NBD connections."""
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "1MiB", block_size=4096)])
    nbdkit = Nbdkit(stack, daemon, "v1", connections=2)
    for handles in ([nbd_connect(nbdkit.uri)] * 2, [nbd_connect(nbdkit.uri), nbd_connect(nbdkit.uri)]):
        stop = []

        def small():
            source = random.Random(1)
            handle = nbd_connect(nbdkit.uri) if handles[0] is handles[1] else handles[0]
            while not stop:
                handle.pwrite(source.randbytes(100), source.randrange(8) * 4096 + 1000)
        thread = Background(small)
        source = random.Random(2)
        for _ in range(ROUNDS):
            block, data = source.randrange(8), source.randbytes(512)
            handles[1].pwrite(data, block * 4096 + 3584)
            equal(bytes(handles[1].pread(512, block * 4096 + 3584)), data, "the aligned neighbour")
        stop.append(True)
        thread.finish()


def test_two_processes_write_neighbouring_blocks(stack):
    """No lock spans two nbdkit processes: whoever keeps to the minimum block size they offer must lose nothing."""
    for block in (512, 4096):
        daemon = Daemon(stack, [volume("v1", stack.path("v%d.img" % block), "1MiB", block_size=block)])
        first = Nbdkit(stack, daemon, "v1")
        second = Nbdkit(stack, daemon, "v1", access="migration")
        handles = [nbd_connect(disk.uri) for disk in (first, second, first, second)]
        minimum = {handle.get_block_size(0) for handle in handles}
        equal(minimum, {block}, "minimum block size")
        neighbours(handles, 64 * KIB, block, block, ROUNDS, SEED)
        neighbours(handles, 256 * KIB, 3 * block, 2 * block, ROUNDS, SEED)


def test_sizes_that_fit_no_block_are_refused_with_size_and_remedy(stack):
    """Never a silent cut: exact to the byte, or refused."""
    for size in (1, 511, 513, 4095, 4097, 1 * MIB + 333, 202893):
        backing = stack.file("odd-%d.img" % size, size)
        daemon = Daemon(stack, [volume("v1", backing)], wait=False)
        try:
            code = daemon.wait(10)
        except AssertionError:  # it serves: then the size must be exact and the tail writable
            handle = nbd_connect(Nbdkit(stack, daemon, "v1").uri)
            equal(handle.get_size(), size, "size")
            handle.pwrite(b"x", size - 1)
            equal(bytes(handle.pread(1, size - 1)), b"x", "last byte")
            continue
        daemon.expected_dead = True
        equal(code, 66, "exit status for a file of %d bytes; log: %s" % (size, daemon.log()))
        true(str(size) in daemon.log() and "512" in daemon.log(), "size and rule in: " + daemon.log())
        equal(os.path.getsize(backing), size, "the refused file's size")


def test_volumes_of_terabytes(stack):
    """Markers at multiples of 2^40 and at 2^32 sectors are at the right place of the backing."""
    sizes = [TIB - 512, TIB + 512, 2 * TIB + 512, 3 * TIB]
    paths = [stack.path("t%d.img" % i) for i in range(len(sizes))]
    try:
        directory = stack.tmpfs(64 * MIB)  # a file of 17 TiB is too large for ext4
        sizes.append(17 * TIB)
        paths.append(directory + "/t.img")
    except Skip:
        pass
    daemon = Daemon(stack, [volume("t%d" % i, path, size) for i, (path, size) in enumerate(zip(paths, sizes))])
    nbdkit = Nbdkit(stack, daemon, None)
    for i, size in enumerate(sizes):
        handle = nbd_connect(nbdkit.export_uri("t%d" % i))
        equal(handle.get_size(), size, "size")
        places = {0, size - 512, 4096 * 1000001}
        for n in range(1, size // TIB + 1):
            places |= {n * TIB - 4096, n * TIB, n * TIB + 4096} if n < 4 else {n * TIB}
        places |= {1 << 41, (1 << 41) - 512}
        places = [place for place in places if 0 <= place <= size - 512]
        for place in places:
            handle.pwrite(place.to_bytes(8, "big") * 64, place)
        handle.zero(min(size, (1 << 32) - 512), max(0, size - TIB // 2 - (1 << 32)))
        for place in places:
            equal(bytes(handle.pread(512, place)), place.to_bytes(8, "big") * 64, "marker at %d" % place)
        handle.flush()
        with open(paths[i], "rb") as backing:
            for place in places:
                backing.seek(place)
                equal(backing.read(512), place.to_bytes(8, "big") * 64, "marker at %d of the backing" % place)
        handle.shutdown()


def test_scattered_writes_of_many_connections_hit_their_places_only(stack):
    """Positioned IO: 500 GiB, eight connections, patterns of 3 bytes to 1 MiB; no data anywhere else."""
    size = 500 * GIB
    backing = stack.path("v.img")
    daemon = Daemon(stack, [volume("v1", backing, size)])
    nbdkit = Nbdkit(stack, daemon, "v1", connections=4)
    offsets = [40 * KIB, 400 * MIB, 4 * GIB, 40 * GIB, 400 * GIB]

    def client(number):
        handle, source, written = nbd_connect(nbdkit.uri), random.Random(SEED + number), {}
        for _ in range(12):
            at = source.choice(offsets) + number * 8 * MIB + source.randrange(4) * 2 * MIB + number
            data = source.randbytes(source.choice((3, 512, 4096, 1 * MIB)))
            handle.pwrite(data, at)
            written[at] = data + written.get(at, b"")[len(data):]
        handle.flush()
        return written
    expected = {}
    for thread in [Background(client, number) for number in range(8)]:
        expected.update(thread.finish())
    ranges = sorted((at // 4096 * 4096, -(-(at + len(data)) // 4096) * 4096) for at, data in expected.items())
    with open(backing, "rb") as file:
        for at, data in expected.items():
            file.seek(at)
            true(file.read(len(data)) == data, "data at %d" % at)
        position = 0
        while True:
            try:
                start = os.lseek(file.fileno(), position, os.SEEK_DATA)
            except OSError:
                break
            position = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            covered = start
            for first, end in ranges:
                if first <= covered < end:
                    covered = end
            true(covered >= position, "data from %d to %d, where nobody wrote" % (covered, position))


def test_check_config_agrees_with_the_daemon_about_sizes(stack):
    """--check-config reads the file only; whatever it says it must not create or change a backing."""
    backing = stack.path("none.img")
    config = stack.path("c.yaml")
    with open(config, "w") as text:
        text.write("listen: tcp:127.0.0.1:1\nvolumes:\n" + volume("v1", backing, "64MiB") + "\n")
    run(RTRSD, "--check-config", "-c", config)
    true(not os.path.exists(backing), "--check-config created the backing")
    with open(config, "w") as text:
        text.write("listen: tcp:127.0.0.1:1\nvolumes:\n" + volume("v1", backing, "1000") + "\n")
    run(RTRSD, "--check-config", "-c", config, status=78)


if __name__ == "__main__":
    main(globals())
