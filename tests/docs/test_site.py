"""The built site: no warning, every public name, Markdown beside each page, and what a browser makes of it."""

from __future__ import annotations

import functools
import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tools.docs.public_names import public_names

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        importlib.util.find_spec("sphinx") is None,
        reason="the site is built with Sphinx, on Python 3.11 or newer: pip install 'accelight[docs]'",
    ),
]
WIDTHS = [400, 1320]  # pixels of a phone, and of the narrowest screen with a page's contents beside it

# Loads each page into a frame, one after the other, and writes down the widths in which it does not fit, and what is
# hard to read in each theme: text whose contrast with its background is under 4.5 (WCAG's AA), and plots, which are
# drawn in black, on a dark background.
_PROBE = """<!doctype html><body><pre id="found"></pre><script>
const pages = %s, widths = %s;
const frame = document.createElement("iframe");
frame.style.height = "800px";
document.body.append(frame);
const rgba = (colour) => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
const over = ([r, g, b, a], below) => [r, g, b].map((part, i) => part * a + below[i] * (1 - a));
const luminance = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, share, i) => {
  const part = colour[i] / 255;
  return sum + share * (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
}, 0);
function hardToRead(shown) {
  const view = shown.defaultView, seen = new Map();
  const behind = (element) => {
    if (!element) return [255, 255, 255];
    if (!seen.has(element)) seen.set(element,
      over(rgba(view.getComputedStyle(element).backgroundColor), behind(element.parentElement)));
    return seen.get(element);
  };
  const found = new Set();
  const texts = shown.createTreeWalker(shown.querySelector("article"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !element.checkVisibility({ visibilityProperty: true })) continue;
    if (element.closest("a.headerlink, .copybtn")) continue; // shown while the mouse is over them
    const below = behind(element), colour = over(rgba(view.getComputedStyle(element).color), below);
    const [dark, light] = [luminance(colour), luminance(below)].sort((a, b) => a - b);
    const contrast = (light + 0.05) / (dark + 0.05);
    if (contrast < 4.5) found.add(`${element.className} ${contrast.toFixed(1)} ${texts.currentNode.data.trim()}`);
  }
  for (const plot of shown.querySelectorAll('article img[src$=".svg"]'))
    if (luminance(behind(plot)) < 0.8) found.add("IMG " + plot.getAttribute("src"));
  return [...found];
}
function next() {
  if (!pages.length) { document.body.id = "done"; return; }
  const page = pages.shift();
  frame.onload = () => {
    const shown = frame.contentDocument, lines = [];
    if (!shown.querySelector("article h1")) lines.push(`no heading: ${page}`);
    for (const width of widths) {
      frame.style.width = width + "px";
      if (shown.documentElement.scrollWidth > width) lines.push(`too wide: ${page} ${width}`);
    }
    for (const theme of ["light", "dark"]) {
      shown.body.dataset.theme = theme; // as the theme's own switch does
      for (const text of hardToRead(shown)) lines.push(`hard to read: ${page} (${theme}) ${text}`);
    }
    document.getElementById("found").append(["shown: " + page, ...lines, ""].join("\\n"));
    next();
  };
  frame.src = page;
}
next();
</script></body>"""

# Asks the search one question after the other and writes down its first results.
_ASK = """<!doctype html><body><pre id="found"></pre><script>
const questions = %s;
const frame = document.createElement("iframe");
document.body.append(frame);
async function ask() {
  for (const question of questions) {
    frame.src = "search.html?q=" + encodeURIComponent(question);
    await new Promise((loaded) => (frame.onload = loaded));
    const shown = frame.contentDocument;
    while (!/finished|not match/.test(shown.querySelector(".search-summary")?.textContent ?? ""))
      await new Promise((later) => setTimeout(later, 5));
    const links = [...shown.querySelectorAll("#search-results li > a")].slice(0, %d);
    document.getElementById("found").append(
      ["\\n" + question, ...links.map((link) => link.getAttribute("href"))].join(" | "));
  }
  document.body.id = "done";
}
ask();
</script></body>"""

QUESTIONS = {
    "clip grad norm FSDP": ("fsdp.html#clipping",),
    "resume fewer GPUs": ("howto/resume.html",),
    "merge sharded checkpoint": ("howto/merge-publish.html",),
    "convert checkpoint to safetensors": ("howto/merge-publish.html", "checkpoint.html"),
    "how much GPU memory do I need": ("howto/plan-memory.html",),
    "CUDA out of memory": ("howto/plan-memory.html", "troubleshooting.html"),
    "training hangs NCCL timeout": ("howto/long-runs.html#find-out-which-process-hangs",),
    "effective batch size gradient accumulation": ("concepts/accumulation.html",),
    "bf16 mixed precision": ("concepts/precision.html",),
    "activation checkpointing to save memory": ("fsdp.html",),
    "stop training on all ranks when loss is NaN": ("howto/signals.html", "callbacks.html"),
    "skip step with NaN gradients": ("howto/long-runs.html#skip-bad-steps-find-broken-copies",),
    "save checkpoints to S3 bucket": ("howto/object-stores.html",),
    "LoRA with FSDP": ("howto/lora.html",),
    "SLURM preemption requeue": ("callbacks.html#on-slurm",),
    "two optimizers GAN manual optimization": ("howto/gan.html",),
    "validation metrics differ on multiple GPUs": ("howto/exact-evaluation.html",),
    "EMA of the weights": ("howto/averages-and-teachers.html",),
    "fine-tune Hugging Face model": ("howto/finetune-hf.html",),
    "torch.compile with FSDP": ("fsdp.html#compilation",),
    "train model larger than GPU memory, offload to CPU": ("deepspeed.html", "fsdp.html"),
    "which strategy should I use": ("choosing.html",),
    "run in a Jupyter notebook": ("howto/notebook.html",),
    "tied embeddings weights": ("checkpoint.html#tied-weights",),
}
"""What a user of Lightning types, without accelight's words, and the pages that answer it."""
FIRST = 3


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    options = ["-W", "-n", "--keep-going", "-q", "-b", "html", "-d", str(folder / "doctrees")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELIGHT_DOCS")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / ".types"), str(ROOT)])
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(folder / "html")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


def _pages(site: Path) -> list[str]:
    names = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    return [name for name in names if name not in ("genindex.html", "py-modindex.html", "search.html")]


def test_every_public_name_has_an_entry(site: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    entries = {name for kind, found in inventory.data.items() if kind.startswith("py:") for name in found}
    assert set(public_names().values()) <= entries


def test_markdown_lies_beside_each_page(site: Path) -> None:
    for page in _pages(site):
        text = (site / page).with_suffix(".md").read_text(encoding="utf-8")
        assert text.startswith(("# ", "<!-- ")), page
        assert "{eval-rst}" not in text, page
        assert "{include}" not in text, page
    assert "gather_for_metrics(" in (site / "api" / "state.md").read_text(encoding="utf-8")
    assert "0.1.0" in (site / "changelog.md").read_text(encoding="utf-8")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def _browse(url: str, folder: Path, budget_ms: int) -> tuple[str, list[str]]:
    """Return a page's DOM when its scripts have run, and what they have written to the console."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no Chromium: apt install chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--enable-logging=stderr"]
    command = [program, *options, f"--virtual-time-budget={budget_ms}", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_search_finds_a_name(address: str, tmp_path: Path) -> None:
    dom, console = _browse(f"{address}/search.html?q=gather_for_metrics", tmp_path, 20_000)
    results = re.findall(r'<li[^>]*>\s*<a href="([^"]+)"', dom[dom.index('id="search-results"') :])
    assert any("api/state.html#accelight.state.gather_for_metrics" in html.unescape(link) for link in results), results
    assert console == []


def test_all_pages_fit_screens_and_can_be_read_in_light_and_dark(site: Path, address: str, tmp_path: Path) -> None:
    pages = _pages(site)
    (site / "probe.html").write_text(_PROBE % (pages, WIDTHS), encoding="utf-8")
    try:
        dom, console = _browse(f"{address}/probe.html", tmp_path, 300_000)
    finally:
        (site / "probe.html").unlink()
    assert 'id="done"' in dom
    found = html.unescape(dom)
    assert re.findall(r"shown: (\S+)$", found, re.MULTILINE) == pages
    assert re.findall("^(?:no heading|too wide|hard to read): .*$", found, re.MULTILINE) == []
    assert console == []


def test_the_search_answers_questions_in_the_words_of_users(site: Path, address: str, tmp_path: Path) -> None:
    (site / "ask.html").write_text(_ASK % (json.dumps(list(QUESTIONS)), FIRST), encoding="utf-8")
    try:
        dom, console = _browse(f"{address}/ask.html", tmp_path, 300_000)
    finally:
        (site / "ask.html").unlink()
    assert 'id="done"' in dom
    found = dict(line.split(" | ", 1) for line in html.unescape(dom).splitlines() if " | " in line)
    missed = {
        asked: found.get(asked)
        for asked, pages in QUESTIONS.items()
        if not any(page in found.get(asked, "") for page in pages)
    }
    assert missed == {}
    assert console == []
