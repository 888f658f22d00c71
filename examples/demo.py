"""A small pool, merged, inspected and subtracted: what `make demo` shows.

Six small networks are trained for real from one base, on the same few examples with different
learning rates and seeds; their weight changes are merged by sign consensus, and the result is
subtracted from the base.
"""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

import negmerge as nm
from negmerge.cli import main as negmerge

FOLDER = Path(".demo")


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int, lr: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(steps):
        picked = torch.randint(len(x), (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[picked]), y[picked]).backward()
        optimizer.step()


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return 100 * (model(x).argmax(1) == y).float().mean().item()


def main() -> None:
    console = Console()
    FOLDER.mkdir(exist_ok=True)
    torch.manual_seed(0)
    centres = torch.randn(4, 16)
    y = torch.randint(4, (2000,))
    x = centres[y] + 1.2 * torch.randn(2000, 16)
    forget = y == 3

    model = make_model()
    train(model, x, y, steps=300, lr=0.05)
    base = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(base, FOLDER / "base.safetensors")
    console.print("[bold]A classifier of four classes; it shall forget the last one.[/]")

    pool = []
    for k in range(6):
        torch.manual_seed(k + 1)
        model.load_state_dict(base)
        train(model, x[forget], y[forget], steps=40 + 20 * k, lr=0.01 * (1 + k % 3))
        pool.append(str(FOLDER / f"member{k}.safetensors"))
        save_file(model.state_dict(), pool[-1])

    patch = str(FOLDER / "patch.safetensors")
    console.print("\n$ negmerge merge base.safetensors member*.safetensors -o patch.safetensors")
    negmerge(["merge", str(FOLDER / "base.safetensors"), *pool, "-o", patch])
    console.print("\n$ negmerge inspect patch.safetensors")
    negmerge(["inspect", patch])

    model.load_state_dict(base)
    tau = nm.TaskVector.load(patch)
    console.print("\n[bold]θ − λτ, from the patch, in place on the model:[/]")
    for scale in (0.0, 1.0, 2.0, 4.0, 6.0):
        with tau.applied(model, -scale):
            console.print(
                f"  λ = {scale:3.1f}"
                f"   forgotten class {accuracy(model, x[forget], y[forget]):5.1f} %"
                f"   other classes {accuracy(model, x[~forget], y[~forget]):5.1f} %"
            )
    console.print(
        "\n$ negmerge apply base.safetensors patch.safetensors --negate 4 -o out.safetensors"
    )
    out = str(FOLDER / "out.safetensors")
    negmerge(["apply", str(FOLDER / "base.safetensors"), patch, "--negate", "4", "-o", out])


if __name__ == "__main__":
    main()
