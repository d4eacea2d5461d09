"""The times of a forward pass's matrix products, which are most of a prediction.

A router asks for them several times in each decision. So they are compiled (``native``), which classes of
msgspec cannot be.
"""

from __future__ import annotations

from sglang_ext.cost_model.operators import Linear, Waves


def products_s(linears: tuple[Linear, ...], waves: Waves, new: int, prompts: int) -> float:
    """Of all runs of some products over all new tokens of so many prompts: see `Waves`."""
    tile_rows, tile_columns, units, fixed_s = waves.tile_rows, waves.tile_columns, waves.units, waves.fixed_s
    unit_s = 2.0 * tile_rows * tile_columns / (waves.flops_per_s / units)
    of_tokens, of_prompts = -(-new // tile_rows), -(-prompts // tile_rows)
    seconds = 0.0
    for one in linears:
        tiles = (of_tokens if one.rows == "tokens" else of_prompts) * -(-one.columns // tile_columns)
        seconds += one.count * (fixed_s + -(-tiles // units) * (unit_s * one.inner))
    return seconds


def adding_products_s(linears: tuple[Linear, ...], waves: Waves, new: int) -> float:
    """A lower bound of what ``new`` tokens add to runs that are made anyway: their tiles and their last waves
    may have room for a part of the tokens."""
    tile_rows, tile_columns, units = waves.tile_rows, waves.tile_columns, waves.units
    unit_s = 2.0 * tile_rows * tile_columns / (waves.flops_per_s / units)
    rows = new / tile_rows - 1.0
    seconds = 0.0
    for one in linears:
        if one.rows == "tokens":
            more = rows * -(-one.columns // tile_columns) / units - 1.0
            if more > 0.0:
                seconds += one.count * (more * (unit_s * one.inner))
    return seconds
