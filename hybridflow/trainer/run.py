"""One run from its configuration to its folder: prepare, start the cluster, train, and note how it ended."""

from __future__ import annotations

from hybridflow.cluster.bootstrap import Cluster, Job
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
            return _on_cluster(loaded, prepare(loaded.config, cluster.world), cluster)
    prepared = prepare(loaded.config, job.world)
    with job.cluster() as cluster:
        if cluster.world != job.world:
            raise ConfigError(f"the nodes have {cluster.ranks_per_node} ranks, the settings were checked for {job.world}; "
                              "set cluster.ranks_per_node to what every node has")
        return _on_cluster(loaded, prepared, cluster)


def _on_cluster(loaded: LoadedConfig, prepared: Prepared, cluster: Cluster) -> RunResult:
    trainer = loaded.config.trainer
    folder = RunFolder.create(trainer.output_dir, trainer.name, trainer.overwrite, loaded.text)
    cluster.log_dir = folder.logs
    journal = Journal(folder, prepared)
    try:
        journal.start(f"hybridflow {trainer.name}: {loaded.config.algorithm.name}, {prepared.steps} steps", summary(prepared, cluster))
        for warning in prepared.report.warnings:
            journal.warn(warning)
        roles = Roles(prepared, cluster)
        try:
            result = Trainer(prepared, roles, journal).run()
        finally:
            roles.close()
    except BaseException as error:
        journal.fail(f"{type(error).__name__}: {error}")
        raise
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
