"""From places to backends."""

from __future__ import annotations

import os
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savestream.errors import PlanError
from savestream.storage_backends import (
    FileBackend,
    Location,
    MemoryBackend,
    TracingBackend,
    register_backend,
    registry,
    resolve_location,
)


@pytest.fixture
def schemes():
    before = dict(registry._registry.factories)
    yield
    registry._registry.factories.clear()
    registry._registry.factories.update(before)


def root_of(place) -> str:
    location = resolve_location(place)
    assert isinstance(location.backend, FileBackend)
    assert location.path == ""
    return location.backend.root


def test_paths_are_made_absolute_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    location = resolve_location("runs/a b")
    monkeypatch.chdir("/")
    assert location.backend.root == str(tmp_path / "runs" / "a b")
    assert location.url == (tmp_path / "runs" / "a b").as_uri()
    assert root_of(tmp_path / "x") == root_of(str(tmp_path / "x")) == str(tmp_path / "x")


@pytest.mark.skipif(os.name != "posix", reason="POSIX paths")
def test_what_only_looks_special_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in ("~/x", "C:\\x", "c:/x", "a:b", "s3:/x", "name:with:colons", "%41"):
        assert root_of(text) == str(tmp_path / text)
    assert root_of("link/../x") == str(tmp_path / "link/../x"), "only the system knows what '..' behind a link is"


@pytest.mark.skipif(os.name != "posix", reason="POSIX paths")
@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("file:///a/b", "/a/b"),
        ("FILE:///a/b", "/a/b"),
        ("file://localhost/a/b", "/a/b"),
        ("file:///a%20b/%3F%23%25/%C3%A9", "/a b/?#%/é"),
        ("file:///a/b/", "/a/b"),
    ],
)
def test_file_urls(url, root):
    assert root_of(url) == root


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("", "empty"),
        ("a\0b", "NUL"),
        ("file:///a%00b", "NUL"),
        ("file://host/a", "host"),
        ("file://", "host"),
        ("file:///", "no directory"),
        ("file:///a?b", "%3F"),
        ("file:///a#b", "%23"),
        ("memory://", "no store"),
        ("memory:///a", "no store"),
        ("memory://x/../a", "refused"),
        ("memory://x/a//b", "refused"),
        ("s3://bucket/key", r"no backend for s3://.*register_backend\('s3'"),
        ("gs://bucket/key", "no backend for gs://"),
        ("az://bucket/key", "no backend for az://"),
        ("http://user:secret@host/x", "no backend for http://"),
        (7, "not a int"),
        (None, "not a NoneType"),
        ((MemoryBackend(), "../a"), "refused"),
        ((MemoryBackend(),), "is .backend, path."),
        (("a", "b"), "is .backend, path."),
        ((MemoryBackend(), 7), "is .backend, path."),
    ],
)
def test_what_cannot_be_a_place_is_refused_with_the_cure(place, message):
    with pytest.raises(PlanError, match=message) as caught:
        resolve_location(place)
    assert "secret" not in str(caught.value)


async def test_memory_urls_name_one_store_per_name():
    first = resolve_location("memory://registry-test/a/b")
    assert (first.path, first.url) == ("a/b", "memory://registry-test/a/b")
    await first.backend.put("a/b", b"x")
    again = resolve_location("memory://registry-test")
    assert again.path == ""
    assert await again.backend.get("a/b", maximum_bytes=1) == b"x"
    other = resolve_location("memory://registry-test-2")
    assert await other.backend.head("a/b") is None


def test_a_backend_and_a_path():
    backend = TracingBackend(MemoryBackend("m"))
    location = resolve_location((backend, "a/b"))
    assert location.backend is backend
    assert location.path == "a/b"
    assert resolve_location(location) == location
    assert resolve_location((backend, "")).child("c") == Location(backend, "c")
    assert location.child("c/d").url == "memory://m/a/b/c/d"


def test_a_registered_scheme(schemes):
    seen = []

    def factory(url: str) -> Location:
        seen.append(url)
        return Location(MemoryBackend("bucket"), "key")

    register_backend("s3", factory)
    assert resolve_location("S3://user@bucket/Key?x=1").path == "key"
    assert seen == ["s3://user@bucket/Key?x=1"]
    for scheme in ("file", "memory", "S3", "x", "", "a b", "1a"):
        with pytest.raises(PlanError, match="scheme"):
            register_backend(scheme, factory)


@pytest.mark.skipif(os.name != "posix", reason="POSIX paths")
@given(
    st.lists(
        st.text(st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1).filter(
            lambda part: part not in (".", "..")
        ),
        min_size=2,
        max_size=4,
    )
)
def test_a_url_leads_back_to_its_place(parts):
    root = "/" + "/".join(parts[:-1])
    location = Location(FileBackend(root), parts[-1])
    assert root_of(location.url) == str(pathlib.Path(root) / parts[-1])
    assert root_of(location.backend.url) == root


def test_resolving_touches_no_storage(tmp_path):
    resolve_location(tmp_path / "a" / "b").child("c")
    assert list(tmp_path.iterdir()) == []
