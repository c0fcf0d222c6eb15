"""Starts one program and watches it until it ended, met a limit, or nobody wants the answer any more."""

from __future__ import annotations

import os
import select
import signal
import time

from . import child, files, identity, linux, processes
from .program import Plan
from .watch import Watch, answer, check, count, drain, receive

TICK_SECONDS = 0.02


def supervise(request: dict, lifeline: int) -> dict:
    """Runs one request of `run_python` and returns the fields of its result, or {"error": text}."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        return _run(request, lifeline)
    except OSError as error:
        return {"error": str(error)}
    finally:
        files.remove_tree(request["folder"])


def _plan(request: dict) -> Plan:
    active = set()
    user = identity.own_user() if os.geteuid() == 0 else None  # root without it is refused: no limit on processes binds root
    if "namespaces" in request["layers"]:
        try:
            identity.enter_namespaces()
            active.add("namespaces")
        except OSError:
            active.discard("namespaces")
    tasks = identity.process_limit(request["limits"]["processes"], user is not None, bool(active))
    return Plan(request, user, tasks, active)


def _run(request: dict, lifeline: int) -> dict:
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the wake-up descriptor tells which came
    stdin = os.memfd_create("stdin")
    with open(stdin, "wb", closefd=False) as stream:
        stream.write(request["stdin"].encode("utf-8", errors="replace"))
    os.lseek(stdin, 0, os.SEEK_SET)
    (out, out_end), (err, err_end), (channel, channel_end) = os.pipe(), os.pipe(), os.pipe()
    plan = _plan(request)
    first = os.fork()
    if first == 0:
        signal.set_wakeup_fd(-1)
        child.start(plan, (stdin, out_end, err_end), channel_end)
    for descriptor in (out_end, err_end, channel_end, stdin):
        os.close(descriptor)
    watch = Watch(first, request["limits"], request["folder"])
    sources = {out: "stdout", err: "stderr", channel: "channel", wake: "wake", lifeline: "lifeline"}
    try:
        _loop(watch, sources)
    finally:
        processes.kill_all(first)
    drain(watch, {out: "stdout", err: "stderr", channel: "channel"})
    return answer(watch)


def _loop(watch: Watch, sources: dict[int, str]) -> None:
    """Until the program ended or a limit was met."""
    poll = select.poll()
    for descriptor in sources:
        os.set_blocking(descriptor, False)
        poll.register(descriptor, select.POLLIN)
    next_check = 0.0
    while watch.wait is None and watch.verdict is None and "error" not in watch.report:
        for descriptor, _ in poll.poll(TICK_SECONDS * 1000):
            if not receive(watch, descriptor, sources[descriptor]):
                poll.unregister(descriptor)
        now = time.monotonic()
        if now >= next_check:
            check(watch, now)
            next_check = now + TICK_SECONDS + 4 * (time.monotonic() - now)  # a check that takes long is made less often
    if watch.verdict is None:
        count(watch)  # on a busy machine a program can end between two checks: what it started is still there
