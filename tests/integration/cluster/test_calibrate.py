"""``sglang-ext calibrate`` against a real server, and the uses of its profile."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sglang_ext.calibration.command import main
from sglang_ext.calibration.measure import DECODE_BATCHES
from sglang_ext.cost_model import Batch, CostModel, Profile, load, save
from sglang_ext.testing.models import model_path
from tests.support.servers.server import ServerProcess, ServerSpec

SPEC = ServerSpec(
    flags=("--max-total-tokens", "8000", "--mem-fraction-static", "0.5", "--chunked-prefill-size", "-1")
)


def test_a_running_server_is_calibrated(get_server, tmp_path, capsys) -> None:
    server: ServerProcess = get_server(SPEC)
    path = tmp_path / "profile.json"
    arguments = ["--url", server.url, "--profile", str(path), "--device-name", "a CPU", "--quiet"]
    more = ["--measure", "longest=512,lengths=3,rounds=2", "--links", "dram=5"]
    # A foreign probe in the middle of a trace, or a server that still seems busy from the test before, is
    # reported, and the profile then lacks the operators, or the calibration fails.
    for _ in range(4):
        if main([*arguments, *more]) == 0 and "operator level: mean error" in capsys.readouterr().out:
            break
    else:
        pytest.fail("four calibrations were disturbed")
    profile = load(path)
    assert (profile.identity.device, profile.identity.tp, profile.identity.dtype) == ("a CPU", 1, "float32")
    assert profile.longest_prompt == 512
    # 4 layers, K and V, 4 heads of 32 numbers, 4 bytes each.
    assert profile.kv_bytes_per_token == 4 * 2 * 4 * 32 * 4
    operators = profile.operators
    assert operators is not None
    products = {(one.inner, one.columns, one.rows): one.count for one in operators.linears}
    assert products == {
        (256, 512, "tokens"): 4,  # q, k and v
        (256, 256, "tokens"): 4,  # behind attention
        (256, 4096, "tokens"): 4,  # gate and up
        (2048, 256, "tokens"): 4,  # down
        (256, 32_000, "one"): 1,  # logits
    }
    assert operators.outside.overlap_s is not None
    assert 0 <= operators.around_s <= operators.outside.fixed_s
    parts = operators.parts(Batch.of(512, 0))
    # The size of each depends on the machine's other work meanwhile.
    assert all(seconds >= 0 for seconds in parts.values())
    assert parts["linear"] > 0
    model = CostModel(profile)
    assert model.exec_s(512, 0) >= model.exec_s(16, 0) > 0
    assert profile.decode is not None
    assert profile.decode.requests == DECODE_BATCHES
    assert all(seconds > 0 for seconds in profile.decode.steps_s)
    # SGLang's overlapping scheduler waits for each launch on a CPU.
    assert profile.decode.late
    _scale(server, profile, path, capsys)


def _scale(server: ServerProcess, profile: Profile, path: Path, capsys) -> None:
    """The constants of this server's parallelism, kept in a profile that is labelled with another."""
    scale = [
        "--url",
        server.url,
        "--scale-profile",
        str(path),
        "--measure",
        "longest=512,rounds=1",
        "--quiet",
    ]
    assert main(scale) == 1
    assert "TP 1" in capsys.readouterr().err
    other = msgspec.structs.replace(
        profile,
        identity=msgspec.structs.replace(profile.identity, tp=2),
        arch=msgspec.structs.replace(profile.arch, tp=2),
        operators=None,
    )
    save(other, path)
    assert main(scale) == 0
    told = load(path)
    assert told.arch.scalings["1"].factor > 0
    assert told.arch.scaled(1).seconds(512, 0) > 0
    assert told.arch.seconds(512, 0) == other.arch.seconds(512, 0)


@pytest.mark.long
def test_a_server_is_started_measured_and_ended(tmp_path, capsys) -> None:
    path = tmp_path / "profile.json"
    flags = "--dtype float32 --mem-fraction-static 0.5 --max-total-tokens 8000 --chunked-prefill-size -1"
    arguments = ["--model-path", str(model_path("tiny", "float32")), "--server-args", flags]
    more = ["--measure", "longest=256,lengths=3,rounds=1,operators=off", "--quiet"]
    assert main([*arguments, *more, "--profile", str(path)]) == 0
    assert load(path).operators is None
    assert "arch level" in capsys.readouterr().out


def test_a_server_that_does_not_start_shows_its_log(tmp_path, capsys) -> None:
    # Refused before SGLang is imported.
    flags = f"--api-key-file {tmp_path / 'gone'}"
    assert main(["--model-path", "none", "--server-args", flags, "--quiet"]) == 1
    said = capsys.readouterr().err
    assert "ended with exit status" in said
    assert "gone" in said


def test_what_is_no_server_is_named(tmp_path, capsys) -> None:
    assert main(["--url", "http://127.0.0.1:9", "--profile", str(tmp_path / "p.json"), "--quiet"]) == 1
    assert "cannot reach http://127.0.0.1:9" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--measure", "longest=5"], "longest must be at least 256"),
        (["--scale-to-tp", "1"], "at least two ranks"),
        (["--url", "ftp://x"], "not of the form"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags, said, capsys) -> None:
    assert main(["--url", "http://127.0.0.1:9", "--quiet", *flags]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--server-args=--port 5"], "--port is set by calibrate itself"),
        (["--server-args=--model-path=x"], "--model-path is set by calibrate itself"),
    ],
)
def test_flags_of_the_server_that_calibrate_sets_are_refused(flags, said, capsys) -> None:
    assert main(["--model-path", "x", "--quiet", *flags]) == 1
    assert said in capsys.readouterr().err
