"""The chat page: its files are there, and its policy lets a browser load nothing else."""

from __future__ import annotations

import re
from importlib import resources


async def test_the_page_and_all_it_loads_are_served(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker(), api_key="secret")
    async with client.get(router.url + "/ui") as answer:
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        page = await answer.text()
        etag = answer.headers["etag"]
    async with client.get(router.url + "/ui", headers={"if-none-match": etag}) as answer:
        assert (answer.status, await answer.read()) == (304, b"")
    wanted = set(re.findall(r'(?:src|href)="(/ui/[^"]+)"', page))
    assert wanted
    seen: set[str] = set()
    while wanted:
        path = wanted.pop()
        seen.add(path)
        async with client.get(router.url + path) as answer:
            assert answer.status == 200, path
            found = re.findall(r'(?:from |src=|href=)"(/ui/[^"]+)"', await answer.text())
            wanted |= set(found) - seen
    pages = resources.files("sglang_ext.router") / "static" / "ui"
    shipped = {f"/ui/{item.name}" for item in pages.iterdir()}
    assert seen == shipped - {"/ui/index.html"}


async def test_nothing_else_can_be_had(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker())
    for path in ("/ui/nothing.js", "/ui/../config.py", "/ui/%2e%2e/config.py", "/ui//etc/passwd"):
        async with client.get(router.url + path) as answer:
            assert answer.status == 404, path


def test_the_page_loads_from_nowhere_else() -> None:
    for item in (resources.files("sglang_ext.router") / "static" / "ui").iterdir():
        assert not re.search(r"https?://|\binnerHTML\b|\beval\(", item.read_text()), item.name
