"""The folder of a run: where everything a run leaves behind has its place.

    runs/<name>/
      config.yaml                  the resolved configuration
      status.json                  running, finished, or failed with the reason
      metrics.jsonl                one line per step
      rollouts/step_000012.jsonl   sampled rollouts of a step
      checkpoint/                  the last weights as a Hugging Face model
      critic/, cost_critic/        the last critics, of runs that train them
      logs/                        output of each worker process
      curves.png, curves.html
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hybridflow.config.file_rules import PARTIAL
from hybridflow.errors import ConfigError, DataError

CRITICS = ("critic", "cost_critic")  # roles whose models are left beside the checkpoint
SHORT_REASON = 400  # characters, of a reason that must fit where the last status was
State = Literal["running", "finished", "failed"]


@dataclass(frozen=True)
class Status:
    """Content of status.json. Times are seconds since 1970."""

    state: State
    reason: str = ""  # why it failed
    step: int = 0  # last step completed
    started: float = 0.0
    updated: float = 0.0
    host: str = ""
    pid: int = 0


class RunFolder:
    """Paths of one run. `create` begins a run and holds a lock on the folder until it has ended; `open` only reads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.status_file = root / "status.json"
        self.metrics = root / "metrics.jsonl"
        self.rollouts = root / "rollouts"
        self.checkpoint = root / "checkpoint"
        self.critics = {name: root / name for name in CRITICS}
        self.logs = root / "logs"
        self.curves_png = root / "curves.png"
        self.curves_html = root / "curves.html"
        self._unlock: weakref.finalize | None = None

    @classmethod
    def create(cls, output_dir: str | os.PathLike[str], name: str, overwrite: bool, config_text: str) -> RunFolder:
        """Makes output_dir/name with the configuration in it and the status "running".

        An existing folder that is not empty needs `overwrite`, which removes what a run writes (the list above) and leaves
        other files alone. Raises ConfigError if the name is no plain folder name, if the folder exists, cannot be written, or belongs
        to a run that is still going on.
        """
        if name in ("", ".", "..") or Path(name).name != name:
            raise ConfigError(f"trainer.name is {name!r}; it must be a plain folder name without '/'")
        run = cls(Path(output_dir) / name)
        try:
            run.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the run folder {run.root} cannot be made ({error}); see trainer.output_dir and trainer.name") from error
        run._lock()
        if any(run.root.iterdir()):
            if not overwrite:
                run._release()
                raise ConfigError(
                    f"the run folder {run.root} exists and is not empty; choose another trainer.name, "
                    "or trainer.overwrite=true to replace it"
                )
            run._clear()
        try:
            run._begin(config_text)
        except OSError as error:
            run._release()
            raise ConfigError(f"the run folder {run.root} cannot be written ({error}); see trainer.output_dir") from error
        return run

    @classmethod
    def open(cls, root: str | os.PathLike[str]) -> RunFolder:
        """The folder of a run that was made before. Raises DataError if it is none."""
        run = cls(Path(root))
        if not run.status_file.is_file():
            raise DataError(f"{root} is no run folder: it has no status.json")
        return run

    def status(self) -> Status:
        return Status(**json.loads(self.status_file.read_text(encoding="utf-8")))

    def progress(self, step: int) -> None:
        """Notes that `step` is complete."""
        self._update("running", "", step)

    def finish(self, step: int) -> None:
        """Notes a good end after `step`, and lets go of the folder."""
        self._update("finished", "", step)
        self._release()

    def fail(self, reason: str) -> None:
        """Notes a bad end with its reason, removes models that are not complete, and lets go of the folder."""
        for path in self._partial():
            shutil.rmtree(path, ignore_errors=True)
        try:
            self._update("failed", reason, self.status().step)
        except OSError as error:
            # A full disk has no room for a new file, but the old one's block is still there.
            status = Status(**asdict(self.status()) | {"state": "failed", "reason": f"{reason[:SHORT_REASON]} ({error})"})
            _overwrite(self.status_file, _status_text(status))
        finally:
            self._release()

    def _begin(self, config_text: str) -> None:
        self.rollouts.mkdir()
        self.logs.mkdir()
        self.config.write_text(config_text, encoding="utf-8")
        now = time.time()
        self._write_status(Status("running", started=now, updated=now, host=socket.gethostname(), pid=os.getpid()))

    def _update(self, state: State, reason: str, step: int) -> None:
        self._write_status(Status(**(asdict(self.status()) | {"state": state, "reason": reason, "step": step, "updated": time.time()})))

    def _write_status(self, status: Status) -> None:
        write_atomic(self.status_file, _status_text(status))

    def _lock(self) -> None:
        """A lock that the system drops when the process dies, so a stale one cannot exist."""
        handle = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                os.close(handle)
                raise ConfigError(
                    f"another run is writing to {self.root} at this moment; end it or choose another trainer.name"
                ) from error
            # Some network file systems cannot lock a folder; then two runs of one name are the user's care.
        self._unlock = weakref.finalize(self, os.close, handle)

    def _release(self) -> None:
        if self._unlock is not None:
            self._unlock()

    def _partial(self) -> list[Path]:
        """Models that a run was writing when it died."""
        return [path.with_name(PARTIAL.format(path.name)) for path in (self.checkpoint, *self.critics.values())]

    def _clear(self) -> None:
        for path in (self.rollouts, self.checkpoint, *self.critics.values(), self.logs, *self._partial()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for path in (self.config, self.status_file, self.metrics, self.curves_png, self.curves_html):
            path.unlink(missing_ok=True)


def _status_text(status: Status) -> str:
    return json.dumps(asdict(status), indent=1) + "\n"


def _overwrite(path: Path, text: str) -> None:
    with path.open("r+", encoding="utf-8") as file:
        file.write(text)
        file.truncate()


def write_atomic(path: Path, text: str) -> None:
    """A reader sees the old content or the new, whole; never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
