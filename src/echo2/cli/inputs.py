"""What the user named on the command line, checked before anything is started.

Invariant: what leaves this module can be run: configuration, tasks and model directory were looked at, and a mistake in
any of them has been told without a run folder, a process or a connection having been made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echo2.config.load import load_config
from echo2.config.root import Config
from echo2.errors import ConfigError, UserError
from echo2.run.folder import RunFolder

CONFIG_NAME = "config.toml"


def checked_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in file ``path`` or of run folder ``path``, with its tasks and its model directory checked."""
    config = _config_of_folder(path.absolute(), overrides) if path.is_dir() else load_config(path, overrides)
    check_parts(config)
    return config


def _config_of_folder(folder: Path, overrides: Sequence[str]) -> Config:
    """A run folder may have been moved since: where it lies now counts, not the ``run.dir`` it was made with."""
    config = load_config(folder / CONFIG_NAME, overrides)
    if config.run.name != folder.name:
        raise UserError(
            f'a run folder must bear the name of its run, got {folder.name} for run.name = "{config.run.name}"; '
            f"rename the folder back"
        )
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder.parent)})})


def check_parts(config: Config) -> None:
    """Raises ConfigError for tasks that cannot be loaded and for a model directory that is not whole."""
    from echo2.data import given
    from echo2.data.registry import load_task
    from echo2.learning.pretrained import check_model_directory

    faults: list[str] = []
    for section in config.tasks:
        try:
            given.size(load_task(section), "train")
        except ConfigError as error:
            faults += error.faults
        except UserError as error:
            faults.append(str(error))
    folder = Path(config.model.path)
    if config.rollout.engine not in ("scripted", "openai") and folder.is_absolute():
        try:
            check_model_directory(folder)
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError(faults)


def check_trainable(config: Config) -> None:
    """Raises ConfigError for an engine that can be asked and takes no weights."""
    if config.rollout.engine == "openai":
        raise ConfigError(
            'rollout.engine = "openai" can be evaluated and not trained, because nobody can give it weights: use vllm, '
            "sglang, parallax or transformers"
        )


def check_port(config: Config) -> None:
    """Raises UserError when the coordinator could not listen where it is told to, before a run folder is made."""
    from echo2.coordinator.server import listen

    ports = {"coordinator.port": config.coordinator.port, "broadcast.relay_port": config.broadcast.relay_port}
    for key, port in ports.items():
        if port:
            listen(config.coordinator.host, port, key).close()


def run_folder(path: Path) -> RunFolder:
    """The run folder that ``path`` names, as a folder or by its configuration file. Raises UserError."""
    if not path.exists():
        raise UserError(f"{path} must be a run's folder or its configuration file, but there is neither")
    folder = RunFolder(path.absolute()) if path.is_dir() else RunFolder.of(load_config(path, check_places=False))
    if not folder.is_used:
        raise UserError(
            f"{folder.root} must be a run folder with a {CONFIG_NAME}; give the folder that the run printed"
        )
    return folder
