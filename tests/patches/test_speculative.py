"""The kernels of speculative decoding in torch: on small batches by hand, and held to SGLang's own."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import sgl_kernel
import speculative_oracle
import torch

from sglang_ext.patches.cpu.speculative import (
    KERNELS,
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

tensor = torch.tensor


@pytest.mark.slow
def test_sglangs_own_kernels_write_the_same(agree_with_triton: Callable[[ModuleType, int], None]) -> None:
    agree_with_triton(speculative_oracle, 25)


def test_sglang_finds_them_in_the_stand_in() -> None:
    for name, kernel in KERNELS.items():
        assert getattr(sgl_kernel, name) is kernel


def test_slots_go_into_the_page_table_and_come_out_of_it() -> None:
    table = torch.zeros(3, 8, dtype=torch.int32)
    rows, starts, ends = tensor([2, 0]), tensor([1, 4]), tensor([4, 6])
    assign_req_to_token_pool_cpu(rows, table, starts, ends, tensor([11, 12, 13, 14, 15]), 8)
    assert table.tolist() == [[0, 0, 0, 0, 14, 15, 0, 0], [0] * 8, [0, 11, 12, 13, 0, 0, 0, 0]]
    slots = torch.zeros(5, dtype=torch.int64)
    assign_extend_cache_locs_cpu(rows, table, starts, ends, slots, 8)
    assert slots.tolist() == [11, 12, 13, 14, 15]
    drafts = torch.zeros(4, dtype=torch.int64)
    assign_draft_cache_locs_contiguous_cpu(rows, table, starts, drafts, 8, 1, 2)
    assert drafts.tolist() == [11, 12, 14, 15]


class Tree:
    """Requests that share the shape of their trees.

    Args:
        above, selected: the drafts, as SGLang numbers them.
        lengths: tokens before each root.
    """

    def __init__(
        self, above: list[int], selected: list[int], lengths: list[int], topk: int, depth: int
    ) -> None:
        requests, self.width = len(lengths), len(selected) + 1
        self.mask = torch.zeros(requests * self.width**2, dtype=torch.bool)
        self.positions = torch.zeros(requests * self.width, dtype=torch.int64)
        self.index, self.next_node, self.next_sibling = torch.full((3, requests, self.width), -1)
        build_tree_kernel_efficient_cpu(
            *(tensor([above] * requests), tensor([selected] * requests), tensor(lengths), self.mask),
            *(self.positions, self.index, self.next_node, self.next_sibling, topk, depth, self.width, 1),
        )

    def verify(
        self, depth: int, candidates: list[list[int]], chosen: list[list[int]]
    ) -> tuple[list[int], list[list[int]], list[int]]:
        """The target's tokens, the accepted nodes, and how many drafts were accepted."""
        requests = len(candidates)
        predicts = torch.zeros(requests * self.width, dtype=torch.int32)
        accepted = torch.full((requests, depth + 1), -1, dtype=torch.int32)
        counts = torch.zeros(requests, dtype=torch.int32)
        verify_tree_greedy_cpu(
            predicts=predicts,
            accept_index=accepted,
            accept_token_num=counts,
            candidates=tensor(candidates),
            retrive_index=self.index,
            retrive_next_token=self.next_node,
            retrive_next_sibling=self.next_sibling,
            target_predict=tensor(chosen),
        )
        return predicts.tolist(), accepted.tolist(), counts.tolist()


def test_a_chain() -> None:
    tree = Tree([-1, 0, 1], [0, 1, 2], [7, 20], topk=1, depth=3)
    assert tree.positions.tolist() == [7, 8, 9, 10, 20, 21, 22, 23]
    assert tree.index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert tree.next_node.tolist() == [[1, 2, 3, -1]] * 2
    assert tree.next_sibling.tolist() == [[-1] * 4] * 2
    assert (
        tree.mask.view(2, 4, 4).tolist() == [[[column <= row for column in range(4)] for row in range(4)]] * 2
    )


def test_a_tree() -> None:
    """Two drafts below the root, numbers 0 and 1, and two below each of them, 2 and 3, 4 and 5."""
    tree = Tree([-1, 0, 1], [0, 1, 3, 4], [7], topk=2, depth=2)
    assert tree.positions.tolist() == [7, 8, 8, 9, 9]
    assert tree.next_node.tolist() == [[1, 3, 4, -1, -1]]
    assert tree.next_sibling.tolist() == [[-1, 2, -1, -1, -1]]
    sees = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
    assert [row.nonzero().flatten().tolist() for row in tree.mask.view(5, 5)] == sees
    predicts, accepted, counts = tree.verify(2, [[5, 8, 9, 6, 4]], [[9, 0, 4, 0, 1]])
    assert accepted == [[0, 2, 4]], "the second child of the root, and its child"
    assert counts == [2]
    assert predicts == [9, 0, 4, 0, 1]


def test_a_mask_with_the_prompt_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="mode 0"):
        build_tree_kernel_efficient_cpu(*[torch.zeros(1, 1)] * 8, 1, 1, 1, 0)


def test_drafts_are_accepted_up_to_the_first_that_the_target_did_not_choose() -> None:
    tree = Tree([-1, 0, 1], [0, 1, 2], [7, 20, 30], topk=1, depth=3)
    candidates = [[5, 1, 2, 3]] * 3
    chosen = [[1, 2, 3, 4], [1, 9, 3, 4], [8, 2, 3, 4]]
    predicts, accepted, counts = tree.verify(3, candidates, chosen)
    assert accepted == [[0, 1, 2, 3], [4, 5, -1, -1], [8, -1, -1, -1]]
    assert counts == [3, 1, 0]
    assert predicts == [1, 2, 3, 4, 1, 9, 0, 0, 8, 0, 0, 0]


def test_the_last_accepted_token_of_each_request() -> None:
    bonus = torch.zeros(3, dtype=torch.int32)
    fill_bonus_tokens_cpu(tensor([1, 2, 3, 4, 5, 6, 7, 8, 9]), tensor([1, 3, 2]), bonus, 3)
    assert bonus.tolist() == [1, 6, 8]


def test_slots_of_accepted_nodes_come_first() -> None:
    accepted = torch.zeros(4, dtype=torch.int64)
    fill_accept_out_cache_loc_cpu(tensor([[3, -1], [0, -1]]), tensor([10, 11, 12, 13]), accepted)
    assert accepted.tolist() == [13, 10, 0, 0]


def test_tokens_move_to_the_front_of_their_request() -> None:
    tokens = tensor([1, 2, 3, 4, 5])
    starts, lengths, new = tensor([0, 3, 3]), tensor([3, 0, 2]), tensor([[7], [8], [9]])
    rotate_input_ids_cpu(tokens, starts, lengths, new, None)
    assert tokens.tolist() == [2, 3, 7, 5, 9]
    rotate_input_ids_cpu(tokens, starts, lengths, new, tensor([1, 0, 4]))
    assert tokens.tolist() == [3, 7, 7, 9, 9]


def test_slots_are_copied_in_every_plane_before_any_is_overwritten() -> None:
    planes = [torch.arange(12, dtype=torch.float32).view(6, 2), torch.arange(6, dtype=torch.int64).view(6, 1)]
    addresses = tensor([plane.data_ptr() for plane in planes], dtype=torch.uint64)
    strides = tensor([plane[0].nbytes for plane in planes])
    copy_all_layer_kv_cache_cpu(addresses, strides, tensor([0, 1, 5]), tensor([1, 0, 2]))
    assert planes[0].tolist() == [[2, 3], [0, 1], [4, 5], [6, 7], [8, 9], [4, 5]]
    assert planes[1].flatten().tolist() == [1, 0, 2, 3, 4, 2]
    copy_all_layer_kv_cache_cpu(
        addresses, strides, tensor([], dtype=torch.int64), tensor([], dtype=torch.int64)
    )
