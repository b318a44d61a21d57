"""The Triton cache against the CPU cache: selection, attention, windows, pages to and fro."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.triton.cases import assert_close, make_rope, only_on_gpu
from tsdoc.errors import CorruptPageError
from tsdoc.kernels import triton_evidence
from tsdoc.kernels.host_pool import KeyStage
from tsdoc.kernels.kv import DevicePiece, KVArray, KVPiece, MemoryPiece
from tsdoc.kernels.selection import SelectionConfig, chunk_range
from tsdoc.kernels.torch_cache import TorchCache
from tsdoc.kernels.triton_backend import TritonBackend
from tsdoc.kernels.triton_cache import TritonCache
from tsdoc.models.config import ModelConfig, RopeConfig

KV_HEADS, GROUP, DIM = 2, 3, 16
CONFIG = SelectionConfig(n_init=4, n_local=12, top_k=20, chunk_size=16)


def make_backend(device: torch.device, **options: Any) -> TritonBackend:
    config = ModelConfig(
        architecture="llama", num_layers=2, hidden_size=96, intermediate_size=8, num_qo_heads=6,
        num_kv_heads=KV_HEADS, head_dim=DIM, vocab_size=8, norm_eps=1e-6,
        rope=RopeConfig(rope_type="default", theta=1e4), window=4096, tie_embeddings=True,
        qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False, eos_token_ids=(),
    )  # fmt: skip
    return TritonBackend(
        config, kv_dtype="float32", compute_dtype=torch.float32, device=device, **options
    )


def make_pieces(sizes: list[int]) -> list[MemoryPiece]:
    starts = np.cumsum([0, *sizes])
    return [
        MemoryPiece(
            start=int(start), capacity=size, num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM,
            kv_dtype="float32",
        )
        for start, size in zip(starts, sizes, strict=False)
    ]  # fmt: skip


def make_pair(
    device: torch.device, config: SelectionConfig, count: int = 600
) -> tuple[TorchCache, TritonCache]:
    """The same K and V in both caches; the device's pages lie in reverse."""
    rope = make_rope(DIM, torch.device("cpu"))
    cpu = TorchCache(make_pieces([count]), rope, config, num_kv_heads=KV_HEADS)
    backend = make_backend(device)
    gpu = backend.cache(make_pieces([count]), make_rope(DIM, device), config)
    backend.pool.place(list(reversed(range(backend.pool.capacity // 256))))
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(count, KV_HEADS, DIM, generator=generator) * 2 for _ in range(2))
    cpu.write(1, 0, k, v)
    gpu.write(1, 0, k.to(device), v.to(device))
    return cpu, gpu


VARIANTS = {
    "paper": CONFIG,
    "per_kv_head": dataclasses.replace(CONFIG, sets="per_kv_head"),
    "topk": dataclasses.replace(CONFIG, function="topk"),
    "head_vote": dataclasses.replace(CONFIG, function="head_vote"),
    "smoothing": dataclasses.replace(CONFIG, smoothing=5),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("allowed", [None, [(10, 40), (200, 209), (250, 270)]])
def test_selects_and_attends_like_the_cpu_cache(
    device: torch.device, name: str, allowed: list[tuple[int, int]] | None
) -> None:
    only_on_gpu(device, name not in ("per_kv_head", "topk") and allowed is not None)
    config = VARIANTS[name]
    cpu, gpu = make_pair(device, config)
    starts = [0, 16, 32]
    generator = torch.Generator().manual_seed(1)
    for origin in (0, 240):
        ranges = [chunk_range(origin + s, origin + s + 16, config) for s in starts]
        q = torch.randn(48, 6, DIM, generator=generator) * 2
        queries = cpu.selection_queries(q, ranges)
        assert_close(gpu.selection_queries(q.to(device), ranges), queries, "rows", torch.float32)
        expected = cpu.select(1, queries, ranges, allowed)
        actual = gpu.select(1, queries.to(device), ranges, allowed)
        assert [a.tolist() for a in actual] == [e.tolist() for e in expected]
        out = gpu.attend_chunks(1, q.to(device), actual, ranges)
        assert_close(out, cpu.attend_chunks(1, q, expected, ranges), "attention", torch.float32)
        one = gpu.attend(1, q[-16:].to(device), expected[-1].to(device), ranges[-1])
        assert_close(one, out[-16:], "attention", torch.float32)


@pytest.mark.parametrize("name", ["paper", "per_kv_head"])
@pytest.mark.parametrize("bounds", [(4, 5), (63, 320), (7, 519)])
def test_finds_what_tokens_looked_at_like_the_cpu_cache(
    device: torch.device, name: str, bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_on_gpu(device, name == "per_kv_head" and bounds != (63, 320))
    monkeypatch.setattr(triton_evidence, "VOTE_BYTES", 4 * (bounds[1] + 256) * 3)
    cpu, gpu = make_pair(device, VARIANTS[name])
    q = torch.randn(5, 6, DIM, generator=torch.Generator().manual_seed(8)) * 2
    votes = gpu.soft_votes(1, q.to(device), *bounds)
    assert_close(votes, cpu.soft_votes(1, q, *bounds), "votes", torch.float32)
    around = chunk_range(530, 535, VARIANTS[name])
    (selected,) = cpu.select(1, cpu.selection_queries(q, [around]), [around])
    mass = gpu.attention_mass(1, q.to(device), selected.to(device), around)
    assert_close(mass, cpu.attention_mass(1, q, selected, around), "attention", torch.float32)
    assert int((mass > 0).sum()) == 4 + selected.unique().numel() + 12


def test_a_window_grows_like_the_cpu_cache(device: torch.device) -> None:
    cpu, gpu = make_pair(device, CONFIG)
    around = chunk_range(400, 401, CONFIG)
    selected = torch.arange(30, 50)[None]
    windows = cpu.open_window(1, selected, around), gpu.open_window(1, selected.to(device), around)
    generator = torch.Generator().manual_seed(2)
    for position in range(400, 404):
        q = torch.randn(1, 6, DIM, generator=generator)
        actual = windows[1].attend(q.to(device), position)
        assert_close(actual, windows[0].attend(q, position), "attention", torch.float32)


def test_decode_steps_hit_miss_and_attend_like_the_cpu_cache(device: torch.device) -> None:
    from tsdoc.engine.selection_cache import SelectionCache
    from tsdoc.kernels.selection import selection_query

    cpu, gpu = make_pair(device, CONFIG)
    decode = gpu.start_decode(500, theta=0.9, max_hits=64, allowed=None)
    assert decode is not None
    reuse = SelectionCache(0.9)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, 6, DIM, generator=generator)
    for position in range(500, 510):
        if position in (502, 507):
            query = torch.randn(1, 6, DIM, generator=generator)
        q = query + 0.1 * torch.randn(1, 6, DIM, generator=generator)
        k, v = (torch.randn(1, KV_HEADS, DIM, generator=generator) for _ in range(2))
        cpu.write(1, position, k, v)
        around = chunk_range(position, position + 1, CONFIG)
        wanted = selection_query(q, cpu.rope, CONFIG.n_local)
        window = reuse.look_up(1, wanted, whole=False)
        if window is None:
            (selected,) = cpu.select(1, wanted[None], [around])
            window = cpu.open_window(1, selected, around)
            reuse.remember(1, wanted, window, whole=False)
        expected = window.attend(q, position)
        at_device = (t.to(device) for t in (q, k, v))
        actual = decode.attend(1, *at_device)
        decode.run(lambda ids: ids.float(), 0)  # on to the next position
        assert_close(actual, expected, "attention", torch.float32)
    assert (decode.num_lookups, decode.num_hits) == (reuse.num_lookups, reuse.num_hits)
    assert reuse.num_hits > 3


def test_pages_go_out_to_the_pieces_and_come_back(device: torch.device) -> None:
    sizes = [256, 300, 100]
    backend = make_backend(device)
    pieces = make_pieces(sizes)
    cache = backend.cache(pieces, make_rope(DIM, device), CONFIG)
    backend.pool.place(list(reversed(range(backend.pool.capacity // 256))))
    k, v = torch.randn(2, 600, KV_HEADS, DIM, generator=torch.Generator().manual_seed(4))
    for layer in range(2):
        cache.write(layer, 0, k.to(device) + layer, v.to(device))
    cache.save(0, 200).wait()
    cache.save(200, 600).wait()
    for layer in range(2):
        stored = np.concatenate([piece.keys(layer) for piece in pieces])[:600]
        assert np.array_equal(stored, (k + layer).numpy())
    other = make_backend(device)
    again = other.cache(pieces, make_rope(DIM, device), CONFIG)
    again.load(600)
    assert torch.equal(other.pool.values[1][:600].cpu(), v)


def test_another_prompt_takes_over_only_what_is_the_same(device: torch.device) -> None:
    backend, rope = make_backend(device), make_rope(DIM, device)
    parent, first, second = make_pieces([256, 100, 100])
    second.start = 256
    for number, piece in enumerate((parent, first, second)):
        for layer in range(2):
            piece.keys(layer)[:] = number
    backend.cache([parent, first], rope, CONFIG).load(356)
    parent.keys(1)[:] = 7  # not read again
    cache = backend.cache([parent, second], rope, CONFIG)
    assert backend.pool.resident == 256
    cache.load(356)
    keys = backend.pool.keys[1][:356, 0, 0].cpu()
    assert keys.unique().tolist() == [0, 2]
    backend.cache([first], rope, CONFIG)
    assert backend.pool.resident == 0


def test_a_prompt_stays_on_the_device_where_its_piece_is_and_its_tail_goes_out(
    device: torch.device,
) -> None:
    backend = make_backend(device)
    (tail,) = make_pieces([100])
    tail.start = 200
    prompt = DevicePiece(start=0, capacity=200)
    cache = backend.cache([prompt, tail], make_rope(DIM, device), CONFIG)
    k, v = torch.randn(2, 300, KV_HEADS, DIM, generator=torch.Generator().manual_seed(5))
    for layer in range(2):
        cache.write(layer, 0, k.to(device), v.to(device))
    cache.save(0, 150).wait()
    cache.save(150, 300).wait()
    assert np.array_equal(tail.keys(1), k[200:].numpy())
    again = backend.cache([prompt, tail], make_rope(DIM, device), CONFIG)
    again.load(300)  # is there
    assert backend.pool.resident == 300


class DamagedPiece(MemoryPiece):
    """Its page [256, 512) of layer 1 is bad."""

    def read(self, layer: int, start: int, out: KVArray) -> None:
        super().read(layer, start, out)
        if layer == 1 and start < 512 and start + len(out) > 256:
            raise CorruptPageError("does not match", where="kv.bin", start=256, end=512)


def test_a_damaged_page_is_reported_and_nothing_counts_as_loaded(device: torch.device) -> None:
    backend = make_backend(device)
    piece: KVPiece = DamagedPiece(
        start=0, capacity=600, num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, kv_dtype="float32"
    )
    cache = backend.cache([piece], make_rope(DIM, device), CONFIG)
    with pytest.raises(CorruptPageError):
        cache.load(600)
    assert backend.pool.resident == 0


def test_a_pool_grows_and_keeps_what_it_holds(device: torch.device) -> None:
    backend = make_backend(device)
    cache = backend.cache(make_pieces([100]), make_rope(DIM, device), CONFIG)
    k, v = torch.randn(2, 100, KV_HEADS, DIM, generator=torch.Generator().manual_seed(5))
    cache.write(0, 0, k.to(device), v.to(device))
    pieces = make_pieces([100, 20_000])
    grown = backend.cache(pieces, make_rope(DIM, device), CONFIG)
    grown.save(0, 100).wait()
    assert np.array_equal(pieces[0].keys(0), k.numpy())


@pytest.mark.parametrize("name", ["paper", "head_vote"])
def test_keys_and_values_in_host_memory_give_the_same(device: torch.device, name: str) -> None:
    """Selection, attention and what comes back, block by block, layer after layer."""
    config, rope = VARIANTS[name], make_rope(DIM, device)
    caches = []
    for on_host in (False, True):
        backend = make_backend(device)
        if on_host:
            backend.pool.move_to_host()
        pieces = make_pieces([400])
        caches.append((backend, backend.cache(pieces, rope, config), pieces))
        assert backend.pool.on_host is on_host
    generator = torch.Generator().manual_seed(4)
    k, v = (torch.randn(2, 400, KV_HEADS, DIM, generator=generator) * 2 for _ in range(2))
    q = torch.randn(400, KV_HEADS * GROUP, DIM, generator=generator).to(device)
    for first, last in ((0, 128), (128, 256), (256, 400)):
        ranges = [chunk_range(s, min(s + 64, last), config) for s in range(first, last, 64)]
        for layer in range(2):
            results = []
            for _, cache, _ in caches:
                own = slice(first, last)
                cache.write(layer, first, k[layer, own].to(device), v[layer, own].to(device))
                queries = cache.selection_queries(q[own], ranges)
                selected = cache.select(layer, queries, ranges)
                # The interpreter takes long for all of them.
                end = dataclasses.replace(ranges[-1], end=ranges[-1].start + 16)
                out = cache.attend(layer, q[end.start : end.end], selected[-1], end)
                results.append(([chosen.tolist() for chosen in selected], out))
            assert results[0][0] == results[1][0]
            assert torch.equal(results[0][1], results[1][1])
        for _, cache, _ in caches:
            cache.save(first, last).wait()
    for _, _, (piece,) in caches:
        assert np.array_equal(piece.keys(1), k[1].numpy())
    # Another prompt that shares its first tokens: what is staged is not what is there any more.
    for _, cache, (piece,) in caches:
        piece.keys(0)[300:] = 1.0
        cache.load(300)
        cache.load(400)
    around = [chunk_range(399, 400, config)]
    query = q[:1].float()
    chosen = [cache.select(0, query, around)[0].tolist() for _, cache, _ in caches]
    assert chosen[0] == chosen[1]


def test_a_stage_copies_what_was_written_and_the_next_layer_ahead(device: torch.device) -> None:
    keys = [torch.randn(512, 1, 8) for _ in range(3)]
    stage = KeyStage(keys, device)
    for start, end in ((0, 200), (200, 300), (300, 512)):
        for layer in range(3):
            keys[layer][start:end] += 1.0  # written by this block
            got = stage.get(layer, start, end)
            assert torch.equal(got[:end].cpu(), keys[layer][:end])
    stage.forget()
    keys[0][:] = 5.0
    assert torch.equal(stage.get(0, 512, 512).cpu(), keys[0])


def test_a_layer_that_is_asked_for_in_parts_is_copied_once(device: torch.device) -> None:
    keys = [torch.randn(512, 1, 8) for _ in range(3)]
    stage = KeyStage(keys, device)
    stage.get(1, 300, 400)
    before = keys[1].clone()
    keys[1] += 1.0
    got = stage.get(1, 300, 512).cpu()
    assert torch.equal(got[:300], before[:300])  # unwritten, as far as it was told
    assert torch.equal(got[300:], keys[1][300:])
    assert torch.equal(stage.get(1, 300, 350)[:350].cpu(), got[:350])
    assert torch.equal(stage.get(1, 512, 512).cpu()[:350], got[:350])
