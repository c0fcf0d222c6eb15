"""Checks a run without starting it and without GPUs: settings, layouts against the model, batch plan, data, reward function.

    python launch/check.py actor.model.path=FOLDER data.train_files=prompts.jsonl reward.function=my_rewards:score --ranks=8

Prints every problem of the settings at once; without any, the data is read and the reward function tried on a sample. Exit code
0: the run can start; 2: it cannot.
"""

from __future__ import annotations

import sys

from hybridflow.config import memory
from hybridflow.config.help import help_text
from hybridflow.config.load import LoadedConfig, load_config
from hybridflow.config.ranks import ranks_here
from hybridflow.config.schema import Config
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.trainer.check import Report, check


def split_ranks(arguments: list[str]) -> tuple[int | None, list[str]]:
    """Takes --ranks=N or --ranks N out of the arguments."""
    rest, value, tokens = [], None, iter(arguments)
    for token in tokens:
        if token == "--ranks" or token.startswith("--ranks="):
            value = token.partition("=")[2] or next(tokens, "")
        else:
            rest.append(token)
    if value is None:
        return None, rest
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"--ranks={value}: the number of worker processes of the whole run, 1 or more.")
    return int(value), rest


def render(loaded: LoadedConfig, report: Report) -> str:
    """The report for people."""
    lines = [f"{loaded.config.algorithm.name} on {report.world} rank{'s' if report.world > 1 else ''}"]
    if report.facts is not None:
        facts = report.facts
        size = f"{facts.parameters / 1e6:,.1f} M parameters, {facts.layers} layers, {facts.heads} heads, {facts.kv_heads} key-value heads"
        lines.append(f"  {'model':<14} {facts.family}, {size}, vocabulary {facts.vocab} ({facts.path})")
    if report.plan is not None:
        lines.append(report.plan.text())
        if report.facts is not None and not report.problems:
            lines.append(memory.render(memory.phases(loaded.config, report.world, report.facts, report.others)))
    lines += [f"warning: {warning}" for warning in report.warnings]
    lines += ["✗ " + problem.replace("\n", "\n  ") for problem in report.problems]
    count = len(report.problems)
    lines.append(f"{count} problem{'s' if count > 1 else ''}; nothing was started." if count else "✓ The run can start.")
    return "\n".join(lines)


def content_problems(config: Config, report: Report) -> list[str]:
    """What is wrong with weight files, tokenizer, data or functions: the first of it."""
    from hybridflow.trainer.prepare import prepare_checked  # transformers and datasets take seconds; wrong settings are told before

    try:
        prepare_checked(config, report)
    except HybridFlowError as error:
        return error.problems if isinstance(error, ConfigError) else [str(error)]
    return []


def main(arguments: list[str]) -> int:
    try:
        ranks, rest = split_ranks(arguments)
        loaded = load_config(rest)
        if loaded.help:
            print(help_text("python launch/check.py", __doc__.splitlines()[0], options="[--ranks=N]"), end="")
            return 0
        if loaded.print_config:
            print(loaded.text, end="")
            return 0
        report = check(loaded.config, ranks or ranks_here(loaded.config.cluster))
        if not report.problems:
            report.problems += content_problems(loaded.config, report)
    except HybridFlowError as error:
        print("\n".join(f"✗ {line}" for line in str(error).splitlines()), file=sys.stderr)
        return error.EXIT_CODE
    print(render(loaded, report))
    return 2 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
