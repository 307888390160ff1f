"""What the tests of the report share: rows that were measured, and a reader of the page."""

from __future__ import annotations

from html.parser import HTMLParser

from layerzero.perf.record import Measurement, Rates
from layerzero.report.overview import Overview, Usage, group_by_kind

HOSTILE = ("x\"'><script>window.injected=1</script><img src=http://evil.example/a.png "
           "onerror=alert(1)>")
RATES = Rates(flops_per_us=100_000.0, bytes_per_us=10_000.0)


def measured(kernel, us, op="linear", family="float32", rows=64, **more):
    sizes = f"rows={rows} hidden=1024"
    return Measurement(kernel, op, f"{family} {sizes}", "here-2t", us, family=family, **{
        "spread": 0.03, "samples": 20, "sizes": sizes, "flops": 2e6, "bytes": 1e5, **more})


ROWS = (measured("fast.one", 50.0), measured("torch.own", 100.0),
        measured("slow.one", 225.0, samples=1, spread=0.0),
        measured("torch.own", 40.0, rows=512), measured("fast.one", 40.4, rows=512, spread=0.6),
        measured("torch.own", 10.0, family="float32 grad"))
BASELINES = frozenset({"torch.own"})


def overview(rows=ROWS, rates=RATES, **more):
    more = {"kinds": group_by_kind(rows, rates, BASELINES), **more}
    return Overview("A machine", "here-2t", "2026-01-02 03:04", rates=rates, ops=9, **more)


class Reader(HTMLParser):
    """The page as tags, attributes and text; complains about what is not closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.rows, self.texts = [], [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append(["", dict(attrs).get("class") or ""])
        if tag not in ("meta", "link", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.texts.append(data)
        if any(tag in ("td", "th") for tag in self.open):
            self.rows[-1][-1][0] += data

    @property
    def text(self):
        return "".join(self.texts)


def flat(text):
    """The words of a text, each with one plain space between them."""
    return " ".join(text.split())


THREE = (measured("torch.own", 80.0, rows=1), measured("fast.one", 10.0, rows=1),
         measured("fast.one", 1.0, rows=3),
         measured("torch.own", 20.0, rows=2), measured("fast.one", 10.0, rows=2))


def usages(**calls):
    """A workload: rows1=(calls, chosen kernel)."""
    return {("linear", f"float32 rows={name[4:]} hidden=1024"): Usage(n, chosen, f"x={name}")
            for name, (n, chosen) in calls.items()}


def us(n):
    return f"{n}\N{NO-BREAK SPACE}µs"
