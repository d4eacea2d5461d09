"""The documentation's site builds strictly, without network, and loads nothing from another host."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# Without --quiet: with it, mkdocs neither shows nor counts warnings, and --strict holds for nothing.
BUILD = """
import socket, sys

def refuse(*_):
    raise OSError("the documentation was to be built without network")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(["build", "--strict", "--config-file", sys.argv[1], "--site-dir", sys.argv[2]])
"""
LOADED = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|(?:@import\s+|url\()["']?((?:https?:)?//[^"')\s]+)"""
)
"""Resources that a browser fetches by itself from another host: scripts, styles, pictures, fonts."""


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BUILD, str(config), str(site)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=config.parent,
    )


def fetched_elsewhere(site: Path) -> set[str]:
    pages = [path for kind in ("html", "css") for path in site.rglob(f"*.{kind}")]
    return {a or b for page in pages for a, b in LOADED.findall(page.read_text("utf-8"))}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_it_is_built_with_its_reference(site: Path) -> None:
    serve = (site / "reference" / "serve.html").read_text("utf-8")
    assert "--kv-dram-size" in serve
    assert "SGLANG_EXT_KV_DRAM_SIZE" in serve
    assert "--balance-abs-threshold" in (site / "reference" / "router.html").read_text("utf-8")
    metrics = (site / "reference" / "metrics.html").read_text("utf-8")
    assert "sglang_ext_router_cached_tokens_total" in metrics
    assert "sglang_ext_router_membership_connected" in metrics
    assert "sglang_ext_cache_disk_weighed_seconds" in metrics
    assert "sglang_ext_pd_unfenced_pages" in metrics
    assert "/v1/chat/completions" in (site / "reference" / "http.html").read_text("utf-8")
    assert "transfer_with_insert" in (site / "python_api.html").read_text("utf-8")
    assert (site / "search" / "search_index.json").stat().st_size > 100_000


def test_it_loads_nothing_from_another_host(site: Path) -> None:
    assert fetched_elsewhere(site) == set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<link rel="stylesheet" href="https://fonts.googleapis.com/css">', True),
        ("<script defer src='//cdn.example.org/x.js'></script>", True),
        ("@import 'https://example.org/x.css';", True),
        ("a{background:url(https://example.org/x.svg)}", True),
        ('<a href="https://github.com/sgl-project/sglang">SGLang</a> <img src="../x.svg">', False),
    ],
)
def test_what_a_browser_would_fetch_is_seen(tmp_path: Path, text: str, found: bool) -> None:
    (tmp_path / "page.html").write_text(text)
    assert bool(fetched_elsewhere(tmp_path)) is found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gone](nowhere.md)", "nowhere.md"),
        ("[no such heading](index.md#nowhere)", "nowhere"),
    ],
)
def test_a_dead_link_fails_the_build(tmp_path: Path, text: str, said: str) -> None:
    """The twin: a small site with the same settings for links, and a link that leads nowhere."""
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    checks = settings[settings.index("validation:") : settings.index("nav:")]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\n{checks}")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "index.md"
    page.write_text("# Home\n")
    assert build(tmp_path / "mkdocs.yml", tmp_path / "site").returncode == 0
    shutil.rmtree(tmp_path / "site")
    page.write_text(f"# Home\n\n{text}\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert said in done.stdout + done.stderr


def without_a_source(data: dict[str, Any]) -> set[str]:
    """The bars of the README's picture whose figure does not stand in the row, or the row not in its page."""
    pages = ROOT / "docs" / "benchmarks"
    return {
        bar["label"]
        for bar in data["bars"]
        if f"{bar['value']:.2f}" not in bar["row"]
        or bar["row"] not in (pages / bar["page"]).read_text("utf-8")
    }


def test_the_picture_of_the_numbers_shows_what_the_pages_say() -> None:
    plot = runpy.run_path(str(ROOT / "scripts" / "headline_plot.py"))
    data = json.loads(plot["DATA"].read_text("utf-8"))
    assert without_a_source(data) == set()
    assert plot["PICTURE"].read_text("utf-8") == plot["draw"](data), "run python scripts/headline_plot.py"


@pytest.mark.parametrize("change", [{"value": 0.07}, {"row": "| `nothing` | 0.08 |"}])
def test_a_figure_without_a_source_is_seen(change: dict[str, object]) -> None:
    data = json.loads((ROOT / "docs" / "benchmarks" / "headline.json").read_text("utf-8"))
    data["bars"][0] |= change
    assert without_a_source(data) == {data["bars"][0]["label"]}


SHARE = runpy.run_path(str(ROOT / "scripts" / "model_share.py"))


def test_the_page_of_models_shows_the_table_of_families() -> None:
    page = SHARE["PAGE"].read_text("utf-8")
    assert page == SHARE["page"](page), "run python scripts/model_share.py --write"
    assert SHARE["page"](page.replace("[server]", "[oracle]", 1)) == page


def test_a_model_counts_when_its_three_tiers_are_proven() -> None:
    models = [
        {"family": "gqa", "some": 3},
        {"family": "embedding", "some": 2},
        {"family": "msa", "some": 4},
        {"name": "x", "unserved": "why", "some": 50},
        {"family": "mla"},
    ]
    assert SHARE["shares"]({"columns": {"some": ""}, "models": models}) == {"some": (3, 3, 9)}
