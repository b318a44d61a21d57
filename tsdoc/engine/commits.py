"""Finished blocks of a prefill, each reported once its K and V have arrived in the pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

from tsdoc.kernels.interface import Pending


class Commits:
    """Calls `on_block` for every block in order.

    Where blocks may be computed ahead of it, it is called in a thread of its own, so that keeping a
    block (checksums, the disk) and computing the next ones go on at the same time.

    Args:
        on_block: Called with a block's end.
        ahead: Blocks that may be under way besides the one that is computed; 0 calls at once.
    """

    def __init__(self, on_block: Callable[[int], None], ahead: int) -> None:
        self._on_block = on_block
        self._ahead = ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tsdoc-commit")
        self._blocks: deque[tuple[Pending, Future[None]]] = deque()

    def add(self, end: int, saved: Pending) -> None:
        """Takes the block that ends at `end`; waits for earlier ones where there are too many.

        Raises:
            TsdocError: what saving or `on_block` raised, of this block or an earlier one.
        """
        if self._ahead == 0:
            saved.wait()
            self._on_block(end)
            return
        before = self._blocks[-1][1] if self._blocks else None
        self._blocks.append((saved, self._thread.submit(self._report, end, saved, before)))
        while len(self._blocks) > self._ahead:
            self._finish_first()

    def finish(self) -> None:
        """Returns once all blocks have been reported.

        Raises:
            TsdocError: what saving or `on_block` raised.
        """
        while self._blocks:
            self._finish_first()

    def _report(self, end: int, saved: Pending, before: Future[None] | None) -> None:
        if before is not None:
            before.result()  # nothing is reported behind a block that failed
        saved.wait()
        self._on_block(end)

    def _finish_first(self) -> None:
        self._blocks[0][1].result()
        self._blocks.popleft()

    def __enter__(self) -> Commits:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops: a block that is being reported is finished, later ones are given up."""
        for _, report in self._blocks:
            report.cancel()
        for saved, _ in self._blocks:
            saved.abandon()
        wait([report for _, report in self._blocks])
        self._thread.shutdown()
