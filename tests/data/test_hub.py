from __future__ import annotations

import pytest

from echo2.data import hub
from echo2.errors import ConfigError


@pytest.mark.parametrize(
    ("names", "split", "files"),
    [
        (["README.md", "data/train-00000-of-00001.parquet"], "train", ["data/train-00000-of-00001.parquet"]),
        (["data/train-0.parquet", "data/test-0.parquet", "test.jsonl"], "test", ["data/test-0.parquet"]),
        (["b/test-1.parquet", "b/test-0.parquet"], "test", ["b/test-0.parquet", "b/test-1.parquet"]),
        (["problems.csv", "dataset_infos.json", ".gitattributes"], "test", ["problems.csv"]),
        (["train.jsonl", "valid.jsonl"], "test", []),
        (["latest.jsonl", "other.jsonl"], "test", []),
    ],
)
def test_the_files_of_a_split_are_found_by_name(names: list[str], split: str, files: list[str]) -> None:
    assert hub.split_files(names, split) == files


def test_files_are_downloaded_and_faults_become_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(dataset: str) -> list[str]:
        raise OSError("no route to host")

    monkeypatch.setattr(hub, "_hub", lambda task: (lambda dataset: ["test.jsonl"], lambda dataset, name: f"/c/{name}"))
    assert hub.fetch_split("a/b", "test", "t") == ["/c/test.jsonl"]
    monkeypatch.setattr(hub, "_hub", lambda task: (lambda dataset: ["x.jsonl", "y.jsonl"], None))
    with pytest.raises(ConfigError, match="t: data set a/b must have files of split 'test', found none"):
        hub.fetch_split("a/b", "test", "t")
    monkeypatch.setattr(hub, "_hub", lambda task: (offline, None))
    with pytest.raises(ConfigError, match=r"must be reachable on the hub .* give it as path"):
        hub.fetch_split("a/b", "test", "t")
