"""Random numbers that depend on their use and not on the numbers drawn before.

The numbers of a sample in an epoch are a hash of (seed, epoch, sample), so that a resumed training
draws the same numbers as an uninterrupted one, in any order and in any process.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import OptionError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def seed_of(*parts: object) -> int:
    """Return a 63-bit seed: a hash of the representation of the parts.

    >>> seed_of("order", 0, 1) == seed_of("order", 0, 1) != seed_of("order", 0, 2)
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def set_apart(size: int, name: str, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide the samples that choose λ: those that tune instead, and those that still choose.

    >>> [half.tolist() for half in set_apart(5, "forget", seed=0)]
    [[2, 3], [0, 1, 4]]

    Args:
        size: the number of samples; an error if one half would be empty.
        name: of the set.
    """
    if size < 2:
        raise OptionError(
            f"groups: {size} samples of the {name} set choose λ, and half of them are to tune the "
            "factors; wanted at least 2; use a larger data set, or leave groups out"
        )
    order = np.random.default_rng(seed_of("tune", name, seed)).permutation(size)
    return np.sort(order[: size // 2]), np.sort(order[size // 2 :])


def draws(seed: int, samples: NDArray[Any], count: int) -> NDArray[np.uint64]:
    """Return `count` uniform 64-bit numbers for each sample: splitmix64 at (seed, sample, k).

    >>> one, two = draws(7, np.array([3, 5]), 2), draws(7, np.array([5]), 2)
    >>> bool((one[1] == two[0]).all())
    True
    """
    with np.errstate(over="ignore"):
        start = _mix(np.asarray(samples).astype(np.uint64) + _mix(np.uint64(seed)))
        return _mix(start[:, None] + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64))


def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def seed_torch(seed: int) -> None:
    """Seed torch's generators, faster than `torch.manual_seed`.

    While no GPU is in use, `torch.manual_seed` takes a millisecond: it saves the call, with its
    traceback, for the time when a GPU is initialised.

    >>> import torch
    >>> with torch.random.fork_rng(devices=[]):
    ...     seed_torch(3); one = torch.rand(2)
    ...     _ = torch.manual_seed(3); torch.equal(one, torch.rand(2))
    True
    """
    import torch

    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def fork_all_random_states() -> Iterator[None]:
    """Restore the generators of torch, numpy and Python at the end, for code of the user."""
    with fork_random_state(), ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
        yield


def seed_all(seed: int) -> None:
    """Seed the generators of torch, numpy and Python."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (code of the user may draw from it)


def fork_random_state() -> AbstractContextManager[None]:
    """Return a context manager that restores the state of torch's generators at its end."""
    import torch

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    return torch.random.fork_rng(devices)
