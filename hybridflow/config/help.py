"""The --help text of programs that take a configuration."""

from __future__ import annotations

from hybridflow.config import keys
from hybridflow.config.load import CONFIG_DIR, choices, group_names

_TEXT = """usage: {program} [KEY=VALUE ...] [--print_config] [--config_dir=FOLDER]{options}

{purpose}

Settings are KEY=VALUE (or --KEY=VALUE), as in
  {program} actor.model.path=FOLDER data.train_files=[a.jsonl,b.parquet] reward.function=my_rewards:score rollout.n=8
Required: actor.model.path, data.train_files, and reward.function where the algorithm generates.

Choices of files, GROUP=NAME:
{groups}

Sections: {sections}
Every key, its default and its meaning: hybridflow/config/schema.py, or --print_config, which also tells where each changed
value comes from and starts nothing. Precedence: command line > experiment file > group files > schema.
--config_dir=FOLDER finds files of your own, such as FOLDER/experiment/my_run.yaml for experiment=my_run.
"""


def help_text(program: str, purpose: str, options: str = "") -> str:
    """What `program --help` prints; `options` are further flags of the program."""
    names = {group: choices(group, [CONFIG_DIR]) for group in group_names(CONFIG_DIR)}
    groups = "\n".join(f"  {group:<11} {', '.join(found)}" for group, found in names.items() if len(found) > 1 or group == "experiment")
    sections = ", ".join(section for section in keys.sections() if section)
    return _TEXT.format(program=program, purpose=purpose, options=f" {options}" if options else "", groups=groups, sections=sections)
