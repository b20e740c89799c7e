"""Reads the files of W&B runs."""

import json
import struct
import zlib

from wandb.proto.wandb_internal_pb2 import Record


def records(folder, kind):
    """The records of one kind in the one offline run of a `wandb` folder."""
    (path,) = folder.glob("offline-run-*/run-*.wandb")
    return records_of(path, kind)


def records_of(path, kind):
    messages = [Record.FromString(data) for data in framed(path.read_bytes())]
    return [getattr(message, kind) for message in messages if message.WhichOneof("record_type") == kind]


def framed(data):
    """The records of a `.wandb` file: after 7 bytes, blocks of 32 KiB of pieces with a checksum, a length and a type each."""
    assert data[:4] == b":W&B"
    position, record = 7, b""
    while position + 7 <= len(data):
        checksum, length, kind = struct.unpack_from("<IHB", data, position)
        piece = data[position + 7 : position + 7 + length]
        assert zlib.crc32(bytes([kind]) + piece) == checksum
        record += piece
        if kind in (1, 4):  # whole, or last
            yield record
            record = b""
        position += 7 + length
        if (left := -position % 32768) < 7:
            position += left


def values(items):
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def history(folder):
    """The logged rows, without W&B's own columns."""
    return [{key: value for key, value in values(record.item).items() if key[0] != "_"} for record in records(folder, "history")]


def offline_run(folder):
    """`(rows, exit code)` of the one offline run of a `wandb` folder."""
    (end,) = records(folder, "exit")
    return history(folder), end.exit_code
