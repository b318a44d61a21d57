"""RoPE against transformers' own tables."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.tiny_models import ROPES, make_config, make_oracle
from tsdoc.kernels.rope import make_rope_table


@pytest.mark.parametrize("rope", ROPES)
def test_table_and_rotation_equal_transformers(rope: str) -> None:
    oracle = make_oracle("llama", rope=rope)
    table = make_rope_table(make_config(oracle).rope, 16, 600)
    x = torch.randn(1, 2, 600, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = oracle.model.rotary_emb(x, torch.arange(600)[None])
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    torch.testing.assert_close(table.rotate(x[0], slice(0, 600)), expected[0], atol=1e-5, rtol=0)
    assert table.attention_factor == pytest.approx(oracle.model.rotary_emb.attention_scaling)


def test_yarn_scales_and_the_others_do_not() -> None:
    factors = {
        rope: make_rope_table(make_config(make_oracle("llama", rope=rope)).rope, 16, 8)
        for rope in ROPES
    }
    assert factors["yarn"].attention_factor > 1.1
    assert all(factors[r].attention_factor == 1.0 for r in ("default", "linear", "llama3"))
