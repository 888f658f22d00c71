"""The checksum of a tensor, and the fingerprint of a model.

The checksum of a tensor is a sum over its 4096-byte blocks, so that ranges can be read in any order
by any number of workers. A block is 512 little-endian 64-bit words w (the last block is padded with
zeros):

    S = Σᵢ low32(wᵢ + kᵢ) · high32(wᵢ + kᵢ)      (the NH hash of UMAC, keys k from splitmix64)
    checksum = Σⱼ mix(Sⱼ + (j + 1) · φ)          (j: the number of the block; mix: `mix`)

all modulo 2⁶⁴. The checksum detects accidents, not attacks; `--digest` records SHA-256 for those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.checkpoints.header import TensorInfo

BLOCK = 4096
BLOCKS_AT_ONCE = 256
"""Blocks of one numpy call: with fewer, threads mostly wait for Python's global lock."""
Words = NDArray[np.uint64]

PHI = np.uint64(0x9E3779B97F4A7C15)
LOW = np.uint64(0xFFFFFFFF)


def mix(z: Any) -> Any:
    """The finaliser of splitmix64, for arrays, and for numbers in compiled code."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


KEYS: Words = mix(np.arange(1, 513, dtype=np.uint64) * PHI)


def checksum(words: Words, first: int) -> int:
    """The checksum of whole blocks, the first of which has the number `first` in its tensor.

    It is computed with numpy; `checksum.py` is the compiled form.

    >>> zeros = np.zeros(512, np.uint64)
    >>> checksum(zeros, 0) == checksum(zeros, 1)
    False
    """
    total = np.zeros(1, np.uint64)  # overflow of a numpy scalar would give a warning
    blocks = words.reshape(-1, BLOCK // 8)
    room = np.empty((2, BLOCKS_AT_ONCE, BLOCK // 8), np.uint64)
    for start in range(0, len(blocks), BLOCKS_AT_ONCE):
        some = blocks[start : start + BLOCKS_AT_ONCE]
        x, high = room[:, : len(some)]
        np.add(some, KEYS, out=x)
        np.right_shift(x, np.uint64(32), out=high)
        x &= LOW
        x *= high
        number = np.arange(first + start + 1, first + start + 1 + len(x), dtype=np.uint64)
        total += mix(x.sum(axis=1) + number * PHI).sum()
    return int(total[0])


def fingerprint(tensors: Mapping[str, TensorInfo], checksums: Mapping[str, int]) -> str:
    """32 hexadecimal digits that depend on the content of a model, but not on its shards."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        info = tensors[name]
        line = f"{name}\0{info.dtype}\0{','.join(map(str, info.shape))}\0{checksums[name]:016x}\n"
        digest.update(line.encode())
    return digest.hexdigest()


def padded_size(count: int) -> int:
    """Round a number of bytes up to whole blocks.

    >>> padded_size(1), padded_size(4096)
    (4096, 4096)
    """
    return -(-count // BLOCK) * BLOCK


def tensor_checksum(model: Checkpoint, info: TensorInfo, buffer: NDArray[np.uint8]) -> int:
    """Read a tensor through a buffer of whole blocks, and return its checksum."""
    total = 0
    for start in range(0, info.nbytes, buffer.nbytes):
        count = min(buffer.nbytes, info.nbytes - start)
        model.read_into(info, start, buffer[:count])
        whole = padded_size(count)
        buffer[count:whole] = 0
        total += checksum(buffer[:whole].view(np.uint64), start // BLOCK)
    return total % 2**64


def fingerprint_of(model: Checkpoint) -> str:
    """Read a whole checkpoint and return its fingerprint.

    >>> from negmerge.checkpoints.state_dict import StateDict
    >>> fingerprint_of(StateDict({"w": np.arange(6, dtype=np.float32)}, "model"))
    'bce5008740b13f324e39b20231d324bd'
    """
    buffer = np.empty(1 << 20, np.uint8)
    sums = {name: tensor_checksum(model, info, buffer) for name, info in model.tensors.items()}
    return fingerprint(model.tensors, sums)
