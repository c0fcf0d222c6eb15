"""Logging of the driver and of the workers: one format, and the rank where there is one."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class _StderrHandler(logging.StreamHandler):
    """Writes to what sys.stderr is at that moment: the live table replaces it so that lines come out above the table."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def setup_logging(level: int | str = logging.INFO, rank: int | None = None, role: str = "") -> None:
    """hybridflow's messages from `level` on, other libraries' from WARNING on, to standard error; may be called again.

    rank, role: of a worker process; they stand in each of its lines.
    """
    place = " ".join([*([role] if role else []), *([f"rank {rank}"] if rank is not None else [])])
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {f'[{place}] ' if place else ''}%(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _StderrHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("hybridflow").setLevel(level)
