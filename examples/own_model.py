"""Make your own classifier forget: a module, two datasets, one call.

`your_model_and_data` stands for your own code; `main` shows the call.
"""

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import negmerge as nm


def your_model_and_data() -> tuple[nn.Module, Dataset, Dataset]:
    """A network trained on random labels, 40 of its records to forget, 200 records it never saw."""
    torch.manual_seed(0)
    x, y = torch.randn(600, 20), torch.randint(4, (600,))
    model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:400]), y[:400]).backward()
        optimizer.step()
    return model, TensorDataset(x[:40], y[:40]), TensorDataset(x[400:], y[400:])


def accuracy(model: nn.Module, data: Dataset) -> float:
    x, y = data[:]
    with torch.no_grad():
        return 100 * (model(x).argmax(1) == y).float().mean().item()


def main() -> None:
    model, forget, test = your_model_and_data()
    pool = nm.Pool(
        settings={"lr": 0.2, "batch": 20, "weight_decay": 1e-4},
        grid={"epochs": [10, 20], "label_smoothing": [0.0, 0.1]},
    )
    forgot = nm.unlearn(model, {"forget": forget, "test": test}, pool=pool)

    for name, network in (("original", model), ("unlearned", forgot)):
        to_forget, unseen = accuracy(network, forget), accuracy(network, test)
        print(f"{name:9}  forget {to_forget:5.1f} %   never seen {unseen:5.1f} %")


if __name__ == "__main__":
    main()
