from __future__ import annotations

from pathlib import Path

import pytest

from echo2.config.load import build_config
from echo2.config.sections import ServerSection
from echo2.config.server_file import load_server
from echo2.errors import ConfigError


def test_the_table_is_read_and_the_others_are_not_looked_at(tmp_path: Path) -> None:
    """So that a run's own file serves as one."""
    file = tmp_path / "run.toml"
    file.write_text('[nonsense]\na = 1\n[server]\ncommand = ["python", "-m", "vllm"]\nstart_timeout_s = 5.0\n')
    assert load_server(file) == ServerSection(command=("python", "-m", "vllm"), start_timeout_s=5.0)
    file.write_text("[run]\nsteps = 3\n")
    assert load_server(file) == load_server(None) == ServerSection()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[server]\nurls = 'x'", r"run\.toml: unknown key `urls` in \[server\]; the nearest known key is `url`"),
        ("[server]\ncommand = 'python'", r"run\.toml: server\.command must be an array"),
        ("server = 3", r"\[server\] of .*run\.toml must be a table"),
    ],
)
def test_faults_are_told_with_the_file(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load_server(file)


@pytest.mark.parametrize(
    ("server", "engine", "sentence"),
    [
        ({"url": "localhost:8000"}, "vllm", "server.url must begin with http"),
        ({"url": "http://a", "arguments": ["-x"]}, "vllm", "give one or the other"),
        ({}, "openai", 'rollout.engine = "openai" needs server.url'),
    ],
)
def test_relations_between_the_servers_keys(server: dict[str, object], engine: str, sentence: str) -> None:
    tables = {"server": server, "rollout": {"engine": engine}, "model": {"path": "tiny:qwen3"}}
    with pytest.raises(ConfigError, match=sentence):
        build_config(tables)
