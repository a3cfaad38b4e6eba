# SPDX-License-Identifier: BSD-3-Clause
"""The bytes of iWARP, RTRS and RNBD, written from the specification alone.

This is a second opinion on the wire format: it shares nothing with the C++ sources, so a
misunderstanding in one of the two shows up as a disagreement. Builders take every field as an argument
with the right value as default, so that a caller can make each of them wrong. Parsers of what the other
end sends are strict and raise WireViolation; nothing is forgiven that we would not send ourselves.
"""

import errno
import struct

# --- CRC32C (Castagnoli), reflected, by table ------------------------------------------------------

_CRC_TABLE = []
for _i in range(256):
    _c = _i
    for _ in range(8):
        _c = (_c >> 1) ^ 0x82F63B78 if _c & 1 else _c >> 1
    _CRC_TABLE.append(_c)


def crc32c(data, crc=0):
    crc ^= 0xFFFFFFFF
    table = _CRC_TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


class WireViolation(Exception):
    """The other end sent something the specification does not allow it to send."""


def check(condition, text):
    if not condition:
        raise WireViolation(text)


# --- MPA -------------------------------------------------------------------------------------------

MPA_REQUEST_KEY = b"MPA ID Req Frame"
MPA_REPLY_KEY = b"MPA ID Rep Frame"
MPA_MARKERS, MPA_CRC, MPA_REJECT, MPA_ENHANCED = 0x80, 0x40, 0x20, 0x10


def mpa_frame(private, key=MPA_REQUEST_KEY, flags=0, revision=1, length=None):
    if length is None:
        length = len(private)
    return key + struct.pack(">BBH", flags, revision, length) + private


class MpaReply:
    def __init__(self, data):
        check(data[:16] == MPA_REPLY_KEY, "MPA reply key %r" % data[:16])
        self.flags, self.revision, self.length = struct.unpack(">BBH", data[16:20])
        self.private = data[20:]

    @property
    def rejected(self):
        return bool(self.flags & MPA_REJECT)

    @property
    def crc(self):
        return bool(self.flags & MPA_CRC)


# --- FPDU, DDP, RDMAP ------------------------------------------------------------------------------

OP_WRITE, OP_READ_REQUEST, OP_READ_RESPONSE, OP_SEND = 0, 1, 2, 3
OP_SEND_INVALIDATE, OP_SEND_SE, OP_SEND_SE_INVALIDATE, OP_TERMINATE = 4, 5, 6, 7
OP_IMMEDIATE, OP_IMMEDIATE_SE, OP_SEND_IMMEDIATE = 8, 9, 0xC

TAGGED, LAST = 0x80, 0x40
DDP_VERSION, RDMAP_VERSION = 1, 1
PAYLOAD_MAX = 61440  # of one FPDU we send


def fpdu(ulpdu, crc=False, length=None, pad=b"\0\0\0", crc_xor=0):
    """Frames a ULPDU. length lies about it; crc_xor spoils the checksum."""
    if length is None:
        length = len(ulpdu)
    body = struct.pack(">H", length & 0xFFFF) + ulpdu
    body += pad[: -len(body) % 4]
    value = (crc32c(body) ^ crc_xor) if crc else crc_xor
    return body + struct.pack("<I", value)


def control(tagged, last, opcode, ddp_version=DDP_VERSION, rdmap_version=RDMAP_VERSION):
    return bytes(((TAGGED if tagged else 0) | (LAST if last else 0) | ddp_version,
                  (rdmap_version << 6) | opcode))


def tagged_ulpdu(stag, to, payload, last=True, opcode=OP_WRITE, **versions):
    return control(True, last, opcode, **versions) + struct.pack(">IQ", stag & 0xFFFFFFFF,
                                                                 to & 0xFFFFFFFFFFFFFFFF) + payload


def untagged_ulpdu(opcode, payload, msn, ulp=0, qn=0, mo=0, last=True, tagged=False, **versions):
    return control(tagged, last, opcode, **versions) + struct.pack(
        ">IIII", ulp & 0xFFFFFFFF, qn, msn & 0xFFFFFFFF, mo) + payload


def terminate_ulpdu(layer_type, code, **kwargs):
    kwargs.setdefault("msn", 1)
    return untagged_ulpdu(OP_TERMINATE, bytes((layer_type, code, 0, 0)), qn=2, **kwargs)


def immediate_payload(value):
    return struct.pack(">II", value, 0)


class Ulpdu:
    """One received ULPDU, checked for everything that does not need state."""

    def __init__(self, data):
        check(len(data) >= 14, "ULPDU of %d bytes" % len(data))
        self.tagged = bool(data[0] & TAGGED)
        self.last = bool(data[0] & LAST)
        check(data[0] & 0x3C == 0, "reserved DDP bits %02x" % data[0])
        check(data[0] & 3 == DDP_VERSION, "DDP version %d" % (data[0] & 3))
        check(data[1] >> 6 == RDMAP_VERSION, "RDMAP version %d" % (data[1] >> 6))
        check(data[1] & 0x30 == 0, "reserved RDMAP bits %02x" % data[1])
        self.opcode = data[1] & 0xF
        if self.tagged:
            self.stag, self.to = struct.unpack(">IQ", data[2:14])
            self.payload = data[14:]
        else:
            check(len(data) >= 18, "untagged ULPDU of %d bytes" % len(data))
            self.ulp, self.qn, self.msn, self.mo = struct.unpack(">IIII", data[2:18])
            self.payload = data[18:]


class Terminate:
    def __init__(self, ulpdu):
        check(ulpdu.qn == 2 and ulpdu.msn == 1 and ulpdu.mo == 0 and ulpdu.last and ulpdu.ulp == 0,
              "Terminate with QN %d MSN %d MO %d" % (ulpdu.qn, ulpdu.msn, ulpdu.mo))
        data = ulpdu.payload
        check(len(data) >= 4, "Terminate of %d bytes" % len(data))
        self.layer_type, self.code, bits, zero = data[:4]
        check(bits & 0x3F == 0 and zero == 0, "Terminate control bits %02x %02x" % (bits, zero))
        self.segment_length = self.header = None
        if bits:
            check(bits == 0xC0, "Terminate with only one of M and D: %02x" % bits)
            self.segment_length = struct.unpack(">H", data[4:6])[0]
            self.header = data[6:]
            check(len(self.header) in (14, 18), "Terminate carries a header of %d bytes" % len(self.header))
            check((len(self.header) == 14) == bool(self.header[0] & TAGGED),
                  "Terminate carries a header of the wrong kind")
        else:
            check(len(data) == 4, "Terminate with %d unannounced bytes" % (len(data) - 4))

    def __str__(self):
        return "0x%02x/%02x" % (self.layer_type, self.code)


# --- RTRS ------------------------------------------------------------------------------------------

RTRS_MAGIC, RTRS_VERSION = 0x1BBD, 0x0200
INFO_REQ, INFO_RSP, RTRS_WRITE, RTRS_READ, RKEY_RSP = 0, 1, 2, 3, 4
NEED_INVAL, NEW_RKEY = 1, 2
IMM_IO_REQ, IMM_IO_RSP, IMM_IO_RSP_INV, IMM_HEARTBEAT, IMM_HEARTBEAT_ACK = 0, 1, 2, 8, 9


def bits(n):
    return 0 if n <= 1 else (n - 1).bit_length()


def imm(kind, payload=0):
    return (kind << 28) | (payload & 0x0FFFFFFF)


def request_imm(queue_depth, chunk, offset):
    return imm(IMM_IO_REQ, (chunk << (28 - bits(queue_depth))) + offset)


def connect_request(path_uuid, session_uuid, cid=0, cid_num=2, recon_cnt=1, first_conn=True,
                    magic=RTRS_MAGIC, version=RTRS_VERSION):
    return struct.pack("<BBHHHHH", 0, 0, magic, version, cid, cid_num, recon_cnt) + path_uuid \
        + session_uuid + bytes((1 if first_conn else 0,)) + bytes(11)


class ConnectResponse:
    """Private data of an accept or a reject, every byte of it checked."""

    def __init__(self, data, rejected):
        check(len(data) >= 56, "connect response of %d bytes" % len(data))
        (magic, version, error, self.queue_depth, self.max_io_size, self.max_hdr_size,
         self.flags) = struct.unpack("<HHhHIII", data[:20])
        check(magic == RTRS_MAGIC, "magic %04x" % magic)
        check(version == RTRS_VERSION, "version %04x" % version)
        check(not any(data[20:]), "reserved bytes of the connect response are not zero")
        self.error = -error
        if rejected:
            check(0 < self.error <= 511, "reject with errno %d" % error)
            check(not any(data[6:20]), "reject with a geometry")
        else:
            check(error == 0, "accept with errno %d" % error)
            check(self.queue_depth >= 1, "queue depth 0")
            check(self.flags in (0, NEW_RKEY), "flags %x" % self.flags)
            check(self.max_hdr_size >= 2088, "header room %d breaks large kernel reads" % self.max_hdr_size)
            check(bits(self.queue_depth) + bits(self.chunk_size) <= 28, "geometry does not fit the immediate")

    @property
    def chunk_size(self):
        return self.max_io_size + self.max_hdr_size


def connect_response(queue_depth=128, max_io_size=131072, max_hdr_size=4096, flags=0, error=0,
                     magic=RTRS_MAGIC, version=RTRS_VERSION):
    return struct.pack("<HHhHIII", magic, version, -error, queue_depth, max_io_size, max_hdr_size,
                       flags) + bytes(36)


def info_request(name, kind=INFO_REQ):
    if isinstance(name, str):
        name = name.encode()
    return struct.pack("<H", kind) + name[:255].ljust(255, b"\0") + bytes(15)


def info_response(descriptors, kind=INFO_RSP, count=None):
    data = struct.pack("<HHI", kind, len(descriptors) if count is None else count, 0)
    for address, key, length in descriptors:
        data += struct.pack("<QII", address, key, length)
    return data


def parse_info_response(data, queue_depth, chunk_size):
    """The chunks as a list of (address, key)."""
    check(len(data) >= 8, "INFO_RSP of %d bytes" % len(data))
    kind, count, reserved = struct.unpack("<HHI", data[:8])
    check(kind == INFO_RSP, "INFO_RSP type %d" % kind)
    check(reserved == 0, "INFO_RSP reserved bytes")
    check(len(data) == 8 + 16 * count, "INFO_RSP of %d bytes for %d descriptors" % (len(data), count))
    check(count != 0 and queue_depth % count == 0, "%d descriptors for depth %d" % (count, queue_depth))
    check(bits(count) + bits(chunk_size) <= 28, "descriptors do not fit the immediate")
    chunks = []
    for i in range(count):
        address, key, length = struct.unpack_from("<QII", data, 8 + 16 * i)
        check(length != 0 and length % chunk_size == 0, "descriptor of %d bytes" % length)
        chunks += [(address + at, key) for at in range(0, length, chunk_size)]
    check(len(chunks) == queue_depth, "%d chunks for depth %d" % (len(chunks), queue_depth))
    check(queue_depth * chunk_size < 1 << 32, "chunks of 4 GiB and more")
    return chunks


def write_message(user_length, kind=RTRS_WRITE):
    return struct.pack("<HH", kind, user_length)


def read_message(user_length, descriptors=(), flags=0, kind=RTRS_READ, count=None):
    data = struct.pack("<HHHH", kind, user_length, flags, len(descriptors) if count is None else count)
    for address, key, length in descriptors:
        data += struct.pack("<QII", address & 0xFFFFFFFFFFFFFFFF, key & 0xFFFFFFFF, length & 0xFFFFFFFF)
    return data


def rkey_response(chunk, key, kind=RKEY_RSP):
    return struct.pack("<HHI", kind, chunk, key)


# --- RNBD ------------------------------------------------------------------------------------------

SESS_INFO, SESS_INFO_RSP, OPEN, OPEN_RSP, IO, CLOSE = range(6)
RO, RW, MIGRATION = 0, 1, 2
READ, WRITE, FLUSH, DISCARD, SECURE_ERASE, WRITE_ZEROES = range(6)
SYNC, FUA, PREFLUSH, NOUNMAP = 0x100, 0x200, 0x400, 0x800
CACHE_FUA, CACHE_WRITEBACK = 1, 2
ALL_ONES = 0xFFFFFFFFFFFFFFFF


def sess_info(version=2, kind=SESS_INFO, filler=0):
    return struct.pack("<HH", kind, filler * 0x0101) + bytes((version,)) + bytes((filler,)) * 31


def open_message(name, mode=RW, kind=OPEN, filler=0):
    """filler is what a kernel client leaves in the padding: anything at all."""
    if isinstance(name, str):
        name = name.encode()
    field = name if len(name) >= 255 else name + b"\0" + bytes((filler,)) * (254 - len(name))
    return struct.pack("<HHBB", kind, filler * 0x0101, mode, filler) + field[:255] + bytes((filler,)) * 3


def close_message(device, kind=CLOSE):
    return struct.pack("<HHI", kind, 0, device & 0xFFFFFFFF)


def io_message(device, op, sector, size, flags=0, prio=0, kind=IO, filler=0):
    return struct.pack("<HHIQIIH", kind, filler * 0x0101, device & 0xFFFFFFFF, sector & ALL_ONES,
                       (op | flags) & 0xFFFFFFFF, size & 0xFFFFFFFF, prio) + bytes((filler,)) * 6


class SessInfoResponse:
    def __init__(self, data):
        kind, padding, self.version = struct.unpack("<HHB", data[:5])
        check(kind == SESS_INFO_RSP, "SESS_INFO_RSP type %d" % kind)
        check(padding == 0 and not any(data[5:36]), "SESS_INFO_RSP leaks old memory in reserved bytes")


class OpenResponse:
    def __init__(self, data):
        (kind, padding, self.device, self.sectors, self.max_hw_sectors, self.max_write_zeroes_sectors,
         self.max_discard_sectors, self.discard_granularity, self.discard_alignment, self.physical,
         self.logical, self.max_segments, self.secure_discard, rotational,
         self.cache_policy) = struct.unpack("<HHIQIIIIIHHHHBB", data[:46])
        check(kind == OPEN_RSP, "OPEN_RSP type %d" % kind)
        check(padding == 0 and rotational == 0 and not any(data[46:56]),
              "OPEN_RSP leaks old memory in reserved bytes")
        check(self.logical >= 512 and self.logical & (self.logical - 1) == 0, "block size %d" % self.logical)
        check(self.sectors * 512 % self.logical == 0, "%d sectors of block size %d" % (self.sectors, self.logical))

    @property
    def size(self):
        return self.sectors * 512


def open_response(device=0, sectors=131072, max_hw_sectors=256, write_zeroes=8388600, discard=8388600,
                  granularity=4096, alignment=0, physical=4096, logical=512, segments=128, secure=0,
                  policy=3, kind=OPEN_RSP):
    return struct.pack("<HHIQIIIIIHHHHBB", kind, 0, device, sectors, max_hw_sectors, write_zeroes, discard,
                       granularity, alignment, physical, logical, segments, secure, 0, policy) + bytes(10)


def errno_name(number):
    if number == errno.EOPNOTSUPP:
        return "EOPNOTSUPP"  # and not its other name
    return "ok" if number == 0 else errno.errorcode.get(number, str(number))
