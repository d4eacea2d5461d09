"""The transfer backend's setup from SGLang's pointers, models and flags."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zmq
from sglang.srt.disaggregation.utils import MetadataBuffers as SglangBuffers

from sglang_ext.cluster_key import MIN_CHARACTERS
from sglang_ext.config import KvConfig
from sglang_ext.disagg.transports.rails import NOWHERE, Place
from sglang_ext.errors import ConfigError
from sglang_ext.patches.adapter.build_transfers import accelerator_place
from sglang_ext.patches.adapter.pd.pd_setup import MetadataBuffers, ScratchRow, keys_of


def test_a_metadata_row_is_what_it_was_in_another_row_of_other_buffers() -> None:
    here = [np.arange(12, dtype=np.int32).reshape(3, 4), np.arange(6, dtype=np.float64).reshape(3, 2)]
    there = [np.zeros((5, 4), np.int32), np.zeros((5, 2))]

    def over(arrays: list[np.ndarray]) -> MetadataBuffers:
        return MetadataBuffers([a.ctypes.data for a in arrays], [a[0].nbytes for a in arrays])

    row = over(here).read(1)
    over(there).write(4, row)
    for mine, theirs in zip(here, there, strict=True):
        assert np.array_equal(mine[1], theirs[4])
        assert not theirs[:4].any()
    with pytest.raises(ValueError, match="32 bytes"):
        over(there).write(0, row[:-1])


def test_a_scratch_row_has_the_layout_of_sglangs_rows_and_shares_nothing_with_them() -> None:
    """A transfer may fill any of SGLang's rows while a stopped request's row is made."""
    theirs = SglangBuffers(4, hidden_size=8, hidden_states_dtype=torch.float32, max_sampling_mask_tokens=0)
    pointers, _, item_bytes = theirs.get_buf_infos()
    rows = MetadataBuffers(pointers, item_bytes)
    filled = bytes(range(1, 256)) * (rows.row_bytes // 255 + 1)
    for number in range(4):
        rows.write(number, filled[number : number + rows.row_bytes])
    before = [rows.read(number) for number in range(4)]
    scratch = ScratchRow(theirs)
    assert scratch.read() == bytes(rows.row_bytes)
    scratch.buffers.output_ids[0][0] = 7
    scratch.buffers.bootstrap_room[0, 0] = 99
    made = scratch.read()
    assert [rows.read(number) for number in range(4)] == before
    rows.write(2, made)
    assert (int(theirs.output_ids[2][0]), int(theirs.bootstrap_room[2, 0])) == (7, 99)


def test_the_key_file_gives_the_keys(tmp_path: pytest.TempPathFactory) -> None:
    assert keys_of(KvConfig()) is None
    path = tmp_path / "key"  # type: ignore[operator]
    path.write_text("abcdefghijklmnopqrstuvwxyz0123456789"[:MIN_CHARACTERS] + "xyz")
    path.chmod(0o600)
    keys = keys_of(KvConfig(cluster_key_file=str(path)))
    assert keys is not None
    ((public, secret),) = keys.curve_pairs()
    assert zmq.curve_public(secret) == public
    assert keys.is_member(public)
    assert not keys.is_member(zmq.curve_keypair()[0])
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="--kv-cluster-key-file"):
        keys_of(KvConfig(cluster_key_file=str(path)))


@pytest.mark.parametrize("says", [True, False])
def test_a_gpu_is_found_on_the_bus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: bool) -> None:
    device = tmp_path / "devices/pci0000:10/0000:10:01.0/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    link = tmp_path / "bus/pci/devices/0000:1b:00.0"
    link.parent.mkdir(parents=True)
    link.symlink_to(device)
    told = {"pci_domain_id": 0, "pci_bus_id": 0x1B, "pci_device_id": 0} if says else {}
    monkeypatch.setattr(torch.cuda, "current_device", int)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**told))
    place = Place(("pci0000:10", "0000:10:01.0", "0000:1b:00.0"), 1) if says else NOWHERE
    assert accelerator_place("cuda", tmp_path) == place
    assert accelerator_place("cpu", tmp_path) == NOWHERE
