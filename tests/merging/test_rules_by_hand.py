"""Cases small enough to be worked out with a pencil, and a patch file known byte for byte."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import negmerge as nm
from negmerge.checkpoints.checksum import add_checksums
from negmerge.checkpoints.fingerprint import checksum
from storage import dense, store

# Five elements, three members:        all +    all −   mixed    with 0    all 0
DELTAS = np.array(
    [
        [1.0, -1.0, 2.0, 0.0, 0.0],
        [2.0, -4.0, -1.0, 3.0, 0.0],
        [6.0, -1.0, 0.5, 3.0, 0.0],
    ]
)
WORKED = [
    ("uniform", {}, [3, -2, 0.5, 2, 0]),
    ("consensus", {}, [3, -2, 0, 0, 0]),
    ("consensus", {"zeros": "abstain"}, [3, -2, 0, 2, 0]),
    ("consensus", {"quorum": 0.6}, [3, -2, 0.5, 2, 0]),
    ("consensus", {"reduce": "min"}, [1, -1, 0, 0, 0]),
    ("consensus", {"reduce": "max"}, [6, -4, 0, 0, 0]),
    ("consensus", {"reduce": "min", "signed": True}, [1, -4, 0, 0, 0]),
    ("consensus", {"reduce": "max", "signed": True}, [6, -1, 0, 0, 0]),
    ("conflict", {}, [0, 0, 0.5, 2, 0]),
    ("magmax", {}, [6, -4, 2, 3, 0]),
    # k = int(.4 · 5) = 2, so the third largest of each is the threshold: 1, 2 and 1.
    # Trimmed: [1 -1 2 0 0], [2 -4 0 3 0], [6 -1 0 3 0].
    ("ties", {"density": 0.4}, [3, -2, 2, 3, 0]),
    # Means 3 −2 .5 2 0; the third largest magnitude is 2.
    ("localize", {"density": 0.4}, [3, -2, 0, 2, 0]),
    # |τ| ≥ 1·|τ̄ − τ|: 1≥2 no, 2≥1, 6≥3 | 1≥1, 4≥2, 1≥1 | 2≥1.5, 1≥1.5 no, .5≥0 | 0≥2 no, 3≥1, 3≥1.
    ("tall", {"factor": 1.0, "agree": 3}, [0, -2, 0, 0, 0]),
    # Agreement 1, 1, 1/3, 2/3 and 0.
    ("soft", {}, [3, -2, 0.5 / 9, 2 * 4 / 9, 0]),
    ("soft", {"power": 1}, [3, -2, 0.5 / 3, 2 * 2 / 3, 0]),
    ("soft", {"power": 3}, [3, -2, 0.5 / 27, 2 * 8 / 27, 0]),
    ("soft", {"power": 4}, [3, -2, 0.5 / 81, 2 * 16 / 81, 0]),
    # Variances 7, 3, 2.25, 3, 0; the squares of the standard errors are 7/3, 1, .75, 1, 0, and
    # mean / standard error 1.96, −2, .58, 2, 0: more than 2 is asked for, so that 2 is not enough.
    ("shrink", {}, [0, 0, 0, 0, 0]),
    ("shrink", {"errors": 2}, [0, 0, 0, 0, 0]),
    ("shrink", {"errors": 1.99}, [0, -2, 0, 2, 0]),
    ("shrink", {"errors": 1.9}, [3, -2, 0, 2, 0]),
    ("shrink", {"errors": 0}, [3, -2, 0.5, 2, 0]),
    # 1 − (7/3)/9, 1 − 1/4, 1 − .75/.25 < 0, 1 − 1/4.
    ("shrink", {"by": "james_stein"}, [20 / 9, -1.5, 0, 1.5, 0]),
]


@pytest.fixture
def pool(tmp_path):
    base = store(tmp_path / "base.safetensors", {"w": np.full(5, 0.25)})
    members = [store(tmp_path / f"m{k}.safetensors", {"w": 0.25 + d}) for k, d in enumerate(DELTAS)]
    return base, members


@pytest.mark.parametrize(("rule", "options", "wanted"), WORKED)
def test_worked_by_hand(pool, rule, options, wanted):
    tau = nm.merge(*pool, rule, options)
    np.testing.assert_array_equal(dense(tau)["w"], np.array(wanted, np.float32))


def test_exact_cancellation_takes_the_majority_sign_of_the_whole_vector(tmp_path):
    """TIES: element 0 cancels; elsewhere minus has the majority, so minus it is."""
    base = store(tmp_path / "b.safetensors", {"w": np.zeros(4)})
    members = [
        store(tmp_path / "m0.safetensors", {"w": np.array([1.0, -1, -1, 2])}),
        store(tmp_path / "m1.safetensors", {"w": np.array([-1.0, -1, -2, 1])}),
    ]
    tau = nm.merge(base, members, "ties", {"density": 1.0})
    np.testing.assert_array_equal(dense(tau)["w"], [-1, -1, -1.5, 1.5])
    mirrored = [
        store(tmp_path / f"n{k}.safetensors", {"w": -np.array(v)})
        for k, v in enumerate([[1.0, -1, -1, 2], [-1.0, -1, -2, 1]])
    ]
    tau = nm.merge(base, mirrored, "ties", {"density": 1.0})
    np.testing.assert_array_equal(dense(tau)["w"], [1, 1, 1.5, -1.5])


def test_forgetting_by_hand(pool, tmp_path):
    tau = nm.merge(*pool)
    nm.apply(pool[0], -0.5 * tau, tmp_path / "out.safetensors")
    with safe_open(tmp_path / "out.safetensors", "numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("w"), [-1.25, 1.25, 0.25, 0.25, 0.25])


def test_sole_dissenters_are_counted(pool):
    """Element 2: the second member alone is not positive; element 3: the first alone is zero."""
    tau = nm.merge(*pool)
    shares = {m["name"]: m["sole_dissent"] for m in tau.origin.members}
    assert shares == {"m0.safetensors": 1 / 5, "m1.safetensors": 1 / 5, "m2.safetensors": 0.0}
    assert tau.origin.sampled == 5


def test_pairs_of_equal_signs_are_counted(tmp_path):
    """Five elements of three members: 3, 3, 1, 1 and no pairs; 3, 1, 1, 0 and 0 of them agree."""
    changes = [[1, 1, 1, 0, 0], [1, -1, 1, 1, 0], [2, -1, 0, -1, 1]]
    base = tmp_path / "base.safetensors"
    save_file({"w": np.zeros(5, np.float32)}, base)
    members = [tmp_path / f"m{k}.safetensors" for k in range(3)]
    for path, change in zip(members, changes, strict=True):
        save_file({"w": np.array(change, np.float32)}, path)
    assert nm.merge(base, members).origin.agreement == {"pairs": 8, "agreeing": 5}
    two = nm.merge(base, members[:2]).origin
    assert two.agreement == {"pairs": 3, "agreeing": 2}
    assert two.pairwise == 2 / 3
    assert "sole_dissent" not in two.members[0]
    assert nm.merge(base, members[:1]).origin.agreement == {}


def test_checksum_is_what_the_documentation_says():
    """A second implementation in plain integers."""
    data = bytes(range(256)) * 40
    top = 2**64

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % top
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % top
        return z ^ (z >> 31)

    phi = 0x9E3779B97F4A7C15
    keys = [mix((i + 1) * phi % top) for i in range(512)]
    padded = data + bytes(-len(data) % 4096)
    total = 0
    for j in range(len(padded) // 4096):
        block = padded[j * 4096 : (j + 1) * 4096]
        inner = 0
        for i in range(512):
            x = (int.from_bytes(block[8 * i : 8 * i + 8], "little") + keys[i]) % top
            inner += (x & 0xFFFFFFFF) * (x >> 32)
        total += mix((inner + (j + 1) * phi) % top)
    words = np.frombuffer(padded, np.uint64)
    assert checksum(words, 0) == total % top
    sums = np.zeros(1, np.uint64)
    add_checksums(words[None].view(np.uint8), 0, len(words) // 512, 0, sums)
    assert int(sums[0]) == total % top


def test_patch_file_is_known_to_the_byte(pool, tmp_path, monkeypatch):
    monkeypatch.setattr("negmerge.merging.engine.versions", lambda: {"negmerge": "0"})
    nm.merge(*pool, out=tmp_path / "p.safetensors", layout="sparse")
    raw = (tmp_path / "p.safetensors").read_bytes()
    with safe_open(tmp_path / "p.safetensors", "numpy") as file:
        metadata = file.metadata()
        assert file.get_tensor("w#mask").tolist() == [0b00011]
        assert file.get_tensor("w#values").tolist() == [3.0, -2.0]
    assert metadata["format"] == "negmerge-patch/1"
    assert json.loads(metadata["tensors"]) == {"w": ["F32", [5], "sparse", 2]}
    assert hashlib.sha256(raw).hexdigest() == GOLDEN


GOLDEN = "5ab2838c0620c32e0d6e9972b91c1fc915339c9b8872c364de854047cfe05ec8"
