"""The bytes of an exported sequence: what frames and describes its records, and how to tell that they arrived whole.

The format, version 1; integers are little-endian, elements as they are in the pool:

    magic "anyattnS", version (uint32), bytes of the header (uint32), bytes of the records (uint64)
    header: JSON with num_tokens and, for each pool, its window, cache spec, scales and which pages follow
    records of each pool's pages in the sequence's order, as `KVPool.read_pages` gives them
    SHA-256 over all that is before it

Magic, version and SHA-256 are where they are in every version, so that another version is told from damage.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

from anyattn.errors import ContractError, StorageError

_MAGIC = b"anyattnS"
_VERSION = 1
_PREFIX = struct.Struct("<8sIIQ")
checksum = hashlib.sha256
"""In the standard library, and with the instructions that processors have for it twice as fast as BLAKE2b: 1.8 GB/s."""
_CHECKSUM_BYTES = checksum().digest_size


def start(header: dict[str, Any], record_bytes: int) -> bytes:
    """All that is before the records."""
    encoded = json.dumps(header).encode()
    return _PREFIX.pack(_MAGIC, _VERSION, len(encoded), record_bytes) + encoded


def opened(data: bytes | bytearray | memoryview) -> tuple[Any, memoryview]:
    """Header and records, once it is sure that these are the bytes that were exported.

    Raises StorageError for what did not arrive whole, ContractError for what never was what is wanted here.
    """
    try:
        view = memoryview(data).cast("B")
    except TypeError as error:
        raise ContractError(f"a sequence is imported from bytes, not {type(data).__name__}: {error}") from error
    if len(view) < _PREFIX.size:
        raise StorageError(f"the export is cut off: {len(view)} bytes are less than its first {_PREFIX.size}.")
    magic, version, header_bytes, record_bytes = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise StorageError(f"these bytes are no export, or a damaged one: they begin with {magic!r}, not {_MAGIC!r}.")
    whole = checksum(view[:-_CHECKSUM_BYTES]).digest() == view[-_CHECKSUM_BYTES:]
    if version != _VERSION and whole:
        raise ContractError(f"version of the format differs: the export has {version}, and here it is {_VERSION}.")
    expected = _PREFIX.size + header_bytes + record_bytes + _CHECKSUM_BYTES
    if len(view) != expected:
        state = "cut off" if len(view) < expected else "extended"
        raise StorageError(f"the export is {state} or damaged: {len(view)} bytes, and it says that it has {expected}.")
    if not whole:
        raise StorageError("the export is damaged: its bytes do not give its checksum.")
    header, records = view[_PREFIX.size :][:header_bytes], view[_PREFIX.size + header_bytes : -_CHECKSUM_BYTES]
    try:
        return json.loads(bytes(header)), records
    except (ValueError, RecursionError) as error:
        raise ContractError(f"the export's header is not JSON: {error}.") from error


def refuse_differences(theirs: list[Any], ours: list[dict[str, Any]]) -> None:
    """Raises ContractError for the first field in which what a header says of the pools is not what ours are."""
    if len(theirs) != len(ours):
        raise ContractError(f"pools differ: the export has {len(theirs)}, and here are {len(ours)}.")
    for index, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        if not isinstance(their, dict):
            raise ContractError("the export's header is not one of this format: a pool is not an object.")
        for name in [*our, *(their.keys() - our.keys())]:
            missing = "nothing"
            if name not in our or name not in their or their[name] != our[name]:
                raise ContractError(
                    f"{name} of pool {index} differs: the export has {their.get(name, missing)!r}, and here it is "
                    f"{our.get(name, missing)!r}. Both sides need the same cache; nothing was imported."
                )
