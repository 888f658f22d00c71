"""The origin of a task vector: rule, base, members, versions; stored as metadata of a patch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from negmerge.errors import FileError, quoted
from negmerge.support.reading import parse_json_value

OPTIONAL = ("agreement", "values", "tied", "include", "exclude", "factors", "reshaped", "hub")
"""Fields that a patch has only if they are not empty."""


@dataclass(frozen=True)
class Origin:
    """How a task vector was made.

    Args:
        rule: the name of the merge rule.
        n: the number of members.
        base: the fingerprint of the base.
        options: the options of the rule.
        members: name and fingerprint of each member; with three members or more also
            `sole_dissent`, the share of the sampled elements where only this member disagreed.
        sampled: the number of elements that were examined for `sole_dissent` and `agreement`.
        agreement: the number of `pairs` of changes that are not zero, of two members in the same
            element, and of those that have the same sign (`agreeing`).
        kept: names of tensors that stay those of the base: integers, and BatchNorm statistics
            unless they are merged.
        digests: the SHA-256 of each input file, if it was requested.
        versions: the versions of the packages that computed the result.
        values: if the values were rounded, their `format`, how many were `rounded` and how many
            became zero (`zeroed`), and the Euclidean norm of the loss relative to that of the
            vector (`error`).
        tied: names of tensors that the base stores a second time, each with the name under which
            the change is stored.
        include: the patterns of the names of merged tensors; without any all were merged.
        exclude: the patterns of the names of tensors that were not merged.
        factors: the factor of the changes of each member, if the members were scaled to one norm.
        reshaped: what changed the merged vector afterwards, by the name of the way, with its
            numbers (`vectors/reshape.py`).
        hub: id and commit, `USER/NAME@COMMIT`, of the models that come from the Hub: that of the
            `base`, and those of members by their positions, "0", "1" and so on.
    """

    rule: str
    n: int
    base: str
    options: dict[str, Any] = field(default_factory=dict)
    members: list[dict[str, Any]] = field(default_factory=list)
    sampled: int = 0
    agreement: dict[str, int] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    include: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    reshaped: dict[str, dict[str, Any]] = field(default_factory=dict)
    hub: dict[str, str] = field(default_factory=dict)

    @property
    def pairwise(self) -> float | None:
        """The share of pairs of members that change an element in the same direction.

        By chance it is one half; all of n members agree by chance in 2^(1-n) of the elements.
        """
        found = self.agreement
        return found["agreeing"] / found["pairs"] if found else None

    def to_metadata(self) -> dict[str, str]:
        fields = {k: v for k, v in asdict(self).items() if k not in OPTIONAL or v}
        return {k: v if isinstance(v, str) else to_json(v) for k, v in fields.items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], path: Path) -> Origin:
        """Parse and check the metadata of a patch."""
        found: dict[str, Any] = {}
        for name, fits in _FIELDS.items():
            if name in OPTIONAL and name not in metadata:
                continue
            try:
                text = metadata[name]
                plain = name in ("rule", "base")
                found[name] = text if plain else parse_json_value(text, path, name)
                if not fits(found[name]):
                    raise ValueError
            except (KeyError, ValueError, FileError):
                raise FileError(
                    f"{path}: metadata {name!r} of the patch is missing or damaged: "
                    f"{quoted(metadata.get(name))}"
                ) from None
        return cls(**found)


def versions() -> dict[str, str]:
    """The versions of the packages on which a result may depend."""
    from importlib.metadata import version

    return {name: version(name) for name in ("negmerge", "numba", "numpy")}


def to_json(value: Any) -> str:
    """Compact JSON with sorted keys: the same value always gives the same text."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _is_list(value: Any, *kinds: type) -> bool:
    return isinstance(value, list) and all(isinstance(v, kinds) for v in value)


def _is_map(value: Any, *kinds: type) -> bool:
    return isinstance(value, dict) and _is_list([*value.values()], *kinds)


def _is_member(value: dict[str, Any]) -> bool:
    return (
        value.keys() <= {"name", "fingerprint", "sole_dissent"}
        and _is_list([value.get("name"), value.get("fingerprint")], str)
        and type(share := value.get("sole_dissent", 0)) in (int, float)
        and 0 <= share <= 1
    )


def _is_agreement(value: dict[str, Any]) -> bool:
    return (
        value.keys() == {"pairs", "agreeing"}
        and all(type(count) is int for count in value.values())
        and 0 <= value["agreeing"] <= value["pairs"] > 0
    )


def _is_rounding(value: dict[str, Any]) -> bool:
    counts = [value.get("rounded"), value.get("zeroed")]
    return (
        value.keys() == {"format", "rounded", "zeroed", "error"}
        and value["format"] in ("float32", "bfloat16")
        and all(type(count) is int and count >= 0 for count in counts)
        and type(value["error"]) in (int, float)
        and value["error"] >= 0
    )


def _is_hub(value: dict[str, str]) -> bool:
    return all(key == "base" or (key.isdecimal() and key.isascii()) for key in value)


def _is_reshaping(value: dict[str, Any]) -> bool:
    plain = {k: v for k, v in value.items() if k != "factors"}
    return _is_map(plain, str, int, float) and _is_map(value.get("factors", {}), int, float)


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "rule": lambda v: isinstance(v, str),
    "base": lambda v: isinstance(v, str),
    "n": lambda v: type(v) is int and v > 0,
    "options": lambda v: _is_map(v, str, int, float),
    "members": lambda v: _is_list(v, dict) and all(map(_is_member, v)),
    "sampled": lambda v: type(v) is int and v >= 0,
    "agreement": lambda v: _is_map(v, int) and _is_agreement(v),
    "kept": lambda v: _is_list(v, str),
    "digests": lambda v: _is_map(v, str),
    "versions": lambda v: _is_map(v, str),
    "values": lambda v: _is_map(v, str, int, float) and _is_rounding(v),
    "tied": lambda v: _is_map(v, str),
    "include": lambda v: _is_list(v, str),
    "exclude": lambda v: _is_list(v, str),
    "factors": lambda v: _is_list(v, int, float) and all(0 < factor < inf for factor in v),
    "reshaped": lambda v: _is_map(v, dict) and all(map(_is_reshaping, v.values())),
    "hub": lambda v: _is_map(v, str) and _is_hub(v),
}
