"""The documentation is true: generated pages are up to date, links lead somewhere, examples run."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import python

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "layerzero"
PAGES = [page for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if page.exists()]
# Every page with Python on it is run: these elsewhere, the others here.
ELSEWHERE = {"hub": "tests/hub_kernels", "diffusers": "tests/pipelines", "api": "test_public_face",
             "quickstart": "the notebook, in test_site", "README": "test_readme"}
RUN = [page for page in PAGES if page.stem not in ELSEWHERE
       and re.search(r"^```python$", page.read_text("utf-8"), re.MULTILINE)]


@pytest.fixture(scope="module")
def generate() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


# generated pages

def test_the_generated_pages_are_up_to_date(generate):
    assert generate.out_of_date() == [], "run python docs/generate.py"


def test_check_names_what_is_stale_and_writes_nothing(generate, tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()                 # without the pages that have other blocks
    policy = (DOCS / "policy.md").read_text("utf-8")
    (tmp_path / "docs" / "policy.md").write_text(policy, "utf-8")
    monkeypatch.setattr(generate, "DOCS", tmp_path / "docs")
    assert generate.main(["--check"]) == 1
    output = capsys.readouterr().out
    names = ("api", "reason-codes", "capabilities", "ops", "settings", "events", "commands",
             "proof")
    assert [line.split()[0] for line in output.splitlines()] == [f"docs/reference/{name}.md"
                                                                 for name in names]
    assert not (tmp_path / "docs" / "reference").exists()
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    page = tmp_path / "docs" / "reference" / "ops.md"
    page.write_text(page.read_text("utf-8").replace("head_dim", "head_size"), "utf-8")
    (tmp_path / "docs" / "policy.md").write_text(policy.replace("`strict_mode` | bool",
                                                                "`strict_mode` | int"), "utf-8")
    (tmp_path / "docs" / "reference" / "old.md").write_text("left over")
    capsys.readouterr()
    assert generate.main(["--check"]) == 1
    output = capsys.readouterr().out
    assert all(name in output for name in ("docs/reference/ops.md", "docs/policy.md",
                                           "docs/reference/old.md"))
    assert "settings.md" not in output


def test_a_policy_page_without_its_marks_is_an_error(generate, tmp_path, monkeypatch):
    (tmp_path / "policy.md").write_text("no marks")
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    with pytest.raises(SystemExit, match="one block"):
        generate.pages()


def test_every_code_op_kernel_setting_and_event_has_its_row(generate):
    from layerzero.selection.policy import SETTINGS
    from layerzero.spec.event import Event
    from layerzero.spec.reason import Code
    from layerzero.world.registry.catalog import builtin_ops

    text = {path.stem: content for path, content in generate.pages().items()}
    assert all(f"| [`{code.value}`](" in text["reason-codes"] for code in Code)
    assert all(f"\n### {code.value}\n" in text["troubleshooting"] for code in Code)
    assert all(f"\n## {name}\n" in text["ops"] and f"\n## {name}\n" in text["capabilities"]
               for name in builtin_ops())
    assert all(f"| `{k.id}` |" in text["capabilities"] and f"- `{k.id}`: " in text["capabilities"]
               for k in generate.kernels())
    assert all(f"| `{name}` |" in text["settings"]
               and f"`LAYERZERO_{name.upper()}`" in text["settings"]
               for name in SETTINGS)
    assert all(f"| `{kind.name}` |" in text["events"] for kind in Event.__subclasses__())


# links and names

def heading_anchors(text: str) -> set[str]:
    """The anchors of a page, as renderers make them."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    heads = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in heading_anchors(path.read_text("utf-8"))):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_of_the_library_that_is_named_exists(page):
    rooms = "|".join(sorted(path.name for path in SOURCE.iterdir() if path.is_dir()
                            and path.name[0] != "_"))
    named = re.findall(rf"`(?:src/layerzero/)?((?:{rooms})/[\w/]*\w\.(?:py|cpp))`",
                       page.read_text("utf-8"))
    assert [name for name in named if not (SOURCE / name).exists()] == []


def test_the_architecture_page_names_every_room():
    text = (DOCS / "architecture.md").read_text("utf-8")
    rooms = [path.name for path in SOURCE.iterdir() if path.is_dir() and list(path.glob("*.py"))]
    assert [room for room in rooms if f"`{room}/`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_of_the_public_interface_that_is_used_exists(page):
    import layerzero as lz

    local = {"add_one", "geglu"}                # what the walk-throughs register
    text = page.read_text("utf-8")
    names = set(re.findall(r"\blz\.([A-Za-z_]\w*)", text)) - local
    assert [name for name in sorted(names) if not hasattr(lz, name)] == []
    grouped = set(re.findall(rf"\blz\.({'|'.join(lz._GROUPS)})\.([A-Za-z_]\w*)", text))
    assert [f"{group}.{name}" for group, name in sorted(grouped)
            if not hasattr(getattr(lz, group), name)] == []


# examples

def missing(need: str) -> bool:
    """Whether what a block says it needs is not here; it says so in a comment above it."""
    return not (torch.cuda.is_available() if need == "cuda" else importlib.util.find_spec(need))


def examples(page: Path, language: str) -> list[tuple[int, str]]:
    """The line at which each block of code begins, and its text; without those for what is not
    here."""
    text = page.read_text("utf-8")
    blocks = re.finditer(rf"^(?:<!-- needs: (\w+) -->\n)?```{language}\n(.*?)^```", text,
                         re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(2)) + 1, block[2]) for block in blocks
            if not (block[1] and missing(block[1]))]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page, world, monkeypatch, tmp_path, capsys):
    """The blocks of a page in order, in a namespace of their own."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": f"docs_{page.stem.replace('-', '_')}"}
    blocks = examples(page, "python")
    if not blocks:
        pytest.skip("every block of this page needs what is not here")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for line, source in blocks:
            file = page
            if named := re.match(r"# ([\w/]+\.py)\n", source):       # a file, which others read
                (tmp_path / named[1]).parent.mkdir(exist_ok=True)
                (tmp_path / named[1]).write_text(source)
                line, file = 1, tmp_path / named[1]
            # Line numbers as on the page, so that a failure points at the example.
            exec(compile("\n" * (line - 1) + source, str(file), "exec", dont_inherit=True),
                 namespace)


@pytest.mark.parametrize(("page", "check"), [
    ("adding-an-op", """
        gate, up = torch.randn(2, 8, 64), torch.randn(2, 8, 64)
        assert torch.equal(lz.geglu(gate, up), lz.op("geglu").reference(gate, up))
        assert "geglu" in dir(lz) and lz.which(lz.geglu, gate, up) == "reference.geglu"
    """),
    ("adding-a-backend", """
        x = torch.randn(4, 64)
        assert "numpy" not in [row.package for row in lz.list_kernels("attention")]
        torch.testing.assert_close(lz.rms_norm(x, backend="numpy"), lz.op("rms_norm").reference(x))
    """),
])
def test_a_plugin_made_as_the_page_says_is_found(page, check, tmp_path):
    """The file of the page in a package, entry points as an installer writes them, a process that
    imports only lz."""
    (_, source), *_ = examples(DOCS / f"{page}.md", "python")
    (_, toml), *_ = examples(DOCS / f"{page}.md", "toml")
    module = tmp_path / source.splitlines()[0].removeprefix("# ")
    module.parent.mkdir()
    module.write_text(source)
    metadata = tmp_path / f"{module.parent.name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {module.parent.name}\nVersion: 1.0\n")
    points = re.sub(r'\[project\.entry-points\."(.*?)"\]', r"[\1]", toml).replace('"', "")
    (metadata / "entry_points.txt").write_text(points)
    python("import torch\nimport layerzero as lz\n" + textwrap.dedent(check),
           PYTHONPATH=os.pathsep.join(
        [str(ROOT / "src"), str(tmp_path)]))
