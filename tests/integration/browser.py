"""Shows pages in Chromium without a screen and says what it saw: run as a process, by tests that
need a browser.

    python browser.py '[{"page": "report.html", "width": 360, "height": 800, "scheme": "dark", "png": "dark.png"}]'

All views of one run have the same `scheme`: Chromium is told once, when it starts. Chromium comes
with the package PyQt6-WebEngine. One line of JSON per view goes to stdout.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

VIEWS = json.loads(sys.argv[1])
SCHEME = VIEWS[0]["scheme"]
FLAGS = ["--disable-gpu", f"--blink-settings=preferredColorScheme={0 if SCHEME == 'dark' else 1}"]
if hasattr(os, "geteuid") and os.geteuid() == 0:       # Chromium's sandbox refuses root
    FLAGS.append("--no-sandbox")
os.environ |= {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_CHROMIUM_FLAGS": " ".join(FLAGS)}

from PyQt6.QtCore import QTimer, QUrl  # noqa: E402
from PyQt6.QtWebEngineCore import (  # noqa: E402
    QWebEnginePage,
    QWebEngineSettings,
    QWebEngineUrlRequestInterceptor,
    qWebEngineChromiumVersion,
)
from PyQt6.QtWebEngineWidgets import QWebEngineView  # noqa: E402
from PyQt6.QtWidgets import QApplication  # noqa: E402

# Everything the assertions need, asked of the laid out page.
PROBE = r"""(() => {
  const folded = [...document.querySelectorAll('details:not([open])')];
  folded.forEach(d => d.open = true);
  const wide = [...document.body.querySelectorAll('*')].filter(e => !e.closest('.scroll') && !e.closest('svg')
    && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1);
  const style = e => getComputedStyle(e);
  const found = JSON.stringify({
    width: innerWidth, page_width: document.documentElement.scrollWidth,
    dark: matchMedia('(prefers-color-scheme: dark)').matches, background: style(document.body).backgroundColor,
    too_wide: wide.slice(0, 5).map(e => e.tagName + '.' + e.className),
    spilled: [...document.querySelectorAll('th, td')].filter(e => e.scrollWidth > e.clientWidth + 1).length,
    scrolling_tables: [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length,
    cells: [...document.querySelectorAll('td.cell')].map(e => [style(e).backgroundColor, style(e).color]),
    text: document.body.innerText, scripts: document.scripts.length, images: document.images.length,
    points: document.querySelectorAll('svg circle').length, injected: window.injected === undefined ? null : 1});
  folded.forEach(d => d.open = false);
  return found;
})()"""


class Recorder(QWebEngineUrlRequestInterceptor):
    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def interceptRequest(self, info) -> None:
        self.urls.append(info.requestUrl().toString())


class Page(QWebEnginePage):
    def __init__(self, parent) -> None:
        super().__init__(parent)
        self.console: list[str] = []

    def javaScriptConsoleMessage(self, level, message, line, source) -> None:
        self.console.append(message)


class Visit:
    """One view after the other: load, ask, take the picture."""

    def __init__(self, app: QApplication) -> None:
        self.app, self.left = app, list(VIEWS)

    def next(self) -> None:
        if not self.left:
            self.app.quit()
            return
        self.view = self.left.pop(0)
        self.window, self.requests = QWebEngineView(), Recorder()
        self.page = Page(self.window)
        self.page.setUrlRequestInterceptor(self.requests)
        # or a local page may not even try, and nothing would be seen
        self.page.settings().setAttribute(
            QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls, True)
        self.window.setPage(self.page)
        self.window.resize(self.view["width"], self.view["height"])
        self.window.loadFinished.connect(self.loaded)
        self.window.show()
        self.window.load(QUrl.fromLocalFile(str(Path(self.view["page"]).resolve())))

    def loaded(self, ok: bool) -> None:
        self.ok = ok
        self.page.runJavaScript(PROBE, self.probed)

    def probed(self, answer) -> None:
        self.found = json.loads(answer)
        self.page.runJavaScript(self.view.get("before_picture", ""))
        QTimer.singleShot(600, self.taken)

    def taken(self) -> None:
        picture = self.window.grab().toImage()
        seen = {picture.pixel(x, y) for x in range(0, picture.width(), 3)
                for y in range(0, picture.height(), 3)}
        own = QUrl.fromLocalFile(str(Path(self.view["page"]).resolve())).toString()
        print(json.dumps({
            "chromium": qWebEngineChromiumVersion(), "loaded": self.ok,
            "picture": picture.save(self.view["png"]), "colours": len(seen),
            "console": self.page.console,
            "requests": [u for u in self.requests.urls if u != own and not u.startswith("data:")],
            **self.found}),
            flush=True)
        self.window.close()
        self.next()


app = QApplication(sys.argv[:1])
visit = Visit(app)
QTimer.singleShot(0, visit.next)
QTimer.singleShot(120_000, lambda: app.exit(3))
raise SystemExit(app.exec())
