"""The documentation site builds without a warning, loads nothing from elsewhere, and works in a browser."""

import json
import os
import re
import resource
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest

import gradwire
from chromium import CHROMIUM
from gradwire import extend

ROOT = Path(__file__).parent.parent
BUILD_SECONDS = 30  # of processors, which CI may spend on a strict build
BROWSER_SECONDS = 90  # by the clock, in which the browser has found and posted everything
LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)")
# Appended to the start page: searches, looks at pages in frames of 400 pixels, and posts what it found.
READER = """
<script>
(async () => {
  const wait = async (ready) => { while (!ready()) await new Promise((go) => setTimeout(go, 50)); };
  const found = { wide: [], hits: [] };
  for (const page of ["index", "choose", "results", "api", "codecs", "network", "training"]) {
    const frame = document.createElement("iframe");
    frame.width = 400; frame.height = 800;
    const loaded = new Promise((go) => frame.addEventListener("load", go));
    frame.src = page + ".html"; document.body.append(frame); await loaded;
    const root = frame.contentDocument.documentElement;
    if (root.scrollWidth > root.clientWidth || !root.querySelector("h1")) found.wide.push(page);
    frame.remove();
  }
  const field = document.querySelector(".md-search__input");
  field.focus(); field.value = "PowerSGD"; field.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
  const links = () => [...document.querySelectorAll(".md-search-result__link")];
  await wait(() => links().length > 0);
  found.hits = links().map((link) => new URL(link.href).pathname);
  await fetch("/found", { method: "POST", body: JSON.stringify(found) });
})();
</script>
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="the extra gradwire[docs] is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    before = processor_seconds()
    made = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    assert processor_seconds() - before < BUILD_SECONDS
    return folder


def processor_seconds() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    assert not {(page.name, link) for page in pages for link in LOADED.findall(page.read_text())}


def test_the_reference_documents_every_export(site: Path) -> None:
    headings = re.findall(r'<h3 id="(?:gradwire\.)?([^"]+)"', (site / "api.html").read_text())
    assert not set(gradwire.__all__) - {heading.rpartition(".")[2] for heading in headings}
    of_authors = {heading.removeprefix("extend.") for heading in headings if heading.startswith("extend.")}
    named = set(re.findall(r"<td><code>(\w+)</code></td>", (site / "api.html").read_text()))
    assert "roundtrip" in of_authors and not set(extend.__all__) - of_authors - named


def test_search_knows_every_page(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = {entry["location"].partition("#")[0] for entry in entries}
    assert {str(page.relative_to(site)) for page in site.rglob("*.html")} - {"404.html"} <= found


class Server(SimpleHTTPRequestHandler):
    """Serves the site, and takes one answer of the browser."""

    def __init__(self, *args: Any, answers: SimpleQueue[Any], **options: Any) -> None:
        self.answers = answers
        super().__init__(*args, **options)

    def do_POST(self) -> None:
        self.answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; apt-get install chromium")
def test_a_browser_finds_pages_and_shows_them_on_400_pixels(site: Path, tmp_path: Path) -> None:
    (site / "reader.html").write_text((site / "index.html").read_text().replace("</body>", READER + "</body>"))
    answers: SimpleQueue[Any] = SimpleQueue()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, answers=answers, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page = f"http://127.0.0.1:{server.server_port}/reader.html"
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
        command = [CHROMIUM, *flags, "--remote-debugging-port=0", "--enable-logging=stderr", "--window-size=1280,900"]
        with (tmp_path / "log").open("w") as log:
            browser = subprocess.Popen([*command, f"--user-data-dir={tmp_path / 'profile'}", page], stderr=log)
            try:
                found = answers.get(timeout=BROWSER_SECONDS)
            finally:
                browser.terminate()
                browser.wait(30)
                server.shutdown()
                (site / "reader.html").unlink()
    assert found["wide"] == []
    assert any(hit.endswith("/codecs.html") for hit in found["hits"])
    assert not [line for line in (tmp_path / "log").read_text().splitlines() if "CONSOLE" in line]
