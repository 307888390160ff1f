"""A result is one line in a traceback, a table in a notebook, and in full when printed."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch

import layerzero as lz
from layerzero.plan.dryrun import DryRun
from layerzero.spec.display import Displayed
from layerzero.tuning.report import TuneReport


class Balance(HTMLParser):
    """Counts rows, and fails where a tag is closed that is not open."""

    def __init__(self):
        super().__init__()
        self.open, self.rows = [], 0

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.rows += tag == "tr"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def results():
    x = torch.ones(2, 8)
    lz.rms_norm(x)
    return [lz.explain("rms_norm", x), lz.doctor(), lz.stats(), DryRun(()), TuneReport(),
            lz.dry_run(lambda y: lz.rms_norm(y), x)]


@pytest.mark.parametrize("index", range(6))
def test_a_result_has_a_short_repr_and_a_table(results, index):
    result = results[index]
    text = repr(result)
    assert text.startswith(f"<{type(result).__name__}: ") and text.endswith(">")
    assert len(text) <= 200 and "\n" not in text
    balance = Balance()
    balance.feed(result._repr_html_())
    assert not balance.open and balance.rows >= 1


def test_the_table_of_a_plan_names_every_kernel_with_its_reasons():
    plan = lz.explain("rms_norm", torch.ones(2, 8))
    page = plan._repr_html_()
    for kernel in (*(s.kernel for s in plan.steps), *(r.kernel for r in plan.rejected)):
        assert kernel in page
    assert "rms_norm -&gt; " in page


def test_text_is_escaped_and_a_long_headline_cut():
    class Report(Displayed):
        def __str__(self):
            return "<b>" + "long " * 100 + "\nmore"

    assert "<b>" not in Report()._repr_html_() and "more" in Report()._repr_html_()
    assert len(repr(Report())) < 200 and repr(Report()).endswith("...>")
