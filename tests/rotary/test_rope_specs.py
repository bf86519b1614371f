"""Reading SGLang's pools and modules: every refusal by name, every layout as a view."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.mem_cache import memory_pool

from radix_rope.integration.rope_layers import attention_layers, rotary_module
from radix_rope.integration.rope_specs import pool_view, read_rope_specs
from radix_rope.rotary.spec import UnsupportedRope
from tests.rotary import support

SPEC = support.spec_of(16, 16)


def mha_pool(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "size": 60,
        "page_size": 4,
        "dtype": dtype,
        "head_num": 2,
        "head_dim": 16,
        "layer_num": 2,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    return memory_pool.MHATokenToKVPool(**{**arguments, **changes})


class TestPools:
    @pytest.mark.parametrize("dtype", support.DTYPES)
    @pytest.mark.parametrize("v_head_dim", [16, 8])
    def test_nhd_is_a_view_of_the_pool(self, dtype: torch.dtype, v_head_dim: int) -> None:
        pool = mha_pool(dtype, v_head_dim=v_head_dim)
        view = pool_view(pool, [SPEC, SPEC])
        assert view.dtype == dtype and view.num_slots == 64
        pool.k_buffer[1][7].fill_(1)
        pool.v_buffer[0][9].fill_(1)
        assert support.bits(view.k[1])[7].sum() and support.bits(view.v[0])[9].sum()

    def test_hnd_addresses_slots_as_sglang_does(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
        pool = mha_pool()
        assert pool.kv_cache_layout == "hnd"
        view = pool_view(pool, [SPEC, SPEC])
        # SGLang's own write, and the view's reading of it.
        key = support.random_rows((3, 2, 16), torch.bfloat16, 1)
        value = support.random_rows((3, 2, 16), torch.bfloat16, 2)
        slots = torch.tensor([5, 6, 63])
        pool.set_kv_buffer(SimpleNamespace(layer_id=1), slots, key, value)
        assert support.same_bits(support.rows(view.k[1], slots), key)
        assert support.same_bits(support.rows(view.v[1], slots), value)
        targets = torch.tensor([20, 33, 41])
        support.build(view, "cpu").move(slots, targets, torch.tensor([0, 3, -8]))
        assert support.same_bits(support.rows(view.v[1], targets), value)
        moved = support.rows(view.k[1], targets)
        support.assert_within_bound(moved, key, torch.tensor([0, 3, -8]), SPEC)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
    def test_mla_rows(self, dtype: torch.dtype) -> None:
        pool = memory_pool.MLATokenToKVPool(
            size=60,
            page_size=4,
            dtype=dtype,
            kv_lora_rank=48,
            qk_rope_head_dim=16,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
        )
        view = pool_view(pool, [support.spec_of(64, 16, 48, False)] * 2)
        assert not view.v and view.dtype == dtype and view.k[0].shape == (64, 1, 64)

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"kv_cache_layout": "vectorized_5d"}, "layout 'vectorized_5d'.*NHD and HND"),
            ({"kv_cache_layout": "page_major"}, "layout 'page_major'.*NHD and HND"),
        ],
    )
    def test_other_layouts(self, change: dict[str, Any], name: str) -> None:
        pool = mha_pool()
        pool.kv_cache_layout = change["kv_cache_layout"]
        with pytest.raises(UnsupportedRope, match=name):
            pool_view(pool, [SPEC, SPEC])

    def test_quantised_pool(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = mha_pool()
        monkeypatch.setattr(type(pool), "is_quantized_kv_cache", True)
        with pytest.raises(UnsupportedRope, match=r"quantised by.*block scales.*fp8 KV cache"):
            pool_view(pool, [SPEC, SPEC])

    def test_int8_cache(self) -> None:
        with pytest.raises(UnsupportedRope, match=r"KV cache dtype torch\.int8"):
            pool_view(mha_pool(torch.int8), [SPEC, SPEC])

    @pytest.mark.parametrize(
        "name",
        [
            "MHATokenToKVPoolFP4",
            "MHATokenToKVPoolMXFP8",
            "MLATokenToKVPoolFP4",
            "DSATokenToKVPool",
            "HybridLinearKVPool",
            "NoOpMHATokenToKVPool",
        ],
    )
    def test_other_pools(self, name: str) -> None:
        kind = getattr(memory_pool, name)
        with pytest.raises(UnsupportedRope, match=f"KV pool {name}.*only MHATokenToKVPool"):
            pool_view(kind.__new__(kind), [SPEC, SPEC])

    def test_sliding_window_pool(self) -> None:
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        with pytest.raises(UnsupportedRope, match="KV pool SWAKVPool"):
            pool_view(SWAKVPool.__new__(SWAKVPool), [SPEC, SPEC])

    def test_mla_for_sparse_attention(self) -> None:
        pool = memory_pool.MLATokenToKVPool.__new__(memory_pool.MLATokenToKVPool)
        pool.dsa_kv_cache_store_fp8, pool.use_dsa = False, True
        with pytest.raises(UnsupportedRope, match="sparse attention"):
            pool_view(pool, [SPEC])


class Layer(torch.nn.Module):
    """An attention layer as SGLang's models write it."""

    def __init__(self, layer_id: int, rope: bool = True, **changes: Any) -> None:
        super().__init__()
        if rope:
            self.rotary_emb = get_rope(16, 16, 64, 10000, dtype=torch.float32)
        self.attn = RadixAttention(2, 16, 1.0, 2, layer_id, **changes)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> None:
        raise NotImplementedError


class Model(torch.nn.Module):
    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.weight = torch.nn.Parameter(torch.zeros(1))


def read(model: Model, layers: int = 2) -> Any:
    return read_rope_specs(model, layers, mha_pool(layer_num=layers))


class TestModules:
    def test_layers_come_in_the_pools_order(self) -> None:
        model = Model(Layer(1), Layer(0))
        assert [layer.layer_id for layer in attention_layers(model)] == [0, 1]
        specs = read(model)
        assert [spec.rotary_dim for spec in specs] == [16, 16]
        assert "layers.1" in specs[0].name

    def test_a_layer_without_rope_beside_one_with(self) -> None:
        specs = read(Model(Layer(0), Layer(1, rope=False)))
        assert [spec.has_rope for spec in specs] == [True, False]

    def test_no_rope_anywhere(self) -> None:
        with pytest.raises(UnsupportedRope, match="no layer has rotary positions"):
            read(Model(Layer(0, rope=False), Layer(1, rope=False)))

    def test_learned_positions(self) -> None:
        model = Model(Layer(0), Layer(1, rope=False))
        model.embed_positions = torch.nn.Embedding(4, 4)
        with pytest.raises(UnsupportedRope, match=r"learned positions \(embed_positions\)"):
            read(model)

    def test_alibi(self) -> None:
        layer = Layer(1, rope=False)
        layer.alibi_slopes = torch.ones(2)
        with pytest.raises(UnsupportedRope, match="ALiBi"):
            read(Model(Layer(0), layer))

    def test_cross_and_bidirectional_attention(self) -> None:
        with pytest.raises(UnsupportedRope, match="cross attention"):
            read(Model(Layer(0), Layer(1, is_cross_attention=True)))
        both = Layer(1, attn_type=AttentionType.DECODER_BIDIRECTIONAL)
        with pytest.raises(UnsupportedRope, match="bidirectional attention"):
            read(Model(Layer(0), both))

    def test_fewer_layers_than_the_pool(self) -> None:
        with pytest.raises(UnsupportedRope, match="holds 3 layers from layer 0, but 2"):
            read(Model(Layer(0), Layer(1)), layers=3)

    def test_two_rotary_modules_in_one_layer(self) -> None:
        layer = Layer(0)
        layer.rotary_other = get_rope(16, 8, 64, 500, dtype=torch.float32)
        with pytest.raises(UnsupportedRope, match="several rotary modules"):
            read(Model(layer), layers=1)

    def test_angles_from_an_unknown_place(self) -> None:
        class Outside(Layer):
            def forward(self, positions, hidden_states, position_embeddings) -> None:  # type: ignore[no-untyped-def, override]
                raise NotImplementedError

        model = Model(Outside(0))
        with pytest.raises(UnsupportedRope, match="angles from outside"):
            rotary_module(model, attention_layers(model)[0])

    def test_a_model_that_cannot_be_probed_is_not_proven(self) -> None:
        from radix_rope.integration.rope_specs import prove_rotation

        model = Model(Layer(0))
        specs = read(model, layers=1)
        with pytest.raises(UnsupportedRope, match=r"cannot be run on probe tokens.*not proven"):
            prove_rotation(model, specs, torch.float32, 32)
