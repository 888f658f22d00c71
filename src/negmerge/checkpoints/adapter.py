"""Adapters of peft: a folder with the low-rank matrices A and B of some modules (LoRA).

An adapter changes the weight of a module by s·BA. `Adapter` reads the configuration and the names;
`adapted.py` is the model that an adapter and its base make.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from negmerge.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, path_within
from negmerge.checkpoints.dtypes import FLOATS
from negmerge.checkpoints.header import MAX_HEADER, TensorInfo
from negmerge.errors import FileError, one_line, quoted
from negmerge.support.bounds import bounded
from negmerge.support.reading import open_regular, parse_json, read_bytes

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft writes before the name of a module."""
OTHER_FORMS = (
    "use_dora", "lora_bias", "use_qalora", "use_bdlora", "target_parameters", "layer_replication",
    "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config",
    "monteclora_config",
)  # fmt: skip
"""Fields of a configuration that make the change of a weight something else than s·BA."""
FLAGS = ("use_rslora", "fan_in_fan_out")
"""Fields that must be true or false."""
PATTERNS = {"r": "rank_pattern", "lora_alpha": "alpha_pattern"}
"""The fields with the ranks and alphas of single modules, by the field for all others."""
OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that also change the weights of the base."""
REMEDY = (
    "merge it into its base with PeftModel.merge_and_unload, save the model and name that folder"
)
_FACTOR = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")


def is_adapter_folder(path: Any) -> bool:
    """Whether a path is a folder with an adapter and without a whole model.

    >>> is_adapter_folder("no such folder")
    False
    """
    if not isinstance(path, str | os.PathLike):
        return False
    names = (CONFIG_FILE, SINGLE_FILE, INDEX_FILE)
    found = [os.path.lexists(os.path.join(path, name)) for name in names]  # noqa: PTH118 any path
    return found == [True, False, False]


@dataclass(frozen=True)
class LowRank:
    """The change of one module: s·BA.

    Args:
        a: the tensor A, of shape rank × inputs.
        b: the tensor B, of shape outputs × rank.
        embedding: whether the module is an embedding, whose weight changes by the transpose.
    """

    a: TensorInfo
    b: TensorInfo
    rank: int
    alpha: float
    scaling: float
    embedding: bool


class Adapter(Checkpoint):
    """An open adapter of the type LoRA.

    Args:
        path: the folder with `adapter_config.json` and `adapter_model.safetensors`.

    Attributes:
        config: the configuration.
        modules: the low-rank changes by name of module.
        full: tensors that replace a tensor of the base, by name: `modules_to_save` and biases.
    """

    config: dict[str, Any]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        try:
            self._check_form()
            self.modules, self.full = self._sorted_out()
        except BaseException:
            self.close()
            raise

    @property
    def base_name(self) -> str:
        """The name of the base, as the one who trained the adapter called it; may be empty."""
        return str(self.config.get("base_model_name_or_path") or "")

    @property
    def transposed(self) -> bool:
        """Whether weights are stored as inputs × outputs (`fan_in_fan_out`, as in GPT-2)."""
        return self.config.get("fan_in_fan_out") is True

    def _open_folder(self, folder: Path) -> None:
        config = path_within(folder, CONFIG_FILE)
        self.config = parse_json(read_bytes(config, MAX_HEADER), config, "content")
        if not os.path.lexists(folder / WEIGHTS_FILE):
            pickled = os.path.lexists(folder / "adapter_model.bin")
            remedy = "; load it with peft and save it again" if pickled else ""
            raise FileError(f"{folder}: contains {CONFIG_FILE}, but no {WEIGHTS_FILE}{remedy}")
        self._open_file(path_within(folder, WEIGHTS_FILE))
        self._watch_file(config)

    def _watch_file(self, path: Path) -> None:
        """Keep a file without tensors open, so that a change of it is noticed."""
        descriptor = open_regular(path)
        self._closing.callback(os.close, descriptor)
        self._add_file(path, descriptor)

    def _check_form(self) -> None:
        """Raise if the adapter is not a plain LoRA."""
        place, config = self.path / CONFIG_FILE, self.config
        kind = config.get("peft_type")
        if kind != "LORA":
            raise FileError(f"{place}: peft_type: got {quoted(kind)}, wanted 'LORA'; {REMEDY}")
        for field in OTHER_FORMS:
            if config.get(field):
                raise FileError(
                    f"{place}: {field}: got {quoted(config[field], 40)}, wanted a plain LoRA "
                    f"without it; {REMEDY}"
                )
        for field in (*FLAGS, *PATTERNS.values()):
            kind, wanted = (bool, "true or false") if field in FLAGS else (dict, "an object")
            if config.get(field) is not None and not isinstance(config[field], kind):
                got = quoted(config[field], 40)
                raise FileError(f"{place}: {field}: got {got}, wanted {wanted}")
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(OTHER_BASES):
            raise FileError(
                f"{place}: init_lora_weights: got {quoted(start)}, which also changes the base; "
                "convert the adapter: save_pretrained(path_initial_model_for_weight_conversion=…)"
            )

    def _sorted_out(self) -> tuple[dict[str, LowRank], dict[str, TensorInfo]]:
        """Return the pairs of matrices by module, and the whole tensors by name."""
        pairs: dict[str, dict[str, TensorInfo]] = {}
        full: dict[str, TensorInfo] = {}
        for key, info in self.tensors.items():
            if info.dtype not in FLOATS:
                raise FileError(
                    f"{self.path} {quoted(key)}: dtype {info.dtype}, wanted {', '.join(FLOATS)}"
                )
            name = key.removeprefix(PREFIX)
            if match := _FACTOR.fullmatch(name):
                known, part = pairs.setdefault(match[1], {}), match[2]
            else:
                known, part = full, name.replace(".base_layer.", ".")
                part = part.replace(".modules_to_save.", ".")
            if "lora_" in name and not match:
                raise FileError(
                    f"{self.path} {quoted(key)}: wanted lora_A and lora_B only, as of a plain "
                    f"LoRA; {REMEDY}"
                )
            if part in known:
                raise FileError(
                    f"{self.path} {quoted(key)}: is there a second time, as "
                    f"{quoted(known[part].name)}; remove one of them"
                )
            known[part] = info
        return {module: self._low_rank(module, pair) for module, pair in pairs.items()}, full

    def _low_rank(self, module: str, pair: Mapping[str, TensorInfo]) -> LowRank:
        if pair.keys() != {"A", "B"}:
            raise FileError(f"{self.path} {quoted(module)}: has only one of lora_A and lora_B")
        a, b = pair["A"], pair["B"]
        rank = self._number("r", module)
        if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise FileError(
                f"{self.path} {quoted(module)}: A is {a.shape} and B is {b.shape}, wanted rank "
                f"{rank:g} as in {CONFIG_FILE}"
            )
        alpha = self._number("lora_alpha", module)
        rslora = self.config.get("use_rslora") is True
        scaling = alpha / (sqrt(rank) if rslora else rank)
        return LowRank(a, b, int(rank), alpha, scaling, ".lora_embedding_" in a.name)

    def _number(self, field: str, module: str) -> float:
        """Return the rank or alpha of a module, as peft finds it."""
        value: Any = self.config.get(field)
        patterns: dict[str, Any] = self.config.get(PATTERNS[field]) or {}
        if patterns and (found := self._first_fitting(patterns, module, PATTERNS[field])):
            value = patterns[found]
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise FileError(
                f"{self.path / CONFIG_FILE}: {field}: got {quoted(value)}, wanted a number above 0"
            )
        return value

    def _first_fitting(self, patterns: Iterable[str], module: str, field: str) -> str | None:
        """Return the first pattern that fits the end of a name, or None."""
        pattern = ""
        try:
            with bounded():
                for pattern in patterns:
                    if re.match(rf"(.*\.)?({pattern})$", module):
                        return pattern
        except (re.error, RecursionError, OverflowError, MemoryError, TimeoutError) as error:
            raise FileError(
                f"{self.path / CONFIG_FILE}: {field}: {quoted(pattern, 40)} is no pattern of "
                f"names: {one_line(error)}"
            ) from None
        return None
