"""The file behind a file tier: fixed places for records, each with a checksum that is verified when it is read."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from anyattn.errors import ContractError, StorageError

if TYPE_CHECKING:
    from anyattn.mem_cache.spec import CacheSpec

# The file: magic, format version and bytes of the JSON that follows, zeros up to a multiple of _ALIGNMENT_BYTES; then
# the records of pages 1 to num_pages, each a page's bytes (`KVPool.read_pages`), its trailer (page id, number of the
# save) and the SHA-256 of both. All integers are little-endian.
_MAGIC = b"anyattnF"
_VERSION = 1
_PREFIX = struct.Struct("<8sII")
_TRAILER = struct.Struct("<QQ")
_ALIGNMENT_BYTES = 4096
# SHA-256 is in the standard library, releases the interpreter's lock, and is what processors have instructions for: at
# 1.8 GB/s twice as fast as BLAKE2b where they do.
_CHECKSUM_BYTES = hashlib.sha256().digest_size


class RecordFile:
    """Pages 1 to `num_pages` in a file of full size from the start. One thread at a time may use it.

    Raises ContractError for a path where no file can be, or one is that may not be overwritten; StorageError when the
    disk is full or broken; OSError later on.
    """

    def __init__(self, path: Path, cache: CacheSpec, num_pages: int, *, overwrite: bool) -> None:
        self._record_bytes = cache.bytes_per_page + _TRAILER.size + _CHECKSUM_BYTES
        header = json.dumps({"cache": asdict(cache), "num_pages": num_pages}).encode()
        start = _PREFIX.pack(_MAGIC, _VERSION, len(header)) + header
        self._data_offset = -(-len(start) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        try:
            self._file = path.open("w+b" if overwrite else "x+b", buffering=0)
        except FileExistsError as error:
            raise ContractError(f"{path} is there already; name another file, or set overwrite=True.") from error
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            raise ContractError(f"{path} cannot be created: {error}. Name another file.") from error
        except OSError as error:
            raise StorageError(f"{path} cannot be created: {error}.") from error
        try:
            _write_all(self._file, start)
            self._file.truncate(self._data_offset + num_pages * self._record_bytes)
        except OSError as error:
            self._file.close()
            path.unlink(missing_ok=True)
            raise StorageError(
                f"{path} cannot be given {num_pages} pages of {self._record_bytes} bytes: {error}."
            ) from error

    def write(self, page: int, number: int, record: memoryview) -> None:
        """number: any that differs from that of what the page held before."""
        trailer = _TRAILER.pack(page, number)
        self._seek(page)
        _write_all(self._file, record)
        _write_all(self._file, trailer + _checksum(record, trailer))

    def read(self, page: int, number: int, record: memoryview) -> None:
        """Fills `record` with what was written for this page under this number; raises OSError if that is not there."""
        tail = bytearray(_TRAILER.size + _CHECKSUM_BYTES)
        self._seek(page)
        if not (_fill(self._file, record) and _fill(self._file, memoryview(tail))):
            raise OSError(f"the file ends before page {page} does: it was cut off")
        trailer = _TRAILER.pack(page, number)
        if bytes(tail) != trailer + _checksum(record, trailer):
            raise OSError(f"page {page} is damaged: its bytes do not give its checksum")

    def close(self) -> None:
        self._file.close()

    def _seek(self, page: int) -> None:
        self._file.seek(self._data_offset + (page - 1) * self._record_bytes)


def _checksum(record: memoryview, trailer: bytes) -> bytes:
    digest = hashlib.sha256(record)
    digest.update(trailer)
    return digest.digest()


def _write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]  # an unbuffered file may take a part only


def _fill(file: Any, data: memoryview) -> bool:
    """Reads as much as `data` has room for; False where the file ends before."""
    while data:
        count = file.readinto(data)
        if not count:
            return False
        data = data[count:]
    return True
