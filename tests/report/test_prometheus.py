from __future__ import annotations

from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from echo2.metrics import Mismatch, StepMetrics
from echo2.report.prometheus import exposition
from echo2.transport.messages import RunStatus


def samples_of(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_the_page_parses_and_holds_status_metrics_and_counters(
    make_status: Callable[..., RunStatus], make_metrics: Callable[..., StepMetrics]
) -> None:
    samples = samples_of(exposition(make_status(), make_metrics(12), {"requests": 120}))
    assert samples["echo2_step", ()] == 12
    assert samples["echo2_rows", (("state", "buffered"),)] == 20
    assert samples["echo2_bubble_ratio", ()] == make_metrics(12).bubble_ratio
    assert samples["echo2_refused_rows_total", (("verdict", "stale"),)] == 1
    assert samples["echo2_requests_total", ()] == 120
    assert samples["echo2_worker_sent_bytes_total", (("worker", "w0"),)] == 26_000_000
    assert samples["echo2_relay_sent_bytes_total", ()] == 52_000_000
    assert samples["echo2_learner", (("statistic", "prox_s"),)] == 0.4


def test_each_task_and_each_worker_that_was_set_aside_has_a_series(
    make_status: Callable[..., RunStatus], make_metrics: Callable[..., StepMetrics]
) -> None:
    status = make_status(set_aside=({"id": "w-7", "name": "greedy", "reason": "it lied"},))
    samples = samples_of(exposition(status, make_metrics(3, pass_share_by_task={"easy": 0.75}), {}))
    assert samples["echo2_task_pass_ratio", (("task", "easy"),)] == 0.75
    assert samples["echo2_worker_set_aside", (("name", "greedy"), ("reason", "it lied"), ("worker", "w-7"))] == 1


def test_each_worker_whose_log_probs_were_compared_has_its_series(
    make_status: Callable[..., RunStatus], make_metrics: Callable[..., StepMetrics]
) -> None:
    seen = Mismatch(name="ada", groups=3, tokens=90, mean_nats=0.01, p99_nats=0.1, beyond_share=0.02)
    samples = samples_of(exposition(make_status(), make_metrics(3, audited={"w-7": seen}), {}))
    labels = (("name", "ada"), ("worker", "w-7"))
    assert samples["echo2_worker_mismatch_nats", labels] == 0.01
    assert samples["echo2_worker_mismatch_p99_nats", labels] == 0.1
    assert samples["echo2_worker_mismatch_beyond_ratio", labels] == 0.02
    assert samples["echo2_worker_audited_tokens", labels] == 90


def test_a_workers_name_cannot_forge_a_metric(make_status: Callable[..., RunStatus]) -> None:
    name = 'x"} 1\necho2_step 0\n#'
    samples = samples_of(exposition(make_status(workers=({"id": "w-1", "name": name, "rate_per_s": 2.0},)), None, {}))
    assert samples["echo2_worker_trajectories_per_second", (("name", name), ("worker", "w-1"))] == 2.0
    assert samples["echo2_step", ()] == 12


def test_whether_a_worker_can_be_dialled_is_told_once_it_was_tried(make_status: Callable[..., RunStatus]) -> None:
    workers = tuple(
        {"id": name, "name": name, "reachable": value} for name, value in (("a", True), ("b", False), ("c", None))
    )
    samples = samples_of(exposition(make_status(workers=workers), None, {}))
    told = {
        dict(labels)["worker"]: value for (name, labels), value in samples.items() if name == "echo2_worker_reachable"
    }
    assert told == {"a": 1.0, "b": 0.0}


def test_what_is_not_known_yet_is_absent(
    make_status: Callable[..., RunStatus], make_metrics: Callable[..., StepMetrics]
) -> None:
    before = samples_of(exposition(make_status(policy=None, workers=()), None, {}))
    assert ("echo2_reward", ()) not in before
    assert ("echo2_published_version", ()) not in before
    assert before["echo2_workers", ()] == 0
    assert ("echo2_broadcast_seconds", ()) not in samples_of(exposition(make_status(), make_metrics(0), {}))
