"""The kernels of ``sgl_kernel`` for speculative decoding, in plain torch; its stand-in (`kernels`) has them.

Names, arguments and results are those of SGLang's CPU kernels, which write into tensors that they are given.
A *tree* of drafts has ``width`` nodes per request: node 0, its root, is the last accepted token, and the
others are drafts, each after its parent. With topk 1 a tree is a chain.

The page table ``req_to_token`` is (rows, context) int32: the slots of a row's tokens. Tensors without a shape
here have one element per request.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch

_QLEN_ONLY = 1
"""SGLang's ``TreeMaskMode``: a mask of (width, width) per request, which has no columns for the prompt."""


def _rows(
    rows: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Each request's entries of the page table from its start to its end."""
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield table[row, start:end]


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    _row_length: int,
) -> None:
    """Write ``slots``, request after request, into the page table from each start to each end."""
    begin = 0
    for entries in _rows(rows, table, starts, ends):
        entries.copy_(slots[begin : begin + len(entries)])
        begin += len(entries)


def assign_extend_cache_locs_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    _row_length: int,
) -> None:
    """The reverse: read ``slots``, request after request, from each start to each end."""
    begin = 0
    for entries in _rows(rows, table, starts, ends):
        slots[begin : begin + len(entries)] = entries
        begin += len(entries)


def assign_draft_cache_locs_contiguous_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    row_length: int,
    topk: int,
    steps: int,
) -> None:
    """Read the ``topk * steps`` slots behind each request's tokens into ``slots``."""
    assign_extend_cache_locs_cpu(rows, table, lengths, lengths + topk * steps, slots, row_length)


def _parents(above: list[int], selected: list[int], topk: int) -> list[int | None]:
    """The parent of each node but the root, as a node's number; None where the parent was not selected.

    Args:
        above: the draft above each group of ``topk`` drafts, as its number among all drafts.
        selected: the drafts that are nodes 1, 2 and so on, as their numbers among all drafts.
    """
    nodes = {draft: node for node, draft in reversed(list(enumerate(selected, 1)))}
    groups = (draft // topk for draft in selected)
    return [nodes.get(above[group]) if group else 0 for group in groups]


def build_tree_kernel_efficient_cpu(
    above: torch.Tensor,
    selected: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_node: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    width: int,
    mask_mode: int,
) -> None:
    """Write the tree of each request.

    Args:
        above: (requests, groups) int64, as of `_parents`.
        selected: (requests, width - 1) int64, as of `_parents`.
        lengths: tokens before the root.
        mask: (requests * width * width,) bool: the nodes that each node attends to, itself and its ancestors.
        positions: (requests * width,) int64: of the nodes in the text.
        index: (requests, width) int64: each node's number in the batch.
        next_node, next_sibling: (requests, width) int64, -1 everywhere: a node's first child, and the next
            child of its parent.
        depth: levels below the root.

    Raises:
        NotImplementedError: for a mask with columns for the prompt, or a packed one.
    """
    if mask_mode != _QLEN_ONLY:
        raise NotImplementedError(f"a tree's mask of mode {mask_mode}; a CPU server uses {_QLEN_ONLY}")
    requests = len(lengths)
    index.copy_(torch.arange(requests * width).view(requests, width))
    sees, place = mask.view(requests, width, width), positions.view(requests, width)
    sees.copy_(torch.eye(width, dtype=torch.bool).expand_as(sees))
    sees[:, :, 0] = True
    for request, length in enumerate(lengths.tolist()):
        place[request, 0] = length
        parents = _parents(above[request].tolist(), selected[request].tolist(), topk)
        for node in range(width - 1, 0, -1):
            parent = parents[node - 1]
            if parent is not None:
                next_sibling[request, node] = next_node[request, parent]
                next_node[request, parent] = node
        for node in range(1, width):
            at: int | None = node
            levels = 0
            while at and levels < depth:
                sees[request, node, at] = True
                at, levels = parents[at - 1], levels + 1
            place[request, node] = length + levels


def verify_tree_greedy_cpu(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accept each request's longest path from the root whose tokens the target model chose.

    Args:
        predicts: (requests * width,) int32: the target's token after each accepted node.
        accept_index: (requests, depth + 1) int32, -1 everywhere: the accepted nodes, root first.
        accept_token_num: int32: accepted drafts, so without the root.
        candidates: (requests, width): the nodes' tokens.
        retrive_index, retrive_next_token, retrive_next_sibling: (requests, width), as the tree was built.
        target_predict: (requests, width): the token that the target chose after each node.
    """
    chosen = target_predict.flatten().tolist()
    trees = zip(
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        strict=True,
    )
    for request, (tokens, index, first_child, sibling) in enumerate(trees):
        node, path = 0, [index[0]]
        while len(path) < accept_index.shape[1]:
            node = first_child[node]
            while node != -1 and tokens[node] != chosen[path[-1]]:
                node = sibling[node]
            if node == -1:
                break
            path.append(index[node])
        for each in path:
            predicts[each] = chosen[each]
        accept_index[request, : len(path)] = torch.tensor(path)
        accept_token_num[request] = len(path) - 1


def fill_bonus_tokens_cpu(
    tokens: torch.Tensor, accepted: torch.Tensor, bonus: torch.Tensor, stride: int
) -> None:
    """Write each request's last accepted token: of its ``stride`` tokens the one at ``accepted - 1``."""
    bonus.copy_(tokens.view(-1, stride).gather(1, accepted.long().unsqueeze(1) - 1).squeeze(1))


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor
) -> None:
    """Write the slots of the accepted nodes, one after the other; the rest of ``accepted`` stays."""
    found = slots[accept_index[accept_index > -1].long()]
    accepted[: len(found)] = found


def rotate_input_ids_cpu(
    tokens: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    new: torch.Tensor,
    places: torch.Tensor | None,
) -> None:
    """Move each request's tokens one place to the front, and write its new token at the end, or at the place
    of the batch that ``places`` names."""
    for request, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if length:
            end = start + length
            tokens[start : end - 1] = tokens[start + 1 : end].clone()
            tokens[end - 1 if places is None else places[request]] = new.flatten()[request]


def copy_all_layer_kv_cache_cpu(
    addresses: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """Copy slots to slots in every plane. All are read before any is written.

    Args:
        addresses, strides: (planes,) uint64 and int64: a plane's address, and bytes per slot.
        targets, sources: (slots,) int64.
    """
    if not len(targets):
        return
    slots = int(torch.maximum(targets.max(), sources.max())) + 1
    for address, stride in zip(addresses.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * stride)).from_address(address)
        plane = torch.frombuffer(memory, dtype=torch.uint8).view(slots, stride)
        plane[targets] = plane[sources]


KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: kernel
    for kernel in (
        assign_draft_cache_locs_contiguous_cpu,
        assign_extend_cache_locs_cpu,
        assign_req_to_token_pool_cpu,
        build_tree_kernel_efficient_cpu,
        copy_all_layer_kv_cache_cpu,
        fill_accept_out_cache_loc_cpu,
        fill_bonus_tokens_cpu,
        rotate_input_ids_cpu,
        verify_tree_greedy_cpu,
    )
}
"""By the names under which SGLang imports them."""
