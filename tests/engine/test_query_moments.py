"""What a layer's queries ask about, from its weights."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_models import make_engine, make_oracle
from tsdoc.kernels.rope import rotate
from tsdoc.kernels.selection import SelectionConfig

CONFIG = SelectionConfig(n_init=4, n_local=40, top_k=40, chunk_size=8)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_it_is_that_of_the_weights_rotated_as_a_decode_step_selects(family: str) -> None:
    oracle = make_oracle(family)
    engine = make_engine(oracle, CONFIG)
    moment = engine.query_moment(1)
    layer, rope = oracle.model.layers[1], engine.runner.rope
    columns = (layer.self_attn.q_proj.weight * layer.input_layernorm.weight).detach().T
    columns = columns.reshape(48, 6, 16).transpose(0, 1)
    if layer.self_attn.q_proj.bias is not None:
        columns = torch.cat((columns, layer.self_attn.q_proj.bias.detach().view(6, 1, 16)), dim=1)
    rotated = rotate(columns, rope.cos[40:41], rope.sin[40:41])
    expected = rotated.mT @ rotated
    expected *= 16 / expected.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]
    expected = expected.view(2, 3, 16, 16).mean(1).double()
    assert moment.shape == (2, 16, 16)
    assert float((moment - expected).norm() / expected.norm()) < 0.1


def test_it_is_the_same_each_time_and_of_that_layer() -> None:
    engine = make_engine(make_oracle("qwen3"), CONFIG)
    assert torch.equal(engine.query_moment(2), engine.query_moment(2))
    assert not torch.allclose(engine.query_moment(2), engine.query_moment(1), atol=0.1)
