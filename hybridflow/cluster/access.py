"""Ray's token authentication with a token of the job's own, so that no user file is read or written for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ray._raylet import AuthenticationTokenLoader, Config


@contextlib.contextmanager
def job_token(token: str) -> Iterator[None]:
    """Within, this process and its children talk to Ray with `token`."""
    ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    _read_again()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _read_again()


def _read_again() -> None:
    """Ray reads both variables once, when it is imported; this is how Ray itself makes a later change count."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
