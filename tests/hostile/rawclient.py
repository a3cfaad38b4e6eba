# SPDX-License-Identifier: BSD-3-Clause
"""A raw RTRS client over iWARP, one thread, no queues: everything can be done right, and everything wrong.

    session = Session(("127.0.0.1", 1234), name="me", connections=2)
    session.establish()                       # connections and INFO
    volume = session.open("v1")
    session.write(volume, 0, b"x" * 4096); session.read(volume, 0, 4096)
    session.close()

Whatever the server sends is checked against the specification; WireViolation means it broke a rule.
"""

import collections
import os
import select
import socket
import struct
import time

import wire
from wire import WireViolation, check

DEFAULT_TIMEOUT = 20.0


class ConnectionClosed(Exception):
    """orderly: FIN at an FPDU boundary. terminate: the Terminate that came before, if any."""

    def __init__(self, connection, orderly, text):
        self.orderly, self.terminate = orderly, connection.terminate
        super().__init__("connection %d: %s%s" % (connection.cid, text, "" if connection.terminate is None else
                                                  " after Terminate %s" % connection.terminate))


class Rejected(Exception):
    def __init__(self, private):
        self.private = private
        self.response = wire.ConnectResponse(private, rejected=True) if len(private) >= 56 else None
        self.error = self.response.error if self.response else None
        super().__init__("rejected: %s" % (wire.errno_name(self.error) if self.error else "without a reason"))


class TimedOut(Exception):
    pass


class RequestFailed(Exception):
    def __init__(self, error):
        self.error = error
        super().__init__("errno %s" % wire.errno_name(error))


Message = collections.namedtuple("Message", "kind payload imm stag")  # kind: send, imm, invalidate, send_imm


class Connection:
    """One iWARP connection: MPA set-up, sending of whole messages or raw bytes, strict reception."""

    def __init__(self, address, regions=None, cid=0, source=None, timeout=DEFAULT_TIMEOUT):
        self.cid, self.timeout, self.terminate = cid, timeout, None
        self.regions = regions if regions is not None else {}
        self.received, self.eof, self.reset = bytearray(), False, False
        self.crc = False
        self.msn_out, self.msn_in = 1, 1
        self.partial, self.partial_op, self.partial_ulp = None, None, 0
        self.tagged_next = None  # (stag, to) a continued tagged message must go on at
        self.answer_fin = True   # a FIN by a FIN, as it should be
        self.socket = socket.create_connection(address, timeout, source_address=(source, 0) if source else None)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self):
        return self.socket.fileno()

    # --- sending

    def send_raw(self, data):
        try:
            self.socket.sendall(data)
        except (ConnectionError, BrokenPipeError) as error:
            self._drain()
            raise ConnectionClosed(self, False, "send: %s" % error) from None

    def fpdu(self, ulpdu, **kwargs):
        kwargs.setdefault("crc", self.crc)
        return wire.fpdu(ulpdu, **kwargs)

    def send_ulpdu(self, ulpdu, **kwargs):
        self.send_raw(self.fpdu(ulpdu, **kwargs))

    def frame_write(self, stag, to, payload, segment=wire.PAYLOAD_MAX):
        frames = b""
        for at in range(0, max(len(payload), 1), segment):
            piece = payload[at:at + segment]
            frames += self.fpdu(wire.tagged_ulpdu(stag, to + at, piece, at + segment >= len(payload)))
        return frames

    def frame_untagged(self, opcode, payload, ulp=0, segment=wire.PAYLOAD_MAX):
        frames = b""
        for at in range(0, max(len(payload), 1), segment):
            frames += self.fpdu(wire.untagged_ulpdu(opcode, payload[at:at + segment], self.msn_out, ulp, mo=at,
                                                    last=at + segment >= len(payload)))
        self.msn_out = (self.msn_out + 1) & 0xFFFFFFFF
        return frames

    def send(self, payload, **kwargs):
        self.send_raw(self.frame_untagged(wire.OP_SEND, payload, **kwargs))

    def write(self, stag, to, payload, **kwargs):
        self.send_raw(self.frame_write(stag, to, payload, **kwargs))

    def immediate(self, value):
        self.send_raw(self.frame_untagged(wire.OP_IMMEDIATE, wire.immediate_payload(value)))

    def write_immediate(self, stag, to, payload, value, **kwargs):
        data = self.frame_write(stag, to, payload, **kwargs) if payload else b""
        self.send_raw(data + self.frame_untagged(wire.OP_IMMEDIATE, wire.immediate_payload(value)))

    def send_terminate(self, layer_type, code):
        self.send_ulpdu(wire.terminate_ulpdu(layer_type, code))

    # --- MPA

    def mpa_connect(self, private, crc=False, **frame):
        """Sends the request, returns the private data of the reply. Rejected, ConnectionClosed, TimedOut."""
        frame.setdefault("flags", wire.MPA_CRC if crc else 0)
        self.send_raw(wire.mpa_frame(private, **frame))
        return self.mpa_reply(crc)

    def mpa_reply(self, crc=False):
        header = self._exactly(20)
        length = struct.unpack(">H", header[18:20])[0]
        check(length <= 512, "MPA reply with %d bytes of private data" % length)
        reply = wire.MpaReply(header + self._exactly(length))
        check(reply.revision in (1, 2), "MPA revision %d" % reply.revision)
        check(not reply.flags & wire.MPA_MARKERS, "MPA reply wants markers")
        self.reply = reply
        self.crc = crc or reply.crc
        if reply.rejected:
            raise Rejected(reply.private)
        return reply.private

    # --- receiving

    def _read(self, timeout):
        """Reads what there is, or waits for something. False: timeout."""
        if self.eof:
            return True
        readable, _, _ = select.select([self.socket], [], [], max(timeout, 0))
        if not readable:
            return False
        try:
            data = self.socket.recv(1 << 20)
        except ConnectionError:
            data, self.reset = b"", True
        if data:
            self.received += data
        else:
            self.eof = True
            if self.answer_fin:
                try:
                    self.socket.shutdown(socket.SHUT_WR)
                except OSError:
                    pass
        return True

    def _drain(self):
        """Picks up a Terminate that may have arrived before a failed send."""
        try:
            while not self.eof and self._read(0.5):
                pass
            while self._next_ulpdu() is not None:
                pass
        except (WireViolation, OSError):
            pass

    def _exactly(self, count):
        deadline = time.monotonic() + self.timeout
        while len(self.received) < count:
            if self.eof:
                raise ConnectionClosed(self, not self.received and not self.reset, "closed during set-up")
            if not self._read(deadline - time.monotonic()):
                raise TimedOut("nothing came for %.0f s" % self.timeout)
        data = bytes(self.received[:count])
        del self.received[:count]
        return data

    def _next_ulpdu(self):
        if len(self.received) < 2:
            return None
        length = struct.unpack_from(">H", self.received)[0]
        padded = 2 + length + (-(2 + length) % 4)
        if len(self.received) < padded + 4:
            return None
        frame = bytes(self.received[:padded + 4])
        del self.received[:padded + 4]
        checksum = struct.unpack_from("<I", frame, padded)[0]
        if self.crc:
            check(checksum == wire.crc32c(frame[:padded]), "CRC of a received FPDU")
        else:
            check(checksum == 0, "CRC field %08x although CRC is off" % checksum)
        check(not any(frame[2 + length:padded]), "pad is not zero")
        ulpdu = wire.Ulpdu(frame[2:2 + length])
        if not ulpdu.tagged and ulpdu.opcode == wire.OP_TERMINATE:
            self.terminate = wire.Terminate(ulpdu)
        return ulpdu

    def _place(self, ulpdu):
        check(ulpdu.opcode == wire.OP_WRITE, "tagged opcode %d" % ulpdu.opcode)
        check(self.partial is None, "tagged segment within an untagged message")
        if self.tagged_next is not None:
            check((ulpdu.stag, ulpdu.to) == self.tagged_next, "tagged message does not go on where it stopped")
        self.tagged_next = None if ulpdu.last else (ulpdu.stag, ulpdu.to + len(ulpdu.payload))
        check(ulpdu.payload, "zero-length Write FPDU")
        region = self.regions.get(ulpdu.stag)
        check(region is not None, "Write to the unknown or revoked STag %08x" % ulpdu.stag)
        at = ulpdu.to - region.base
        check(0 <= at and at + len(ulpdu.payload) <= len(region.data),
              "Write of %d bytes at offset %d of a region of %d" % (len(ulpdu.payload), at, len(region.data)))
        region.data[at:at + len(ulpdu.payload)] = ulpdu.payload
        region.written += len(ulpdu.payload)

    def _message(self, ulpdu):
        """Assembles untagged messages; None while one is unfinished."""
        op = ulpdu.opcode
        check(op in (wire.OP_SEND, wire.OP_SEND_INVALIDATE, wire.OP_IMMEDIATE, wire.OP_SEND_IMMEDIATE),
              "opcode %d" % op)
        check(self.tagged_next is None, "untagged segment within a tagged message")
        check(ulpdu.qn == 0, "QN %d" % ulpdu.qn)
        check(ulpdu.msn == self.msn_in, "MSN %d instead of %d" % (ulpdu.msn, self.msn_in))
        if self.partial is None:
            self.partial, self.partial_op, self.partial_ulp = bytearray(), op, ulpdu.ulp
        check(op == self.partial_op and ulpdu.ulp == self.partial_ulp, "message changes its kind half way")
        check(ulpdu.mo == len(self.partial), "MO %d instead of %d" % (ulpdu.mo, len(self.partial)))
        self.partial += ulpdu.payload
        if not ulpdu.last:
            return None
        payload, ulp, self.partial = bytes(self.partial), self.partial_ulp, None
        self.msn_in = (self.msn_in + 1) & 0xFFFFFFFF
        if op == wire.OP_SEND:
            check(ulp == 0, "reserved field of a Send is %08x" % ulp)
            return Message("send", payload, None, None)
        if op == wire.OP_SEND_INVALIDATE:
            check(not payload, "Send with Invalidate of %d bytes" % len(payload))
            check(ulp in self.regions, "invalidation of the unknown STag %08x" % ulp)
            del self.regions[ulp]
            return Message("invalidate", payload, None, ulp)
        if op == wire.OP_SEND_IMMEDIATE:
            return Message("send_imm", payload, ulp, None)
        check(ulp == 0, "reserved field of Immediate Data is %08x" % ulp)
        check(len(payload) == 8, "Immediate Data of %d bytes" % len(payload))
        value, rest = struct.unpack(">II", payload)
        check(rest == 0, "second word of Immediate Data is %08x" % rest)
        return Message("imm", b"", value, None)

    def next_message(self):
        """A complete message out of what was received; None if there is none. ConnectionClosed."""
        while True:
            ulpdu = self._next_ulpdu()
            if ulpdu is None:
                if self.eof:
                    orderly = not self.received and not self.reset and self.terminate is None
                    raise ConnectionClosed(self, orderly, "reset" if self.reset else "closed by the server")
                return None
            if self.terminate is not None:
                self.received.clear()
                continue  # nothing but EOF may follow
            if ulpdu.tagged:
                self._place(ulpdu)
                continue
            message = self._message(ulpdu)
            if message is not None:
                return message

    def wait_message(self, timeout=None):
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        while True:
            message = self.next_message()
            if message is not None:
                return message
            if not self._read(deadline - time.monotonic()):
                raise TimedOut("no message on connection %d" % self.cid)

    def wait_closed(self, timeout=None):
        """Swallows messages until the server closes. Returns the ConnectionClosed; TimedOut if it does not."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        while True:
            try:
                self.wait_message(deadline - time.monotonic())
            except ConnectionClosed as closed:
                return closed

    # --- leaving

    def half_close(self):
        self.socket.shutdown(socket.SHUT_WR)

    def reset_close(self):
        """RST instead of FIN."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self):
        self.socket.close()


class Region:
    """Client memory the server may write into under a key."""

    def __init__(self, length, base):
        self.data, self.base, self.written = bytearray(length), base, 0


class Image:
    """One request as it goes into a chunk: what is written where, and the immediate."""

    def __init__(self, chunk, start, payload, offset, region=None, stag=None, read_length=0):
        self.chunk, self.start, self.payload, self.offset = chunk, start, payload, offset
        self.region, self.stag, self.read_length = region, stag, read_length
        self.imm = None     # overrides the computed immediate
        self.rkey = None    # overrides the chunk's key
        self.address = None  # overrides the remote address
        self.response = None

    def patch(self, at, data):
        """Overwrites bytes of the written part; at counts from the start of the chunk."""
        at -= self.start
        self.payload = self.payload[:at] + data + self.payload[at + len(data):]
        return self


Response = collections.namedtuple("Response", "error invalidated connection")


class Session:
    """One session with one path."""

    def __init__(self, address, name=None, connections=2, crc=False, timeout=DEFAULT_TIMEOUT, session_uuid=None,
                 path_uuid=None, source=None, first_conn=True):
        self.address, self.timeout, self.crc, self.source = address, timeout, crc, source
        self.name = name if name is not None else "raw-%s" % os.urandom(4).hex()
        self.connections_wanted, self.first_conn = connections, first_conn
        self.session_uuid = session_uuid or os.urandom(16)
        self.path_uuid = path_uuid or os.urandom(16)
        self.connections, self.regions = [], {}
        self.geometry, self.chunks = None, []
        self.pending, self.busy = {}, set()
        self.invalidated = set()
        self.next_stag = int.from_bytes(os.urandom(2), "big") << 8 | 0x100
        self.heartbeats, self.acks, self.answer_heartbeats = 0, 0, True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # --- establishment

    def open_connection(self, cid, mpa=None, **request):
        connection = Connection(self.address, self.regions, cid, self.source, self.timeout)
        request.setdefault("cid_num", self.connections_wanted)
        request.setdefault("first_conn", self.first_conn)
        private = wire.connect_request(request.pop("path_uuid", self.path_uuid),
                                       request.pop("session_uuid", self.session_uuid), cid, **request)
        try:
            reply = connection.mpa_connect(private, self.crc, **(mpa or {}))
            response = wire.ConnectResponse(reply, rejected=False)
        except Exception:
            connection.close()
            raise
        if self.geometry is None:
            self.geometry = response
        else:
            check(vars(response) == vars(self.geometry), "connections of one path differ in geometry")
        self.connections.append(connection)
        return connection

    def connect(self):
        for cid in range(self.connections_wanted):
            self.open_connection(cid)

    def info(self):
        self.connections[0].send(wire.info_request(self.name))
        self.wait_info()

    def wait_info(self):
        message = self.connections[0].wait_message(self.timeout)
        check(message.kind == "send", "%s instead of INFO_RSP" % message.kind)
        self.chunks = wire.parse_info_response(message.payload, self.queue_depth, self.geometry.chunk_size)

    def establish(self):
        self.connect()
        self.info()
        return self

    @property
    def queue_depth(self):
        return self.geometry.queue_depth

    @property
    def new_rkey(self):
        return bool(self.geometry.flags & wire.NEW_RKEY)

    # --- memory and permits

    def region(self, length):
        stag = self.next_stag
        self.next_stag = (self.next_stag + 0x101) & 0x7FFFFFFF
        region = Region(length, (stag & 0xFFFFFF00) << 8 | 0x10)
        self.regions[stag] = region
        return stag, region

    def permit(self):
        for i in range(self.queue_depth):
            if i not in self.busy:
                return i
        raise AssertionError("no permit left")

    # --- requests

    def write_image(self, user, data=b"", chunk=None, usr_len=None, kind=wire.RTRS_WRITE, offset=None):
        chunk = self.permit() if chunk is None else chunk
        payload = data + user + wire.write_message(len(user) if usr_len is None else usr_len, kind)
        return Image(chunk, 0, payload, len(data) + len(user) if offset is None else offset)

    def read_image(self, user, length=0, need_inval=True, chunk=None, usr_len=None, kind=wire.RTRS_READ,
                   offset=None, desc_len=None, desc_key=None, desc_addr=None, count=None, read_flags=None):
        chunk = self.permit() if chunk is None else chunk
        stag = region = None
        descriptors = []
        if length:
            stag, region = self.region(length)
            descriptors = [(region.base if desc_addr is None else desc_addr, stag if desc_key is None else desc_key,
                            length if desc_len is None else desc_len)]
        if read_flags is None:
            read_flags = wire.NEED_INVAL if need_inval and length else 0
        payload = user + wire.read_message(len(user) if usr_len is None else usr_len, descriptors, read_flags, kind,
                                           count)
        return Image(chunk, length, payload, length + len(user) if offset is None else offset, region, stag, length)

    def frames(self, image, connection):
        address, key = self.chunks[image.chunk]
        value = wire.request_imm(self.queue_depth, image.chunk, image.offset) if image.imm is None else image.imm
        frames = connection.frame_write(key if image.rkey is None else image.rkey,
                                        (address if image.address is None else image.address) + image.start,
                                        image.payload)
        return frames + connection.frame_untagged(wire.OP_IMMEDIATE, wire.immediate_payload(value))

    def post(self, image, cid=None):
        connection = self.connections[self.default_cid() if cid is None else cid]
        self.busy.add(image.chunk)
        self.pending[image.chunk] = image
        image.response = None
        connection.send_raw(self.frames(image, connection))
        return image

    def default_cid(self):
        return 1 if len(self.connections) > 1 else 0

    def on_message(self, connection, message):
        if message.kind == "invalidate":
            self.invalidated.add(message.stag)
            return
        if message.kind == "imm":
            kind, payload = message.imm >> 28, message.imm & 0x0FFFFFFF
            if kind == wire.IMM_HEARTBEAT:
                check(connection.cid == 0, "heartbeat on connection %d" % connection.cid)
                check(payload == 0, "heartbeat with payload %x" % payload)
                self.heartbeats += 1
                if self.answer_heartbeats:
                    connection.immediate(wire.imm(wire.IMM_HEARTBEAT_ACK))
                return
            if kind == wire.IMM_HEARTBEAT_ACK:
                check(connection.cid == 0, "heartbeat ack on connection %d" % connection.cid)
                self.acks += 1
                return
            check(not self.new_rkey, "answer by write with immediate in NEW_RKEY mode")
        else:
            check(message.kind == "send_imm" and self.new_rkey, "a message of kind %s" % message.kind)
            kind, payload = message.imm >> 28, message.imm & 0x0FFFFFFF
        check(kind in (wire.IMM_IO_RSP, wire.IMM_IO_RSP_INV), "immediate of type %d" % kind)
        error, number = payload >> 19, payload & 0x7FFFF
        check(number in self.pending, "answer for id %d, which is not in use" % number)
        image = self.pending.pop(number)
        invalidated = kind == wire.IMM_IO_RSP_INV
        if self.new_rkey:
            check(len(message.payload) == 8, "RKEY_RSP of %d bytes" % len(message.payload))
            rsp, buf_id, key = struct.unpack("<HHI", message.payload)
            check(rsp == wire.RKEY_RSP and buf_id == number, "RKEY_RSP type %d for chunk %d" % (rsp, buf_id))
            address, old = self.chunks[number]
            check(key in (old, (old & 0xFFFFFF00) | ((old + 1) & 0xFF)), "new key %08x after %08x" % (key, old))
            self.chunks[number] = (address, key)
        check(invalidated == (image.stag in self.invalidated),
              "answer of type %d, invalidation seen: %s" % (kind, image.stag in self.invalidated))
        self.invalidated.discard(image.stag)
        self.regions.pop(image.stag, None)
        if image.region is not None:
            expected = image.read_length if error == 0 else 0
            check(image.region.written == expected,
                  "errno %d, but %d of %d bytes written" % (error, image.region.written, image.read_length))
        self.busy.discard(number)
        image.response = Response(error, invalidated, connection.cid)

    def pump(self, timeout):
        """Handles what arrives within timeout; returns whether something did."""
        progress = False
        for connection in self.connections:
            message = connection.next_message()
            while message is not None:
                progress = True
                self.on_message(connection, message)
                message = connection.next_message()
        if progress:
            return True
        readable, _, _ = select.select(self.connections, [], [], max(timeout, 0))
        for connection in readable:
            connection._read(0)
            message = connection.next_message()
            while message is not None:
                self.on_message(connection, message)
                message = connection.next_message()
        return bool(readable)

    def wait(self, image, timeout=None):
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        while image.response is None:
            if not self.pump(deadline - time.monotonic()) and time.monotonic() >= deadline:
                raise TimedOut("no answer to chunk %d" % image.chunk)
        return image.response

    def idle(self, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.pump(deadline - time.monotonic())

    def call(self, image, cid=None, timeout=None):
        """The errno of the answer."""
        return self.wait(self.post(image, cid), timeout).error

    def call_ok(self, image, cid=None):
        response = self.wait(self.post(image, cid))
        if response.error:
            raise RequestFailed(response.error)
        return image

    # --- RNBD

    def sess_info(self, version=2):
        image = self.call_ok(self.read_image(wire.sess_info(version), 36), 0)
        response = wire.SessInfoResponse(image.region.data)
        check(response.version == min(version, 2), "version %d for %d" % (response.version, version))
        return response

    def open(self, name, mode=wire.RW, filler=0):
        image = self.call_ok(self.read_image(wire.open_message(name, mode, filler=filler), 56), 0)
        return wire.OpenResponse(image.region.data)

    def close_device(self, volume):
        self.call_ok(self.write_image(wire.close_message(volume.device)), 0)

    def io_read_image(self, volume, offset, length, flags=wire.SYNC, **kwargs):
        user = wire.io_message(volume.device, wire.READ, offset // 512, length, flags)
        return self.read_image(user, length, **kwargs)

    def io_write_image(self, volume, offset, data, flags=wire.SYNC, **kwargs):
        user = wire.io_message(volume.device, wire.WRITE, offset // 512, len(data), flags)
        return self.write_image(user, data, **kwargs)

    def read(self, volume, offset, length, cid=None, **kwargs):
        return bytes(self.call_ok(self.io_read_image(volume, offset, length, **kwargs), cid).region.data)

    def write(self, volume, offset, data, cid=None, **kwargs):
        self.call_ok(self.io_write_image(volume, offset, data, **kwargs), cid)

    def flush(self, volume, cid=None, flags=wire.FUA | wire.SYNC):
        user = wire.io_message(volume.device, wire.FLUSH, wire.ALL_ONES, 0, flags)
        self.call_ok(self.read_image(user), cid)

    def range_image(self, volume, op, offset, length, flags=0):
        return self.write_image(wire.io_message(volume.device, op, offset // 512, length, flags))

    def discard(self, volume, offset, length, cid=None):
        self.call_ok(self.range_image(volume, wire.DISCARD, offset, length), cid)

    def write_zeroes(self, volume, offset, length, flags=0, cid=None):
        self.call_ok(self.range_image(volume, wire.WRITE_ZEROES, offset, length, flags), cid)

    def heartbeat(self, timeout=None):
        """Sends one and waits for its ack."""
        before, deadline = self.acks, time.monotonic() + (timeout or self.timeout)
        self.connections[0].immediate(wire.imm(wire.IMM_HEARTBEAT))
        while self.acks == before:
            if not self.pump(deadline - time.monotonic()) and time.monotonic() >= deadline:
                raise TimedOut("heartbeat not answered")

    # --- the end

    def wait_path_closed(self, timeout=None):
        """All connections must be closed by the server. Returns the list of ConnectionClosed by cid."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        return [connection.wait_closed(max(deadline - time.monotonic(), 0.01)) for connection in self.connections]

    def close(self):
        for connection in self.connections:
            connection.close()
        self.connections = []
