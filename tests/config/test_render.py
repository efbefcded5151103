from __future__ import annotations

import tomllib

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.config.load import build_config
from echo2.config.render import config_digest, render_config
from echo2.config.schema import SECTIONS

SCRIPTED = {"rollout": {"engine": "scripted"}}

options = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda key: key != "path"),
    st.recursive(
        st.text(max_size=12) | st.integers(-(2**40), 2**40) | st.booleans() | st.floats(allow_nan=False),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


@settings(max_examples=60)
@given(options=options, lr=st.floats(1e-12, 10), name=st.text(max_size=20))
def test_a_rendering_loads_to_the_same_configuration(options: dict[str, object], lr: float, name: str) -> None:
    config = build_config(
        {
            **SCRIPTED,
            "learning": {"lr": lr},
            "metrics": {"wandb_project": name},
            "tasks": [{"name": "a", "options": options}, {"name": "b", "weight": 2.5}],
        }
    )

    again = build_config(tomllib.loads(render_config(config)))

    assert again == config
    assert config_digest(again) == config_digest(config)


def test_every_key_is_printed_under_its_meaning() -> None:
    lines = render_config(build_config(SCRIPTED)).splitlines()

    for section in SECTIONS.values():
        for key, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{key} has no docstring"
            where = next(n for n, line in enumerate(lines) if line.removeprefix("# ").startswith(f"{key} = "))
            assert lines[where - 1].startswith("# ")


def test_the_digest_knows_values_and_not_the_order_of_keys() -> None:
    forwards = build_config({**SCRIPTED, "run": {"seed": 1, "steps": 2}})
    backwards = build_config({"run": {"steps": 2, "seed": 1}, **SCRIPTED})

    assert config_digest(forwards) == config_digest(backwards)
    assert config_digest(forwards) != config_digest(build_config({**SCRIPTED, "run": {"seed": 1, "steps": 3}}))
