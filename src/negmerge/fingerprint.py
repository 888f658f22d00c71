"""Checksums at the speed of memory, and the fingerprint of a whole model.

A tensor's checksum is a sum over its 4096-byte blocks, so that ranges can be read in any order by
any number of workers. A block is 512 little-endian 64-bit words w (the last one padded with zeros):

    S = Σᵢ low32(wᵢ + kᵢ) · high32(wᵢ + kᵢ)      (the NH hash of UMAC, keys k from splitmix64)
    checksum = Σⱼ mix(Sⱼ + (j + 1) · φ)          (j: the block's number; mix: its finaliser)

all modulo 2⁶⁴. It finds accidents, not attacks: `--digest` adds SHA-256 for those.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoint import Checkpoint
from negmerge.header import TensorInfo
from negmerge.reading import open_regular

BLOCK = 4096
AT_ONCE = 256
"""Blocks at once: with fewer, threads wait for Python's lock more than they compute."""
Words = NDArray[np.uint64]

_PHI = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)


def _mixed(z: Words) -> Words:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _keys() -> Words:
    return _mixed(np.arange(1, 513, dtype=np.uint64) * _PHI)


KEYS = _keys()


def checksum(words: Words, first: int, keys: Words) -> int:
    """The sum over whole blocks of words, the first of which has number `first`.

    >>> zeros = np.zeros(512, np.uint64)
    >>> checksum(zeros, 0, KEYS) == checksum(zeros, 1, KEYS)
    False

    In numpy, so that reading one model needs no compiler; merging many has a compiled twin.
    """
    total = np.zeros(1, np.uint64)  # an array wraps around; a single number would warn of it
    blocks = words.reshape(-1, BLOCK // 8)
    room = np.empty((2, AT_ONCE, BLOCK // 8), np.uint64)
    for start in range(0, len(blocks), AT_ONCE):
        some = blocks[start : start + AT_ONCE]
        x, high = room[:, : len(some)]
        np.add(some, keys, out=x)
        np.right_shift(x, np.uint64(32), out=high)
        x &= _LOW
        x *= high
        number = np.arange(first + start + 1, first + start + 1 + len(x), dtype=np.uint64)
        total += _mixed(x.sum(axis=1) + number * _PHI).sum()
    return int(total[0])


def fingerprint(tensors: Mapping[str, TensorInfo], checksums: Mapping[str, int]) -> str:
    """Name a model's content, however it is cut into files: 32 hexadecimal digits.

    tensors: what there is; checksums: the checksum of each tensor's bytes.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        info = tensors[name]
        line = f"{name}\0{info.dtype}\0{','.join(map(str, info.shape))}\0{checksums[name]:016x}\n"
        digest.update(line.encode())
    return digest.hexdigest()


def padded(count: int) -> int:
    """Bytes of the blocks that hold `count` bytes.

    >>> padded(1), padded(4096)
    (4096, 4096)
    """
    return -(-count // BLOCK) * BLOCK


def tensor_checksum(model: Checkpoint, info: TensorInfo, buffer: NDArray[np.uint8]) -> int:
    """Read a tensor once through the buffer and return its checksum."""
    total = 0
    for start in range(0, info.nbytes, buffer.nbytes):
        count = min(buffer.nbytes, info.nbytes - start)
        model.read_into(info, start, buffer[:count])
        whole = padded(count)
        buffer[count:whole] = 0
        total += checksum(buffer[:whole].view(np.uint64), start // BLOCK, KEYS)
    return total % 2**64


def fingerprint_of(model: Checkpoint) -> str:
    """Read a whole checkpoint and name its content.

    >>> from safetensors.numpy import save_file
    >>> path = getfixture("tmp_path") / "m.safetensors"
    >>> save_file({"w": np.arange(6, dtype=np.float32)}, path)
    >>> with Checkpoint(path) as model:
    ...     fingerprint_of(model)
    '...'
    """
    buffer = np.empty(1 << 20, np.uint8)
    sums = {name: tensor_checksum(model, info, buffer) for name, info in model.tensors.items()}
    return fingerprint(model.tensors, sums)


def digest_of(model: Checkpoint) -> str:
    """SHA-256 over the bytes of a checkpoint's files, in the order of their names."""
    digest = hashlib.sha256()
    for path in model.files:
        with os.fdopen(open_regular(path), "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
