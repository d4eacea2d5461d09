"""Compares our kernels of speculative decoding with SGLang's own, in Triton's interpreter, on random batches:
``TRITON_INTERPRET=1 python speculative_oracle.py SEED COUNT``.
"""

# ruff: noqa: E402 (SGLang can be imported once the process is prepared)

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from sglang_ext.patches.cpu import runtime

runtime.prepare_process(os.environ)

import torch
from sglang.kernels.ops.kvcache.cache_move import copy_all_layer_kv_cache_tiled
from sglang.kernels.ops.speculative import cache_locs, eagle, multi_layer_eagle, spec_tree
from sglang.srt.mem_cache.allocation import assign_req_to_token_pool
from sglang.srt.speculative.eagle_utils import organize_draft_results
from sglang.srt.speculative.spec_utils import select_top_k_tokens

from sglang_ext.patches.cpu import speculative as ours

Arguments = dict[str, Any]
CONTEXT = 64
QLEN_ONLY = spec_tree.TreeMaskMode.QLEN_ONLY


def upper(count: int) -> int:
    return 1 << (count - 1).bit_length()


def numbers(high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=dtype)


def page_table(requests: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the requests, and the table."""
    return torch.randperm(requests + 3)[:requests], numbers(9999, requests + 3, CONTEXT, dtype=torch.int32)


def assigns(requests: int) -> Iterable[tuple[str, Arguments, Callable[..., None]]]:
    rows, table = page_table(requests)
    starts = numbers(CONTEXT // 2, requests)
    ends = starts + numbers(CONTEXT // 2, requests)
    given = {"rows": rows, "table": table, "starts": starts, "ends": ends}
    slots = numbers(9999, int((ends - starts).sum()))
    yield (
        "assign_req_to_token_pool_cpu",
        {**given, "slots": slots, "_row_length": CONTEXT},
        lambda rows, table, starts, ends, slots, _row_length: assign_req_to_token_pool[(requests,)](
            rows, table, starts, ends, slots, CONTEXT, upper(requests)
        ),
    )
    yield (
        "assign_extend_cache_locs_cpu",
        {**given, "slots": torch.zeros_like(slots), "_row_length": CONTEXT},
        lambda rows, table, starts, ends, slots, _row_length: cache_locs.assign_extend_cache_locs[
            (requests,)
        ](rows, table, starts, ends, slots, CONTEXT, upper(requests)),
    )
    topk, steps = int(numbers(4, 1, low=1)), int(numbers(6, 1, low=1))
    yield (
        "assign_draft_cache_locs_contiguous_cpu",
        {
            "rows": rows,
            "table": table,
            "lengths": starts,
            "slots": numbers(9, requests * topk * steps),
            "row_length": CONTEXT,
            "topk": topk,
            "steps": steps,
        },
        lambda rows, table, lengths, slots, row_length, topk, steps: (
            cache_locs.assign_draft_cache_locs_contiguous[(requests,)](
                rows, table, lengths, slots, CONTEXT, topk, steps, BS=requests
            )
        ),
    )


def drafted(requests: int, topk: int, steps: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Trees as SGLang drafts them: the drafts above each group, and those that are selected."""
    scores, found = None, []
    for step in range(steps):
        shape = (requests, topk) if step == 0 else (requests * topk, topk)
        likely = torch.rand(shape)
        _, _, scores, info = select_top_k_tokens(step, likely, numbers(50, *shape), None, scores, topk)
        found.append(info)
    above, selected, _ = organize_draft_results(*map(list, zip(*found, strict=True)), width)
    return above, selected


def trees(requests: int) -> Iterable[tuple[str, Arguments, Callable[..., None]]]:
    topk, steps = int(numbers(4, 1, low=1)), int(numbers(5, 1, low=1))
    drafts = topk + (steps - 1) * topk**2
    width = steps + 1 if topk == 1 else 1 + int(numbers(min(drafts, 9) + 1, 1, low=1))
    above, selected = drafted(requests, topk, steps, width)
    empty = torch.full((4, requests, width), -1)
    yield (
        "build_tree_kernel_efficient_cpu",
        {
            "above": above,
            "selected": selected,
            "lengths": numbers(500, requests, low=1),
            "mask": torch.ones(requests * width * width, dtype=torch.bool),
            "positions": empty[0].flatten(),
            "index": empty[1],
            "next_node": empty[2],
            "next_sibling": empty[3],
            "topk": topk,
            "depth": steps,
            "width": width,
            "mask_mode": QLEN_ONLY,
        },
        lambda **given: spec_tree.sgl_build_tree_kernel_triton(*given.values()),
    )
    built = torch.full((3, requests, width), -1)
    lengths = numbers(500, requests, low=1)
    mask = torch.ones(requests * width * width, dtype=torch.bool)
    spec_tree.sgl_build_tree_kernel_triton(
        above,
        selected,
        lengths,
        mask,
        torch.empty(requests * width, dtype=torch.int64),
        *built,
        topk,
        steps,
        width,
        QLEN_ONLY,
    )
    yield (
        "verify_tree_greedy_cpu",
        {
            "predicts": torch.zeros(requests * width, dtype=torch.int32),
            "accept_index": torch.full((requests, steps + 1), -1, dtype=torch.int32),
            "accept_token_num": torch.empty(requests, dtype=torch.int32),
            "candidates": numbers(3, requests, width),
            **dict(zip(("retrive_index", "retrive_next_token", "retrive_next_sibling"), built, strict=True)),
            "target_predict": numbers(3, requests, width),
        },
        lambda **given: spec_tree.verify_tree_greedy_triton(*given.values()),
    )


def accepts(requests: int) -> Iterable[tuple[str, Arguments, Callable[..., None]]]:
    stride = int(numbers(6, 1, low=1))
    yield (
        "fill_bonus_tokens_cpu",
        {
            "tokens": numbers(99, requests, stride, dtype=torch.int32),
            "accepted": numbers(stride + 1, requests, low=1, dtype=torch.int32),
            "bonus": torch.zeros(requests, dtype=torch.int32),
            "stride": stride,
        },
        lambda tokens, accepted, bonus, stride: eagle.fill_bonus_tokens[(requests,)](
            tokens, accepted, bonus, stride
        ),
    )
    index = numbers(requests * stride, requests, stride, low=-1, dtype=torch.int32)
    yield (
        "fill_accept_out_cache_loc_cpu",
        {
            "accept_index": index,
            "slots": numbers(9999, requests * stride),
            "accepted": torch.zeros(requests * stride, dtype=torch.int64),
        },
        lambda accept_index, slots, accepted: eagle.fill_accept_out_cache_loc[(index.numel(),)](
            accept_index, slots, accepted, upper(index.numel())
        ),
    )
    lengths = numbers(20, requests)
    starts = lengths.cumsum(0) - lengths
    for places in (None, starts + torch.clamp(lengths - 1, min=0)):
        yield (
            "rotate_input_ids_cpu",
            {
                "tokens": numbers(99, int(lengths.sum()) + 1),
                "starts": starts,
                "lengths": lengths,
                "new": numbers(99, requests, 1),
                "places": places,
            },
            lambda tokens, starts, lengths, new, places: multi_layer_eagle.rotate_input_ids_kernel[
                (requests,)
            ](tokens, starts, lengths, new, places, BLOCK_SIZE=4096),
        )


def compare(name: str, given: Arguments, triton: Callable[..., None]) -> None:
    """Run both on copies of the arguments; all tensors have to be equal afterwards."""
    theirs, own = (
        {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in given.items()}
        for _ in range(2)
    )
    triton(**theirs)
    kernel = ours.KERNELS[name]
    kernel(**own) if name == "verify_tree_greedy_cpu" else kernel(*own.values())
    for key, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert value.tolist() == own[key].tolist(), f"{name}, {key}: {value} and {own[key]} of {given}"


def compare_copies() -> None:
    """Slots that overlap, in planes of unequal strides."""
    planes = [numbers(255, 40, size, dtype=torch.uint8) for size in (48, 16)]
    copies = [plane.clone() for plane in planes]
    targets, sources = torch.randperm(40)[:12], torch.randperm(40)[:12]

    def described(those: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        addresses = torch.tensor([each.data_ptr() for each in those], dtype=torch.uint64)
        return addresses, torch.tensor([each.shape[1] for each in those])

    copy_all_layer_kv_cache_tiled[(2, 1)](*described(planes), targets, sources, 12, 16, BYTES_PER_TILE=64)
    ours.copy_all_layer_kv_cache_cpu(*described(copies), targets, sources)
    assert all(map(torch.equal, planes, copies))


def main(seed: int, count: int) -> None:
    """Compare ``count`` random batches of each kernel; raises AssertionError at the first that differs."""
    torch.manual_seed(seed)
    names = {"copy_all_layer_kv_cache_cpu"}
    for _ in range(count):
        requests = int(numbers(6, 1, low=1))
        for cases in (assigns, trees, accepts):
            for name, given, triton in cases(requests):
                names.add(name)
                compare(name, given, triton)
        compare_copies()
    assert names == set(ours.KERNELS)
    print(f"{count} batches agree")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
