"""No name, link, reference or archive leads out of a repository, and nothing is downloaded."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import hub_repositories as repositories
import pytest
from hub_repositories import UNIVERSAL, build, in_cache

from layerzero.integrations.hub import Content, Hub, HubError, NotHere, UnsafePath, unpack

NAME = "me/norm"


def hub_of(folder: Path, **options) -> Hub:
    return Hub(**{"folders": {NAME: folder}, "allow": ("me/*",), **options})


@pytest.mark.parametrize("name", ["../norm", "me/../norm", "me", "/etc/passwd", "me/norm/x",
                                  "me/..", "", "me\\norm", "me/norm\n", "C:/norm", "./norm",
                                  "me/no..rm"])
def test_names_that_are_paths(tmp_path, name):
    for ask in (lambda: Hub(allow=("*",)).load(name, version=1),
                lambda: Hub(folders={name: tmp_path}),
                lambda: Hub(allow=("*",)).lockfile(f"{name}@1")):
        with pytest.raises(UnsafePath, match="organisation/name"):
            ask()


@pytest.mark.parametrize("revision", ["../../x", "/etc", "a/b", "..", "", "a..b", "a\nb"])
def test_revisions_that_are_paths(tmp_path, revision):
    with pytest.raises(UnsafePath, match="a revision is"):
        Hub(allow=("*",), cache=tmp_path).load(NAME, revision=revision)


@pytest.mark.parametrize("options", [{"version": -1}, {"version": "1"}, {"version": True},
                                     {"version": 1, "revision": "main"}])
def test_versions_that_are_none(tmp_path, options):
    with pytest.raises(HubError, match="version"):
        hub_of(tmp_path).load(NAME, **options)


def test_a_reference_that_leads_elsewhere(tmp_path):
    build(tmp_path / "r")
    in_cache(tmp_path / "cache", tmp_path / "r", NAME, 1)
    build(tmp_path / "outside")
    for text in ("../../../outside", str(tmp_path / "outside"), "main"):
        (tmp_path / "cache" / "kernels--me--norm" / "refs" / "v1").write_text(text)
        with pytest.raises(UnsafePath, match="hash of a commit"):
            Hub(cache=tmp_path / "cache", allow=("*",)).load(NAME, version=1)


def link_outward(tmp_path: Path, how: str) -> Path:
    """A repository with a link that leads out of it."""
    repository = tmp_path / "r"
    folder = build(repository)
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "inner.py").write_text("x = 1")
    build(secret)
    if how == "file":
        (folder / "inner.py").symlink_to(secret / "inner.py")
    elif how == "relative":
        (folder / "inner.py").symlink_to("../../../secret/inner.py")
    elif how == "folder":
        (folder / "inner").symlink_to(secret)
    elif how == "inside":
        (folder / "inner").symlink_to(folder)
    elif how == "nothing":
        (folder / "inner.py").symlink_to(tmp_path / "nothing")
    elif how == "circle":
        (folder / "inner.py").symlink_to(folder / "inner.py")
    elif how == "metadata":
        (folder / "metadata.json").unlink()
        (folder / "metadata.json").symlink_to(secret / "build" / UNIVERSAL / "metadata.json")
    elif how == "pipe":
        os.mkfifo(folder / "pipe.py")
    elif how == "build":
        shutil.rmtree(repository / "build")
        (repository / "build").symlink_to(secret / "build")
    return repository


@pytest.mark.parametrize("how", [
    "file", "relative", "folder", "inside", "nothing", "circle", "metadata", "pipe", "build"])
def test_links_that_lead_out(tmp_path, how):
    repository = link_outward(tmp_path, how)
    with pytest.raises(UnsafePath):
        hub_of(repository).load(NAME)
    with pytest.raises(UnsafePath):
        hub_of(repository).lockfile(NAME)


def test_a_linked_build_is_rejected(tmp_path):
    build(tmp_path / "secret")
    (tmp_path / "r" / "build").mkdir(parents=True)
    (tmp_path / "r" / "build" / UNIVERSAL).symlink_to(tmp_path / "secret" / "build" / UNIVERSAL)
    explanation = hub_of(tmp_path / "r").explain(NAME)
    assert not explanation.ok and "outside of" in str(explanation.verdicts[0])


def test_links_of_the_cache_stay_in_it(tmp_path):
    build(tmp_path / "r", id="_links_a")
    in_cache(tmp_path / "cache", tmp_path / "r", NAME, 1)
    hub = Hub(cache=tmp_path / "cache", allow=("me/*",))
    assert hub.load(NAME, version=1).offers == ("rms_norm",)
    assert hub.explain(NAME, revision=repositories.commit_of(f"{NAME} 1")).ok


def pack(path: Path, members: dict[str, bytes], link: str = "") -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data)
            if link:
                info = zipfile.ZipInfo("link")
                info.external_attr = 0o120777 << 16
                archive.writestr(info, link)
        return path
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        if link:
            info = tarfile.TarInfo("link")
            info.type, info.linkname = tarfile.SYMTYPE, link
            archive.addfile(info)
    return path


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz"])
def test_archives(tmp_path, suffix):
    folder = build(tmp_path / "r", id=f"_archive_{suffix.strip('.').replace('.', '_')}")
    members = {f"build/{UNIVERSAL}/{p.name}": p.read_bytes() for p in folder.iterdir()}
    fine = unpack(pack(tmp_path / f"fine{suffix}", members), tmp_path / "fine")
    assert hub_of(fine).load(NAME).offers == ("rms_norm",)
    with pytest.raises(HubError, match="an empty or a new folder"):
        unpack(tmp_path / f"fine{suffix}", tmp_path / "fine")
    for i, bad in enumerate(("../evil", "build/../../evil", "/evil", "..\\evil", "C:/evil")):
        into = tmp_path / f"bad{i}"
        with pytest.raises(UnsafePath, match="would land outside"):
            unpack(pack(tmp_path / f"bad{i}{suffix}", {"first": b"x", bad: b"x"}), into)
        assert not into.exists() and not (tmp_path / "evil").exists(), "nothing of it"
    with pytest.raises(UnsafePath, match="a link or a device"):
        unpack(pack(tmp_path / f"link{suffix}", {"a": b"x"}, link="/etc"), tmp_path / "link")
    (tmp_path / f"junk{suffix}").write_bytes(b"PK\x03\x04 junk")
    with pytest.raises(HubError, match=r"wanted a repository as \.zip"):
        unpack(tmp_path / f"junk{suffix}", tmp_path / "junk")


# Not there

def test_what_is_not_here_is_not_downloaded(tmp_path):
    with pytest.raises(NotHere) as caught:
        Hub(cache=tmp_path, allow=("*",)).load("kernels-community/activation", version=1)
    assert str(tmp_path) in str(caught.value) and "nothing is downloaded" in str(caught.value)
    assert "install_kernel" in str(caught.value)
    build(tmp_path / "r")
    in_cache(tmp_path / "cache", tmp_path / "r", NAME, 3)
    hub = Hub(cache=tmp_path / "cache", allow=("*",))
    for options in ({"version": 1}, {}):
        with pytest.raises(NotHere, match="versions 3 are there"):
            hub.load(NAME, **options)
    with pytest.raises(NotHere, match="with builds in"):
        hub_of(tmp_path / "empty").load(NAME)


def test_the_content_of_a_folder(tmp_path):
    (tmp_path / "a").write_text("1")
    first = Content.of(tmp_path, tmp_path)
    assert set(first.files) == {"a"} and Content.of(tmp_path, tmp_path).sha256 == first.sha256
    (tmp_path / "b").write_text("")
    assert Content.of(tmp_path, tmp_path).sha256 != first.sha256
    (tmp_path / "b").unlink()
    (tmp_path / "a").rename(tmp_path / "c")
    assert Content.of(tmp_path, tmp_path).sha256 != first.sha256, "the name counts"
