"""The process that is connected to a Ray cluster, and the workers that it starts there.

A worker is a Ray actor: it makes the scenario once and runs one step at a time. The bridge gives
steps to workers that have nothing to do, passes on what they tell, and replaces workers whose node
or process is lost. What a step has written to the run directory stays; the step runs again
elsewhere and continues from there.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from negmerge.errors import FINAL, FileError, NegMergeError, OptionError, one_line
from negmerge.runs.executors.ray import Job
from negmerge.runs.executors.worker import StepLog, keep_freed_memory, node_name, run_step
from negmerge.runs.steps import ModelStep, Step
from negmerge.runs.watch import Report
from negmerge.support.files import file_digest, report_write_errors, use_own_names, write_file
from negmerge.support.processes import end_with_parent

PLACES = "RAY_AUTH_TOKEN or ~/.ray/auth_token; see docs/scale.md"
POLL = 0.25
"""Seconds between two looks at the workers."""


def bridge(job: Job, pipe: Any, parent: int) -> None:
    """Connect to the cluster, and serve the stages of a run until it stops."""
    # Ray then stops what it has started; after SIGKILL its agents would live for a minute more.
    end_with_parent(parent, by=signal.SIGTERM)
    redirect_errors(job.logs)
    try:
        found = connect(job)
    except (NegMergeError, ImportError) as error:
        pipe.send(("error", str(error)))
        return
    except ConnectionError as error:
        pipe.send(("lost", str(error)))
        return
    except Exception as error:
        pipe.send(("lost", one_line(error)))
        return
    cluster = Cluster(job, pipe)
    try:
        pipe.send(("ready", found))
        while (message := pipe.recv())[0] == "run":
            cluster.run(message[1], message[2])
    except (EOFError, BrokenPipeError):
        pass
    finally:
        with suppress(Exception):
            cluster.release()
        import ray

        ray.shutdown()


def redirect_errors(logs: Path | None) -> None:
    """Let what Ray prints about a lost cluster go to `ray.log`, or nowhere."""
    if logs is None:
        place = Path(os.devnull)
    else:
        logs.mkdir(parents=True, exist_ok=True)
        place = logs / "ray.log"
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def check_address(address: str) -> None:
    """Raise if nothing listens at an address; Ray would wait for a minute."""
    host, _, port = address.rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers: {error.strerror or error}") from None


def connect(job: Job) -> dict[str, Any]:
    """Connect to the cluster, or start one; return its CPUs and GPUs."""
    settings = job.settings
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DISABLE_METRICS_COLLECTION", "1")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Only those who know the token can give work to a cluster, which runs any code.
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        if settings.address == "local":
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    check_address(settings.address)
    import ray

    options: dict[str, Any] = {}
    if settings.address == "local":
        options = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        options["num_cpus"] = len(os.sched_getaffinity(0))
    options |= {"namespace": "negmerge", "log_to_driver": False, "logging_level": "error"}
    try:
        ray.init(address=settings.address, **options)
    except ConnectionError as error:
        text = f"{one_line(error)}; all nodes and this process need the same token ({PLACES})"
        raise ConnectionError(text) from None
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    gpus = sum(float(node.get("GPU", 0)) for node in nodes)
    return {"cpus": sum(cpus), "largest": max(cpus, default=0), "gpus": gpus}


class Worker:
    """An actor: makes the scenario once, and runs steps."""

    def __init__(self, job: Job, expected: str, probe: tuple[Path, bytes] | None) -> None:
        self.events: deque[tuple[Any, ...]] = deque()
        self.job, self.node = job, node_name()
        own = version("negmerge")
        if own != expected:
            raise OptionError(f"{self.node}: has negmerge {own}, wanted {expected}; install it")
        if probe is not None:
            check_folder(self.node, *probe)
        use_own_names(secrets.token_hex(8))
        keep_freed_memory()
        from negmerge.training.prefetch import set_feed_workers

        set_feed_workers(job.feed_workers)
        self.scenario = job.make_scenario()

    def where(self) -> tuple[str, str]:
        """Return the name and the id of the node."""
        import ray

        return self.node, ray.get_runtime_context().get_node_id()

    def told(self) -> list[tuple[Any, ...]]:
        """Return what the running step has told since the last call."""
        return [self.events.popleft() for _ in range(len(self.events))]

    def run(self, position: int, step: Step[Any], threads: int) -> tuple[Any, ...]:
        """Run a step; return its result and the hashes of its files, or its error."""
        report = Report(
            lambda count: self.events.append(("advance", position, count)),
            lambda facts: self.events.append(("tell", position, dict(facts))),
        )
        log = None
        if self.job.logs is not None:
            log = StepLog(self.job.logs, step.label, self.node, redirect=True)
        try:
            done = run_step(step, self.scenario, threads, report, log)
            paths = [step.out]
            if isinstance(step, ModelStep):
                paths = [p for model in step.models for p in (model.out, model.cost_file)]
            files = {path: file_digest(path) for path in paths if path.is_file()}
        except Exception as error:
            own = isinstance(error, NegMergeError)
            text = str(error) if own else one_line(error)
            where = "" if log is None else str(log.path)
            return "error", text, isinstance(error, FINAL), where, self.told()
        return "done", done, files, self.told()


def check_folder(node: str, probe: Path, content: bytes) -> None:
    """Raise unless this node sees a file that the driver wrote, and can write beside it."""
    try:
        seen = probe.read_bytes()
    except OSError:
        seen = b""
    if seen != content:
        raise OptionError(
            f"{node}: does not see {probe.parent.parent}; name a run directory on a file system "
            "that all nodes share"
        )
    own = probe.with_name(f"{probe.stem}{secrets.token_hex(4)}.probe")
    try:
        own.write_bytes(content)
        own.unlink()
    except OSError as error:
        raise FileError(f"{node}: {own.parent}: cannot write: {error.strerror}") from None


@dataclass
class Actor:
    """A worker as the bridge sees it."""

    handle: Any
    needs: tuple[Any, ...]
    ready: Any
    node: str = ""
    node_id: str = ""
    position: int | None = None
    """The step that it runs."""
    result: Any = None
    events: Any = None
    began: float = field(default_factory=time.monotonic)


@dataclass
class Waiting:
    """A step that is not done; `avoid` has the nodes on which it failed."""

    step: Step[Any]
    failures: int = 0
    avoid: set[str] = field(default_factory=set[str])


class Cluster:
    """Gives steps to workers."""

    def __init__(self, job: Job, pipe: Any) -> None:
        self.job, self.pipe = job, pipe
        self.actors: list[Actor] = []
        self.broken = 0
        """The workers that did not start, since one did."""
        self.probe: tuple[Path, bytes] | None = None

    def run(self, steps: list[tuple[int, Step[Any]]], threads: int) -> None:
        """Run the steps of a stage."""
        self.steps = {position: Waiting(step) for position, step in steps}
        self.queue = deque(self.steps)
        self.threads, self.needs = threads, self._needs(threads, [step for _, step in steps])
        self._keep([actor for actor in self.actors if actor.needs == self.needs])
        self.idle_since = time.monotonic()
        try:
            self._write_probe()
            while self.steps:
                self._start_workers()
                self._assign()
                self._look()
        except NegMergeError as error:
            self.pipe.send(("error", str(error)))
        finally:
            self._remove_probe()

    def release(self) -> None:
        """End all workers."""
        self._keep([])

    # ------------------------------------------------------------------------------------- workers

    def _needs(self, threads: int, steps: list[Step[Any]]) -> tuple[Any, ...]:
        """Return the resources of a worker for any of the steps: CPUs, GPUs and memory."""
        import ray

        settings = self.job.settings
        gpus = settings.gpus
        if gpus is None:
            has_any = bool(ray.cluster_resources().get("GPU"))
            gpus = max(step.needs.gpus for step in steps) if has_any else 0.0
        memory = max((step.needs.memory or 0 for step in steps), default=0)
        return threads, gpus, settings.memory or memory or None

    def _keep(self, kept: list[Actor]) -> None:
        import ray

        for actor in self.actors:
            if actor not in kept:
                with suppress(Exception):
                    ray.kill(actor.handle)
        self.actors = kept

    def _capacity(self) -> int:
        """Return the number of workers that the living nodes hold."""
        import ray

        cpus, gpus, memory = self.needs
        count = 0
        for node in ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                fits = [has.get("CPU", 0) // cpus]
                fits += [has.get("GPU", 0) // gpus] if gpus else []
                fits += [has.get("memory", 0) // memory] if memory else []
                count += int(min(fits))
        return count

    def _start_workers(self) -> None:
        """Start as many workers as there are steps, and as the cluster holds."""
        wanted = min(len(self.steps), self.job.workers or len(self.steps))
        if len(self.actors) >= wanted:
            return
        capacity = self._capacity()
        if not capacity and not any(actor.node for actor in self.actors):
            if time.monotonic() - self.idle_since > self.job.settings.patience:
                cpus, gpus, memory = self.needs
                raise NegMergeError(
                    f"no node of the cluster has {cpus} CPUs, {gpus:g} GPUs"
                    f"{f' and {memory / 1e9:.1f} GB of memory' if memory else ''} for a step; add "
                    "one, or change threads, executor.gpus or executor.memory; run the same "
                    "command again, it continues where it stopped"
                )
            return
        self.idle_since = time.monotonic()
        while len(self.actors) < min(wanted, capacity):
            self.actors.append(self._start_worker())

    def _start_worker(self) -> Actor:
        import ray

        cpus, gpus, memory = self.needs
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0}
        options |= {} if memory is None else {"memory": memory}
        # The second thread answers `told` while the first one runs a step.
        options |= {"concurrency_groups": {"told": 1}, "scheduling_strategy": "SPREAD"}
        kind: Any = ray.remote(**options)(Worker)
        handle = kind.remote(self.job, version("negmerge"), self.probe)
        return Actor(handle, self.needs, handle.where.remote())

    def _assign(self) -> None:
        """Give steps to workers that have nothing to do."""
        for actor in self.actors:
            if actor.node and actor.position is None and self.queue:
                position = self._next_for(actor)
                if position is None:
                    continue
                self.queue.remove(position)
                step = self.steps[position].step
                actor.position = position
                actor.result = actor.handle.run.remote(position, step, self.threads)
                self.pipe.send(("started", position, actor.node))

    def _next_for(self, actor: Actor) -> int | None:
        """Return a step for a worker: one that failed on its node waits for another node."""
        for position in self.queue:
            avoid = self.steps[position].avoid
            others = any(self._may_take(one, avoid) for one in self.actors if one is not actor)
            if actor.node_id not in avoid or not others:
                return position
        return None

    def _may_take(self, actor: Actor, avoid: set[str]) -> bool:
        """Whether a worker, which may be starting, is on a node that a step need not avoid."""
        starting = time.monotonic() - actor.began < self.job.settings.patience
        return actor.node_id not in avoid if actor.node else starting

    # -------------------------------------------------------------------------------------- events

    def _look(self) -> None:
        """Wait a moment, then take what workers have to tell."""
        import ray
        from ray.exceptions import RayError

        refs = list(self._references())
        if not refs:
            time.sleep(POLL)
            return
        ray.wait(refs, num_returns=1, timeout=POLL)
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for actor in list(self.actors):
            try:
                self._take(actor, done)
            except RayError as error:
                self._lost(actor, error)

    def _references(self) -> Iterator[Any]:
        for actor in self.actors:
            if not actor.node:
                yield actor.ready
            if actor.position is not None:
                yield actor.result
                if actor.events is None and time.monotonic() - actor.began > POLL:
                    actor.events = actor.handle.told.options(concurrency_group="told").remote()
                if actor.events is not None:
                    yield actor.events

    def _take(self, actor: Actor, done: list[Any]) -> None:
        import ray

        if actor.events in done:
            events, actor.events, actor.began = ray.get(actor.events), None, time.monotonic()
            self._pass_on(events)
        if not actor.node and actor.ready in done:
            actor.node, actor.node_id = ray.get(actor.ready)
            self.broken = 0
        if actor.position is not None and actor.result in done:
            kind, *content = ray.get(actor.result)
            position, actor.position, actor.result = actor.position, None, None
            self._pass_on(content.pop())
            if kind == "done":
                del self.steps[position]
                self.pipe.send(("done", position, *content))
            else:
                text, final, log = content
                self._failed(position, actor, text, final, log)

    def _pass_on(self, events: list[tuple[Any, ...]]) -> None:
        for event in events:
            self.pipe.send(event)

    def _failed(self, position: int, actor: Actor, text: str, final: bool, log: str) -> None:
        """Try a step again elsewhere, or stop the run."""
        waiting = self.steps[position]
        waiting.failures += 1
        waiting.avoid.add(actor.node_id)
        self.pipe.send(("failed", position, f"{actor.node}: {text}"))
        if final or waiting.failures > self.job.settings.retries:
            tried = "" if waiting.failures == 1 else f" ({waiting.failures} attempts)"
            raise NegMergeError(
                f"{waiting.step.label}: failed on node {actor.node}{tried}: {text}"
                + (f"; its log is {log}" if log else "")
            )
        self.queue.append(position)

    def _lost(self, actor: Actor, error: Exception) -> None:
        """A worker has died, or did not start."""
        self.actors.remove(actor)
        if not actor.node:
            cause = getattr(error, "cause", None)
            text = str(cause) if isinstance(cause, NegMergeError) else one_line(error)
            self.broken += 1
            if isinstance(cause, FINAL) or self.broken > self.job.settings.retries:
                raise NegMergeError(f"a worker of the cluster did not start: {text}")
            self.pipe.send(("note", f"a worker did not start: {text}"))
            return
        if actor.position is not None:
            waiting = self.steps[actor.position]
            where = f"the worker of {waiting.step.label} on node {actor.node}"
            self.pipe.send(("note", f"{where} is lost; the step starts again elsewhere"))
            log = self.job.logs
            if log is not None:
                log = StepLog(log, waiting.step.label, actor.node).path
            self._failed(actor.position, actor, "its worker is lost", False, str(log or ""))
            waiting.avoid.discard(actor.node_id)  # the node may be well: only a process has died

    # --------------------------------------------------------------------------------------- probe

    def _write_probe(self) -> None:
        """Write a file that every worker must see before it starts."""
        if self.job.folder is not None and self.probe is None:
            content = secrets.token_hex(16).encode()
            path = self.job.folder / ".state" / f"{secrets.token_hex(8)}.probe"
            with report_write_errors(path):
                path.parent.mkdir(exist_ok=True)
            write_file(path, content)
            self.probe = path, content

    def _remove_probe(self) -> None:
        if self.probe is not None and not self.steps:
            self.probe[0].unlink(missing_ok=True)
            self.probe = None
