"""Dataclasses whose fields are flags: the same value and the same refusal from every way in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_ext.errors import ConfigError
from sglang_ext.flags import COUNT, REQUIRED, SECONDS, SIZE, Flagged, flag, one_of, parse_seconds


@dataclass(frozen=True, kw_only=True)
class Settings(Flagged):
    variable_prefix = "T_"

    name: str = flag(REQUIRED, "Its name.", aliases=("--called",), group="First")
    size: int = flag(4, "Its size | 100% of it.", SIZE.positive())
    wait_secs: float = flag(1.5, "How long.", SECONDS)
    mode: str = flag("a", "How.", one_of("a", "b"), group="Second")
    folder: Path | None = flag(None, "Where.")
    ports: tuple[int, ...] = flag((), "Several.", COUNT, several="append")
    words: tuple[str, ...] = flag((), "More.", several="*")
    key: str | None = flag(None, "Hush.", secret=True, file=True)
    quiet: bool = flag(False, "Say nothing.")
    loud: bool = flag(True, "Do not shout.", name="--no-loud")
    inner: int = 7
    """No flag."""


def test_what_is_given_wins_over_the_environment_and_that_over_the_default(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("T_SIZE", "2KiB")
    monkeypatch.setenv("T_QUIET", "yes")
    monkeypatch.setenv("T_MODE", "b")
    monkeypatch.setenv("T_KEY", "")
    monkeypatch.setenv("T_WORDS", "u,v")
    found = Settings.parse(
        ["--called", "n", "--mode", "a", "--wait-secs", "2min", "--ports", "1", "--ports", "2"]
    )
    assert (found.name, found.size, found.mode, found.wait_secs) == ("n", 2048, "a", 120.0)
    assert (found.ports, found.words, found.folder) == ((1, 2), ("u", "v"), None)
    assert (found.quiet, found.loud, found.key, found.inner) == (True, True, None, 7)
    file = tmp_path / "key"
    file.write_text("secret")
    file.chmod(0o600)
    found = Settings.parse(
        ["--name", "n", "--no-loud", "--folder", "f", "--key-file", str(file), "--words", "x"]
    )
    assert (found.loud, found.folder, found.key, found.words) == (False, Path("f"), "secret", ("x",))
    assert "secret" not in repr(found)
    with pytest.raises(ConfigError, match="given twice"):
        Settings.parse(["--name", "n", "--key", "secret", "--key-file", str(file)])


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        ("size", "0", "0 must be greater than 0"),
        ("size", "big", "'big' is not a size"),
        ("wait_secs", "soon", "'soon' is not a duration"),
        ("mode", "c", "'c' is not one of a, b"),
        ("ports", "-1", "'-1' is not a whole number"),
    ],
)
def test_every_way_in_refuses_the_same_by_the_users_name(field, text, said, monkeypatch, capsys) -> None:
    name = "--" + field.replace("_", "-")
    with pytest.raises(SystemExit):
        Settings.parse(["--name", "n", f"{name}={text}"])
    assert f"argument {name}: {said}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=said) as caught:
        Settings.from_user({"name": "n"}, {f"T_{field.upper()}": text})
    assert caught.value.field == f"T_{field.upper()}"
    if field in ("mode", "ports"):
        with pytest.raises(ConfigError, match=said) as caught:
            Settings(name="n", **{field: text if field == "mode" else (text,)})
        assert caught.value.field == name


def test_unknown_names_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown variable T_SISE.*T_SIZE"):
        Settings.from_user({"name": "n"}, {"T_SISE": "1"})
    with pytest.raises(ConfigError, match=r"unknown setting 'sise'.*size"):
        Settings.from_values({"name": "n", "sise": 1})
    with pytest.raises(ConfigError, match="True is not of type int"):
        Settings(name="n", size=True)
    found = Settings(name="n", size=9, ports=(3,))
    assert Settings.from_values(found.values()) == found == dataclasses.replace(found, size=9)


def test_the_reference_has_every_flag_under_its_heading() -> None:
    text = Settings.markdown()
    first, second = text.split("## Second")
    assert "| `--name` NAME | `T_NAME` | required | Its name. |" in first
    assert "| `--size` SIZE | `T_SIZE` | `4` | Its size \\| 100% of it. |" in first
    assert "| `--mode` {a,b} | `T_MODE` | `a` | How. |" in second
    assert "| `--no-loud` | `T_LOUD` |  | Do not shout. |" in second
    assert "| `--key-file` FILE |" in second
    assert "inner" not in text
    shown = " ".join(Settings.parser().format_help().split())
    assert "Its size | 100% of it. Default: 4." in shown
    assert "Default: None" not in shown


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("1e-3", 0.001), ("500ms", 0.5), ("1.5 s", 1.5), ("10min", 600), ("2h", 7200)],
)
def test_a_duration_is_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)
