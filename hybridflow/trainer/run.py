"""One run from its configuration to its folder: prepare, start the cluster, train, and note how it ended."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from hybridflow.cluster.bootstrap import Cluster, Job, ending_signal, orphaned, signals_wait
from hybridflow.cluster.watch import losses_named
from hybridflow.config.load import LoadedConfig
from hybridflow.errors import ConfigError
from hybridflow.observe.run_folder import RunFolder
from hybridflow.trainer.journal import Journal
from hybridflow.trainer.loop import RunResult, Trainer
from hybridflow.trainer.prepare import Prepared, prepare
from hybridflow.trainer.roles import Roles


def run(loaded: LoadedConfig, job: Job) -> RunResult:
    """Every check that needs no worker comes first; on an existing cluster, whose size must be asked, right after connecting."""
    if job.world is None:
        with job.cluster() as cluster:
            prepared = prepare(loaded.config, cluster.world)
            with _recorded(loaded, prepared) as journal:
                return _train(prepared, cluster, journal)
    prepared = prepare(loaded.config, job.world)
    with _recorded(loaded, prepared) as journal, job.cluster(status_file=journal.folder.status_file) as cluster, _noting_failure(journal):
        if cluster.world != job.world:
            raise ConfigError(f"the nodes have {cluster.ranks_per_node} ranks, the settings were checked for {job.world}; "
                              "set cluster.ranks_per_node to what every node has")
        return _train(prepared, cluster, journal)


@contextlib.contextmanager
def _recorded(loaded: LoadedConfig, prepared: Prepared) -> Iterator[Journal]:
    """The run folder, made before anything is started; a bad end is noted in it."""
    trainer = loaded.config.trainer
    journal = Journal(RunFolder.create(trainer.output_dir, trainer.name, trainer.overwrite, loaded.text), prepared)
    with _noting_failure(journal):
        yield journal


@contextlib.contextmanager
def _noting_failure(journal: Journal) -> Iterator[None]:
    """Used inside the cluster as well: taking that down takes seconds, and whoever ends the job may not wait for them."""
    try:
        yield
    except BaseException as error:
        with signals_wait():  # a second Ctrl-C must not leave the run without its end
            journal.fail(reason(error))
        raise


def reason(error: BaseException) -> str:
    """Why a run ended, for its status."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C)"
    number = ending_signal()
    if isinstance(error, SystemExit) and number:
        return f"ended by {signal.Signals(number).name}" + (": torchrun was killed" if orphaned() else "")
    return f"{type(error).__name__}: {error}"


def _train(prepared: Prepared, cluster: Cluster, journal: Journal) -> RunResult:
    cluster.log_dir = journal.folder.logs
    trainer = prepared.config.trainer
    journal.start(f"hybridflow {trainer.name}: {prepared.config.algorithm.name}, {prepared.steps} steps", summary(prepared, cluster))
    for warning in prepared.report.warnings:
        journal.warn(warning)
    with losses_named():
        roles = Roles(prepared, cluster)
    with contextlib.closing(roles), losses_named():
        result = Trainer(prepared, roles, journal).run()
    journal.finish(result.steps)
    return result


def summary(prepared: Prepared, cluster: Cluster) -> dict[str, object]:
    """The start of a run in a few lines: model, ranks, batch plan."""
    facts = prepared.report.facts
    shown: dict[str, object] = {
        "model": f"{facts.family}, {facts.parameters / 1e6:,.1f} M parameters ({facts.path})",
        "ranks": f"{cluster.world} on {cluster.device}, {len(cluster.ranks_per_node)} node(s); cluster up in {cluster.start_seconds:.1f} s",
        "data": f"{len(prepared.train)} prompts, {len(prepared.validation) if prepared.validation else 0} for validation",
    }
    return shown | {"plan": "\n" + prepared.report.plan.text()}
