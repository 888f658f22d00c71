"""The speed of this machine is measured by real steps, and turned into hours."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from negmerge.runs.calibration import Speed, measure_speed, measured_hours
from negmerge.runs.estimate import Estimate, Processed, estimate
from negmerge.runs.recipe import load_recipe
from negmerge.scenarios.workload import Probe
from negmerge.support.progress import Quiet
from negmerge.training.hyperparameters import HyperParameters


class Counted(nn.Module):
    """Counts the samples that run through it, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)
        self.seen: dict[bool, list[int]] = {True: [], False: []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen[self.training].append(len(x))
        return self.layer(x.flatten(1))


def work_of(network: nn.Module, batch: int) -> Processed:
    probe = Probe("tiny", lambda: network, (3, 2, 2), 5)
    return Processed(probe, HyperParameters(batch=batch), trained=7200.0, scored=3600.0)


def test_hours_follow_from_speeds():
    assert Speed(2.0, 4.0, 8, 3).hours(work_of(nn.Identity(), 8)) == 1.25


def test_the_batch_grows_to_that_of_the_recipe():
    network = Counted()
    speed = measure_speed(work_of(network, 24), seconds=0.2)
    assert list(dict.fromkeys(network.seen[True])) == [1, 4, 16, 24]
    assert set(network.seen[False]) == {24}
    assert (speed.batch, speed.trained > 0, speed.scored > 0) == (24, True, True)
    assert 1 <= speed.steps < network.seen[True].count(24)


def test_a_step_that_waits_for_other_processes_does_not_count():
    class Delayed(Counted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(self.seen[True]) == 1:
                time.sleep(0.3)
            return super().forward(x)

    assert measure_speed(work_of(Delayed(), 24), seconds=0.2).batch == 24


@pytest.mark.parametrize("name", ["desk_clip_fashion", "desk_clip_fashion_linear", "demo"])
def test_the_networks_of_recipes_can_be_measured(name: str):
    wanted = estimate(load_recipe(name, ["pool.settings.batch=4"]))
    (work,) = wanted.networks.values()
    network = work.probe.build()
    before = {k: p.detach().clone() for k, p in network.named_parameters()}
    small = replace(work, probe=replace(work.probe, build=lambda: network))
    text = measured_hours(replace(wanted, networks={"it": small}), Quiet(), seconds=0.1)
    assert "measured on this machine" in text
    assert "hours; it: " in text
    assert "random weights and images" in text
    moved = {k for k, p in network.named_parameters() if not torch.equal(p, before[k])}
    assert moved
    attention = [k for k in moved if ".attn." in k]
    assert bool(attention) == name.endswith("_linear")  # what the recipe freezes is frozen


def test_estimates_of_runs_with_one_network_add_up():
    one = Estimate(1, 2, 3, 4, {"tiny": work_of(nn.Identity(), 8)})
    both = one + Estimate(
        1, 5, 1, 3, {"tiny": work_of(nn.Identity(), 8), "other": one.networks["tiny"]}
    )
    assert (both.disk, both.memory, both.hours, both.weights) == (2, 5, 4, 4)
    assert {k: (v.trained, v.scored) for k, v in both.networks.items()} == {
        "tiny": (14400.0, 7200.0),
        "other": (7200.0, 3600.0),
    }
