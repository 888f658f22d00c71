"""Where the steps of a run are computed; no result depends on it."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from negmerge.support.settings import Natural, Positive, Strict

ADDRESS = re.compile(r"local|auto|[A-Za-z0-9_.:\[\]-]+:(\d{1,5})")


class ExecutorSettings(Strict):
    """The section `executor` of a recipe; the recipe that a run keeps does not contain it."""

    kind: Literal["local", "ray"] = "local"
    """Processes of this machine, or a Ray cluster (`pip install 'negmerge[ray]'`)."""
    address: str = "local"
    """The Ray cluster: HOST:PORT, `auto` for the one that this machine belongs to, or `local` to
    start one on this machine for the time of the run. All nodes must see the run directory."""
    gpus: Annotated[float, Field(ge=0, le=64)] | None = None
    """The GPUs of each step, or a share of one, such as 0.5. None: 1 if the cluster has GPUs."""
    memory: Annotated[int, Field(ge=1)] | None = None
    """The bytes of memory that are reserved for each step on its node. None: no reservation."""
    retries: Natural = 2
    """How often a step is tried again after its worker was lost or it failed for a reason that
    another attempt may not meet, such as a full disk; then the run stops."""
    patience: Positive = 300.0
    """Seconds to wait for a cluster that is lost, or has no node with the resources of a step."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        match = ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match[1] or 1) < 65536:
            raise ValueError("wanted HOST:PORT, auto or local")
        return address

    @field_validator("gpus")
    @classmethod
    def _check_gpus(cls, gpus: float | None) -> float | None:
        if gpus is not None and gpus > 1 and gpus != int(gpus):
            raise ValueError("wanted a share of one GPU, or a whole number of GPUs")
        return gpus

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        usual = {name: field.default for name, field in type(self).model_fields.items()}
        given = [name for name, value in self if value != usual[name]]
        if self.kind == "local" and given:
            raise ValueError(f"{', '.join(sorted(given))}: for Ray; set executor.kind to ray, too")
        return self
