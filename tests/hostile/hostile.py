#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""A hostile client: every malformed input of the protocol by name with its expected outcome, and mutations
of good sessions at byte and at message level.

    hostile.py --port 1234 --list
    hostile.py --port 1234 --case usr-len-beyond-offset
    hostile.py --port 1234 --seconds 600 --seed 7          # the named cases, then mutations
    hostile.py --port 1234 --seed 7 --iteration 4711       # one mutation again

An outcome is a short text: "ok" or the name of an errno (the request was answered), "closed" (the path
was closed), "terminate 11/00" (closed after that Terminate), "reject ENXIO" (MPA reject), "silent". A case
lists the outcomes that are right. When a path is to be closed, all of its connections must be. After every
case a good session must work.
"""

import argparse
import errno
import os
import random
import socket
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import rawclient  # noqa: E402
import wire  # noqa: E402
from rawclient import Connection, ConnectionClosed, Rejected, Session, TimedOut  # noqa: E402

CASES = {}
SILENCE = 1.0       # seconds after which an unanswered request counts as silently dropped
CLOSE_LIMIT = 4.0   # seconds within which the other connections of a broken path must be closed


class Failed(Exception):
    pass


def case(name, *allowed, mode=None, slow=False):
    """mode: only for servers in "plain" or "new-rkey" mode."""
    def register(function):
        assert name not in CASES, name
        CASES[name] = (function, allowed, mode, slow)
        return function
    return register


def closed_text(closed):
    if closed.terminate is None:
        return "closed"
    return "terminate %02x/%02x" % (closed.terminate.layer_type, closed.terminate.code)


class HostileSession(Session):
    """Adds outcomes as text."""

    def outcome_of_close(self, cid, timeout=SILENCE):
        """What becomes of the path after something bad went out on connection cid."""
        try:
            closed = self.connections[cid].wait_closed(timeout)
        except TimedOut:
            return "silent"
        return self.all_closed(closed, cid)

    def all_closed(self, closed, cid):
        deadline = time.monotonic() + CLOSE_LIMIT
        for other in self.connections:
            if other.cid == cid:
                continue
            try:
                other.wait_closed(max(deadline - time.monotonic(), 0.05))
            except TimedOut:
                raise Failed("connection %d broke (%s), but connection %d stays open"
                             % (cid, closed, other.cid)) from None
        return closed_text(closed)

    def outcome(self, image, cid=None, timeout=SILENCE):
        cid = self.default_cid() if cid is None else cid
        try:
            return wire.errno_name(self.call(image, cid, timeout))
        except TimedOut:
            return "silent"
        except ConnectionClosed as closed:
            if closed.terminate is None:
                # The answer may be on another connection, where the mistake was noticed.
                for other in self.connections:
                    try:
                        other_closed = other.wait_closed(CLOSE_LIMIT)
                    except TimedOut:
                        raise Failed("connection %d stays open" % other.cid) from None
                    if other_closed.terminate is not None:
                        closed = other_closed
                return closed_text(closed)
            return self.all_closed(closed, [c for c in self.connections if c.terminate is not None][0].cid)

    def after(self, cid=None):
        """For inputs that must leave no trace: a read still works, on that connection too."""
        volume = self.volume
        return self.outcome(self.io_read_image(volume, 0, 512 if volume.logical == 512 else 4096), cid)

    def answer_what_is_there(self):
        try:
            while self.pump(0):
                pass
        except (ConnectionClosed, wire.WireViolation):
            pass  # whoever uses the session will see it

    def raw_outcome(self, data, cid=1):
        """Sends bytes; closed in some way, or harmless and a following read works."""
        try:
            self.connections[cid].send_raw(data)
        except ConnectionClosed as closed:
            return self.all_closed(closed, cid)
        return self.harmless_or_closed(cid)

    def harmless_or_closed(self, cid=1):
        result = self.after(cid)
        if result == "silent":  # perhaps a close is on its way
            return self.outcome_of_close(cid)
        return "harmless" if result == "ok" else result


class Context:
    def __init__(self, address, arguments):
        self.address, self.arguments = address, arguments
        self.sessions = []
        self.sockets = []
        self.crc = False

    def new_session(self, **kwargs):
        kwargs.setdefault("crc", self.crc)
        kwargs.setdefault("timeout", 5.0)
        session = HostileSession(self.address, **kwargs)
        self.sessions.append(session)
        return session

    def session(self, volume="evil", mode=wire.RW, **kwargs):
        """Established, with the volume open."""
        session = self.new_session(**kwargs)
        for other in self.sessions:  # the others must answer their heartbeats
            if other is not session and other.connections and other.chunks:
                other.answer_what_is_there()
        for attempt in range(50):
            try:
                session.establish()
                break
            except (Rejected, ConnectionClosed):
                # Limits may hold while the remains of the case before are cleared away.
                session.close()
                session.geometry = None
                if attempt == 49:
                    raise
                time.sleep(0.1)
        session.sess_info()
        session.volume = self.open(session, volume, mode)
        return session

    @staticmethod
    def open(session, volume, mode=wire.RW):
        """The writer of the case before may take a moment to be counted out."""
        for _ in range(60):
            try:
                return session.open(volume, mode)
            except rawclient.RequestFailed as failed:
                if failed.error != errno.EPERM:
                    raise
                time.sleep(0.1)
        raise Failed("volume stays open for writing by a session that is gone")

    def connection(self, timeout=5.0):
        connection = Connection(self.address, timeout=timeout)
        self.sockets.append(connection)
        return connection

    def clean_up(self):
        for thing in self.sessions + self.sockets:
            thing.close()
        self.sessions, self.sockets = [], []

    def check_alive(self):
        """A good session: connect, open, write, read, heartbeat."""
        data = os.urandom(4096)
        session = self.session()
        session.write(session.volume, 65536, data)
        if session.read(session.volume, 65536, 4096, cid=0) != data:
            raise Failed("the good session after the case read something else than it wrote")
        session.heartbeat()
        self.clean_up()


def setup_outcome(function):
    """accept, reject ERRNO, reject (no private data), closed, silent."""
    try:
        function()
    except Rejected as rejected:
        return "reject " + wire.errno_name(rejected.error) if rejected.response else "reject"
    except ConnectionClosed as closed:
        return closed_text(closed)
    except TimedOut:
        return "silent"
    return "accept"


# === MPA ===========================================================================================

def good_request(**kwargs):
    return wire.connect_request(os.urandom(16), os.urandom(16), **kwargs)


def mpa_case(name, allowed, data):
    @case("mpa-" + name, *allowed)
    def run(ctx):
        connection = ctx.connection(timeout=3)

        def go():
            connection.send_raw(data())
            connection.mpa_reply()
        return setup_outcome(go)


mpa_case("wrong-key", ["closed"], lambda: wire.mpa_frame(good_request(), key=b"MPA ID Req Frane"))
mpa_case("reply-key-in-a-request", ["closed"], lambda: wire.mpa_frame(good_request(), key=wire.MPA_REPLY_KEY))
mpa_case("http", ["closed"], lambda: b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
mpa_case("revision-0", ["closed"], lambda: wire.mpa_frame(good_request(), revision=0))
mpa_case("revision-3", ["closed"], lambda: wire.mpa_frame(good_request(), revision=3))
mpa_case("revision-255", ["closed"], lambda: wire.mpa_frame(good_request(), revision=255))
mpa_case("reject-flag-in-a-request", ["closed"], lambda: wire.mpa_frame(good_request(), flags=wire.MPA_REJECT))
mpa_case("private-data-257", ["closed"], lambda: wire.mpa_frame(good_request() + bytes(201)))
mpa_case("private-data-length-65535", ["closed"], lambda: wire.mpa_frame(good_request(), length=65535))
mpa_case("reserved-flags", ["accept"], lambda: wire.mpa_frame(good_request(), flags=0x0F))
mpa_case("revision-2-without-enhanced", ["accept"], lambda: wire.mpa_frame(good_request(), revision=2))
mpa_case("enhanced-with-3-bytes", ["reject", "closed"],
         lambda: wire.mpa_frame(bytes(3), flags=wire.MPA_ENHANCED, revision=2))
mpa_case("enhanced", ["accept"],
         lambda: wire.mpa_frame(bytes.fromhex("00010001") + good_request(), flags=wire.MPA_ENHANCED, revision=2))


@case("mpa-markers-wanted", "reject")
def _(ctx):
    connection = ctx.connection()

    def go():
        connection.send_raw(wire.mpa_frame(good_request(), flags=wire.MPA_MARKERS | wire.MPA_CRC))
        connection.mpa_reply()
    result = setup_outcome(go)
    if not connection.reply.flags & wire.MPA_CRC or connection.reply.revision != 1:
        raise Failed("the reject does not repeat revision and C: %02x %d" % (connection.reply.flags,
                                                                             connection.reply.revision))
    connection.wait_closed(3)
    return result


@case("mpa-eof-after-every-prefix", "closed")
def _(ctx):
    whole = wire.mpa_frame(good_request())
    for length in range(0, len(whole), 5):
        connection = ctx.connection(timeout=3)
        connection.send_raw(whole[:length])
        connection.half_close()
        connection.wait_closed()
        connection.close()
    return "closed"


@case("mpa-reset-after-every-prefix", "closed")
def _(ctx):
    whole = wire.mpa_frame(good_request())
    for length in range(0, len(whole) + 1, 5):
        connection = ctx.connection()
        connection.send_raw(whole[:length])
        connection.reset_close()
    return "closed"


@case("mpa-silent-and-byte-per-half-second", "closed", slow=True)
def _(ctx):
    """The limit of 5 s is absolute: a byte now and then must not extend it."""
    silent, slow = ctx.connection(), ctx.connection()
    whole, start, at = wire.mpa_frame(good_request()), time.monotonic(), 0
    ends = {}
    while len(ends) < 2 and time.monotonic() < start + 12:
        for connection in (silent, slow):
            if connection not in ends and connection._read(0.25) and connection.eof:
                ends[connection] = time.monotonic() - start
        if slow not in ends:
            try:
                slow.send_raw(whole[at:at + 1])
                at += 1
            except ConnectionClosed:
                ends[slow] = time.monotonic() - start
    if len(ends) < 2 or not all(3 < end < 8 for end in ends.values()):
        raise Failed("closed after %s s" % [round(end, 1) for end in ends.values()])
    return "closed"


@case("mpa-request-in-single-bytes", "accept")
def _(ctx):
    connection = ctx.connection()

    def go():
        for byte in wire.mpa_frame(good_request()):
            connection.send_raw(bytes((byte,)))
        connection.mpa_reply()
    return setup_outcome(go)


@case("mpa-data-behind-the-request", "accept", "closed")
def _(ctx):
    """The initiator must wait for the reply. Whatever comes of it, it must not be taken as a session."""
    connection = ctx.connection()

    def go():
        connection.send_raw(wire.mpa_frame(good_request(cid_num=1)) + connection.frame_untagged(
            wire.OP_SEND, wire.info_request("early")))
        connection.mpa_reply()
    return setup_outcome(go)


@case("mpa-many-silent-connections", "accept")
def _(ctx):
    """200 sockets that say nothing, and a good client still gets in."""
    for _ in range(200):
        try:
            ctx.connection()
        except OSError:
            break
    for attempt in range(20):
        try:
            ctx.new_session().establish()
            return "accept"
        except (Rejected, ConnectionClosed, OSError):
            time.sleep(0.5)
    return "closed"


# === Connection request ============================================================================

def request_case(name, allowed, private, **frame):
    @case("request-" + name, *allowed)
    def run(ctx):
        return setup_outcome(lambda: ctx.connection().mpa_connect(private(), **frame))


RESET = ["reject ECONNRESET"]
request_case("empty", RESET, lambda: b"")
request_case("1-byte", RESET, lambda: b"\0")
request_case("55-bytes", RESET, lambda: good_request()[:55])
request_case("57-bytes", ["accept"], lambda: good_request() + b"x")
request_case("256-bytes", ["accept"], lambda: good_request() + bytes(200))
request_case("zeros", RESET, lambda: bytes(56))
request_case("ones", RESET, lambda: b"\xff" * 56)
request_case("wrong-magic", RESET, lambda: good_request(magic=0xBD1B))
request_case("major-1", RESET, lambda: good_request(version=0x0100))
request_case("major-3", RESET, lambda: good_request(version=0x0300))
request_case("odd-minor", ["accept"], lambda: good_request(version=0x0207))
request_case("cid-num-0", RESET, lambda: good_request(cid_num=0))
request_case("cid-num-1", ["accept"], lambda: good_request(cid_num=1))
# Within the protocol, but a server may bound it lower.
request_case("cid-num-4096", ["accept"] + RESET + ["reject ENOMEM", "reject EMFILE"],
             lambda: good_request(cid_num=4096))
request_case("cid-num-4097", RESET, lambda: good_request(cid_num=4097))
request_case("cid-num-65535", RESET, lambda: good_request(cid_num=65535))
request_case("cid-equals-cid-num", RESET, lambda: good_request(cid=2, cid_num=2))
request_case("cid-beyond-cid-num", RESET, lambda: good_request(cid=65535, cid_num=2))
request_case("unknown-session-without-first-conn", ["reject ENXIO"], lambda: good_request(first_conn=False))
request_case("cid-3-before-cid-0", ["accept"] + RESET, lambda: good_request(cid=3, cid_num=5))


@case("request-cma-bytes-set", "accept")
def _(ctx):
    private = b"\x40\x05" + good_request()[2:]
    return setup_outcome(lambda: ctx.connection().mpa_connect(private))


@case("request-reserved-bytes-set", "accept")
def _(ctx):
    private = good_request()[:44] + b"\xff" * 12
    return setup_outcome(lambda: ctx.connection().mpa_connect(private))


@case("request-cid-num-changes-within-a-path", *RESET)
def _(ctx):
    session = ctx.new_session(connections=3)
    session.open_connection(0)
    return setup_outcome(lambda: session.open_connection(1, cid_num=4))


@case("request-same-cid-twice", *RESET)
def _(ctx):
    session = ctx.new_session(connections=3)
    session.open_connection(0)
    session.open_connection(1)
    return setup_outcome(lambda: session.open_connection(1))


@case("request-path-that-is-connected", *RESET)
def _(ctx):
    session = ctx.session()
    result = setup_outcome(lambda: session.open_connection(0))
    if session.after() != "ok":
        raise Failed("the connected path suffered")
    return result


@case("request-path-of-another-session", "accept", *RESET)
def _(ctx):
    """The path's uuid under another session's uuid: at most a session of its own, never a share in mine."""
    victim = ctx.session()
    other = ctx.new_session(path_uuid=victim.path_uuid)
    result = setup_outcome(other.establish)
    if result == "accept":
        stag = victim.chunks[0][1]
        other.connections[1].write(stag, victim.chunks[0][0], bytes(8))
        if not other.outcome_of_close(1).startswith("terminate 11/0"):
            raise Failed("a path of another session accepts the victim's key")
    if victim.after() != "ok":
        raise Failed("the victim suffered")
    return result


@case("request-second-path-between-the-same-addresses", "reject EEXIST")
def _(ctx):
    session = ctx.session()
    second = ctx.new_session(session_uuid=session.session_uuid, name=session.name)
    return setup_outcome(second.establish)


@case("request-more-than-128-paths", "reject ECONNRESET", "reject EEXIST", "reject ENOMEM", "reject EBUSY")
def _(ctx):
    first = ctx.session(connections=1)
    for number in range(1, 140):
        path = ctx.new_session(session_uuid=first.session_uuid, name=first.name, connections=1,
                               source="127.0.1.%d" % number, first_conn=False)
        result = setup_outcome(path.establish)
        first.answer_what_is_there()
        if result != "accept":
            if first.after(0) != "ok":
                raise Failed("the first path suffered")
            return result
    return "accept"


@case("request-flood-of-half-open-paths", "reject")
def _(ctx):
    """Somewhere there must be a limit; a session that is up does not feel it, and it ends with the flood."""
    good = ctx.session()
    refused = 0
    for _ in range(400):
        session = ctx.new_session()
        if setup_outcome(lambda: session.open_connection(0)) != "accept":
            refused += 1
        good.answer_what_is_there()
    if good.after() != "ok":
        raise Failed("the established session suffered")
    return "reject" if refused else "accept"


@case("request-flood-of-sessions", "ok")
def _(ctx):
    """Sessions until the limit, which must refuse with a reason; then all leave and there is room again."""
    good = ctx.session()
    for _ in range(300):
        session = ctx.new_session(connections=1)
        result = setup_outcome(session.establish)
        if result != "accept":
            if not result.startswith("reject E"):
                raise Failed("over the limit: %s" % result)
            break
        good.answer_what_is_there()
    return good.after()


@case("disconnect-during-establishment", "closed")
def _(ctx):
    for victim in range(3):
        for reset in (False, True):
            session = ctx.new_session(connections=4)
            for cid in range(3):
                session.open_connection(cid)
            connection = session.connections.pop(victim)
            connection.reset_close() if reset else connection.close()
            for other in session.connections:
                other.wait_closed(CLOSE_LIMIT)
    return "closed"


@case("disconnect-around-info", "closed")
def _(ctx):
    """Before INFO_REQ, and between INFO_REQ and INFO_RSP, each connection, FIN and RST."""
    for victim in range(3):
        for reset in (False, True):
            for info_first in (False, True):
                session = ctx.new_session(connections=3)
                session.connect()
                if info_first:
                    session.connections[0].send(wire.info_request(session.name))
                connection = session.connections.pop(victim)
                connection.reset_close() if reset else connection.close()
                for other in session.connections:
                    other.wait_closed(CLOSE_LIMIT)
    return "closed"


# === INFO ==========================================================================================

def info_case(name, allowed, act, connections=2, connect=None):
    @case("info-" + name, *allowed)
    def run(ctx):
        session = ctx.new_session(connections=connections)
        if connect is None:
            session.connect()
        else:
            for cid in range(connect):
                session.open_connection(cid)
        cid = act(session) or 0
        try:
            session.wait_info()
        except ConnectionClosed:
            pass
        except TimedOut:
            return "silent"
        else:
            return "ok"
        return session.outcome_of_close(cid)


def send_info(name=None, data=None, cid=0):
    def act(session):
        session.timeout = 2
        session.connections[cid].send(data(session) if data else wire.info_request(name))
        return cid
    return act


info_case("before-all-connections", ["closed"], send_info("early"), connections=4, connect=2)
info_case("0-bytes", ["closed"], send_info(data=lambda s: b""))
info_case("1-byte", ["closed"], send_info(data=lambda s: b"\0"))
info_case("271-bytes", ["closed"], send_info(data=lambda s: wire.info_request(s.name)[:271]))
info_case("273-bytes", ["terminate 12/05"], send_info(data=lambda s: wire.info_request(s.name) + b"x"))
info_case("1-mib", ["terminate 12/05"], send_info(data=lambda s: wire.info_request(s.name) + bytes(60000)))
info_case("wrong-type", ["closed"], send_info(data=lambda s: wire.info_request(s.name, kind=1)))
info_case("name-empty", ["closed"], send_info(""))
info_case("name-without-nul", ["closed"], send_info(b"x" * 255))
info_case("name-254", ["ok"], send_info(b"x" * 254))
info_case("name-slash", ["closed"], send_info("a/b"))
info_case("name-dot", ["closed"], send_info("a.b"))
info_case("name-percent", ["ok", "closed"], send_info("%n%s%SESSNAME%"))
info_case("name-control-bytes", ["ok", "closed"], send_info(b"\x1b[2Ja\nb\rc\x07\x7f"))
info_case("name-not-utf8", ["ok", "closed"], send_info(b"\xff\xfe\x80\xc0"))
info_case("garbage-behind-the-name", ["ok"],
          send_info(data=lambda s: b"\0\0" + s.name.encode() + b"\0" + b"\xaa" * (269 - len(s.name))))


@case("info-on-connection-1", "terminate 12/02", "closed")
def _(ctx):
    """Connection 1 has no receive posted before INFO."""
    session = ctx.new_session()
    session.connect()
    session.connections[1].send(wire.info_request(session.name))
    return session.outcome_of_close(1)


@case("info-twice", "terminate 12/05")
def _(ctx):
    session = ctx.session()
    session.connections[0].send(wire.info_request(session.name))
    return session.outcome_of_close(0)


@case("info-name-of-another-session", "closed")
def _(ctx):
    first = ctx.session()
    second = ctx.new_session(name=first.name)
    second.connect()
    second.connections[0].send(wire.info_request(first.name))
    result = second.outcome_of_close(0, 2)
    if first.after() != "ok":
        raise Failed("the session that owns the name suffered")
    return result


@case("info-never-comes", "closed", slow=True)
def _(ctx):
    """A half-open path is given up after the handshake limit; see --handshake-timeout."""
    session = ctx.new_session()
    session.connect()
    limit = ctx.arguments.handshake_timeout
    if limit > 10 and not ctx.arguments.long:
        return None
    return session.outcome_of_close(0, limit + 5)


# === Sends where only writes belong ================================================================

@case("send-with-payload-after-info", "terminate 12/05")
def _(ctx):
    session = ctx.session()
    session.connections[1].send(b"12345678")
    return session.outcome_of_close(1)


@case("send-with-immediate-and-payload", "terminate 12/05", "closed")
def _(ctx):
    session = ctx.session()
    connection = session.connections[1]
    connection.send_raw(connection.frame_untagged(wire.OP_SEND_IMMEDIATE, bytes(8), 0x10000000))
    return session.outcome_of_close(1)


@case("send-empty-must-not-starve-receives", "harmless", "closed")
def _(ctx):
    session = ctx.session()
    connection = session.connections[1]
    try:
        for _ in range(3 * session.queue_depth):
            connection.send(b"")
    except ConnectionClosed as closed:
        return session.all_closed(closed, 1)
    return session.harmless_or_closed()


@case("send-in-one-burst-larger-than-all-receives", "harmless", "closed", "terminate 12/02")
def _(ctx):
    session = ctx.session()
    connection = session.connections[1]
    return session.raw_outcome(b"".join(connection.frame_untagged(wire.OP_SEND, b"") for _ in range(2000)))


# === iWARP, the checks in their order ==============================================================

def iwarp_case(name, allowed, ulpdu, cid=1, crc=None, follow=b"", **frame):
    """ulpdu(session, connection) -> bytes of one ULPDU, sent on an established path."""
    @case("iwarp-" + name, *allowed)
    def run(ctx):
        session = ctx.session(**({} if crc is None else {"crc": crc}))
        session.after(cid)  # a responder sends no Terminate before it received something good
        connection = session.connections[cid]
        return session.raw_outcome(connection.fpdu(ulpdu(session, connection), **frame) + follow, cid)


def untagged(opcode, payload=b"", **kwargs):
    def build(session, connection):
        arguments = dict(kwargs)
        if "msn_plus" in arguments:
            arguments["msn"] = connection.msn_out + arguments.pop("msn_plus")
        arguments.setdefault("msn", connection.msn_out)
        return wire.untagged_ulpdu(opcode, payload, **arguments)
    return build


def tagged(stag=None, to=None, payload=b"12345678", **kwargs):
    """stag and to as functions of the session's first chunk (address, key)."""
    def build(session, connection):
        address, key = session.chunks[0]
        return wire.tagged_ulpdu(key if stag is None else stag(key), address if to is None else to(address),
                                 payload, **kwargs)
    return build


for _length in (0, 1, 2, 13):
    iwarp_case("1-length-%d" % _length, ["terminate 20/03"], lambda s, c, n=_length: b"\xc1\x40" [:n].ljust(n, b"\0"),
               follow=bytes(32))
iwarp_case("1-untagged-length-17", ["terminate 20/03"], lambda s, c: untagged(wire.OP_SEND)(s, c)[:17], follow=bytes(32))
iwarp_case("1-untagged-length-14", ["terminate 20/03"], lambda s, c: untagged(wire.OP_SEND)(s, c)[:14], follow=bytes(32))
for _version in (0, 2, 3):
    iwarp_case("2-ddp-version-%d-tagged" % _version, ["terminate 11/04"], tagged(ddp_version=_version))
    iwarp_case("2-ddp-version-%d-untagged" % _version, ["terminate 12/06"], untagged(wire.OP_SEND, ddp_version=_version))
    iwarp_case("3-rdmap-version-%d-tagged" % _version, ["terminate 02/05"], tagged(rdmap_version=_version))
    iwarp_case("3-rdmap-version-%d-untagged" % _version, ["terminate 02/05"],
               untagged(wire.OP_SEND, rdmap_version=_version))
for _opcode in (0x1, 0xA, 0xB, 0xD, 0xE, 0xF):
    iwarp_case("4-opcode-%x" % _opcode, ["terminate 02/06"], untagged(_opcode))
    iwarp_case("4-opcode-%x-tagged" % _opcode, ["terminate 02/06"], tagged(opcode=_opcode))
iwarp_case("4-read-response", ["terminate 02/06"], tagged(opcode=wire.OP_READ_RESPONSE))
iwarp_case("4-read-response-untagged", ["terminate 02/06"], untagged(wire.OP_READ_RESPONSE))
iwarp_case("4-read-request-whole", ["terminate 02/06"],
           untagged(wire.OP_READ_REQUEST, struct.pack(">IQIIQ", 0x100, 0, 4096, 0x100, 0), qn=1, msn=1))
iwarp_case("4-write-untagged", ["terminate 02/06"], untagged(wire.OP_WRITE))
for _opcode in (wire.OP_SEND, wire.OP_SEND_INVALIDATE, wire.OP_TERMINATE, wire.OP_IMMEDIATE, wire.OP_SEND_IMMEDIATE):
    iwarp_case("4-untagged-opcode-%x-sent-tagged" % _opcode, ["terminate 02/06"], tagged(opcode=_opcode))


@case("iwarp-5-opcode-changes-within-a-message", "terminate 02/07")
def _(ctx):
    session = ctx.session()
    c = session.connections[1]
    return session.raw_outcome(c.fpdu(untagged(wire.OP_SEND, last=False)(session, c))
                               + c.fpdu(untagged(wire.OP_SEND_SE)(session, c)))


@case("iwarp-5-write-within-a-send", "terminate 02/07")
def _(ctx):
    session = ctx.session()
    c = session.connections[1]
    return session.raw_outcome(c.fpdu(untagged(wire.OP_SEND, last=False)(session, c)) + c.fpdu(tagged()(session, c)))


@case("iwarp-5-send-within-a-write", "terminate 02/07")
def _(ctx):
    session = ctx.session()
    c = session.connections[1]
    return session.raw_outcome(c.fpdu(tagged(last=False)(session, c)) + c.fpdu(untagged(wire.OP_SEND)(session, c)))


@case("iwarp-5-immediate-within-info-request", "terminate 02/07")
def _(ctx):
    session = ctx.new_session()
    session.connect()
    c = session.connections[0]
    c.send_raw(c.fpdu(wire.untagged_ulpdu(wire.OP_SEND, bytes(100), 1, last=False))
               + c.fpdu(wire.untagged_ulpdu(wire.OP_IMMEDIATE, bytes(8), 1, mo=100)))
    return session.outcome_of_close(0)


for _qn in (1, 2, 3, 0xFFFFFFFF):
    iwarp_case("6-send-on-queue-%x" % _qn, ["terminate 12/01"], untagged(wire.OP_SEND, qn=_qn))
iwarp_case("6-immediate-on-queue-1", ["terminate 12/01"], untagged(wire.OP_IMMEDIATE, bytes(8), qn=1))
iwarp_case("7-msn-0", ["terminate 12/03"], untagged(wire.OP_IMMEDIATE, bytes(8), msn=0))
iwarp_case("7-msn-one-too-high", ["terminate 12/03"], untagged(wire.OP_IMMEDIATE, bytes(8), msn_plus=1))
iwarp_case("7-msn-repeated", ["terminate 12/03"], untagged(wire.OP_IMMEDIATE, bytes(8), msn_plus=-1), cid=0)
iwarp_case("7-msn-far-away", ["terminate 12/03"], untagged(wire.OP_IMMEDIATE, bytes(8), msn_plus=0x80000000))


@case("iwarp-8-no-receive-posted", "terminate 12/02")
def _(ctx):
    session = ctx.new_session()
    session.connect()
    session.connections[1].immediate(wire.imm(wire.IMM_IO_REQ))
    return session.outcome_of_close(1)


iwarp_case("9-first-segment-at-offset-4", ["terminate 12/04"], untagged(wire.OP_SEND, mo=4))
iwarp_case("9-offset-near-4-gib", ["terminate 12/04"], untagged(wire.OP_SEND, b"x" * 16, mo=0xFFFFFFF8))


@case("iwarp-9-gap-between-segments", "terminate 12/04")
def _(ctx):
    session = ctx.new_session()
    session.connect()
    c = session.connections[0]
    c.send_raw(c.fpdu(wire.untagged_ulpdu(wire.OP_SEND, bytes(100), 1, last=False))
               + c.fpdu(wire.untagged_ulpdu(wire.OP_SEND, bytes(100), 1, mo=104)))
    return session.outcome_of_close(0)


@case("iwarp-10-segments-longer-than-the-receive", "terminate 12/05")
def _(ctx):
    session = ctx.new_session()
    session.connect()
    c = session.connections[0]
    c.send_raw(c.fpdu(wire.untagged_ulpdu(wire.OP_SEND, bytes(200), 1, last=False))
               + c.fpdu(wire.untagged_ulpdu(wire.OP_SEND, bytes(200), 1, mo=200)))
    return session.outcome_of_close(0)


for _length in (0, 4, 7, 9, 16, 4096):
    iwarp_case("11-immediate-of-%d-bytes" % _length, ["terminate 02/ff"], untagged(wire.OP_IMMEDIATE, bytes(_length)))
iwarp_case("11-immediate-in-two-segments", ["terminate 02/ff"], untagged(wire.OP_IMMEDIATE, bytes(8), last=False))
iwarp_case("12-empty-write-to-nowhere", ["harmless"], tagged(stag=lambda k: 0xDEADBE00, payload=b""))
iwarp_case("13-stag-0", ["terminate 11/00"], tagged(stag=lambda k: 0))
iwarp_case("13-stag-unknown", ["terminate 11/00"], tagged(stag=lambda k: 0xFFFFFF00))
iwarp_case("13-stag-with-a-stale-key", ["terminate 11/00"], tagged(stag=lambda k: (k & ~0xFF) | ((k - 1) & 0xFF)))
iwarp_case("13-stag-with-a-future-key", ["terminate 11/00"], tagged(stag=lambda k: (k & ~0xFF) | ((k + 1) & 0xFF)))


@case("iwarp-13-every-other-stag-index", "terminate 11/00", "terminate 11/02")
def _(ctx):
    """No index but those of its own INFO_RSP is of any use to a client."""
    result = "terminate 11/00"
    for index in (1, 2, 3, 7, 100, 255, 256, 0xFFFF, 0x10000, 0xFFFFFF):
        session = ctx.session()
        address, key = session.chunks[0]
        if any(index == k >> 8 for _, k in session.chunks):
            ctx.clean_up()
            continue
        c = session.connections[1]
        result = session.raw_outcome(c.fpdu(wire.tagged_ulpdu(index << 8 | (key & 0xFF), address, b"12345678")))
        if result not in ("terminate 11/00", "terminate 11/02"):
            raise Failed("index %x: %s" % (index, result))
        ctx.clean_up()
    return result


@case("iwarp-14-stag-of-another-session", "terminate 11/02")
def _(ctx):
    victim, session = ctx.session("evil4k"), ctx.session()
    victim.write(victim.volume, 0, b"v" * 4096)
    address, key = victim.chunks[0]
    c = session.connections[1]
    result = session.raw_outcome(c.fpdu(wire.tagged_ulpdu(key, address, b"\xff" * 64)))
    if victim.after() != "ok":
        raise Failed("the victim suffered")
    return result


iwarp_case("15-offset-wraps", ["terminate 11/03"], tagged(to=lambda a: 0xFFFFFFFFFFFFFFFC))
iwarp_case("15-offset-wraps-far", ["terminate 11/03"], tagged(to=lambda a: 0xFFFFFFFFFFFFFFFF, payload=bytes(4096)))
iwarp_case("16-below-the-base", ["terminate 11/01"], tagged(to=lambda a: a - 1 if a else 0xFFFFFFFFFFFFFFF0))
iwarp_case("16-far-beyond-the-end", ["terminate 11/01"], tagged(to=lambda a: a + (1 << 31)))
iwarp_case("16-top-half-of-the-address-space", ["terminate 11/01"], tagged(to=lambda a: a | 1 << 63))


@case("iwarp-16-one-byte-beyond-the-end", "terminate 11/01")
def _(ctx):
    session = ctx.session()
    address, key = session.chunks[-1]
    c = session.connections[1]
    to = address + session.geometry.chunk_size - 7
    return session.raw_outcome(c.fpdu(wire.tagged_ulpdu(key, to, b"12345678")))


@case("iwarp-16-last-byte-is-fine", "harmless")
def _(ctx):
    session = ctx.session()
    address, key = session.chunks[-1]
    c = session.connections[1]
    to = address + session.geometry.chunk_size - 8
    return session.raw_outcome(c.fpdu(wire.tagged_ulpdu(key, to, b"12345678")))


@case("iwarp-16-second-segment-runs-over-the-end", "terminate 11/01")
def _(ctx):
    session = ctx.session()
    address, key = session.chunks[-1]
    c = session.connections[1]
    to = address + session.geometry.chunk_size - 64
    return session.raw_outcome(c.fpdu(wire.tagged_ulpdu(key, to, bytes(64), last=False))
                               + c.fpdu(wire.tagged_ulpdu(key, to + 64, bytes(4))))


iwarp_case("18-invalidate-unknown-stag", ["terminate 02/09"], untagged(wire.OP_SEND_INVALIDATE, ulp=0xFFFFFF00))
iwarp_case("18-invalidate-stag-0", ["terminate 02/09"], untagged(wire.OP_SEND_INVALIDATE, ulp=0))
iwarp_case("18-invalidate-own-chunk", ["terminate 01/09", "closed"],  # hurts nobody but the path itself
           lambda s, c: untagged(wire.OP_SEND_INVALIDATE, ulp=s.chunks[0][1])(s, c))
iwarp_case("18-invalidate-own-chunk-with-solicited-event", ["terminate 01/09", "closed"],
           lambda s, c: untagged(wire.OP_SEND_SE_INVALIDATE, ulp=s.chunks[0][1])(s, c))


@case("iwarp-18-invalidate-a-chunk-of-another-session", "terminate 01/09")
def _(ctx):
    victim, session = ctx.session("evil4k"), ctx.session()
    c = session.connections[1]
    result = session.raw_outcome(c.fpdu(untagged(wire.OP_SEND_INVALIDATE, ulp=victim.chunks[0][1])(session, c)))
    if victim.after() != "ok":
        raise Failed("the victim suffered")
    return result


for _cid in (0, 1):
    iwarp_case("19-bad-crc-on-connection-%d" % _cid, ["terminate 20/02"], untagged(wire.OP_IMMEDIATE, bytes(8)),
               cid=_cid, crc=True, crc_xor=0x00010000)
iwarp_case("19-bad-crc-on-a-write", ["terminate 20/02"], tagged(payload=bytes(100)), crc=True, crc_xor=1)
@case("iwarp-19-zero-crc-where-one-is-due", "terminate 20/02")
def _(ctx):
    session = ctx.session(crc=True)
    session.after(1)
    ulpdu = untagged(wire.OP_IMMEDIATE, bytes(8))(session, session.connections[1])
    return session.raw_outcome(wire.fpdu(ulpdu, crc=False))


@case("iwarp-19-bad-crc-in-a-large-segment-is-not-executed", "terminate 20/02")
def _(ctx):
    """Placed, perhaps, but never delivered: the request behind it must not run."""
    session = ctx.session(crc=True)
    session.write(session.volume, 0, b"a" * 49152)
    image = session.io_write_image(session.volume, 0, b"b" * 49152)
    address, key = session.chunks[image.chunk]
    c = session.connections[1]
    data = c.fpdu(wire.tagged_ulpdu(key, address, image.payload), crc_xor=4)
    data += c.frame_untagged(wire.OP_IMMEDIATE,
                             wire.immediate_payload(wire.request_imm(session.queue_depth, image.chunk, image.offset)))
    result = session.raw_outcome(data)
    again = ctx.session(crc=True)
    if again.read(again.volume, 0, 49152) != b"a" * 49152:
        raise Failed("a write with a CRC error reached the volume")
    return result


iwarp_case("20-pad-not-zero", ["harmless"], tagged(payload=b"12345"), pad=b"\xaa\xbb\xcc")
iwarp_case("reserved-ddp-bits", ["harmless"], lambda s, c: bytes((0xC1 | 0x3C, 0x40)) + tagged()(s, c)[2:])
iwarp_case("reserved-rdmap-bits", ["harmless"], lambda s, c: bytes((0xC1, 0x70)) + tagged()(s, c)[2:])
@case("iwarp-first-fpdu-on-a-connection-is-malformed", "closed", "terminate 02/06")
def _(ctx):
    """A responder sends nothing, not even Terminate, before it received one valid FPDU."""
    session = ctx.session()
    return session.raw_outcome(session.connections[1].fpdu(untagged(0xF)(session, session.connections[1])))


@case("iwarp-ulp-field-and-second-word-of-immediate-data-set", "harmless")
def _(ctx):
    session = ctx.session()
    connection = session.connections[1]
    connection.send_raw(connection.frame_untagged(wire.OP_IMMEDIATE, struct.pack(">II", 0x90000000, 0xFFFFFFFF),
                                                  ulp=0xFFFFFFFF))
    return session.harmless_or_closed()


@case("iwarp-immediate-with-solicited-event", "ok")
def _(ctx):
    session = ctx.session()
    c = session.connections[0]
    before = session.acks
    c.send_raw(c.frame_untagged(wire.OP_IMMEDIATE_SE, wire.immediate_payload(wire.imm(wire.IMM_HEARTBEAT))))
    session.idle(0.3)
    return "ok" if session.acks == before + 1 else "silent"


def terminate_case(name, build):
    @case("iwarp-terminate-" + name, "closed")
    def run(ctx):
        """Never answered by a Terminate, and the path is gone."""
        session = ctx.session()
        session.connections[1].send_raw(session.connections[1].fpdu(build()))
        return session.outcome_of_close(1)


terminate_case("received", lambda: wire.terminate_ulpdu(0x11, 0x02))
terminate_case("on-queue-0", lambda: wire.untagged_ulpdu(wire.OP_TERMINATE, bytes(4), 1))
terminate_case("with-msn-7", lambda: wire.terminate_ulpdu(0x11, 0x02, msn=7))
terminate_case("empty", lambda: wire.untagged_ulpdu(wire.OP_TERMINATE, b"", 1, qn=2))
terminate_case("64-kib", lambda: wire.untagged_ulpdu(wire.OP_TERMINATE, bytes(65000), 1, qn=2))
terminate_case("with-cut-header", lambda: wire.untagged_ulpdu(wire.OP_TERMINATE, bytes((0x11, 0, 0xC0, 0, 0)), 1, qn=2))
terminate_case("mirrored-like-siw", lambda: wire.untagged_ulpdu(wire.OP_TERMINATE, bytes((0x20, 6, 3, 0)), 1, qn=2))


@case("iwarp-first-fpdu-is-terminate", "closed")
def _(ctx):
    session = ctx.new_session()
    session.connect()
    session.connections[0].send_terminate(0, 0)
    return session.outcome_of_close(0)


@case("iwarp-largest-fpdu", "ok")
def _(ctx):
    """L up to 65535 is accepted whatever we send ourselves."""
    session = ctx.session()
    data = os.urandom(61440)
    image = session.io_write_image(session.volume, 0, data)
    address, key = session.chunks[image.chunk]
    if len(image.payload) > 65521:
        raise Failed("case needs a smaller request")
    session.busy.add(image.chunk)
    session.pending[image.chunk] = image
    c = session.connections[1]
    c.send_raw(c.fpdu(wire.tagged_ulpdu(key, address, image.payload)) + c.frame_untagged(
        wire.OP_IMMEDIATE, wire.immediate_payload(wire.request_imm(session.queue_depth, image.chunk, image.offset))))
    if session.wait(image).error or session.read(session.volume, 0, 61440) != data:
        raise Failed("data differ")
    # 65535 = 14 + 65521 bytes over the room of a chunk, without a request behind it.
    if session.geometry.chunk_size >= 65521:
        c.send_raw(c.fpdu(wire.tagged_ulpdu(key if not session.new_rkey else session.chunks[image.chunk][1], address,
                                            bytes(65521))))
    return session.after()


@case("iwarp-any-split-of-the-stream", "ok")
def _(ctx):
    """The same bytes in pieces of 1..n: TCP keeps no borders."""
    session = ctx.session()
    c = session.connections[1]
    data = os.urandom(4096)
    for size in (1, 2, 3, 7, 19, 21, 100, 1459):
        image = session.io_write_image(session.volume, 8192, data)
        session.busy.add(image.chunk)
        session.pending[image.chunk] = image
        frames = session.frames(image, c)
        pieces = [frames[at:at + size] for at in range(0, len(frames), size)]
        if size <= 3:  # the interesting borders are in the headers
            pieces = pieces[:60] + [b"".join(pieces[60:-60])] + pieces[-60:]
        for piece in pieces:
            c.send_raw(piece)
        if session.wait(image).error or session.read(session.volume, 8192, 4096) != data:
            raise Failed("pieces of %d" % size)
    return "ok"


@case("iwarp-write-in-tiny-segments", "ok")
def _(ctx):
    session = ctx.session()
    data = os.urandom(4096)
    image = session.io_write_image(session.volume, 0, data)
    address, key = session.chunks[image.chunk]
    session.busy.add(image.chunk)
    session.pending[image.chunk] = image
    c = session.connections[1]
    c.send_raw(c.frame_write(key, address, image.payload, segment=5) + c.frame_untagged(
        wire.OP_IMMEDIATE, wire.immediate_payload(wire.request_imm(session.queue_depth, image.chunk, image.offset))))
    if session.wait(image).error or session.read(session.volume, 0, 4096) != data:
        raise Failed("data differ")
    return "ok"


def cut_case(name, end):
    @case("iwarp-" + name, "closed")
    def run(ctx):
        """FIN or RST at every kind of place inside a request; it must not be executed."""
        session = ctx.session()
        session.write(session.volume, 0, b"k" * 8192)
        for cut in (1, 2, 3, 10, 16, 17, 5000, -40, -31, -1):  # a whole request has 8280 bytes
            victim = ctx.session("evil", wire.RO)
            image = victim.io_write_image(victim.volume, 0, b"l" * 8192)
            victim.connections[1].send_raw(victim.frames(image, victim.connections[1])[:cut])
            end(victim.connections[1])
            victim.connections[0].wait_closed(CLOSE_LIMIT)
            victim.close()
        if session.read(session.volume, 0, 8192) != b"k" * 8192:
            raise Failed("a cut request was executed")
        return "closed"


cut_case("fin-inside-a-request", lambda c: c.half_close())
cut_case("reset-inside-a-request", lambda c: c.reset_close())


@case("iwarp-fpdu-that-never-ends", "closed", slow=True)
def _(ctx):
    """Half an FPDU on connection 1 while connection 0 answers heartbeats: the progress limit of 25 s ends it."""
    if not ctx.arguments.long:
        return None
    session = ctx.session()
    image = session.io_write_image(session.volume, 0, b"x" * 4096)
    session.connections[1].send_raw(session.frames(image, session.connections[1])[:1000])
    deadline = time.monotonic() + 35
    try:
        while time.monotonic() < deadline:
            session.pump(0.2)
    except ConnectionClosed as closed:
        return closed_text(closed)
    return "silent"


@case("leave-request-and-fin-in-one-segment", "closed")
def _(ctx):
    """The end of the stream arrives together with the last bytes; it must be found at once, whole or cut."""
    for cut in (0, 1, 40):
        session = ctx.session()
        connection = session.connections[1]
        frames = session.frames(session.io_write_image(session.volume, 0, b"x" * 4096), connection)
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        connection.send_raw(frames[:len(frames) - cut])
        connection.half_close()
        session.connections[0].wait_closed(1.5)
        ctx.clean_up()
    return "closed"


@case("iwarp-io-before-info", "terminate 12/02", "closed")
def _(ctx):
    session = ctx.new_session()
    session.connect()
    session.connections[1].immediate(0x00000020)
    return session.outcome_of_close(1)


# === RTRS requests =================================================================================

def rtrs_case(name, allowed, build, cid=None, mode=None, connections=2):
    @case("rtrs-" + name, *allowed, mode=mode)
    def run(ctx):
        session = ctx.session(connections=connections)
        return session.outcome(build(session), cid)


def set_imm(image, imm):
    image.imm = imm
    return image


def good_read(session, length=4096, **kwargs):
    return session.io_read_image(session.volume, 0, length, **kwargs)


def good_write(session, length=4096, **kwargs):
    return session.io_write_image(session.volume, 0, bytes(length), **kwargs)


@case("rtrs-chunk-id-beyond-depth", "closed")
def _(ctx):
    """Only possible where the depth is no power of two: the test daemon's is not."""
    session = ctx.session()
    depth = session.queue_depth
    if depth & (depth - 1) == 0:
        raise Failed("the daemon under test must have a depth that is no power of two")
    return session.outcome(set_imm(good_write(session), wire.request_imm(depth, depth, 64)))


rtrs_case("chunk-id-all-ones", ["closed"], lambda s: set_imm(good_write(s), 0x0FFFFFFF))
rtrs_case("offset-0", ["closed", "EINVAL"], lambda s: set_imm(good_write(s), wire.request_imm(s.queue_depth, 0, 0)))
rtrs_case("offset-last-byte", ["closed"],
          lambda s: set_imm(good_write(s), wire.request_imm(s.queue_depth, 0, s.geometry.chunk_size - 1)))
rtrs_case("offset-chunk-size", ["closed"],
          lambda s: set_imm(good_write(s), wire.request_imm(s.queue_depth, 0, s.geometry.chunk_size)))
rtrs_case("offset-beyond-chunk", ["closed"],
          lambda s: set_imm(good_write(s), wire.request_imm(s.queue_depth, 0, s.geometry.chunk_size + 4096)))


def at_chunk_end(session, image_bytes, keep):
    """A message whose first `keep` bytes are the last of the chunk."""
    image = rawclient.Image(0, session.geometry.chunk_size - keep, image_bytes[:keep], session.geometry.chunk_size - keep)
    return image


rtrs_case("write-message-over-the-end", ["closed"], lambda s: at_chunk_end(s, wire.write_message(0), 2))
rtrs_case("read-message-over-the-end", ["closed"], lambda s: at_chunk_end(s, wire.read_message(0), 4))
rtrs_case("descriptor-over-the-end", ["closed"],
          lambda s: at_chunk_end(s, wire.read_message(0, [(0, 1, 512)], 1), 8))
rtrs_case("usr-len-beyond-offset", ["closed"], lambda s: good_write(s, 512, usr_len=545))
rtrs_case("usr-len-beyond-offset-in-a-read", ["closed"], lambda s: good_read(s, 512, usr_len=545))
rtrs_case("usr-len-65535", ["closed"], lambda s: good_write(s, 512, usr_len=65535))
rtrs_case("usr-len-0", ["closed", "EINVAL"], lambda s: good_write(s, 512, usr_len=0))
rtrs_case("usr-len-1", ["closed", "EINVAL"], lambda s: s.write_image(b"\4"))
rtrs_case("usr-len-3", ["closed", "EINVAL"], lambda s: s.write_image(b"\4\0\0"))
rtrs_case("usr-len-4-io-header-only", ["closed", "EINVAL"], lambda s: s.write_image(b"\4\0\0\0"))
rtrs_case("usr-len-23", ["closed", "EINVAL"],
          lambda s: s.write_image(wire.io_message(s.volume.device, wire.WRITE, 0, 512)[:23], bytes(512)))
rtrs_case("usr-len-24-without-priority", ["ok"],
          lambda s: s.write_image(wire.io_message(s.volume.device, wire.WRITE, 0, 512)[:24], bytes(512)))
rtrs_case("usr-len-40-longer-than-known", ["ok", "EINVAL"],
          lambda s: s.write_image(wire.io_message(s.volume.device, wire.WRITE, 0, 512) + bytes(8), bytes(512)))
rtrs_case("usr-message-larger-than-header-room", ["closed", "EINVAL", "ok"],
          lambda s: s.write_image(wire.io_message(s.volume.device, wire.WRITE, 0, 0) + bytes(5000)))
for _kind in (0, 1, 4, 5, 0xFF, 0xFFFF):
    rtrs_case("message-type-%x" % _kind, ["closed"], lambda s, k=_kind: s.write_image(bytes(32), kind=k))
rtrs_case("read-with-2-descriptors", ["closed", "EINVAL"], lambda s: good_read(s, count=2))
rtrs_case("read-with-65535-descriptors", ["closed", "EINVAL"], lambda s: good_read(s, count=65535))
rtrs_case("need-inval-without-descriptor", ["ok"],
          lambda s: s.read_image(wire.io_message(s.volume.device, wire.FLUSH, wire.ALL_ONES, 0),
                                 read_flags=wire.NEED_INVAL))
rtrs_case("unknown-read-flags", ["ok", "closed"], lambda s: good_read(s, read_flags=0xFFFE))
rtrs_case("io-read-without-descriptor", ["EINVAL", "closed"],
          lambda s: s.read_image(wire.io_message(s.volume.device, wire.READ, 0, 4096)))
rtrs_case("descriptor-length-0", ["closed", "EINVAL"], lambda s: good_read(s, desc_len=0))
rtrs_case("descriptor-shorter-than-data", ["closed", "EINVAL"], lambda s: good_read(s, desc_len=512))
rtrs_case("descriptor-longer-than-data", ["closed", "EINVAL"], lambda s: good_read(s, desc_len=8192))
rtrs_case("descriptor-length-max-io-plus-512", ["closed", "EINVAL"],
          lambda s: good_read(s, desc_len=s.geometry.max_io_size + 512))
rtrs_case("descriptor-length-4-gib", ["closed", "EINVAL"], lambda s: good_read(s, desc_len=0xFFFFFFFF))
rtrs_case("read-larger-than-max-io", ["closed", "EINVAL"],
          lambda s: s.io_read_image(s.volume, 0, s.geometry.max_io_size + 512))
rtrs_case("write-larger-than-max-io", ["closed", "EINVAL"],
          lambda s: s.io_write_image(s.volume, 0, bytes(s.geometry.max_io_size + 512)))
rtrs_case("on-connection-0", ["ok"], good_write, cid=0)
for _imm in (1, 2, 3, 5, 7, 10, 12, 15):
    @case("rtrs-immediate-type-%d" % _imm, "harmless", "closed")
    def _(ctx, kind=_imm):
        session = ctx.session()
        session.connections[1].immediate(wire.imm(kind, 0x05))
        session.connections[0].immediate(wire.imm(kind, 0x05))
        return session.harmless_or_closed()


@case("rtrs-read-with-a-key-the-client-does-not-have", "closed")
def _(ctx):
    """A verbs client's adapter would answer the write with a NAK: here the Terminate of the client."""
    session = ctx.session()
    image = good_read(session, desc_key=0xABCDEF01)
    session.post(image)
    connection = session.connections[1]
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        try:
            session.pump(0.2)
        except wire.WireViolation:
            connection.send_terminate(0x11, 0)
            connection.half_close()
            break
    other = session.connections[0].wait_closed(CLOSE_LIMIT)
    return closed_text(other)


@case("rtrs-read-answer-refused-by-reset", "closed")
def _(ctx):
    session = ctx.session()
    for _ in range(20):
        session.post(session.io_read_image(session.volume, 0, session.geometry.max_io_size))
    session.connections[1].reset_close()
    closed = session.connections[0].wait_closed(CLOSE_LIMIT)
    session.connections = session.connections[:1]
    return closed_text(closed)


@case("rtrs-same-chunk-twice", "ok", "closed")
def _(ctx):
    """The second request for a chunk that may still be executing, on each pair of connections."""
    result = "ok"
    for first, second in ((1, 1), (1, 2), (0, 1)):
        session = ctx.session(connections=3)
        images = [session.io_write_image(session.volume, 4096 * i, bytes((65 + i,)) * 4096, chunk=3) for i in range(2)]
        session.busy.add(3)
        session.pending[3] = images[0]
        try:
            session.connections[first].send_raw(session.frames(images[0], session.connections[first]))
            session.connections[second].send_raw(session.frames(images[1], session.connections[second]))
            deadline = time.monotonic() + SILENCE
            while time.monotonic() < deadline:
                try:
                    session.pump(0.1)
                except wire.WireViolation:
                    pass  # a second answer to the id is what was asked for
        except ConnectionClosed:
            result = "closed"
        ctx.clean_up()
    return result


@case("rtrs-more-requests-than-depth", "ok", "closed")
def _(ctx):
    session = ctx.session(connections=3)
    images = [session.io_write_image(session.volume, 4096 * i, bytes(4096), chunk=i % session.queue_depth)
              for i in range(3 * session.queue_depth)]
    try:
        for i, image in enumerate(images):
            connection = session.connections[1 + i % 2]
            session.pending[image.chunk] = image
            connection.send_raw(session.frames(image, connection))
        deadline = time.monotonic() + SILENCE
        while time.monotonic() < deadline:
            try:
                session.pump(0.1)
            except wire.WireViolation:
                pass
    except ConnectionClosed:
        return "closed"
    return "ok"


@case("rtrs-chunk-rewritten-while-it-is-executed", "ok", "closed", mode="plain")
def _(ctx):
    """Header, user message and descriptor change after the immediate went out: never a crash, never a write
    outside of what either version allows."""
    random_source = random.Random(ctx.arguments.seed)
    result = "ok"
    for _ in range(30):
        session = ctx.session()
        connection = session.connections[1]
        image = good_read(session, 4096)
        address, key = session.chunks[image.chunk]
        session.busy.add(image.chunk)
        session.pending[image.chunk] = image
        data = session.frames(image, connection)
        for _ in range(20):
            at = random_source.randrange(len(image.payload))
            junk = bytes((random_source.randrange(256),)) * random_source.randrange(1, 9)
            data += connection.frame_write(key, address + image.start + at, junk)
        try:
            connection.send_raw(data)
            session.wait(image, SILENCE)
        except (ConnectionClosed, wire.WireViolation, TimedOut):
            result = "closed"
        ctx.clean_up()
    return result


@case("rtrs-stale-key-after-the-answer", "terminate 11/00", mode="new-rkey")
def _(ctx):
    """NEW_RKEY mode: the key of the last request is dead once its answer brought the next."""
    session = ctx.session()
    address, key = session.chunks[0]
    session.write(session.volume, 0, bytes(512))
    if session.chunks[0][1] == key:
        raise Failed("the key did not change")
    session.connections[1].write(key, address, b"12345678")
    return session.outcome_of_close(1)


@case("rtrs-chunk-written-while-it-is-executed", "terminate 11/00", "closed", "ok", mode="new-rkey")
def _(ctx):
    """NEW_RKEY mode: behind the immediate the old key is dead at once. Without the Terminate if the write was
    on its way into memory when the key was revoked."""
    session = ctx.session()
    connection = session.connections[1]
    image = good_write(session)
    address, key = session.chunks[image.chunk]
    session.busy.add(image.chunk)
    session.pending[image.chunk] = image
    connection.send_raw(session.frames(image, connection) + connection.frame_write(key, address, b"12345678"))
    try:
        while True:
            session.pump(SILENCE)
    except ConnectionClosed as closed:
        return session.all_closed(closed, 1)


@case("rtrs-key-renewed-256-times", "ok", mode="new-rkey")
def _(ctx):
    session = ctx.session()
    for _ in range(300):
        session.write(session.volume, 0, bytes(512), chunk=2)
    return session.after()


# === Heartbeats ====================================================================================

@case("heartbeat-on-connection-1", "harmless", "closed")
def _(ctx):
    session = ctx.session()
    session.connections[1].immediate(wire.imm(wire.IMM_HEARTBEAT))
    time.sleep(0.1)
    for connection in session.connections:
        connection._read(0)
    try:
        session.pump(0.1)
    except wire.WireViolation:
        pass  # an ack on that connection: odd, but asked for
    except ConnectionClosed:
        return "closed"
    return session.harmless_or_closed()


@case("heartbeat-ack-never-asked-for", "harmless")
def _(ctx):
    session = ctx.session()
    for _ in range(50):
        session.connections[0].immediate(wire.imm(wire.IMM_HEARTBEAT_ACK))
    return session.harmless_or_closed()


@case("heartbeat-with-payload-bits", "harmless")
def _(ctx):
    session = ctx.session()
    session.connections[0].immediate(0x8ABCDEF0)
    return session.harmless_or_closed()


@case("heartbeat-flood", "harmless", "closed")
def _(ctx):
    session = ctx.session()
    connection = session.connections[0]
    beats = 20000
    try:
        connection.socket.settimeout(10)
        for _ in range(beats // 500):
            connection.send_raw(b"".join(connection.frame_untagged(
                wire.OP_IMMEDIATE, wire.immediate_payload(wire.imm(wire.IMM_HEARTBEAT))) for _ in range(500)))
            session.pump(0)
        while session.pump(0.3):
            pass
    except ConnectionClosed:
        return "closed"
    if not 1 <= session.acks <= beats:  # one ack may stand for many
        raise Failed("%d acks for %d heartbeats" % (session.acks, beats))
    return session.harmless_or_closed()


@case("heartbeat-flood-without-reading-the-acks", "harmless", "closed")
def _(ctx):
    """The queue of answers to a peer that reads nothing must be bounded."""
    session = ctx.session()
    connection = session.connections[0]
    burst = 500
    try:
        connection.socket.settimeout(0.5)
        for _ in range(400):
            connection.send_raw(b"".join(connection.frame_untagged(
                wire.OP_IMMEDIATE, wire.immediate_payload(wire.imm(wire.IMM_HEARTBEAT))) for _ in range(burst)))
    except (ConnectionClosed, socket.timeout):
        pass
    return "closed"


@case("heartbeat-never-answered", "closed", slow=True)
def _(ctx):
    session = ctx.session()
    session.answer_heartbeats = False
    start = time.monotonic()
    limit = ctx.arguments.heartbeat_limit
    try:
        while time.monotonic() < start + limit * 2 + 2:
            session.pump(0.2)
    except ConnectionClosed as closed:
        if not limit * 0.6 < time.monotonic() - start < limit * 1.6:
            raise Failed("closed after %.1f s, not around %.1f" % (time.monotonic() - start, limit)) from None
        return closed_text(closed)
    return "silent"


@case("peer-that-never-reads", "ok", slow=True)
def _(ctx):
    """Its answers pile up at the server; a good session goes on, and the silent one can be closed."""
    lazy, good = ctx.session("evil4k"), ctx.session()
    for _ in range(lazy.queue_depth):
        lazy.post(lazy.io_read_image(lazy.volume, 0, lazy.geometry.max_io_size))
    start = time.monotonic()
    while time.monotonic() < start + 2:
        lazy.connections[0].immediate(wire.imm(wire.IMM_HEARTBEAT))
        if good.after() != "ok":
            raise Failed("the good session suffered")
        time.sleep(0.02)
    lazy.close()
    ctx.open(good, "evil4k")  # granted only when the lazy one's opening is given back
    return good.after()


# === RNBD ==========================================================================================

def rnbd_case(name, allowed, build, cid=None, volume="evil", mode=wire.RW):
    @case("rnbd-" + name, *allowed)
    def run(ctx):
        session = ctx.session(volume, mode)
        result = session.outcome(build(session), cid)
        if "closed" not in result and "terminate" not in result and session.after() != "ok":
            raise Failed("after the answer %s the session does not work" % result)
        return result


for _kind in (1, 3, 6, 0x104, 0xFFFF):
    rnbd_case("message-type-%x" % _kind, ["EINVAL"],
              lambda s, k=_kind: s.read_image(wire.sess_info(kind=k), 36), cid=0)
rnbd_case("sess-info-twice", ["ok"], lambda s: s.read_image(wire.sess_info(), 36), cid=0)
for _version in (0, 1, 255):
    @case("rnbd-sess-info-version-%d" % _version, "ok")
    def _(ctx, version=_version):
        session = ctx.session()
        session.sess_info(version)  # checks min(version, 2)
        return session.after()
rnbd_case("sess-info-short", ["EINVAL"], lambda s: s.read_image(wire.sess_info()[:20], 36), cid=0)
rnbd_case("sess-info-as-write", ["EINVAL"], lambda s: s.write_image(wire.sess_info()), cid=0)
rnbd_case("sess-info-as-write-with-room", ["EINVAL"], lambda s: s.write_image(wire.sess_info(), bytes(36)), cid=0)
rnbd_case("sess-info-without-room", ["EINVAL"], lambda s: s.read_image(wire.sess_info()), cid=0)
rnbd_case("sess-info-room-35", ["EINVAL"], lambda s: s.read_image(wire.sess_info(), 35), cid=0)
rnbd_case("open-as-write", ["EINVAL"], lambda s: s.write_image(wire.open_message("evil")), cid=0)
rnbd_case("open-without-room", ["EINVAL"], lambda s: s.read_image(wire.open_message("evil")), cid=0)
rnbd_case("open-room-55", ["EINVAL"], lambda s: s.read_image(wire.open_message("evil"), 55), cid=0)
rnbd_case("open-cut-in-the-name", ["EINVAL"], lambda s: s.read_image(wire.open_message("evil")[:8], 56), cid=0)
rnbd_case("open-cut-by-one", ["EINVAL"], lambda s: s.read_image(wire.open_message("evil")[:260], 56), cid=0)


@case("rnbd-answers-with-more-room-than-needed-leak-nothing", "ok", "EINVAL")
def _(ctx):
    """A chunk full of 0xAA, then SESS_INFO and OPEN with room for 4096 bytes in it."""
    session = ctx.session()
    session.write(session.volume, 0, b"\xaa" * 4096, chunk=0)
    result = "ok"
    for user, size in ((wire.sess_info(), 36), (wire.open_message("evil", wire.RO), 56)):
        image = session.read_image(user, 4096, chunk=0)
        result = session.outcome(image, 0)
        if result == "ok" and b"\xaa" in bytes(image.region.data[:size]):
            raise Failed("old bytes within the answer")
    return result


@case("rnbd-answers-in-a-used-chunk-have-zero-padding", "ok")
def _(ctx):
    """Every chunk was full of 0xAA; the reserved bytes of each answer are zero all the same."""
    session = ctx.session()
    for chunk in range(session.queue_depth):
        session.write(session.volume, 0, b"\xaa" * session.geometry.max_io_size, chunk=chunk)
    for chunk in range(0, session.queue_depth, 7):
        session.busy = set(range(session.queue_depth)) - {chunk}
        session.sess_info()
        session.open("evil", wire.RO)
    return "ok"


@case("rnbd-open-garbage-in-reserved-bytes", "ok")
def _(ctx):
    session = ctx.session()
    session.open("evil", wire.RO, filler=0xEE)  # as kernel clients do
    return session.after()


@case("rnbd-open-without-sess-info", "ok")
def _(ctx):
    session = ctx.new_session().establish()
    session.volume = ctx.open(session, "evil")
    return session.after()


def open_case(name, allowed, volume, mode=wire.RO):
    rnbd_case("open-" + name, allowed, lambda s: s.read_image(wire.open_message(volume, mode), 56), cid=0)


NO_VOLUME = ["ENOENT", "EINVAL", "EACCES"]
open_case("unknown", ["ENOENT"], "nothere")
open_case("empty", NO_VOLUME, "")
open_case("without-nul", ["EINVAL"], b"e" * 255)
open_case("254-characters", NO_VOLUME, b"e" * 254)
open_case("dot-dot", NO_VOLUME, "../evil")
open_case("dot-dot-etc-passwd", NO_VOLUME, "../../../../../../etc/passwd")
open_case("absolute", NO_VOLUME, "/etc/passwd")
open_case("double-slash", NO_VOLUME, "//evil")
open_case("slash-suffix", NO_VOLUME, "evil/")
open_case("directory", NO_VOLUME, "/tmp")
open_case("dot", NO_VOLUME, ".")
open_case("percent", NO_VOLUME, "%n%n%s%SESSNAME%")
open_case("escape-and-newline", NO_VOLUME, b"evil\n\x1b[31mforged line")
open_case("not-utf8", NO_VOLUME, b"\xff\xfe\xc0\x80")
open_case("case-differs", NO_VOLUME, "EVIL")
open_case("not-on-the-access-list", ["ENOENT", "EACCES"], "forbidden")  # ENOENT does not tell that it exists
open_case("mode-3", ["EINVAL"], "evil4k", mode=3)
open_case("mode-255", ["EINVAL"], "evil4k", mode=255)
open_case("read-only-volume-rw", ["EROFS", "EPERM", "EACCES"], "evilro", mode=wire.RW)


@case("rnbd-open-twice-with-another-mode", "ok")
def _(ctx):
    """The same name gives the same id, whatever the mode, and the first mode stays in force."""
    session = ctx.session("evil", wire.RO)
    again = session.open("evil", wire.RW)
    if again.device != session.volume.device:
        raise Failed("another device id")
    result = session.outcome(good_write(session))
    if result not in ("EROFS", "EPERM", "EACCES"):
        raise Failed("a write through an opening that was RO first: %s" % result)
    return session.after()


@case("rnbd-open-thousands-of-times", "ok")
def _(ctx):
    session = ctx.session()
    ids = set()
    for _ in range(3000):
        ids.add(session.open("evil", wire.RW).device)
    if len(ids) != 1:
        raise Failed("%d ids for one name" % len(ids))
    for number in range(1000):
        if session.outcome(session.read_image(wire.open_message("none%d" % number, wire.RO), 56), 0) != "ENOENT":
            raise Failed("unknown name")
    return session.after()


@case("rnbd-open-close-cycles", "ok")
def _(ctx):
    session = ctx.session()
    for _ in range(500):
        session.close_device(session.volume)
        session.volume = session.open("evil", wire.RW)
    return session.after()


@case("rnbd-second-writer", "EPERM")
def _(ctx):
    ctx.session()
    other = ctx.new_session().establish()
    return other.outcome(other.read_image(wire.open_message("evil", wire.RW), 56), 0)


@case("rnbd-third-migration-writer", "EPERM")
def _(ctx):
    ctx.session("evil4k", wire.RW)
    second = ctx.new_session().establish()
    if second.outcome(second.read_image(wire.open_message("evil4k", wire.MIGRATION), 56), 0) != "ok":
        raise Failed("the second writer must be admitted in migration mode")
    third = ctx.new_session().establish()
    return third.outcome(third.read_image(wire.open_message("evil4k", wire.MIGRATION), 56), 0)


def io_case(name, allowed, op, sector=0, size=4096, data=None, device=None, as_read=None, length=None, flags=0,
            **kwargs):
    """op with sector and bi_size; data: length of what is written; as_read: length of the read buffer."""
    def build(session):
        user = wire.io_message(session.volume.device if device is None else device(session), op,
                               sector(session.volume) if callable(sector) else sector, size, flags)
        if as_read is not None:
            return session.read_image(user, as_read)
        return session.write_image(user, bytes(data or 0))
    rnbd_case("io-" + name, allowed, build, **kwargs)


BAD = ["EINVAL", "closed"]
OUT = ["EINVAL", "EIO", "ENOSPC", "EOVERFLOW"]
io_case("read-as-write", ["EINVAL"], wire.READ, data=4096)
io_case("read-as-write-without-data", ["EINVAL"], wire.READ)
io_case("write-as-read", ["EINVAL"], wire.WRITE, as_read=4096)
rnbd_case("close-as-read", ["EINVAL", "ok"], lambda s: s.read_image(wire.close_message(77), 36), cid=0)
io_case("unknown-device", ["ENOTCONN"], wire.WRITE, data=4096, device=lambda s: s.volume.device + 1)
io_case("unknown-device-read", ["ENOTCONN"], wire.READ, as_read=4096, device=lambda s: 77)
io_case("device-all-ones", ["ENOTCONN"], wire.WRITE, data=4096, device=lambda s: 0xFFFFFFFF)
io_case("read-at-the-end", OUT, wire.READ, lambda v: v.sectors, as_read=4096)
io_case("read-across-the-end", OUT, wire.READ, lambda v: v.sectors - 1, as_read=4096)
io_case("write-across-the-end", OUT, wire.WRITE, lambda v: v.sectors - 7, data=4096)
io_case("write-beyond-the-end", OUT, wire.WRITE, lambda v: v.sectors + 8, data=4096)
io_case("sector-overflows-bytes", OUT, wire.WRITE, (1 << 55) + 1, data=4096)
io_case("sector-overflows-to-0", OUT, wire.WRITE, 1 << 55, data=4096)
io_case("sector-all-ones", OUT, wire.WRITE, wire.ALL_ONES, data=4096)
io_case("sector-all-ones-read", OUT, wire.READ, wire.ALL_ONES, as_read=4096)
io_case("discard-all-ones", OUT, wire.DISCARD, wire.ALL_ONES, 4096)
io_case("discard-4-gib", OUT, wire.DISCARD, 0, 0xFFFFFE00)
io_case("discard-size-all-ones", OUT, wire.DISCARD, 0, 0xFFFFFFFF)
io_case("write-zeroes-size-all-ones", OUT, wire.WRITE_ZEROES, 0, 0xFFFFFFFF)
io_case("write-zeroes-across-the-end", OUT, wire.WRITE_ZEROES, lambda v: v.sectors - 1, 4096)
io_case("length-511", BAD, wire.WRITE, size=511, data=511)
io_case("length-513-read", BAD, wire.READ, size=513, as_read=513)
io_case("length-1-discard", ["EINVAL", "ok"], wire.DISCARD, size=1)
io_case("length-0-write", BAD + ["ok"], wire.WRITE, size=0, data=0)
io_case("length-0-read", BAD + ["ok"], wire.READ, size=0, as_read=0)
io_case("length-0-discard", ["EINVAL", "ok"], wire.DISCARD, size=0)
io_case("length-0-write-zeroes", ["EINVAL", "ok"], wire.WRITE_ZEROES, size=0)
io_case("length-0-beyond-the-end", OUT + ["ok"], wire.WRITE_ZEROES, lambda v: v.sectors + 100, 0)
io_case("size-smaller-than-data", ["EINVAL"], wire.WRITE, size=512, data=4096)
io_case("size-larger-than-data", ["EINVAL"], wire.WRITE, size=8192, data=4096)
io_case("size-larger-than-read-buffer", ["EINVAL"], wire.READ, size=8192, as_read=4096)
io_case("discard-with-data", ["EINVAL", "ok"], wire.DISCARD, data=4096)
io_case("flush-sector-all-ones-as-write", ["ok"], wire.FLUSH, wire.ALL_ONES, 0)
io_case("flush-with-data", ["EINVAL", "ok"], wire.FLUSH, wire.ALL_ONES, 4096, data=4096)
io_case("flush-with-read-buffer", ["EINVAL", "ok"], wire.FLUSH, wire.ALL_ONES, 0, as_read=4096)
io_case("secure-erase", ["EOPNOTSUPP"], wire.SECURE_ERASE)
for _op in (6, 7, 0x7F, 0xFF):
    io_case("op-%d" % _op, ["EOPNOTSUPP", "EINVAL"], _op)
io_case("unknown-flags", ["ok"], wire.WRITE, data=4096, flags=0xFFFFF000)
io_case("write-on-ro-volume", ["EROFS", "EPERM", "EACCES"], wire.WRITE, data=4096, volume="evilro", mode=wire.RO)
io_case("write-through-ro-opening", ["EROFS", "EPERM", "EACCES"], wire.WRITE, data=4096, mode=wire.RO)
io_case("discard-through-ro-opening", ["EROFS", "EPERM", "EACCES"], wire.DISCARD, mode=wire.RO)
io_case("write-zeroes-through-ro-opening", ["EROFS", "EPERM", "EACCES"], wire.WRITE_ZEROES, mode=wire.RO)
io_case("flush-through-ro-opening", ["ok", "EROFS", "EPERM"], wire.FLUSH, wire.ALL_ONES, 0, mode=wire.RO)
io_case("512-bytes-on-4096-blocks", BAD, wire.WRITE, size=512, data=512, volume="evil4k")
io_case("misaligned-on-4096-blocks", BAD, wire.WRITE, 1, data=4096, volume="evil4k")
io_case("discard-512-on-4096-blocks", ["EINVAL", "ok"], wire.DISCARD, 1, 512, volume="evil4k")


@case("rnbd-io-on-a-closed-device", "ENOTCONN")
def _(ctx):
    session = ctx.session()
    session.close_device(session.volume)
    return session.outcome(good_write(session))


@case("rnbd-io-on-a-device-of-another-session", "ENOTCONN")
def _(ctx):
    owner = ctx.session()
    other = ctx.new_session().establish()
    other.volume = owner.volume
    return other.outcome(good_read(other))


@case("rnbd-close-twice-and-unknown", "ok")
def _(ctx):
    session = ctx.session()
    session.close_device(session.volume)
    session.close_device(session.volume)
    for device in (0, 1, 77, 0xFFFFFFFF):
        session.call_ok(session.write_image(wire.close_message(device)), 0)
    session.volume = session.open("evil", wire.RW)
    return session.after()


@case("rnbd-close-while-io-is-in-flight", "ok")
def _(ctx):
    """CLOSE waits for what is being executed; what comes behind it is refused."""
    for _ in range(20):
        session = ctx.session(connections=3)
        images = [session.post(session.io_write_image(session.volume, i * 65536, bytes(65536)), 1 + i % 2)
                  for i in range(40)]
        close = session.post(session.write_image(wire.close_message(session.volume.device)), 0)
        for image in images:
            if session.wait(image).error not in (0, errno.ENOTCONN):
                raise Failed("unexpected errno")
        if session.wait(close).error:
            raise Failed("CLOSE failed")
        ctx.clean_up()
    return "ok"


@case("rnbd-session-lost-with-io-in-flight-and-back-at-once", "ok")
def _(ctx):
    for number in range(20):
        session = ctx.session(connections=3, name="phoenix" if number % 2 else None)
        for i in range(session.queue_depth // 2):
            session.post(session.io_write_image(session.volume, i * 65536, bytes(65536)), 1 + i % 2)
        if number % 2:
            for connection in session.connections:
                connection.reset_close()
            time.sleep(0.3)
        ctx.clean_up()
    return "ok"


# === Leaving =======================================================================================

def leave_case(name, victims, how):
    @case("leave-" + name, "closed")
    def run(ctx):
        session = ctx.session(connections=5)
        for cid in victims:
            how(session.connections[cid])
        rest = [c for c in session.connections if c.cid not in victims]
        for connection in rest:
            connection.wait_closed(CLOSE_LIMIT)
        return "closed"


leave_case("fin-on-connection-0", [0], lambda c: c.half_close())
leave_case("fin-on-connection-4", [4], lambda c: c.half_close())
leave_case("fin-on-three-in-reverse", [4, 2, 0], lambda c: c.half_close())
leave_case("reset-on-connection-0", [0], lambda c: c.reset_close())
leave_case("reset-on-connection-3", [3], lambda c: c.reset_close())
leave_case("reset-on-all", [0, 1, 2, 3, 4], lambda c: c.reset_close())


@case("leave-half-close-then-go-on-sending", "closed")
def _(ctx):
    """Connection 1 says FIN; connection 0 sends on and must find the path closed."""
    session = ctx.session()
    session.connections[1].half_close()
    try:
        for _ in range(100):
            session.connections[0].immediate(wire.imm(wire.IMM_HEARTBEAT))
            time.sleep(0.02)
    except ConnectionClosed:
        pass
    session.connections[0].wait_closed(CLOSE_LIMIT)
    return "closed"


# === Mutations =====================================================================================

INTERESTING = (0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 513, 4095, 4096, 4097,
               32767, 32768, 65535, 65536, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)


class Mutator:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def number(self, right, width=32):
        r = self.random
        choice = r.randrange(5)
        if choice == 0:
            value = r.choice(INTERESTING)
        elif choice == 1:
            value = r.getrandbits(width)
        elif choice == 2:
            value = right + r.randrange(-4, 5)
        elif choice == 3:
            value = right ^ (1 << r.randrange(width))
        else:
            value = ~right
        return value & ((1 << width) - 1)

    def bytes(self, data):
        """Damages a byte string in one of the usual ways."""
        r = self.random
        data = bytearray(data)
        for _ in range(r.choice((1, 1, 1, 2, 5))):
            if not data:
                return bytes(r.getrandbits(8) for _ in range(8))
            at = r.randrange(len(data))
            if r.random() < 0.6:  # headers are where it hurts
                at = r.randrange(min(len(data), 64))
            kind = r.randrange(7)
            if kind == 0:
                data[at] ^= 1 << r.randrange(8)
            elif kind == 1:
                data[at] = r.choice((0, 1, 0x7F, 0x80, 0xFF))
            elif kind == 2:
                del data[at:at + r.choice((1, 2, 4, 16, 100))]
            elif kind == 3:
                data[at:at] = bytes(r.getrandbits(8) for _ in range(r.choice((1, 2, 4, 20))))
            elif kind == 4:
                data[at:at] = data[at:at + r.choice((4, 20, 32, 64))]
            elif kind == 5:
                data = data[:at]
            else:
                width = r.choice((2, 4, 8))
                data[at:at + width] = r.choice(INTERESTING).to_bytes(8, r.choice(("big", "little")))[:width]
        return bytes(data)


def mutated_image(session, mutator):
    """A request with one or two of its fields wrong."""
    r, volume = mutator.random, session.volume
    device, op, sector, size, flags = volume.device, r.randrange(6), r.randrange(volume.sectors), 4096, wire.SYNC
    sector -= sector % (volume.logical // 512)
    fields = {}
    for name in r.sample(("device", "op", "sector", "size", "flags", "usr_len", "kind", "offset", "count", "rflags",
                          "desc_len", "desc_key", "user", "imm", "start", "rkey", "address", "direction"),
                         r.choice((1, 1, 2))):
        fields[name] = True
    if "device" in fields:
        device = mutator.number(device)
    if "op" in fields:
        op = mutator.number(op, 8)
    if "sector" in fields:
        sector = mutator.number(sector, 64)
    if "size" in fields:
        size = mutator.number(size)
    if "flags" in fields:
        flags = mutator.number(flags) & ~0xFF
    user = wire.io_message(device, op, sector, size, flags)
    is_read = op in (wire.READ, wire.FLUSH)
    if "direction" in fields:
        is_read = not is_read
        user = r.choice((user, wire.sess_info(r.getrandbits(8)), wire.close_message(device + 1),
                         wire.open_message(mutator.bytes(b"evil"), r.choice((0, 3, 255)))))
    if "user" in fields:
        user = mutator.bytes(user)[:2000]
    kwargs = {"chunk": r.randrange(session.queue_depth)}
    if "usr_len" in fields:
        kwargs["usr_len"] = mutator.number(len(user), 16)
    if "kind" in fields:
        kwargs["kind"] = mutator.number(3 if is_read else 2, 16)
    length = 4096 if op in (wire.READ, wire.WRITE) else 0
    if "offset" in fields:
        kwargs["offset"] = mutator.number(length + len(user), 20)
    if is_read:
        if "count" in fields:
            kwargs["count"] = mutator.number(1, 16)
        if "rflags" in fields:
            kwargs["read_flags"] = mutator.number(1, 16)
        if "desc_len" in fields:
            kwargs["desc_len"] = mutator.number(length)
        if "desc_key" in fields:
            kwargs["desc_key"] = mutator.number(0x12345678)
        image = session.read_image(user, length, **kwargs)
    else:
        image = session.write_image(user, bytes(length), **kwargs)
    address, key = session.chunks[image.chunk]
    if "imm" in fields:
        image.imm = mutator.number(wire.request_imm(session.queue_depth, image.chunk, image.offset))
    if "start" in fields:
        image.start = mutator.number(image.start, 18)
    if "rkey" in fields:
        image.rkey = mutator.number(key)
    if "address" in fields:
        image.address = mutator.number(address, 64)
    return image


def mutated_fpdu(session, connection, mutator):
    r = mutator.random
    address, key = session.chunks[r.randrange(session.queue_depth)]
    versions = {"ddp_version": 1, "rdmap_version": 1}
    if r.random() < 0.5:
        stag = mutator.number(key) if r.random() < 0.5 else key
        to = mutator.number(address, 64) if r.random() < 0.5 else address
        ulpdu = wire.tagged_ulpdu(stag, to, bytes(r.choice((0, 1, 8, 100, 4096))), r.random() < 0.7,
                                  r.choice((0, 0, r.randrange(16))), **versions)
    else:
        ulpdu = wire.untagged_ulpdu(r.choice((3, 4, 8, 8, 12, r.randrange(16))), bytes(r.choice((0, 8, 8, 272, 1))),
                                    connection.msn_out + r.choice((0, 0, 0, 1, -1)), mutator.number(key),
                                    r.choice((0, 0, 0, 1, 2)), r.choice((0, 0, 0, 4)), r.random() < 0.8, **versions)
        connection.msn_out += 1
    if r.random() < 0.3:
        ulpdu = mutator.bytes(ulpdu)
    return connection.fpdu(ulpdu[:65535], length=None if r.random() < 0.9 else mutator.number(len(ulpdu), 16))


def mutation(ctx, iteration):
    """One bad session. Whatever happens to it, only the server's life counts."""
    mutator = Mutator(ctx.arguments.seed * 1000003 + iteration)
    r = mutator.random
    session = ctx.new_session(connections=r.choice((1, 2, 2, 4)), crc=r.random() < 0.25, timeout=0.4)
    level = r.choice(("set-up", "info", "request", "request", "request", "fpdu", "fpdu", "bytes", "bytes"))
    try:
        if level == "set-up":
            for cid in range(session.connections_wanted):
                private = wire.connect_request(session.path_uuid, session.session_uuid, cid,
                                               session.connections_wanted)
                frame = wire.mpa_frame(private)
                if r.random() < 0.5:
                    frame = wire.mpa_frame(mutator.bytes(private)[:256])
                if r.random() < 0.5:
                    frame = mutator.bytes(frame)
                connection = Connection(session.address, session.regions, cid, None, 0.2)
                session.connections.append(connection)
                connection.send_raw(frame)
                session.geometry = wire.ConnectResponse(connection.mpa_reply(), False)
            session.info()
            return
        session.connect()
        if level == "info":
            connection = session.connections[0]
            data = wire.info_request(session.name)
            connection.send_raw(mutator.bytes(connection.frame_untagged(wire.OP_SEND, mutator.bytes(data))))
            session.wait_info()
            return
        session.info()
        session.volume = session.open("evil", r.choice((wire.RO, wire.MIGRATION)))
        for _ in range(r.randrange(1, 12)):
            cid = r.randrange(len(session.connections))
            connection = session.connections[cid]
            if level == "request":
                image = mutated_image(session, mutator)
                session.post(image, cid)
                if r.random() < 0.3:
                    session.wait(image, 0.05)
            elif level == "fpdu":
                connection.send_raw(mutated_fpdu(session, connection, mutator))
            else:
                image = good_read(session) if r.random() < 0.5 else good_write(session)
                session.busy.add(image.chunk)
                session.pending[image.chunk] = image
                connection.send_raw(mutator.bytes(session.frames(image, connection)))
            session.pump(0)
        session.pump(0.02)
    except (ConnectionClosed, Rejected, TimedOut, rawclient.RequestFailed, OSError):
        pass
    except (wire.WireViolation, AssertionError, struct.error):
        pass  # an answer to something that was never properly asked
    finally:
        if r.random() < 0.2:
            for connection in session.connections:
                try:
                    connection.reset_close()
                except OSError:
                    pass
        ctx.clean_up()


# === Watching ======================================================================================

class Watch:
    """The daemon's size from outside."""

    def __init__(self, pid):
        self.pid, self.base = pid, None

    def sample(self):
        with open("/proc/%d/status" % self.pid) as status:
            fields = dict(line.split(":", 1) for line in status)
        return {"rss": int(fields["VmRSS"].split()[0]) * 1024, "threads": int(fields["Threads"]),
                "fds": len(os.listdir("/proc/%d/fd" % self.pid))}

    def settle(self, want=None, seconds=12):
        """Closing takes a moment: the smallest of the samples of a while, early when it is as small as before."""
        best = self.sample()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            now = self.sample()
            best = {key: min(best[key], now[key]) for key in best}
            if want and best["fds"] <= want["fds"]:
                break
            if not want and time.monotonic() > deadline - seconds + 2:
                break
            time.sleep(0.2)
        return best


def run_case(ctx, name, allowed, function):
    try:
        result = function(ctx)
        if result is not None and result not in allowed:
            raise Failed("outcome %s, right would be %s" % (result, " or ".join(allowed)))
    finally:
        ctx.clean_up()
    ctx.check_alive()
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int)
    parser.add_argument("--seconds", type=float, default=0, help="of mutations behind the named cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iteration", type=int, help="only this mutation")
    parser.add_argument("--case", action="append", help="only this case; may be a prefix ending in *")
    parser.add_argument("--skip", action="append", default=[], help="leave this case out")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--no-cases", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="print failures only")
    parser.add_argument("--slow", type=float, default=5, help="print cases that take longer, in seconds")
    parser.add_argument("--long", action="store_true", help="also cases that wait for the handshake limit of 30 s")
    parser.add_argument("--mode", choices=("plain", "new-rkey"), default="plain")
    parser.add_argument("--pid", type=int, help="of the daemon: memory, descriptors, threads must stay flat")
    parser.add_argument("--rss-slack", type=int, default=16 << 20, help="bytes; 0 does not check (sanitizers)")
    parser.add_argument("--heartbeat-limit", type=float, default=3.0, help="seconds until a silent peer is dead")
    parser.add_argument("--handshake-timeout", type=float, default=30.0)
    arguments = parser.parse_args()

    if arguments.list:
        for name, (_, allowed, mode, slow) in CASES.items():
            print("%-64s %s%s%s" % (name, " | ".join(allowed), "  [%s]" % mode if mode else "", "  [slow]" if slow else ""))
        return 0
    if arguments.port is None:
        parser.error("--port is needed")
    ctx = Context((arguments.host, arguments.port), arguments)
    ctx.check_alive()
    if arguments.iteration is not None:
        mutation(ctx, arguments.iteration)
        ctx.check_alive()
        return 0

    selected = [name for name in CASES if not arguments.case or any(
        name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])) for pattern in arguments.case)]
    if arguments.case and not selected:
        parser.error("no such case")
    if arguments.no_cases:
        selected = []
    failures, ran = 0, 0
    for name in selected:
        function, allowed, mode, _ = CASES[name]
        if (mode and mode != arguments.mode) or name in arguments.skip:
            continue
        start = time.monotonic()
        ran += 1
        try:
            result = run_case(ctx, name, allowed, function)
            if (arguments.case and not arguments.quiet) or time.monotonic() - start > arguments.slow:
                print("ok   %s: %s (%.2f s)" % (name, result, time.monotonic() - start))
        except Exception as error:  # a case must not end the run
            failures += 1
            ctx.clean_up()
            print("FAIL %s: %s: %s" % (name, type(error).__name__, error), flush=True)
            try:
                Context((arguments.host, arguments.port), arguments).check_alive()
            except Exception as dead:
                print("FAIL the daemon does not serve a good session any more: %s" % dead)
                return 1
    print("%d named cases, %d failures" % (ran, failures), flush=True)

    watch = Watch(arguments.pid) if arguments.pid else None
    base = watch.settle() if watch else None
    iteration, deadline = 0, time.monotonic() + arguments.seconds
    next_check = time.monotonic() + 1
    while time.monotonic() < deadline:
        try:
            mutation(ctx, iteration)
        except Exception as error:
            failures += 1
            print("FAIL mutation, --seed %d --iteration %d: %s: %s" % (arguments.seed, iteration, type(error).__name__,
                                                                      error))
        iteration += 1
        if iteration == 300 and watch:
            base = watch.settle()  # caches are warm
        if time.monotonic() > next_check:
            try:
                ctx.check_alive()
            except Exception as error:
                print("FAIL after mutation --seed %d --iteration %d (or up to 1 s earlier): %s: %s"
                      % (arguments.seed, iteration - 1, type(error).__name__, error))
                return 1
            next_check = time.monotonic() + 1
    if arguments.seconds:
        print("%d mutations with seed %d" % (iteration, arguments.seed))
    if watch:
        end = watch.settle(base)
        print("daemon before: %s after: %s" % (base, end))
        # The workers of the six volumes are started as they are needed, at most four each.
        for key, slack in (("rss", arguments.rss_slack), ("fds", 0), ("threads", 6 * 4)):
            if (key != "rss" or slack) and end[key] > base[key] + slack:
                failures += 1
                print("FAIL %s of the daemon grew from %d to %d" % (key, base[key], end[key]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
