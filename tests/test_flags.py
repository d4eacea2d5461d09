"""Dataclasses whose fields are flags: the same value and the same refusal from every way in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest

from sglang_ext.cli import COMMANDS, flags_of
from sglang_ext.errors import ConfigError
from sglang_ext.flags import (
    COUNT,
    REQUIRED,
    SECONDS,
    SIZE,
    Flagged,
    flag,
    list_flag,
    one_of,
    parse_seconds,
    show_size,
)


@dataclass(frozen=True, kw_only=True)
class Settings(Flagged):
    variable_prefix = "T_"
    lists = (list_flag("--limits", "What it may take."),)
    removed = MappingProxyType({"--memory": "--limits bytes=SIZE", "T_MEMORY": "T_LIMITS=bytes=SIZE"})

    name: str = flag(REQUIRED, "Its name.", aliases=("--called",), group="First", common=True)
    size: int = flag(4, "Its size | 100% of it.", SIZE.positive())
    wait_secs: float = flag(1.5, "How long.", SECONDS)
    mode: str = flag("a", "How.", one_of("a", "b"), group="Second", common=True)
    folder: Path | None = flag(None, "Where.")
    ports: tuple[int, ...] = flag((), "Several.", COUNT, several="append")
    words: tuple[str, ...] = flag((), "More.", several="*")
    key: str | None = flag(None, "Hush.", secret=True, file=True)
    quiet: bool = flag(False, "Say nothing.")
    pace: str = flag("auto", "How fast.", one_of("auto", "slow"))
    pace_secs: float = flag(2.0, "The time between two.", SECONDS.positive(), within="--pace", key="every")
    most_bytes: int = flag(1 << 20, "Memory.", SIZE, within="--limits", key="bytes")
    most_live: int = flag(3, "Entries.", COUNT, within="--limits")
    probe: str = flag("on", "For measuring.", one_of("on", "off"), variable_only=True)
    socket: int | None = flag(None, "From the parent.", internal=True)
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
    assert "| `--name` NAME | common | `T_NAME` | required | Its name. |" in first
    assert "| `--size` SIZE | advanced | `T_SIZE` | `4` | Its size \\| 100% of it. |" in first
    assert "| `--mode` {a,b} | common | `T_MODE` | `a` | How. |" in second
    assert "| `--no-loud` | advanced | `T_LOUD` |  | Do not shout. |" in second
    assert "| `--key-file` FILE |" in second
    assert "| `--limits` NAME=VALUE,... | advanced | `T_LIMITS` |  | What it may take. |" in second
    assert "| `--limits` `bytes=`SIZE | advanced |  | `1MiB` | Memory. |" in second
    assert "| `--pace` `every=`SECONDS | advanced |  | `2.0` | The time between two. |" in second
    assert "| `T_PROBE` | `on` | For measuring. |" in text.split("## Environment variables")[1]
    assert "inner" not in text
    assert "socket" not in text
    shown = " ".join(Settings.parser("all").format_help().split())
    assert "Its size | 100% of it. Default: 4." in shown
    assert "Default: None" not in shown


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("1e-3", 0.001), ("500ms", 0.5), ("1.5 s", 1.5), ("10min", 600), ("2h", 7200)],
)
def test_a_duration_is_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"),
        (4, "4"),
        (1 << 20, "1MiB"),
        (32 * 10**9, "32GB"),
        (256 * 10**6, "256MB"),
        (1_000_001, "1000001"),
    ],
)
def test_a_size_is_shown_as_users_write_it(size: int, text: str) -> None:
    assert show_size(size) == text


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--limits", "bytes=2KiB,most-live=5"], {"most_bytes": 2048, "most_live": 5}),
        (["--limits", "bytes=1", "--limits", "most-live=4,bytes=2"], {"most_bytes": 2, "most_live": 4}),
        (["--pace", "slow"], {"pace": "slow"}),
        (["--pace", "slow, every=500ms"], {"pace": "slow", "pace_secs": 0.5}),
        (["--pace", "every=1"], {"pace_secs": 1.0}),
    ],
)
def test_settings_of_one_flag(words: list[str], found: dict[str, object], monkeypatch) -> None:
    monkeypatch.setenv("T_PROBE", "off")
    expected = Settings(name="n", probe="off", **found)
    assert Settings.parse(["--name", "n", *words]) == expected
    by_variable = {f"T_{words[-2][2:].upper()}": words[-1], "T_PROBE": "off"}
    if len(words) == 2:
        assert Settings.from_user({"name": "n"}, by_variable) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--limits", "byte=1"], "argument --limits: there is no setting 'byte'; there are bytes, most-live"),
        (["--limits", "bytes"], "argument --limits: bytes has no value; write bytes=SIZE"),
        (["--limits", "most-live=x"], "argument --limits: most-live: 'x' is not a whole number"),
        (["--limits", "most-live=1,bytes"], "argument --limits: bytes has no value; write bytes=SIZE"),
        (["--pace", "fast,every=1"], "argument --pace: 'fast' is not one of auto, slow"),
        (["--pace", "slow,every=0"], "argument --pace: every: 0.0 must be greater than 0"),
        (["--memory", "4"], "there is no flag --memory any more; use --limits bytes=SIZE"),
        (["--help", "third"], "'third' is not one of common, advanced, all, first, second"),
    ],
)
def test_wrong_settings_are_refused_by_name(words: list[str], said: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        Settings.parse(["--name", "n", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_setting_is_named_when_the_constructor_refuses_it() -> None:
    with pytest.raises(ConfigError, match="'x' is not one of") as caught:
        Settings(name="n", probe="x")
    assert caught.value.field == "T_PROBE"
    with pytest.raises(ConfigError) as caught:
        Settings(name="n", pace_secs=0.0)
    assert caught.value.field == "--pace every"
    with pytest.raises(ConfigError, match=r"is no variable any more.*T_LIMITS=bytes=SIZE") as caught:
        Settings.from_user({"name": "n"}, {"T_MEMORY": "1"})
    assert caught.value.field == "T_MEMORY"


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ([], {"--name", "--mode"}),
        (["first"], {"--name", "--size", "--wait-secs"}),
        (["second"], {"--mode", "--folder", "--limits", "--pace"}),
        (["advanced"], {"--size", "--limits"}),
        (["all"], {"--name", "--size", "--mode", "--limits", "--pace"}),
    ],
)
def test_help_shows_a_level_or_a_group(word: list[str], shown: set[str], capsys) -> None:
    flags = {"--name", "--size", "--wait-secs", "--mode", "--folder", "--limits", "--pace"}
    with pytest.raises(SystemExit) as ended:
        Settings.parse(["--help", *word])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    there = {name for name in flags if f"\n  {name} " in text}
    assert shown <= there
    if word not in (["advanced"], ["all"], ["second"]):
        assert there == shown
    assert ("more flags: --help all" in " ".join(text.split())) is (word != ["all"])
    assert "--socket" not in text
    assert "--probe" not in text
    assert "--memory" not in text


REMOVED = [
    (name, old, new)
    for name, command in COMMANDS.items()
    if (flags := flags_of(command)) is not None
    for old, new in flags.removed.items()
]


@pytest.mark.parametrize(("command", "old", "new"), REMOVED)
def test_each_removed_name_is_refused_with_its_replacement(command, old, new, capsys) -> None:
    flags = flags_of(COMMANDS[command])
    assert flags is not None
    if old.startswith("--"):
        with pytest.raises(SystemExit):
            flags.parser().parse_args([old, "1"])
        assert f"there is no flag {old} any more; use {new}" in capsys.readouterr().err
    else:
        with pytest.raises(ConfigError) as caught:
            flags.environment_values({old: "1"})
        assert (caught.value.field, new in str(caught.value)) == (old, True)
    # The replacement exists.
    there = {one.name for one in flags.options()} | {
        one.variable for one in (*flags.flags(), *flags.options())
    }
    word = new.removeprefix("the variable ").partition(" ")[0].partition("=")[0]
    assert word in there or word == "SSL_CERT_FILE"
    found = {one.name: one for one in flags.options()}.get(word)
    if found is not None and found.settings:
        keys = {one.key for one in found.settings}
        named = {
            part.partition("=")[0]
            for part in new.partition(" ")[2].partition(" or ")[0].split(",")
            if "=" in part
        }
        assert named <= keys


def test_the_commands_have_as_many_flags_as_a_user_can_survey() -> None:
    """At most 60 common ones for serve, router and cluster, and 130 over all commands, of which four share
    the flags that say how a router is reached. The offline commands have 24 of their own: they read files, or
    try a GPU, and run no cluster, so that operators of a cluster need not survey their flags."""
    shown = {
        name: [one for one in flags.options() if not one.internal and not one.positional]
        for name, command in COMMANDS.items()
        if (flags := flags_of(command)) is not None
    }
    common = [one for name in ("serve", "router", "cluster") for one in shown[name] if one.common]
    assert sum(1 + one.file for one in common) <= 60
    of = {name: sum(1 + one.file for one in some) for name, some in shown.items()}
    offline = of.keys() & {"diverge", "estimate", "gpu-check", "simulate"}
    assert sum(of[name] for name in offline) <= 24
    assert sum(of[name] for name in of.keys() - offline) <= 130
