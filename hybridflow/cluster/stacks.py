"""What the threads of a silent rank do: its stacks, asked of the process itself, on whichever node it runs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridflow.cluster.worker import STACK_SIGNAL, Place

STACK_SECONDS = 1.0  # time a process gets to write its stacks
REMOTE_STACK_SECONDS = 10.0  # the same on another node, where a helper process must start first
STOPPED = "(no stack: the process is stopped, by SIGSTOP or a debugger)"


def stacks_of(places: Mapping[int, Place]) -> dict[int, str]:
    """Stacks of the threads of each rank, as far as its node answers in time."""
    here = ray.get_runtime_context().get_node_id()
    by_node: dict[str, dict[int, Place]] = {}
    for rank, place in places.items():
        by_node.setdefault(place.node_id, {})[rank] = place
    asked = {_ask(node, ranks): ranks for node, ranks in by_node.items() if node != here}
    texts = dump_stacks(by_node.get(here, {}))
    if asked:
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=REMOTE_STACK_SECONDS)
        for ref in ready:
            texts |= _told(ref, asked[ref])
    return dict(sorted(texts.items()))


def dump_stacks(places: Mapping[int, Place]) -> dict[int, str]:
    """Make workers on this node write their stacks (works while they are stuck in native code), and read them."""
    texts = {rank: _ask_process(place) for rank, place in places.items()}
    if not all(texts.values()):
        time.sleep(STACK_SECONDS)
    return {rank: text or _read(places[rank]) for rank, text in texts.items()}


def _ask_process(place: Place) -> str:
    """Why there will be no stack; empty if there should be one."""
    try:
        if _state(place.pid) in "Tt":
            return STOPPED
        os.kill(place.pid, STACK_SIGNAL)
    except OSError as error:
        return f"(no stack: {error})"
    return ""


def _read(place: Place) -> str:
    try:
        return Path(f"/proc/{place.pid}/fd/{place.stack_fd}").read_text(errors="replace").strip()
    except OSError as error:
        return f"(no stack: {error})"


def _state(pid: int) -> str:
    """Of a process, one letter: R runs, S sleeps, D waits for a device, T is stopped, t is traced."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _ask(node: str, places: Mapping[int, Place]) -> ray.ObjectRef:
    on_node = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0)(dump_stacks).options(scheduling_strategy=on_node).remote(places)


def _told(ref: ray.ObjectRef, places: Mapping[int, Place]) -> dict[int, str]:
    """The answer to _ask: a node that is lost gives none, and must not hide what the stacks are asked for."""
    try:
        return ray.get(ref)
    except RayError as error:
        return dict.fromkeys(places, f"(no stack: {error})")
