#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""A good client that verifies its IO until it is told to stop (SIGTERM) or something is wrong.

It keeps a copy of the volume and compares every read with it. Prints the number of requests at the end;
exit status 1 on the first difference, error or lost connection.
"""

import argparse
import os
import random
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import rawclient  # noqa: E402
import wire  # noqa: E402


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--volume", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--crc", action="store_true")
    arguments = parser.parse_args()
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    source = random.Random(arguments.seed)
    session = rawclient.Session((arguments.host, arguments.port), connections=3, crc=arguments.crc, timeout=30)
    session.establish()
    session.sess_info()
    volume = session.open(arguments.volume, wire.RW)
    block, size = volume.logical, min(volume.size, 4 << 20)
    session.write_zeroes(volume, 0, size)
    shadow, requests, reads = bytearray(size), 1, {}
    busy = []  # (image, first, end, data or None); requests in flight never overlap

    def finish(entry):
        image, first, end, data = entry
        response = session.wait(image)
        if response.error:
            raise rawclient.RequestFailed(response.error)
        if data is not None:
            shadow[first:end] = data
        elif bytes(image.region.data) != shadow[first:end]:
            raise SystemExit("goodclient: read of %d bytes at %d differs from what was written" % (end - first, first))

    while not stop:
        length = block * source.randrange(1, min(16384, session.geometry.max_io_size) // block + 1)
        first = source.randrange(0, (size - length) // block + 1) * block
        for entry in [e for e in busy if e[1] < first + length and first < e[2]] or (busy[:1] if len(busy) > 8 else []):
            finish(entry)
            busy.remove(entry)
        cid = source.randrange(3)
        if source.random() < 0.5:
            data = source.randbytes(length)
            busy.append((session.post(session.io_write_image(volume, first, data), cid), first, first + length, data))
        else:
            busy.append((session.post(session.io_read_image(volume, first, length), cid), first, first + length, None))
        requests += 1
        if requests % 500 == 0:
            session.flush(volume)
    for entry in busy:
        finish(entry)
    for at in range(0, size, 32768):
        if session.read(volume, at, 32768) != shadow[at:at + 32768]:
            raise SystemExit("goodclient: volume differs at %d" % at)
    session.close_device(volume)
    print("goodclient: %d requests verified" % requests)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (rawclient.ConnectionClosed, rawclient.TimedOut, rawclient.RequestFailed, rawclient.Rejected,
            wire.WireViolation) as error:
        print("goodclient: %s: %s" % (type(error).__name__, error))
        sys.exit(1)
