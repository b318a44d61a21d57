"""The engine: prefills a prompt block by block and answers questions from its pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from tsdoc.engine.commits import Commits
from tsdoc.engine.decoder import DecoderPart
from tsdoc.engine.forward import Runner, chunk_bounds
from tsdoc.engine.generate import Generation, GenerationConfig
from tsdoc.engine.query_moments import find_query_moment
from tsdoc.engine.selection_cache import MAX_HITS
from tsdoc.engine.team import ALONE, Team
from tsdoc.errors import UsageError
from tsdoc.kernels.index_use import IndexConfig, IndexWatch
from tsdoc.kernels.interface import Backend, DeviceCache
from tsdoc.kernels.kv import KVPiece, MemoryPiece
from tsdoc.kernels.piece_rows import as_tensor
from tsdoc.kernels.rope import make_rope_table
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.torch_cache import TorchBackend
from tsdoc.kernels.torch_index import make_layer_index


class Engine:
    """Runs one model with one set of selection settings.

    Args:
        decoder: The model.
        selection: TokenSelect's settings.
        max_tokens: Longest prompt with question and answer this engine will see; with a budget
            that covers it, attention is full.
        question_chunk_size: Largest question chunk that will be used.
        backend: Device of decoder and caches; by default the CPU.
        index: How questions and answers find candidates; None scores every token, as prefill does.
        team: The ranks that share the model; by default this one has all of it.
        steps: See `Runner`.

    Attributes:
        index: Knows how well those that go by the key index select; None where none does.

    Raises:
        UsageError: the attended tokens would not fit the model's trained window.
    """

    def __init__(
        self,
        decoder: DecoderPart,
        selection: SelectionConfig,
        *,
        max_tokens: int,
        question_chunk_size: int,
        backend: Backend | None = None,
        index: IndexConfig | None = None,
        team: Team = ALONE,
        steps: DecoderPart | None = None,
    ) -> None:
        chunk = max(selection.chunk_size, question_chunk_size)
        budget = selection.n_init + selection.top_k + selection.n_local + chunk + MAX_HITS
        window = decoder.config.window
        needed = min(budget, max_tokens)
        if needed > window:
            raise UsageError(
                f"n_init + top_k + n_local + chunk size + {MAX_HITS} = {budget} tokens do not fit "
                f"the model's trained window of {window}",
                hint=f"Lower top_k by {needed - window} or choose a model with a longer window.",
            )
        self._budget, self._needed = budget, needed
        self.index = IndexWatch(index, self.query_moment) if index is not None else None
        positions = max(needed, selection.n_local + chunk)
        config = decoder.config
        self.backend = backend or TorchBackend(num_kv_heads=config.num_kv_heads)
        rope = make_rope_table(config.rope, config.head_dim, positions, self.backend.device)
        self.runner = Runner(
            decoder=decoder, selection=selection, rope=rope, team=team, steps=steps
        )

    def covers(self, max_tokens: int) -> bool:
        """Whether it does for prompts of up to `max_tokens` too."""
        return min(self._budget, max_tokens) <= self._needed

    def cache(self, pieces: Sequence[KVPiece], index: IndexWatch | None = None) -> DeviceCache:
        """A device cache over `pieces`, which cover the prompt without gaps."""
        cache = self.backend.cache(pieces, self.runner.rope, self.runner.selection, index)
        self.runner.team.followers.know(cache, pieces, self.runner)
        return cache

    def prefill(
        self,
        pieces: Sequence[KVPiece],
        ids: npt.NDArray[np.int32],
        start: int,
        *,
        prefill_block: int,
        on_block: Callable[[int], None],
        on_work: Callable[[int], None] | None = None,
    ) -> None:
        """Computes K and V of `ids[start:]`, a block at a time.

        Blocks end at absolute multiples of `prefill_block`, chunks at those of chunk_size, so an
        interrupted run that goes on from a block's end repeats the same arithmetic.

        Args:
            pieces: Hold [0, start) and have room for the rest.
            ids: All token ids of the prompt.
            start: First token to compute: 0, a chunk boundary, or len(ids).
            prefill_block: Tokens that go through the layers together.
            on_block: Called with the block's end once its K and V are written to `pieces`: in
                order, but maybe in a thread of its own.
            on_work: Called while a block is computed, where that is done one block at a time: with
                the tokens that its finished layers would be the whole work of.

        Raises:
            ResourceError: the device cannot hold the prompt.
            CorruptPageError: a page of [0, start) does not match its checksum.
        """
        cache = self.cache(pieces)
        self.runner.load(cache, start)
        chunk_size = self.runner.selection.chunk_size
        if self.backend.save_ahead > 0:  # the device is behind its host, and blocks are soon done
            on_work = None
        with Commits(on_block, self.backend.save_ahead) as commits:
            for first, last in chunk_bounds(start, len(ids), prefill_block):
                self.runner.run_chunks(
                    cache,
                    torch.from_numpy(ids[first:last].astype(np.int64)),
                    first,
                    chunk_bounds(first, last, chunk_size),
                    need_logits=False,
                    on_layer=on_work and self._in_tokens(on_work, last - first),
                )
                commits.add(last, self.runner.save(cache, first, last))
            commits.finish()

    def _in_tokens(self, on_work: Callable[[int], None], num_tokens: int) -> Callable[[int], None]:
        """Returns a callback that tells `on_work` layers of `num_tokens` as so many tokens."""
        num_layers = self.runner.decoder.config.num_layers
        return lambda layers: on_work(num_tokens * layers // num_layers)

    def index_piece(self, piece: KVPiece) -> None:
        """Makes the key index of a piece in memory that is complete, where it will be used."""
        if not isinstance(piece, MemoryPiece) or self.index is None:
            return
        if self.index.config.applies(self.runner.selection, piece.capacity):
            layers = range(self.runner.decoder.config.num_layers)
            piece.set_index(
                [
                    make_layer_index(as_tensor(piece.keys(layer)), self.query_moment(layer))
                    for layer in layers
                ]
            )

    def query_moment(self, layer: int) -> torch.Tensor:
        """What a layer's selections ask about; see `tsdoc.engine.query_moments`."""
        runner = self.runner
        return find_query_moment(runner.decoder, layer, runner.rope, runner.selection.n_local)

    def generate(
        self,
        pieces: Sequence[KVPiece],
        question: Sequence[int],
        start: int,
        config: GenerationConfig,
    ) -> Generation:
        """Starts an answer to `question` (token ids) at position `start`; iterate to run it.

        `pieces` hold [0, start) and have room for the question and the answer behind it.
        """
        cache = self.cache(pieces, self.index)
        self.runner.load(cache, start)
        return Generation(
            runner=self.runner,
            cache=cache,
            question=question,
            start=start,
            config=config,
        )
