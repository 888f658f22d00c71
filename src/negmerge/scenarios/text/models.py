"""Causal language models: opening them, tied weights, LoRA, and the files beside the weights."""

from __future__ import annotations

import copy
import inspect
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from logging import CRITICAL
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from negmerge.checkpoints.model_folder import CARD, WEIGHTS, fetch_folder
from negmerge.errors import FileError, OptionError, one_line, quoted
from negmerge.scenarios.text.settings import Lora
from negmerge.support.files import file_digest, write_file
from negmerge.support.reading import MAX_JSON, parse_json, read_bytes
from negmerge.text.library import STORIES
from negmerge.training.loop import Trained, WriteCheckpoint
from negmerge.training.seeds import fork_random_state, seed_torch

SHIPPED = {"stories15m": STORIES}
"""The models of the package."""
SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "tokenizer.model",
    "vocab.json", "merges.txt",
)  # fmt: skip
"""Files that other programs need beside the weights."""
CONFIGURATION = ("config.json", "generation_config.json")
"""Those that belong to the model, not to the tokenizer."""


class ModelFolder:
    """A model on this machine: a folder, the copy of a Hub id, or a model of the package.

    Only safetensors files are opened, and code of a folder is never run.

    Args:
        name, revision: the fields of the recipe.
        tokenizer: the folder or Hub id of the tokenizer, if it is not beside the model.
        field: the field of the recipe that names the model, for errors.
    """

    def __init__(
        self,
        name: str,
        revision: str | None = None,
        tokenizer: str | None = None,
        field: str = "model.name",
    ) -> None:
        self.name, self.revision, self.tokenizer_name = name, revision, tokenizer
        self.field = field

    @cached_property
    def path(self) -> Path:
        """The folder; a Hub id is fetched."""
        path = self._found(self.field, self.name, [*SIDE_FILES, *WEIGHTS], self.revision)
        if (path / "adapter_config.json").exists():
            raise OptionError(
                f"{self.field} {quoted(self.name)}: is an adapter; wanted the folder of a whole "
                "model; merge the adapter into its base first"
            )
        if not (path / "config.json").is_file():
            raise FileError(f"{path}: has no config.json; wanted a folder of transformers")
        return path

    @cached_property
    def side_files(self) -> list[Path]:
        """The files beside the weights; those of the tokenizer are in its own folder."""
        found = [(self.path if n in CONFIGURATION else self.coder) / n for n in SIDE_FILES]
        return [path for path in found if path.is_file()]

    @cached_property
    def coder(self) -> Path:
        """The folder of the tokenizer."""
        if self.tokenizer_name is None:
            return self.path
        return self._found("model.tokenizer", self.tokenizer_name, [*SIDE_FILES])

    @staticmethod
    def _found(field: str, name: str, files: list[str], revision: str | None = None) -> Path:
        """Return a folder, that of a model of the package, or the copy of a Hub id."""
        if Path(name).is_dir():
            return Path(name)
        if name in SHIPPED and not Path(name).exists():
            return SHIPPED[name]
        return fetch_folder(field, name, [*files, CARD], revision, list(SHIPPED))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the configuration, the tokenizer and the weights."""
        files = [*self.side_files, *sorted(p for kind in WEIGHTS for p in self.path.glob(kind))]
        return " ".join(file_digest(path)[:16] for path in files)

    def tokenizer(self) -> Any:
        """The tokenizer."""
        from transformers import AutoTokenizer

        folder = self.coder
        with self._opening("tokenizer", folder):
            return AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )

    def model(self) -> nn.Module:
        """The model in float32, with one name for each weight."""
        from transformers import AutoModelForCausalLM

        folder = self.path
        with self._opening("model", folder), fork_random_state():
            opened: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                attn_implementation="sdpa",
                ignore_mismatched_sizes=True,  # they are told below, in one line
                output_loading_info=True,
            )
        model, found = opened
        for problem in ("missing_keys", "mismatched_keys"):
            if found.get(problem):
                # A mismatched key comes with both shapes, a missing one alone.
                first = min(key if isinstance(key, str) else key[0] for key in found[problem])
                raise FileError(
                    f"{self.path}: the weights do not fit config.json: {problem.split('_')[0]} "
                    f"{quoted(first)}"
                )
        name_once(model)
        return model

    def empty_model(self) -> nn.Module:
        """The model without weights, whose tensors have shapes only."""
        from transformers import AutoConfig, AutoModelForCausalLM

        folder = self.path
        with self._opening("model", folder), torch.device("meta"):
            config = AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        model.tie_weights()
        name_once(model)
        return model

    @staticmethod
    @contextmanager
    def _opening(what: str, place: Path) -> Iterator[None]:
        from transformers.utils import logging

        logging.disable_progress_bar()  # the program shows progress itself
        level = logging.get_verbosity()
        logging.set_verbosity(CRITICAL)  # and problems in one line
        try:
            yield
        except Exception as error:  # a configuration or a file of others may raise anything
            raise FileError(
                f"{place}: transformers cannot open the {what}: {one_line(error)}"
            ) from None
        finally:
            logging.set_verbosity(level)

    def copy_side_files(self, folder: Path) -> list[Path]:
        """Write what other programs need beside weights in float32; return the paths."""
        found: list[Path] = []
        for path in self.side_files:
            content = read_bytes(path, MAX_JSON)
            if path.name == "config.json":
                config = parse_json(content, path, "content")
                config = {k: v for k, v in config.items() if k != "torch_dtype"}
                content = json.dumps(config | {"dtype": "float32"}, indent=2).encode()
            found.append(folder / path.name)
            write_file(found[-1], content)
        return found


def name_once(model: nn.Module) -> None:
    """Let the state of a model have one name for each weight, the first one.

    Tied weights have several names; files, merges and sparsities would count them twice.
    """
    first: dict[int, str] = {}
    others: dict[str, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(weight), name)) != name:
            others[name] = known

    def leave_out(module: nn.Module, state: dict[str, Tensor], prefix: str, local: Any) -> None:
        for name in others:
            state.pop(prefix + name, None)

    def add(module: nn.Module, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        for name, known in others.items():
            if prefix + known in state:
                state.setdefault(prefix + name, state[prefix + known])

    model.register_state_dict_post_hook(leave_out)
    model.register_load_state_dict_pre_hook(add)


def embeddings_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights with one row for each token: the embeddings and the output layer."""
    places: Any = model
    wanted = [places.get_input_embeddings(), places.get_output_embeddings()]
    ids = {id(module.weight) for module in wanted if module is not None}
    return {name: weight for name, weight in model.named_parameters() if id(weight) in ids}


def logits(model: nn.Module, inputs: Mapping[str, Tensor], first: int) -> Tensor:
    """Return the logits at the positions from `first` on; fewer positions take less memory."""
    size = inputs["input_ids"].shape[1]
    kept = {"logits_to_keep": size - first} if _keeps(model) else {}
    found = model(**inputs, use_cache=False, **kept).logits
    return found if kept else found[:, first:]


def _keeps(model: Any) -> bool:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
    return "logits_to_keep" in inspect.signature(base.forward).parameters


def with_lora(model: nn.Module, lora: Lora, seed: int) -> Any:
    """Return a model of peft whose adapters are trained, and nothing else.

    Args:
        seed: the seed of the matrices A.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore (peft declares an int and divides it)
        target_modules=list(lora.targets) or "all-linear",
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with fork_random_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old names of transformers, and of tied weights
        seed_torch(seed)
        tied = [id(w) for _, w in model.named_parameters(remove_duplicate=False)]
        try:
            adapted = get_peft_model(model, config)  # pyright: ignore (a PreTrainedModel)
        except ValueError as error:
            raise OptionError(f"lora.targets: {one_line(error)}") from None
    for name, module in adapted.named_modules():
        own = getattr(getattr(module, "base_layer", None), "weight", None)
        if tied.count(id(own)) > 1:
            raise OptionError(
                f"lora.targets: {quoted(name.rsplit('.', 1)[-1])} has the same weights as another "
                "layer, which would change with it; remove it"
            )
    return adapted


def merging(write: WriteCheckpoint) -> WriteCheckpoint:
    """Return a function that writes a copy of a model with its adapters merged.

    The adapters of the model itself stay as they are: its training goes on.
    """

    def write_merged(adapted: Any, trained: Trained) -> None:
        write(copy.deepcopy(adapted).merge_and_unload(), trained)

    return write_merged
