"""Pages in a headless Chromium, driven by its DevTools protocol over a pipe: no package is needed.

    with Browser() as browser:
        seen = browser.look(Path("report.html"), width=400, scheme="dark", picture=Path("dark.png"))
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)
FLAGS = ("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
         "--remote-debugging-pipe")
# Chromium listens on the descriptor 3 and answers on 4.
LAUNCH = ("import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
          "os.execv(sys.argv[3], sys.argv[3:])")

# Everything the assertions need, asked of the laid out page with all its details open.
PROBE = r"""(() => {
  const folded = [...document.querySelectorAll('details:not([open])')];
  folded.forEach(d => d.open = true);
  const right = document.documentElement.clientWidth + 1;
  const wide = [...document.body.querySelectorAll('*')].filter(e => !e.closest('.scroll')
    && !e.closest('svg') && e.getBoundingClientRect().right > right);
  const style = e => getComputedStyle(e);
  const shown = e => e.getClientRects().length > 0;
  const meets = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
    && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const collisions = [...document.querySelectorAll('svg')].map(svg => {
    // a rotated text has a box far larger than itself
    const texts = [...svg.querySelectorAll('text')].filter(t => !t.hasAttribute('transform'));
    const boxes = texts.map(t => t.getBoundingClientRect());
    return boxes.flatMap((a, i) => boxes.slice(i + 1).flatMap((b, j) => meets(a, b)
      ? [texts[i].textContent + ' / ' + texts[i + 1 + j].textContent] : []));
  }).flat();
  const outside = [...document.querySelectorAll('svg')].flatMap(svg => {
    const frame = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text')].filter(t => {
      const box = t.getBoundingClientRect();
      return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
        || box.bottom > frame.bottom + 1;
    }).map(t => t.textContent);
  });
  const found = {
    width: innerWidth, page_width: document.documentElement.scrollWidth,
    dark: matchMedia('(prefers-color-scheme: dark)').matches,
    background: style(document.body).backgroundColor, collisions, outside,
    too_wide: wide.slice(0, 5).map(e => e.tagName + '.' + e.className),
    spilled: [...document.querySelectorAll('th, td')].filter(
      e => e.scrollWidth > e.clientWidth + 1).length,
    scrolling_tables: [...document.querySelectorAll('.scroll')].filter(
      e => e.scrollWidth > e.clientWidth + 1).map(e => e.getAttribute('aria-label')),
    cells: [...document.querySelectorAll('td.cell')].filter(shown).map(
      e => [style(e).backgroundColor, style(e).color]),
    text: document.body.innerText, scripts: document.scripts.length,
    images: document.images.length, points: document.querySelectorAll('svg circle').length,
    injected: window.injected === undefined ? null : 1};
  folded.forEach(d => d.open = false);
  return found;
})()"""


class Browser:
    """One Chromium process with an empty profile; a page of its own for each look."""

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        flags = [*FLAGS, f"--user-data-dir={self._profile}"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:       # Chromium's sandbox refuses root
            flags.append("--no-sandbox")
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(read_there), str(write_there), CHROMIUM, *flags],
            pass_fds=(read_there, write_there), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(read_there)
        os.close(write_there)
        self._in, self._out = os.fdopen(read_here, "rb", 0), os.fdopen(write_here, "wb", 0)
        self._rest, self._number = b"", 0
        self._events: list[dict[str, Any]] = []
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._in.close()
        self._out.close()
        shutil.rmtree(self._profile, ignore_errors=True)

    def look(self, page: Path, width: int, height: int = 900, scheme: str = "light",
             picture: Path | None = None) -> dict[str, Any]:
        """Load a page; return what Chromium says of it, what it asked for and what it printed."""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._events.clear()
        for domain in ("Page", "Network", "Runtime"):
            self._ask(f"{domain}.enable", session)
        self._ask("Emulation.setDeviceMetricsOverride", session, width=width, height=height,
                  deviceScaleFactor=1, mobile=False)
        self._ask("Emulation.setEmulatedMedia", session,
                  features=[{"name": "prefers-color-scheme", "value": scheme}])
        url = page.resolve().as_uri()
        self._ask("Page.navigate", session, url=url)
        while not any(e["method"] == "Page.loadEventFired" for e in self._events):
            self._events.append(self._receive())
        result = self._ask("Runtime.evaluate", session, expression=PROBE, returnByValue=True)
        if picture is not None:
            shot = self._ask("Page.captureScreenshot", session, captureBeyondViewport=True)
            picture.write_bytes(base64.b64decode(shot["data"]))
        asked = [e["params"]["request"]["url"] for e in self._events
                 if e["method"] == "Network.requestWillBeSent"]
        printed = [str(e["params"]["args"][0].get("value")) for e in self._events
                   if e["method"] == "Runtime.consoleAPICalled"]
        self._ask("Target.closeTarget", targetId=target)
        return {**result["result"]["value"], "console": printed,
                "requests": [u for u in asked if u != url and not u.startswith("data:")]}

    def _ask(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            if "method" in answer:
                self._events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._in.fileno(), 1 << 20)
            assert part, "Chromium ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
