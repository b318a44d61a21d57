"""Rotary position embedding (RoPE) for compact positions: default, linear, llama3 and yarn.

Frequencies follow the model's config (`transformers.modeling_rope_utils` is the oracle in tests);
positions are the compact ones of TokenSelect, so they never exceed the trained window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tsdoc.models.config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTable:
    """Cosines and sines of every compact position a run can need.

    Attributes:
        cos: [num_positions, head_dim] float32, the attention factor included.
        sin: Same.
        attention_factor: What yarn multiplies rotated queries and keys with; 1.0 otherwise.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    attention_factor: float

    def rotate(
        self, x: torch.Tensor, positions: slice | torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rotates `x` [..., num_tokens, head_dim] to `positions` (slice or [num_tokens]).

        The result is `out`, where that is given: float32, of the same shape, not `x` itself.
        """
        return rotate(x, self.cos[positions], self.sin[positions], out)


def make_rope_table(
    config: RopeConfig, head_dim: int, num_positions: int, device: torch.device | str = "cpu"
) -> RopeTable:
    """Computes the table for positions [0, num_positions) in float32."""
    inv_freq, factor = inverse_frequencies(config, head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq)
    angles = torch.cat((angles, angles), dim=-1).to(device)
    return RopeTable(cos=angles.cos() * factor, sin=angles.sin() * factor, attention_factor=factor)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Applies RoPE in the half-split layout: dimension i is paired with i + head_dim / 2.

    Args:
        x: [..., num_tokens, head_dim].
        cos: [num_tokens, head_dim], broadcast over the leading dimensions.
        sin: Same.
        out: See `RopeTable.rotate`.
    """
    half = x.shape[-1] // 2
    out = torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Returns inverse frequencies [head_dim / 2] (float32) and the attention factor."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (config.theta**exponents)
    if config.rope_type == "linear":
        return plain / (config.factor or 1.0), 1.0
    if config.rope_type == "llama3":
        return _llama3(plain, config), 1.0
    if config.rope_type == "yarn":
        return _yarn(plain, config, head_dim)
    return plain, 1.0


def _llama3(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short kept, between interpolated."""
    factor, low, high = config.factor, config.low_freq_factor, config.high_freq_factor
    window = config.original_window
    assert factor and low and high and window  # noqa: S101 - checked when the config is read
    wavelength = 2 * math.pi / plain
    share = ((window / wavelength) - low) / (high - low)
    smooth = share.clamp(0, 1)
    blended = (1 - smooth) * plain / factor + smooth * plain
    return blended


def _yarn(plain: torch.Tensor, config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): a ramp over dimensions between interpolation and extrapolation."""
    factor, window = config.factor, config.original_window
    assert factor and window  # noqa: S101 - checked when the config is read

    def dimension(num_rotations: float) -> float:
        turns = window / (num_rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast or 32.0), dimension(config.beta_slow or 1.0)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = (high - low) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    inv_freq = plain / factor * ramp + plain * (1 - ramp)

    def mscale(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention_factor = config.attention_factor
    if attention_factor is None:
        if config.mscale and config.mscale_all_dim:
            attention_factor = mscale(factor, config.mscale) / mscale(factor, config.mscale_all_dim)
        else:
            attention_factor = mscale(factor, 1.0)
    return inv_freq, attention_factor
