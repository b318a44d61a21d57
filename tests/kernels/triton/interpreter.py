"""Triton's interpreter, mended where numpy refuses what it does."""

from __future__ import annotations

from typing import Any


def mend_interpreter() -> None:
    """Lets loop bounds be arrays of one element, which the interpreter converts with int()."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
