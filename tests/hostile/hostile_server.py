#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""A hostile server for the client end: nbdkit with our plugin meets a server that misbehaves in one step.

Right is: the NBD client gets an error (EIO for requests) within the configured time-outs, nbdkit's message
names the server, nbdkit itself goes on and ends normally. Never a crash, never a hang, never a byte of
somebody else's answer.

    hostile_server.py --list
    hostile_server.py --case answer-for-an-unused-id
"""

import argparse
import errno
import os
import struct
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "e2e"))
import harness  # noqa: E402
import rawserver  # noqa: E402
import wire  # noqa: E402
from rawserver import Server, Stop  # noqa: E402

CASES = {}
IO_TIMEOUT, CONNECT_TIMEOUT = 2, 2


def at_connect(name, says=()):
    """The connection must fail, with a message that names the server and contains the words of says."""
    def register(server_class):
        CASES[name] = (server_class, "connect", says)
        return server_class
    return register


def at_io(name, allowed=("EIO",)):
    """Attaching works; a read (and, unless allowed has "ok", every read) fails with one of these."""
    def register(server_class):
        CASES[name] = (server_class, "io", allowed)
        return server_class
    return register


# --- MPA and the connect response

class Reply(Server):
    private = None

    def on_connect(self, connection, cid):
        self.mpa_reply(connection, self.private)


def bad_accept(name, private, says=()):
    at_connect("accept-" + name, says)(type(name, (Reply,), {"private": private}))


bad_accept("depth-0", wire.connect_response(queue_depth=0))
bad_accept("max-io-size-0", wire.connect_response(max_io_size=0))
bad_accept("header-size-0", wire.connect_response(max_hdr_size=0))
bad_accept("header-size-8", wire.connect_response(max_hdr_size=8))
bad_accept("sizes-overflow-32-bits", wire.connect_response(4, 0xFFFFF000, 0x2000))
bad_accept("max-io-size-4-gib", wire.connect_response(1, 0xFFFFF000, 4096))
bad_accept("header-size-4-gib", wire.connect_response(1, 4096, 0xFFFFF000))
bad_accept("depth-65535-of-1-mib", wire.connect_response(65535, 1 << 20, 4096))
bad_accept("bits-do-not-fit", wire.connect_response(512, 1 << 20, 4096))
bad_accept("with-errno", wire.connect_response(error=errno.EBUSY))
bad_accept("wrong-magic", wire.connect_response(magic=0xBD1B))
bad_accept("major-1", wire.connect_response(version=0x100))
bad_accept("major-255", wire.connect_response(version=0xFF00))
bad_accept("empty", b"")
bad_accept("1-byte", b"\0")
bad_accept("55-bytes", wire.connect_response()[:55])


class Reject(Server):
    error, private = errno.ECONNRESET, None

    def on_connect(self, connection, cid):
        self.mpa_reject(connection, wire.connect_response(0, 0, 0, 0, self.error) if self.private is None
                        else self.private)


for _error in (errno.EPERM, errno.ENXIO, errno.ENOMEM, errno.EACCES, errno.EBUSY, errno.EEXIST, errno.EINVAL,
               errno.ECONNRESET, 511, 0, -5):
    at_connect("reject-errno-%d" % _error, [errno.errorcode[_error]] if 0 < _error < 134 else [])(
        type("Reject%d" % abs(_error), (Reject,), {"error": _error}))
at_connect("reject-without-private-data")(type("RejectEmpty", (Reject,), {"private": b""}))
at_connect("reject-with-1-byte")(type("RejectByte", (Reject,), {"private": b"\x01"}))
at_connect("reject-with-256-bytes-of-garbage")(type("RejectGarbage", (Reject,), {"private": b"\xa5" * 256}))


class RawReply(Server):
    data, then = b"", "close"

    def serve(self, connection):
        connection.exactly(76)
        connection.send_raw(self.data)
        if self.then == "hold":
            connection.exactly(1)


def raw_reply(name, data, then="close"):
    at_connect("mpa-" + name)(type(name, (RawReply,), {"data": data, "then": then}))


GOOD_REPLY = wire.mpa_frame(wire.connect_response(), wire.MPA_REPLY_KEY)
raw_reply("closed-without-reply", b"")
raw_reply("silence", b"", "hold")
raw_reply("http", b"HTTP/1.0 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "hold")
raw_reply("request-key-in-the-reply", wire.mpa_frame(wire.connect_response()), "hold")
raw_reply("half-a-reply-then-silence", GOOD_REPLY[:30], "hold")
raw_reply("half-a-reply-then-close", GOOD_REPLY[:30])
raw_reply("private-data-65535", wire.mpa_frame(bytes(2000), wire.MPA_REPLY_KEY, length=65535), "hold")
raw_reply("markers", wire.mpa_frame(wire.connect_response(), wire.MPA_REPLY_KEY, wire.MPA_MARKERS), "hold")
raw_reply("revision-2", wire.mpa_frame(wire.connect_response(), wire.MPA_REPLY_KEY, revision=2), "hold")
raw_reply("revision-0-and-garbage", wire.mpa_frame(b"\xff" * 56, wire.MPA_REPLY_KEY, 0xFF, 0), "hold")


@at_connect("mpa-reply-in-single-bytes-for-ever")
class _(Server):
    def serve(self, connection):
        connection.exactly(76)
        for byte in GOOD_REPLY:
            connection.send_raw(bytes((byte,)))
            time.sleep(0.5)


@at_io("depth-differs-on-the-second-connection", allowed=("ok", "EIO"))
class _(Server):
    """A client takes the geometry from connection 0 only."""
    def on_connect(self, connection, cid):
        depth = self.queue_depth if cid == 0 else self.queue_depth // 2
        self.mpa_reply(connection, wire.connect_response(depth, self.max_io_size, self.max_hdr_size))


@at_connect("second-connection-rejected", ["ENOMEM"])
class _(Server):
    def on_connect(self, connection, cid):
        if cid == 0:
            super().on_connect(connection, cid)
            return
        try:
            self.mpa_reject(connection, wire.connect_response(0, 0, 0, 0, errno.ENOMEM))
        finally:
            time.sleep(0.5)  # before connection 0 is closed too


@at_connect("second-connection-silent")
class _(Server):
    def on_connect(self, connection, cid):
        if cid == 0:
            super().on_connect(connection, cid)
        else:
            connection.exactly(1)


@at_connect("heartbeat-before-info-response")
class _(Server):
    """The only receive is the one for INFO_RSP: a message of another kind in it is malformed."""
    def on_info(self, connection, name):
        connection.send_raw(connection.immediate(wire.imm(wire.IMM_HEARTBEAT)))
        super().on_info(connection, name)


# --- INFO_RSP

class Info(Server):
    def payload(self, descriptors):
        return wire.info_response(descriptors)

    def info_payload(self, connection):
        chunks = [(i << 32, connection.path.keys[i], self.chunk_size) for i in range(self.queue_depth)]
        return self.payload(chunks)


def bad_info(name):
    def register(payload):
        at_connect("info-" + name)(type(name, (Info,), {"payload": lambda self, chunks: payload(self, chunks)}))
        return payload
    return register


bad_info("no-descriptors")(lambda s, c: wire.info_response([]))
bad_info("one-descriptor-too-few")(lambda s, c: wire.info_response(c[:-1]))
bad_info("one-descriptor-too-many")(lambda s, c: wire.info_response(c + [(99 << 32, 1, s.chunk_size)]))
bad_info("not-a-divisor")(lambda s, c: wire.info_response(c[:2] + [(c[2][0], c[2][1], s.chunk_size * 30)]))
bad_info("length-0")(lambda s, c: wire.info_response([(c[0][0], c[0][1], 0)] + c[1:]))
bad_info("length-not-a-multiple")(lambda s, c: wire.info_response([(c[0][0], c[0][1], s.chunk_size - 1)] + c[1:]))
bad_info("lengths-sum-wrong")(lambda s, c: wire.info_response([(c[0][0], c[0][1], 2 * s.chunk_size)] + c[1:]))
bad_info("length-4-gib")(lambda s, c: wire.info_response([(a, k, 0xFFFFFFFF) for a, k, _ in c]))
bad_info("count-beyond-the-message")(lambda s, c: wire.info_response(c[:2], count=32))
bad_info("count-65535")(lambda s, c: wire.info_response(c, count=65535))
bad_info("wrong-type")(lambda s, c: wire.info_response(c, kind=wire.INFO_REQ))
bad_info("truncated")(lambda s, c: wire.info_response(c)[:-1])
bad_info("7-bytes")(lambda s, c: wire.info_response(c)[:7])
bad_info("empty")(lambda s, c: b"")
bad_info("too-long-for-the-receive")(lambda s, c: wire.info_response(c) + bytes(4096))
bad_info("1-mib")(lambda s, c: bytes(60000))
bad_info("garbage")(lambda s, c: b"\xff" * 520)


@at_connect("info-silence")
class _(Server):
    def on_info(self, connection, name):
        connection.exactly(1)


@at_connect("info-answered-by-close")
class _(Server):
    def on_info(self, connection, name):
        raise Stop


@at_connect("info-answered-by-terminate")
class _(Server):
    def on_info(self, connection, name):
        connection.send_raw(wire.fpdu(wire.terminate_ulpdu(0x12, 0x05), connection.crc))
        connection.exactly(1)


@at_connect("info-answered-on-connection-1")
class _(Server):
    def on_info(self, connection, name):
        other = connection.path.connections[1]
        other.send_raw(other.untagged(wire.OP_SEND, self.info_payload(connection)))


# --- OPEN_RSP

def bad_open(name, says=(), **fields):
    def open_payload(self, device):
        return wire.open_response(device, **{"sectors": self.volume_size // 512, **fields})
    at_connect("open-" + name, says)(type(name, (Server,), {"open_payload": open_payload}))


bad_open("logical-block-0", logical=0)
bad_open("logical-block-1", logical=1)
bad_open("logical-block-3", logical=3)
bad_open("logical-block-256", logical=256)
bad_open("logical-block-1000", logical=1000)
bad_open("logical-block-65535", logical=65535)
bad_open("sectors-2-to-the-55", sectors=1 << 55)
bad_open("sectors-all-ones", sectors=wire.ALL_ONES)
bad_open("wrong-type", kind=wire.SESS_INFO_RSP)


@at_connect("open-answer-cut-short")
class _(Server):
    """The answer says success, but only 20 of the 56 bytes came."""
    def open_payload(self, device):
        return super().open_payload(device)[:20].replace(b"\3", b"\0", 1)


@at_connect("open-silence")
class _(Server):
    def on_request(self, connection, chunk, is_read, user, data, descriptor, flags):
        if struct.unpack_from("<H", user)[0] != wire.OPEN:
            super().on_request(connection, chunk, is_read, user, data, descriptor, flags)


@at_connect("sess-info-silence")
class _(Server):
    def on_request(self, connection, chunk, is_read, user, data, descriptor, flags):
        pass


@at_connect("sess-info-refused")
class _(Server):
    def execute(self, connection, is_read, user, data, descriptor):
        return errno.EINVAL, b""


for _error in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, 511):
    def _execute(self, connection, is_read, user, data, descriptor, error=_error):
        if struct.unpack_from("<H", user)[0] == wire.OPEN:
            return error, b""
        return Server.execute(self, connection, is_read, user, data, descriptor)
    at_connect("open-errno-%d" % _error)(type("Open%d" % _error, (Server,), {"execute": _execute}))


# --- IO

class BadIo(Server):
    """respond_io answers a READ of RNBD IO; everything else is answered well."""

    def on_request(self, connection, chunk, is_read, user, data, descriptor, flags):
        kind, _, _, _, rw = struct.unpack_from("<HHIQI", user.ljust(24, b"\0"))
        if kind == wire.IO and rw & 0xFF == wire.READ:
            error, answer = self.execute(connection, is_read, user, data, descriptor)
            self.respond_io(connection, chunk, error, answer, descriptor, flags)
        else:
            super().on_request(connection, chunk, is_read, user, data, descriptor, flags)

    def respond_io(self, connection, chunk, error, answer, descriptor, flags):
        self.respond(connection, chunk, error, answer, descriptor, flags)


def bad_io(name, allowed=("EIO",), **attributes):
    def register(respond_io):
        at_io(name, allowed)(type(name, (BadIo,), dict(attributes, respond_io=respond_io)))
        return respond_io
    return register


NEW = {"flags": wire.NEW_RKEY}


@bad_io("silence")
def _(self, connection, chunk, error, answer, descriptor, flags):
    pass


@bad_io("closed-instead-of-an-answer")
def _(self, connection, chunk, error, answer, descriptor, flags):
    raise Stop


@bad_io("terminate-instead-of-an-answer")
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(wire.fpdu(wire.terminate_ulpdu(0x11, 0), connection.crc))
    connection.exactly(1)


@bad_io("half-an-answer-then-silence")
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(connection.write_frames(descriptor[1], descriptor[0], answer)[:100])


@bad_io("half-an-answer-then-close")
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(connection.write_frames(descriptor[1], descriptor[0], answer)[:100])
    raise Stop


# An answer nobody waits for is ignored or costs the path; the real answer never comes.
for _name, _id in (("an-unused-id", 17), ("an-id-beyond-the-depth", 1000), ("the-largest-id", 0x7FFFF)):
    @bad_io("answer-for-" + _name)
    def _(self, connection, chunk, error, answer, descriptor, flags, number=_id):
        connection.send_raw(connection.immediate(wire.imm(wire.IMM_IO_RSP, number)))


@bad_io("answer-twice", allowed=("ok", "EIO"))
def _(self, connection, chunk, error, answer, descriptor, flags):
    self.respond(connection, chunk, error, answer, descriptor, flags)
    connection.send_raw(connection.immediate(wire.imm(wire.IMM_IO_RSP, chunk)))


@bad_io("answer-on-another-connection", allowed=("ok", "EIO"))
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(connection.write_frames(descriptor[1], descriptor[0], answer))
    other = connection.path.connections[0]
    with other.lock:
        other.send_raw(other.immediate(wire.imm(wire.IMM_IO_RSP, chunk)))


@bad_io("answer-says-invalidated-although-nobody-asked-or-did", allowed=("ok", "EIO"))
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(connection.write_frames(descriptor[1], descriptor[0], answer)
                        + connection.immediate(wire.imm(wire.IMM_IO_RSP_INV, chunk)))


@bad_io("invalidation-of-an-unknown-key")
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(connection.untagged(wire.OP_SEND_INVALIDATE, b"", 0xFFFFFF00))


@bad_io("data-to-an-unknown-key")
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(connection.write_frames(0xFFFFFF00, descriptor[0], answer))


@bad_io("data-to-a-stale-key")
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(connection.write_frames((descriptor[1] & ~0xFF) | ((descriptor[1] - 1) & 0xFF),
                                                descriptor[0], answer))


@bad_io("data-beyond-the-buffer")
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(connection.write_frames(descriptor[1], descriptor[0], answer + b"x"))


@bad_io("data-in-front-of-the-buffer")
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(connection.write_frames(descriptor[1], descriptor[0] - 4, answer))


@bad_io("data-after-the-answer")
def _(self, connection, chunk, error, answer, descriptor, flags):
    """The key must be dead once the answer is there: the buffer belongs to the NBD client's next request."""
    connection.send_raw(connection.write_frames(descriptor[1], descriptor[0], answer)
                        + connection.immediate(wire.imm(wire.IMM_IO_RSP, chunk)))
    time.sleep(0.2)
    connection.send_raw(connection.write_frames(descriptor[1], descriptor[0], b"\xee" * len(answer)))


CASES["data-after-the-answer"] = (CASES["data-after-the-answer"][0], "io", ("ok", "EIO"))


@bad_io("answer-after-the-time-out")
def _(self, connection, chunk, error, answer, descriptor, flags):
    time.sleep(IO_TIMEOUT + 2)
    self.respond(connection, chunk, error, b"\xee" * len(answer), descriptor, flags)


@bad_io("every-errno", allowed=("EIO", "EINVAL", "ENOSPC", "EPERM", "ENOMEM", "ENOTSUP", "ESHUTDOWN", "EOPNOTSUPP"))
def _(self, connection, chunk, error, answer, descriptor, flags):
    self.next_error = getattr(self, "next_error", 0) % 511 + 1
    self.respond(connection, chunk, self.next_error, b"", descriptor, flags)


@bad_io("unknown-immediate-types", allowed=("ok", "EIO"))
def _(self, connection, chunk, error, answer, descriptor, flags):
    for kind in (3, 4, 7, 10, 15):
        connection.send_raw(connection.immediate(wire.imm(kind, chunk)))
    self.respond(connection, chunk, error, answer, descriptor, flags)


@bad_io("request-sent-by-the-server", allowed=("ok", "EIO"))
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(connection.immediate(wire.imm(wire.IMM_IO_REQ, 0x20)))
    self.respond(connection, chunk, error, answer, descriptor, flags)


@bad_io("heartbeats-on-io-connection", allowed=("ok", "EIO"))
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(b"".join(connection.immediate(wire.imm(wire.IMM_HEARTBEAT)) for _ in range(20)))
    self.respond(connection, chunk, error, answer, descriptor, flags)


@bad_io("more-messages-than-receives", allowed=("ok", "EIO"))
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(b"".join(connection.untagged(wire.OP_SEND, b"") for _ in range(2000)))
    self.respond(connection, chunk, error, answer, descriptor, flags)


@bad_io("send-with-payload-in-plain-mode")
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(connection.untagged(wire.OP_SEND, b"12345678"))


@bad_io("send-with-immediate-in-plain-mode")
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(connection.untagged(wire.OP_SEND_IMMEDIATE, wire.rkey_response(chunk, 1), 0x10000000 | chunk))


@bad_io("rubbish-on-the-stream")
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(b"\xff" * 300)


@bad_io("zeros-on-the-stream")
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(bytes(300))


for _name, _spoil in (("ddp-version", {"ddp_version": 0}), ("rdmap-version", {"rdmap_version": 2})):
    @bad_io("wrong-" + _name)
    def _(self, connection, chunk, error, answer, descriptor, flags, spoil=_spoil):
        connection.send_raw(wire.fpdu(wire.untagged_ulpdu(wire.OP_IMMEDIATE, bytes(8), connection.msn_out, **spoil)))


@bad_io("wrong-msn")
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.msn_out += 1
    self.respond(connection, chunk, error, answer, descriptor, flags)


@bad_io("read-request-opcode")
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(wire.fpdu(wire.untagged_ulpdu(wire.OP_READ_REQUEST, bytes(28), 1, qn=1), connection.crc))


# NEW_RKEY mode: what comes in place of a good RKEY_RSP.
def bad_rkey(name, payload, allowed=("EIO",)):
    @bad_io("rkey-rsp-" + name, allowed, **NEW)
    def _(self, connection, chunk, error, answer, descriptor, flags):
        connection.send_raw(connection.write_frames(descriptor[1], descriptor[0], answer) + connection.untagged(
            wire.OP_SEND_IMMEDIATE, payload(chunk), wire.imm(wire.IMM_IO_RSP, chunk)))


bad_rkey("7-bytes", lambda chunk: wire.rkey_response(chunk, 0x107)[:7])
bad_rkey("empty", lambda chunk: b"")
bad_rkey("too-long", lambda chunk: wire.rkey_response(chunk, 0x107) + b"x")
bad_rkey("wrong-type", lambda chunk: wire.rkey_response(chunk, 0x107, kind=1))
bad_rkey("another-chunk", lambda chunk: wire.rkey_response((chunk + 1) % 32, 0x107))
bad_rkey("chunk-beyond-the-depth", lambda chunk: wire.rkey_response(32, 0x107))
bad_rkey("chunk-65535", lambda chunk: wire.rkey_response(65535, 0x107))


@bad_io("plain-answer-in-new-rkey-mode", allowed=("ok", "EIO"), **NEW)
def _(self, connection, chunk, error, answer, descriptor, flags):
    connection.send_raw(connection.write_frames(descriptor[1], descriptor[0], answer)
                        + connection.immediate(wire.imm(wire.IMM_IO_RSP, chunk)))


@at_io("heartbeats-are-not-answered-and-io-neither")
class _(BadIo):
    def on_heartbeat(self, connection):
        pass

    def respond_io(self, connection, chunk, error, answer, descriptor, flags):
        pass


@at_io("heartbeat-flood", allowed=("ok", "EIO"))
class _(BadIo):
    def respond_io(self, connection, chunk, error, answer, descriptor, flags):
        service = connection.path.connections[0]
        with service.lock:
            service.send_raw(b"".join(service.immediate(wire.imm(wire.IMM_HEARTBEAT)) for _ in range(5000)))
        self.respond(connection, chunk, error, answer, descriptor, flags)


@at_io("good", allowed=("ok",))
class _(Server):
    """The control: against a server that behaves everything works."""


@at_io("good-new-rkey", allowed=("ok",))
class _(Server):
    flags = wire.NEW_RKEY


# --- running one

CLIENT = r"""
import os, sys, time, nbd
allowed, limit = sys.argv[2].split(","), float(sys.argv[3])
h = nbd.NBD()
h.connect_uri(sys.argv[1])
size = h.get_size()
for round in range(3):
    for length in (4096, 131072, 524288):
        start = time.monotonic()
        try:
            data = h.pread(length, round * 4096)
            outcome = "ok"
        except nbd.Error as error:
            outcome = error.errno
        took = time.monotonic() - start
        if outcome not in allowed:
            sys.exit("read %d of round %d: %s instead of %s" % (length, round, outcome, allowed))
        if took > limit:
            sys.exit("read took %.1f s" % took)
        if outcome == "ok" and bytes(data) != bytes(length):
            sys.exit("read %d bytes of somebody's data" % length)
sys.exit(42)
"""


def run_case(name, verbose=False):
    server_class, stage, expectation = CASES[name]
    server = server_class()
    address = "tcp:127.0.0.1:%d" % server.port
    named = dict(connections=2, io_timeout="%ds" % IO_TIMEOUT, connect_timeout="%ds" % CONNECT_TIMEOUT,
                 heartbeat_interval="300ms")
    start = time.monotonic()
    try:
        if stage == "connect":
            # The NBD client is refused (status 1); nbdkit passes its status on, a crash would show as another.
            harness.nbdkit_run(address, "v1", 'nbdinfo --size "$uri" >/dev/null && exit 9; exit 43', status=43, timeout=20,
                               **named)
            message = "\n".join(line for line in harness.run.stderr.splitlines() if "nbdkit: " in line)
            harness.contains(message, "127.0.0.1", *expectation)
        else:
            harness.requires_nbd_module()
            limit = (IO_TIMEOUT * 2 + 3) * harness.PATIENCE
            script = "%s -c %s \"$uri\" %s %s" % (sys.executable, shell_quote(CLIENT), ",".join(expectation), limit)
            harness.nbdkit_run(address, "v1", script, status=42, timeout=60, **named)
        if harness.SANITIZER_REPORT.search(harness.run.stderr):
            raise AssertionError(harness.run.stderr[-6000:])
        if server.violations:
            raise AssertionError("the client broke the protocol: %s" % "; ".join(server.violations[:3]))
        if verbose:
            print(harness.run.stderr)
    finally:
        server.stop()
    return time.monotonic() - start


def shell_quote(text):
    return "'" + text.replace("'", "'\\''") + "'"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", action="append")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        for name, (_, stage, expectation) in CASES.items():
            print("%-56s %-8s %s" % (name, stage, " ".join(expectation)))
        return 0
    if not os.path.exists(harness.PLUGIN):
        print("SKIP: no plugin in %s" % harness.BUILD)
        return 77
    try:
        harness.requires_tool("nbdkit", "nbdinfo")
        harness.requires_nbd_module()
    except harness.Skip as skip:
        print("SKIP: %s" % skip)
        return 77
    failures, pending = [], list(arguments.case or CASES)

    def one(name):
        try:
            took = run_case(name, arguments.verbose)
            return "ok   %-56s %4.1f s" % (name, took)
        except Exception as error:
            failures.append(name)
            return "FAIL %s: %s" % (name, str(error)[-1500:])

    # They mostly wait for time-outs, each in processes of its own.
    if len(pending) == 1:
        print(one(pending[0]))
    else:
        from multiprocessing import Pool
        with Pool(4) as pool:
            for line in pool.imap_unordered(one_in_pool, pending):
                if line.startswith("FAIL"):
                    failures.append(line)
                    print(line, flush=True)
        print("%d cases, %d failures" % (len(pending), len(failures)))
    return 1 if failures else 0


def one_in_pool(name):
    try:
        run_case(name)
        return "ok   " + name
    except Exception as error:
        return "FAIL %s: %s" % (name, str(error)[-1500:])


if __name__ == "__main__":
    sys.exit(main())
