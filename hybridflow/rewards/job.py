"""One batch of responses on its way through the reward processes: sent, answered, timed out, or lost with a process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait

from hybridflow.config.schema import RewardConfig
from hybridflow.errors import RewardError
from hybridflow.rewards.function import Item
from hybridflow.rewards.outcome import failure_text
from hybridflow.rewards.process import RewardProcess
from hybridflow.rewards.worker import TIMED_OUT, Failure, Outcome

POLL_SECONDS = 0.5  # how often a process that died without closing its pipe is looked for
CHUNK = 16  # responses sent at once: hides the round trip, small enough to keep the processes evenly busy


class Job:
    """Scores `items` with `processes`; a process that is killed or dies is replaced, so their number stays."""

    def __init__(self, config: RewardConfig, processes: Sequence[RewardProcess], items: Sequence[Item]) -> None:
        self.config, self.processes, self.items = config, list(processes), items
        self.waiting = deque(range(len(items)))
        self.outcomes: dict[int, Outcome] = {}
        self.alone: set[int] = set()  # to be sent one at a time: their process ended while it had several calls in flight
        self.lost_while_idle = 0

    def run(self) -> list[Outcome]:
        """One outcome per item, in order. Raises RewardError at the first failure that ends the run."""
        while len(self.outcomes) < len(self.items):
            for slot in range(len(self.processes)):
                self._feed(slot)
            expected = [p for p in self.processes if p.pending or p.signature is None]
            limit = min(p.deadline if p.pending else p.start_deadline for p in expected)
            answered = wait([p.pipe for p in expected], timeout=min(POLL_SECONDS, max(0.0, limit - time.monotonic())))
            for slot, process in enumerate(self.processes):
                if process in expected:
                    self._look_at(slot, process.pipe in answered)
        return [self.outcomes[number] for number in range(len(self.items))]

    def leave(self) -> list[RewardProcess]:
        """The processes for the next batch: those still busy with this one (after an error) are replaced."""
        for slot, process in enumerate(self.processes):
            if process.pending or process.pipe.closed:
                self._replace(slot)
        return self.processes

    def _feed(self, slot: int) -> None:
        process = self.processes[slot]
        if process.pending or process.signature is None or not self.waiting:
            return
        numbers = self._share(process)
        try:
            process.send(numbers, [self.items[number] for number in numbers])
        except (BrokenPipeError, ConnectionResetError) as error:
            self.waiting.extendleft(reversed(numbers))
            self.lost_while_idle += 1
            if self.lost_while_idle > 2 * len(self.processes):
                raise RewardError(f"reward processes of {self.config.function} end by themselves between two calls") from error
            self._replace(slot)

    def _share(self, process: RewardProcess) -> list[int]:
        """The next items of a process: all for a batched function, else few enough that none waits while others idle."""
        if process.signature.batched:
            share = len(self.waiting)
        elif process.signature.concurrent:
            share = min(self.config.concurrency, -(-len(self.waiting) // len(self.processes)))
        else:
            share = min(CHUNK, -(-len(self.waiting) // (2 * len(self.processes))))
        numbers = [self.waiting.popleft()]
        while len(numbers) < share and not self.alone.intersection((numbers[0], self.waiting[0])):
            numbers.append(self.waiting.popleft())
        return numbers

    def _look_at(self, slot: int, answered: bool) -> None:
        process = self.processes[slot]
        if process.signature is None:
            if answered or time.monotonic() > process.start_deadline:
                process.wait_ready()
        elif answered:
            self._receive(slot)
        elif process.exited():
            self._lose(slot)
        elif time.monotonic() > process.deadline:
            self._give_up(slot, TIMED_OUT)

    def _receive(self, slot: int) -> None:
        process = self.processes[slot]
        try:
            outcomes = process.receive()
        except (EOFError, ConnectionResetError):
            self._lose(slot)
            return
        process.restart_clock()
        for outcome in outcomes:
            self._record(process.pending.popleft(), outcome)

    def _lose(self, slot: int) -> None:
        batched = self.processes[slot].signature.batched
        self._give_up(slot, Failure(f"did not return: its process {self.processes[slot].exit_text()}", whole=batched))

    def _give_up(self, slot: int, outcome: Outcome) -> None:
        """Replace the process. The response it was at (all of them for a batched function) gets `outcome`; those it had
        not started on go to another one. Of several asynchronous calls the guilty one is not known: each is tried again, alone."""
        signature, pending = self.processes[slot].signature, list(self.processes[slot].pending)
        self._replace(slot)
        if signature.concurrent and len(pending) > 1:
            self.alone.update(pending)
            self.waiting.extendleft(reversed(pending))
            return
        concerned = pending if signature.batched else pending[:1]
        self.waiting.extendleft(reversed(pending[len(concerned):]))
        for number in concerned:
            self._record(number, outcome)

    def _replace(self, slot: int) -> None:
        self.processes[slot].kill()
        self.processes[slot] = RewardProcess(self.config)

    def _record(self, number: int, outcome: Outcome) -> None:
        if isinstance(outcome, Failure) and (outcome.contract or self.config.on_error == "raise"):
            raise RewardError(failure_text(self.config, outcome, number, self.items))
        self.outcomes[number] = outcome
