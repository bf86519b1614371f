"""Options: defaults, every kind of wrong value, and what the message says."""

import pytest

from radix_rope.config import ConfigError, RadixRopeConfig, config_from_env, parse_config


def test_defaults() -> None:
    config = parse_config("{}")
    assert config == RadixRopeConfig()
    assert (config.mode, config.min_run_tokens, config.recompute_tokens, config.kernel) == (
        "shifted",
        64,
        16,
        "auto",
    )


def test_values_are_taken() -> None:
    config = parse_config('{"mode": "exact", "min_run_tokens": 7, "rotate": false}')
    assert (config.mode, config.min_run_tokens, config.rotate) == ("exact", 7, False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"min_runs": 3}', ["unknown option 'min_runs'", "min_run_tokens: integer from 1"]),
        ('{"min_run_tokens": -1}', ["min_run_tokens", "-1", "integer from 1 to"]),
        ('{"recompute_tokens": -16}', ["recompute_tokens", "integer from 0 to"]),
        ('{"recompute_tokens": 1.5}', ["recompute_tokens", "1.5"]),
        ('{"min_run_tokens": true}', ["min_run_tokens", "true"]),
        ('{"min_run_tokens": "64"}', ["min_run_tokens", '"64"']),
        ('{"mode": "fast"}', ["mode", "shifted, opt_in, exact, off"]),
        ('{"mode": ["exact"]}', ["mode", "one of"]),
        ('{"repair": "tail"}', ["repair", "none, head, attention"]),
        ('{"attention_percent": 101}', ["attention_percent", "integer from 1 to 100"]),
        ('{"kernel": "cuda"}', ["kernel", "auto, cpu, torch, triton, flashinfer"]),
        ('{"rotate": 1}', ["rotate", "true or false"]),
        ("[1, 2]", ["JSON object", "list", "min_run_tokens"]),
        ("{mode: exact}", ["not valid JSON", "min_run_tokens"]),
        ('{"stride": 1}', ["stride", "integer from 4"]),
        ("NaN", ["JSON object"]),
    ],
)
def test_refused_with_what_is_allowed(text: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(text)
    for part in said:
        assert part in str(error.value)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RADIX_ROPE_CONFIG", raising=False)
    assert config_from_env() == RadixRopeConfig()
    monkeypatch.setenv("RADIX_ROPE_CONFIG", '{"mode": "off"}')
    assert config_from_env().mode == "off"
