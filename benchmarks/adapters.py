"""Merging LoRA adapters of a base with the shape of a Llama of 1.24 B parameters, in bfloat16.

    python benchmarks/adapters.py [--layers 16] [--adapters 10] [--dense 4] [--times 1]

Compared are a merge by negmerge, `add_weighted_adapter` of peft, and the merge of dense models that
peft has made of the adapters (`merge_and_unload`); of the last there are fewer, because they need
2.5 GB of disk each. Every command is a process of its own; memory is its peak without files that
the system caches. Writes `results/adapters.md` and `results/adapters.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import describe, markdown_table
from measuring import command, peak_anonymous
from pools import CACHE

RESULTS = Path(__file__).parent / "results"
RANK = 16
CONFIG = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}


def make_base(folder: Path, layers: int) -> None:
    """Write a random model as transformers does."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, num_hidden_layers=layers))
    model.save_pretrained(folder)


def make_adapters(base: Path, folder: Path, count: int) -> None:
    """Write random adapters for all linear layers, which share A."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    torch.manual_seed(0)
    tuned = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"))
    for k in range(count):
        torch.manual_seed(k + 1)
        for name, weight in tuned.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(std=0.01)
        tuned.save_pretrained(folder / f"adapter{k}", save_embedding_layers=False)


def peft_combine(base: Path, adapters: list[Path], kind: str, out: Path) -> None:
    """Combine adapters with peft, and save the combination as an adapter."""
    import torch
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    names = [path.name for path in adapters]  # not numbers, which peft takes for those of layers
    tuned = PeftModel.from_pretrained(model, adapters[0], adapter_name=names[0])
    for path in adapters[1:]:
        tuned.load_adapter(path, adapter_name=path.name)
    more = {"density": 0.2} if kind == "ties" else {}
    weights = [1 / len(names)] * len(names)
    tuned.add_weighted_adapter(names, weights, "all", combination_type=kind, **more)
    tuned.save_pretrained(out, selected_adapters=["all"], save_embedding_layers=False)


def peft_dense(base: Path, adapters: list[Path], out: Path) -> None:
    """Write the dense models of adapters."""
    import torch
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    for k, path in enumerate(adapters):
        model = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        PeftModel.from_pretrained(model, path).merge_and_unload().save_pretrained(out / f"dense{k}")


def child(function: Callable[..., None], *arguments: Any) -> list[str]:
    """The command that calls a function of this file in a new process."""
    given = json.dumps([[str(x) for x in a] if isinstance(a, list) else str(a) for a in arguments])
    return [sys.executable, __file__, "--call", function.__name__, "--given", given]


def call(name: str, given: list[Any]) -> None:
    """Call a function; texts become paths or numbers as it needs them."""
    if name == "make_base":
        make_base(Path(given[0]), int(given[1]))
    elif name == "make_adapters":
        make_adapters(Path(given[0]), Path(given[1]), int(given[2]))
    elif name == "peft_combine":
        peft_combine(Path(given[0]), [*map(Path, given[1])], given[2], Path(given[3]))
    else:
        peft_dense(Path(given[0]), [*map(Path, given[1])], Path(given[2]))


def _cpu() -> float:
    """The CPU seconds of all commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(times: int, arguments: list[str], out: Path) -> dict[str, float]:
    """The shortest time of a command and its peak of memory; the output is removed."""
    seconds, cpu, peak = [], [], 0
    for _ in range(times):
        shutil.rmtree(out, ignore_errors=True)
        out.unlink(missing_ok=True) if out.is_file() else None
        begun, used = time.perf_counter(), _cpu()
        peak = max(peak, peak_anonymous(arguments))
        seconds.append(time.perf_counter() - begun)
        cpu.append(_cpu() - used)
    files = [p for p in out.rglob("*") if p.is_file()] if out.is_dir() else [out]
    return {
        "seconds": min(seconds),
        "cpu": min(cpu),
        "peak": peak,
        "written": sum(path.stat().st_size for path in files),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=10)
    parser.add_argument("--dense", type=int, default=4)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--call")
    parser.add_argument("--given")
    options = parser.parse_args()
    if options.call:
        call(options.call, json.loads(options.given))
        return
    work = CACHE / f"adapters-{options.layers}-{options.adapters}"
    base, out = work / "base", work / "out"
    if not (work / f"adapter{options.adapters - 1}").exists():
        work.mkdir(parents=True, exist_ok=True)
        peak_anonymous(child(make_base, base, options.layers))
        peak_anonymous(child(make_adapters, base, work, options.adapters))
    adapters = [work / f"adapter{k}" for k in range(options.adapters)]
    some, dense = adapters[: options.dense], [out / f"dense{k}" for k in range(options.dense)]
    patch, model = work / "patch.safetensors", work / "model"
    runs: dict[str, tuple[list[str], Path]] = {
        f"negmerge, consensus of {len(adapters)}, patch": (
            command("merge", base, *adapters, "-o", patch),
            patch,
        ),
        f"negmerge, TIES of {len(adapters)}, patch": (
            command("merge", base, *adapters, "--rule", "ties", "-o", patch),
            patch,
        ),
        f"negmerge, mean of {len(adapters)}, model": (
            command("merge", base, *adapters, "--rule", "uniform", "--add", 1, "-o", model),
            model,
        ),
        **{
            f"peft add_weighted_adapter, {kind} of {len(adapters)}": (
                child(peft_combine, base, adapters, kind, out),
                out,
            )
            for kind in ("linear", "cat", "ties")
        },
        f"negmerge, consensus of {len(some)}, patch": (
            command("merge", base, *some, "-o", patch),
            patch,
        ),
        f"peft merge_and_unload of {len(some)}, dense models": (
            child(peft_dense, base, some, out),
            out,
        ),
        f"negmerge, consensus of {len(some)} dense models, patch": (
            command("merge", base, *dense, "-o", patch),
            patch,
        ),
    }
    found: dict[str, dict[str, float]] = {}
    for title, (arguments, written) in runs.items():
        found[title] = measure(options.times, arguments, written)
        print(title, found[title], flush=True)
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(model, ignore_errors=True)
    patch.unlink(missing_ok=True)
    write(options, found)


def write(options: argparse.Namespace, found: dict[str, dict[str, float]]) -> None:
    """Write the results."""
    used = f"--layers {options.layers} --adapters {options.adapters} --dense {options.dense}"
    line = f"python benchmarks/adapters.py {used} --times {options.times}"
    rows = [
        {
            "merge": title,
            "seconds": f"{row['seconds']:.1f}",
            "CPU seconds": f"{row['cpu']:.1f}",
            "peak memory, MB": f"{row['peak'] / 1e6:,.0f}",
            "written, MB": f"{row['written'] / 1e6:,.0f}",
        }
        for title, row in found.items()
    ]
    text = [
        "# Merging LoRA adapters",
        "",
        f"`{line}`, {describe()}. Load average at the end: {os.getloadavg()[1]:.1f}; with other",
        "processes on the machine, compare the CPU seconds.",
        "",
        f"Base: a random Llama in bfloat16 with {options.layers} layers of width 2048 (16 layers "
        f"are 1.24 B parameters). Adapters: rank {RANK}, all linear layers, one A for all.",
        "Every row is a process of its own, with its start; memory: its peak without cached files.",
        "",
        markdown_table(rows),
        "",
        "What peft computes is not the same: `linear` and `ties` combine the matrices A and B, not",
        "the changes BA; `cat` is the exact mean, with the sum of all ranks as its rank. Dense",
        "models of peft are rounded to bfloat16, the members of negmerge to float32. Memory that",
        "is backed by a file, such as a base that is mapped, is not counted.",
    ]
    (RESULTS / "adapters.md").write_text("\n".join(text) + "\n")
    content = {"command": line, "machine": describe(), "rows": found}
    (RESULTS / "adapters.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
