"""What is handed to SkyPilot and read from it, by SkyPilot's own types. Skipped where it is not installed."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_sky import real_server, real_sky

from echo2.errors import Refused, TransportError, Unauthorised
from echo2.provisioning.pools import skypilot_sdk
from echo2.provisioning.pools.skypilot_clusters import Known, cluster_name, labels
from echo2.provisioning.pools.skypilot_market import MOST_CHARACTERS
from echo2.provisioning.pools.skypilot_sdk import Order, Sdk, is_gone, task, told

JOIN = "echo2://token@10.0.0.1:8400?tls=1"
MACHINE = "gcp-a2-highgpu-1g-us-x1-spot-1"
ORDER = Order(
    cluster=cluster_name("run-1", MACHINE),
    machine_id=MACHINE,
    infra="gcp/us-x1",
    instance_type="a2-highgpu-1g",
    accelerator="A100",
    accelerators=1,
    use_spot=True,
    image="docker:example/echo2:1",
    disk_gb=100,
    labels=labels(MACHINE, Known("gcp-a2-highgpu-1g-us-x1-spot", 1.2)),
    run=f"set -e\nexec echo2 worker --name {MACHINE}",
    idle_minutes=5,
)


@pytest.fixture
def sky() -> Any:
    return real_sky()


def test_the_task_is_one_machine_of_the_catalog_row(sky: Any) -> None:
    made = task(ORDER, JOIN)
    assert isinstance(made, sky.Task)
    made.validate_name()
    made.validate_run()
    assert made.num_nodes == 1
    (resources,) = made.resources
    assert isinstance(resources, sky.Resources)
    assert resources.cloud.is_same_cloud(sky.GCP())
    assert (resources.region, resources.instance_type) == ("us-x1", "a2-highgpu-1g")
    assert resources.accelerators == {"A100": 1}
    assert resources.use_spot
    assert resources.disk_size == 100
    assert resources.extract_docker_image() == "example/echo2:1"
    assert resources.labels["echo2-machine"] == MACHINE


def test_what_is_empty_is_left_to_skypilot(sky: Any) -> None:
    import msgspec

    bare = msgspec.structs.replace(ORDER, image="", disk_gb=0, infra="vast/Utah, US, NA", use_spot=False)
    (resources,) = task(bare, JOIN).resources
    assert resources.extract_docker_image() is None
    assert not resources.disk_size_specified if hasattr(resources, "disk_size_specified") else True
    assert resources.region == "Utah, US, NA"


def test_the_join_string_is_a_secret_and_in_nothing_else(sky: Any) -> None:
    made = task(ORDER, JOIN)
    config = made.to_yaml_config()
    assert config.pop("secrets") == {"ECHO2_JOIN": JOIN}
    assert "token" not in str(config)
    assert "token" not in repr(made)
    assert "token" not in repr(made.secrets)
    assert config["api_server_access"] is False


@pytest.mark.parametrize(
    ("function", "arguments", "options"),
    [
        ("launch", ["task"], {"cluster_name": "c", "idle_minutes_to_autostop": 5, "down": True, "wait_for": None}),
        ("down", ["c"], {}),
        ("status", [["c"]], {"refresh": None, "all_users": True}),
        ("api_status", [], {"fields": ["name"]}),
        ("api_cancel", [["id"]], {"silent": True}),
        ("get", ["id"], {}),
        ("list_accelerators", [], {"name_filter": "A100", "clouds": ["gcp"]}),
    ],
)
def test_the_calls_fit_the_functions(sky: Any, function: str, arguments: list[Any], options: dict[str, Any]) -> None:
    inspect.signature(getattr(sky, function)).bind(*arguments, **options)


async def test_the_real_objects_pass_through_a_launch_and_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    server = real_server(monkeypatch)
    sdk = Sdk()
    request_id = await sdk.launch(ORDER, JOIN)
    (launched,) = server.launched
    assert type(launched.wait_for).__name__ == "AutostopWaitFor"
    (request,) = await sdk.unfinished()
    assert (request.request_id, request.kind, request.cluster) == (request_id, "launch", ORDER.cluster)
    server.land(ORDER.cluster, last_event="Cluster \x1b[1mis up\x1b[0m")
    (sighting,) = await sdk.sighted(await sdk.status([ORDER.cluster], ask_clouds=True))
    assert (sighting.name, sighting.status, sighting.was_up) == (ORDER.cluster, "UP", True)
    assert sighting.detail == "Cluster is up"
    assert dict(sighting.labels) == ORDER.labels
    await sdk.result(await sdk.down(ORDER.cluster))
    with pytest.raises(Refused) as error:
        await sdk.result(await sdk.down(ORDER.cluster))
    assert is_gone(error.value)


@pytest.mark.parametrize(("zone", "usd_per_h"), [("us-x1-a", 1.2), ("us-x1-b", 1.4)])
async def test_a_machine_costs_what_its_zone_costs(
    monkeypatch: pytest.MonkeyPatch, zone: str, usd_per_h: float
) -> None:
    server, sdk = real_server(monkeypatch), Sdk()
    await sdk.launch(ORDER, JOIN)
    (resources,) = server.launched[0].task.resources
    server.land(ORDER.cluster, handle=SimpleNamespace(launched_resources=resources.copy(zone=zone)))
    (sighting,) = await sdk.sighted(await sdk.status([ORDER.cluster], ask_clouds=False))
    assert sighting.usd_per_h == pytest.approx(usd_per_h)


async def test_a_machine_that_no_catalog_has_costs_nobody_knows_what(monkeypatch: pytest.MonkeyPatch) -> None:
    server, sdk = real_server(monkeypatch), Sdk()
    await sdk.launch(ORDER, JOIN)
    (resources,) = server.launched[0].task.resources
    elsewhere = resources.copy(instance_type="a2-highgpu-99g", zone="us-x1-a")
    server.land(ORDER.cluster, handle=SimpleNamespace(launched_resources=elsewhere))
    (sighting,) = await sdk.sighted(await sdk.status([ORDER.cluster], ask_clouds=False))
    assert sighting.usd_per_h is None


def test_the_states_of_clusters_are_those_we_know(sky: Any) -> None:
    from sky.utils import status_lib

    assert {state.value for state in sky.ClusterStatus} == {"INIT", "UP", "STOPPED", "AUTOSTOPPING", "PENDING"}
    assert status_lib.INIT_KIND_UNHEALTHY == "unhealthy"


def test_errors_of_skypilot_are_told_apart(sky: Any) -> None:
    for name in (*skypilot_sdk._AWAY, *skypilot_sdk._BARRED):
        assert issubclass(getattr(sky.exceptions, name), Exception), name
    assert type(told(sky.exceptions.ApiServerConnectionError("http://127.0.0.1:46580"))) is TransportError
    assert type(told(sky.exceptions.ApiServerAuthenticationError("http://127.0.0.1:46580"))) is Unauthorised
    assert type(told(sky.exceptions.ResourcesUnavailableError("none left"))) is Refused
    assert type(told(sky.exceptions.NoCloudAccessError("no cloud is enabled"))) is Refused
    assert is_gone(told(sky.exceptions.ClusterDoesNotExist("gone")))  # type: ignore[arg-type]


def test_names_and_labels_are_legal_on_every_cloud_and_no_name_is_cut(sky: Any) -> None:
    from sky.utils import common_utils
    from sky.utils.registry import CLOUD_REGISTRY

    longest = {"machine": "m" * 63, "offer": "o" * MOST_CHARACTERS}
    tags = labels(longest["machine"], Known(longest["offer"], 123.456789))
    common_utils.check_cluster_name_is_valid(ORDER.cluster)
    clouds = list(CLOUD_REGISTRY.values())
    assert len(clouds) > 10
    for cloud in clouds:
        limit = cloud.max_cluster_name_length()
        if limit is not None:
            assert common_utils.make_cluster_name_on_cloud(ORDER.cluster, limit).startswith(ORDER.cluster), cloud
        for key, value in tags.items():
            valid, why = cloud.is_label_valid(key, value)
            assert valid, f"{cloud}: {why}"


def test_the_catalog_is_where_and_in_the_schema_that_we_read(sky: Any) -> None:
    from sky.skylet import constants

    from echo2.provisioning.pools.skypilot import CATALOG

    assert f"{constants.CATALOG_DIR}/{constants.CATALOG_SCHEMA_VERSION}" == str(CATALOG)
