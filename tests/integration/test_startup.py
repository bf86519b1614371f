"""What is refused at start-up, and what the message says."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from radix_rope.integration import options, seams
from radix_rope.integration.cpu.activate import PLATFORM_CLASS, activate
from radix_rope.integration.support import UnsupportedFeature, refuse_unsupported


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """SGLang's own command line, with our options added by the real plugin loader."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    # monkeypatch restores both afterwards, whatever the actions set.
    monkeypatch.setenv("RADIX_ROPE_CONFIG", "")
    monkeypatch.setenv("RADIX_ROPE_CACHE_IMPL", "")
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def test_impl_is_an_alias_of_the_backend_option(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args(["--model-path", "m", "--radix-cache-impl", "radix_rope"])
    assert args.radix_cache_backend == "radix_rope"


def test_impl_takes_a_dotted_path(parser: argparse.ArgumentParser) -> None:
    path = "sglang.srt.mem_cache.radix_cache:RadixCache"
    args = parser.parse_args(["--model-path", "m", "--radix-cache-impl", path])
    assert args.radix_cache_backend == path
    # The scheduler is another process and must find it too.
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.mem_cache.registry import get_radix_cache_factory as f\n"
        f"assert f({path!r}) is not None\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("radixrope", ["'radixrope' is not registered", "radix_rope", "package.module:Class"]),
        ("no.such.module:Tree", ["cannot be imported", "no.such.module"]),
        ("collections:OrderedDict", ["is not a BasePrefixCache"]),
    ],
)
def test_unknown_impl_is_refused(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str], name: str, said: list[str]
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--model-path", "m", "--radix-cache-impl", name])
    message = capsys.readouterr().err
    assert all(part in message for part in said), message


def test_config_option(parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    parser.parse_args(["--model-path", "m", "--radix-rope-config", '{"recompute_tokens": 4}'])
    assert json.loads(os.environ["RADIX_ROPE_CONFIG"]) == {"recompute_tokens": 4}
    for text, said in [
        ('{"recompute_token": 4}', "unknown option 'recompute_token'"),
        ('{"recompute_tokens": -4}', "integer from 0 to"),
        ("nonsense", "not valid JSON"),
    ]:
        with pytest.raises(SystemExit):
            parser.parse_args(["--model-path", "m", "--radix-rope-config", text])
        assert said in capsys.readouterr().err
    # A refused option changes nothing.
    assert json.loads(os.environ["RADIX_ROPE_CONFIG"]) == {"recompute_tokens": 4}


def test_other_versions_are_refused_by_name() -> None:
    seams.check_version(installed="0.5.23")
    with pytest.raises(seams.SGLangVersionError) as error:
        seams.check_version(installed="0.5.12")
    assert "0.5.12" in str(error.value) and "0.5.23" in str(error.value)
    assert "allow_untested_sglang" in str(error.value)
    seams.check_version(allow_untested=True, installed="0.5.12")


def server_args(**changed: Any) -> Any:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    return ServerArgs(model_path="/nowhere", **changed)


def test_missing_model_folder_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(FileNotFoundError, match=r"'/nowhere' does not exist.*fetch-model"):
        server_args(radix_cache_backend="radix_rope").resolve_once()


def test_bad_environment_is_refused_in_the_process_the_user_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RADIX_ROPE_CONFIG", '{"min_run_tokens": 0}')
    with pytest.raises(ValueError, match="min_run_tokens"):
        server_args(radix_cache_backend="radix_rope").resolve_once()


def plain_config(**changed: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "enable_hierarchical_cache": False, "enable_lmcache": False, "enable_flexkv": False,
        "enable_streaming_session": False, "enable_unified_memory": False,
        "enable_page_major_kv_layout": False, "enable_hisparse": False,
        "speculative_algorithm": None, "pp_size": 1, "enable_dp_attention": False,
        "attn_cp_size": 1, "dcp_size": 1, "disaggregation_mode": "null", "enable_lora": None,
        "enable_two_batch_overlap": False, "enable_single_batch_overlap": False,
        "enable_pdmux": False, "dllm_algorithm": None, "prefill_attention_backend": None,
        "attention_backend": "triton", "enable_session_radix_cache": False,
        "enable_unified_cache_external_linker": False, "enable_layernorm_sp": False,
        "enable_attn_tp_input_scattered": False, "enable_mis": False,
        "enable_return_routed_experts": False, "enable_return_indexer_topk": False,
        "enable_mixed_chunk": True, "enable_return_hidden_states": False,
        "enable_deterministic_inference": False, "kv_canary": "none", "kv_events_config": None,
        "attn_dp_size": 1, "lora_paths": None, "radix_eviction_policy": "lru",
        "enable_torch_compile": False,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changed})


def plain_model(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"is_encoder_decoder": False, "is_multimodal": False, **changed})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"enable_streaming_session": True}, "--enable-streaming-session"),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"tp_size": 2, "attn_dp_size": 2}, "--attn-dp-size 2"),
        # The old spelling, which SGLang rewrites while it resolves.
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, "--attn-dp-size 2"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"lora_paths": ["a=/nowhere"]}, "--enable-lora"),
        ({"kv_events_config": '{"publisher": "zmq"}'}, "--kv-events-config"),
        ({"attention_backend": "flex_attention"}, "attention backend 'flex_attention'"),
    ],
)
def test_refused_before_the_model_is_loaded(
    model_folder: Path, changed: dict[str, Any], said: str
) -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    args = {"model_path": str(model_folder), "dtype": "float32", **changed}
    with pytest.raises(UnsupportedFeature) as error:
        ServerArgs(radix_cache_backend="radix_rope", **args).resolve_once()
    assert said in str(error.value)
    # It is radix_rope that refuses: stock SGLang takes the same.
    ServerArgs(**args).resolve_once()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"kv_events_config": "{}"}, "--kv-events-config"),
        ({"attn_dp_size": 2}, "--attn-dp-size 2 (DP attention)"),
        ({"enable_dp_attention": True}, "DP attention"),
        ({"lora_paths": ["a=/b"]}, "--enable-lora"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"enable_streaming_session": True}, "UnifiedRadixCache"),
        ({"enable_session_radix_cache": True}, "--enable-session-radix-cache"),
        ({"enable_unified_cache_external_linker": True}, "UnifiedRadixCache"),
        ({"enable_mis": True}, "--enable-mis"),
        ({"enable_return_routed_experts": True}, "--enable-return-routed-experts"),
        ({"enable_return_indexer_topk": True}, "--enable-return-indexer-topk"),
        ({"enable_return_hidden_states": True}, "--enable-mixed-chunk with --enable-return-hidden"),
        ({"enable_deterministic_inference": True}, "--enable-deterministic-inference"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
        ({"kv_canary": "raise"}, "--kv-canary raise"),
        ({"enable_layernorm_sp": True}, "--enable-layernorm-sp"),
        ({"enable_attn_tp_input_scattered": True}, "--enable-attn-tp-input-scattered"),
        ({"attention_backend": "aiter"}, "attention backend 'aiter'"),
        ({"prefill_attention_backend": "flex_attention"}, "'flex_attention'"),
    ],
)
def test_unsupported_features_are_refused_by_name(changed: dict[str, Any], said: str) -> None:
    arguments = {"is_hybrid_swa": False, "is_hybrid_ssm": False}
    refuse_unsupported(plain_config(), model=plain_model(), **arguments)
    with pytest.raises(UnsupportedFeature) as error:
        refuse_unsupported(plain_config(**changed), model=plain_model(), **arguments)
    assert said in str(error.value) and "not supported" in str(error.value)


def test_unsupported_models_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeature, match="a hybrid sliding-window model"):
        refuse_unsupported(
            plain_config(), is_hybrid_swa=True, is_hybrid_ssm=False, model=plain_model()
        )
    with pytest.raises(UnsupportedFeature, match="recurrent state"):
        refuse_unsupported(
            plain_config(), is_hybrid_swa=False, is_hybrid_ssm=True, model=plain_model()
        )
    with pytest.raises(UnsupportedFeature, match="encoder-decoder"):
        refuse_unsupported(
            plain_config(),
            is_hybrid_swa=False,
            is_hybrid_ssm=False,
            model=plain_model(is_encoder_decoder=True),
        )
    with pytest.raises(UnsupportedFeature, match=r"multimodal model.*--language-model-only"):
        refuse_unsupported(
            plain_config(),
            is_hybrid_swa=False,
            is_hybrid_ssm=False,
            model=plain_model(is_multimodal=True),
        )
    with pytest.raises(UnsupportedFeature, match="n-gram"):
        refuse_unsupported(
            plain_config(),
            is_hybrid_swa=False,
            is_hybrid_ssm=False,
            model=plain_model(),
            ngram_embedding=True,
        )


def test_platform_is_inert_where_something_better_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert activate() == PLATFORM_CLASS
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    assert activate() is None
    monkeypatch.delenv("SGLANG_PLATFORM")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert activate() is None


def test_plugin_never_raises_while_loading() -> None:
    # SGLang would log it, skip the plugin, and later only say "not registered".
    assert options.IMPL_ENV_VAR == "RADIX_ROPE_CACHE_IMPL"
    code = (
        "import os; os.environ['RADIX_ROPE_CONFIG'] = '{\"bad\": 1}'\n"
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.mem_cache.registry import get_radix_cache_factory as f\n"
        "assert f('radix_rope') is not None\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Failed to execute general plugin" not in done.stderr


@pytest.mark.engine
def test_an_unsupported_rope_is_named(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dynamic-ntk"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, folder / name)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 2
    config.pop("rope_parameters", None)
    config["rope_theta"] = 100000.0
    config["rope_scaling"] = {"rope_type": "dynamic", "type": "dynamic", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    code = (
        "import sys, sglang\n"
        "if __name__ == '__main__':\n"
        "    sglang.Engine(model_path=sys.argv[1], load_format='dummy', dtype='float32',\n"
        "        max_total_tokens=1000, disable_cuda_graph=True, log_level='error',\n"
        "        radix_cache_backend='radix_rope')\n"
    )
    script = tmp_path / "start.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    assert "UnsupportedRope" in done.stderr
    assert "dynamic" in done.stderr.lower()
