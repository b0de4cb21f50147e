"""Building the kernels: what the cache tells apart, and that whatever goes wrong is a reason, not an exception."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qarl.ops import library
from qarl.ops.library import Build, build, cache_folder, find_compiler, library_path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    library.built.cache_clear()
    library.load.cache_clear()
    yield
    library.built.cache_clear()
    library.load.cache_clear()


@pytest.fixture
def compiler() -> str:
    found = find_compiler()
    if found is None:
        pytest.skip("no C compiler here")
    return found


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel that compiles quickly."""
    path = tmp_path / "tiny.c"
    path.write_text("int answer(void) { return 42; }\n")
    monkeypatch.setattr(library, "SOURCES", (path,))
    return path


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    assert cache_folder() == tmp_path / "cache" / "qarl"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "qarl"


def test_the_kernels_compile_without_a_warning(compiler, monkeypatch):
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"))
    found = build()
    assert found.path is not None, found.reason
    assert ctypes.CDLL(str(found.path)).qarl_matmul


def test_a_second_build_comes_from_the_cache(compiler, source):
    first = build()
    assert first == Build(library_path(compiler), compiler, "compiled")
    assert build() == Build(first.path, compiler, "from cache")
    assert ctypes.CDLL(str(first.path)).answer() == 42


def test_another_source_flag_compiler_or_processor_is_another_library(compiler, source, tmp_path, monkeypatch):
    paths = [library_path(compiler), library_path(compiler)]
    assert paths[0] == paths[1]
    source.write_text(source.read_text() + "// changed\n")
    paths.append(library_path(compiler))
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-O1"))
    paths.append(library_path(compiler))
    other = tmp_path / "cc"
    other.symlink_to(compiler)
    paths.append(library_path(str(other)))
    monkeypatch.setattr(library, "cpu_identity", lambda: "another processor")
    paths.append(library_path(compiler))
    assert len(set(paths)) == len(paths) - 1


def test_another_version_of_the_same_compiler_is_another_library(source, tmp_path):
    fake = tmp_path / "fakecc"
    paths = []
    for version in ("1", "2"):
        fake.write_text(f"#!/bin/sh\necho version {version}\n")
        fake.chmod(0o755)
        paths.append(library_path(str(fake)))
    assert paths[0] != paths[1]


def test_the_environment_chooses_the_compiler(compiler, tmp_path, monkeypatch):
    (tmp_path / "mycc").symlink_to(compiler)
    monkeypatch.setenv("CC", str(tmp_path / "mycc"))
    assert find_compiler() == str(tmp_path / "mycc")


def test_a_compiler_that_is_not_there_is_a_reason(monkeypatch):
    monkeypatch.setenv("CC", "/no/such/compiler")
    assert build() == Build(None, None, "no C compiler found (looked for /no/such/compiler)")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert build() == Build(None, None, "no C compiler found (looked for cc, gcc, clang)")
    assert library.load() is None


def test_a_compiler_that_fails_is_a_reason(source, monkeypatch):
    monkeypatch.setenv("CC", "/bin/false")
    found = build()
    assert found.path is None
    assert found.compiler == "/bin/false"
    assert found.reason.startswith("/bin/false -O3")
    assert "failed" in found.reason
    assert list(cache_folder().iterdir()) == []


def test_a_source_that_does_not_compile_is_a_reason_in_the_compilers_words(compiler, source):
    source.write_text("int answer(void) { return forty_two; }\n")
    found = build()
    assert found.path is None
    assert "forty_two" in found.reason


def test_a_compiler_that_cannot_be_started_is_a_reason(tmp_path, monkeypatch):
    (tmp_path / "broken").write_bytes(b"\x00\x01")
    (tmp_path / "broken").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "broken"))
    assert build().path is None
    assert build().reason.startswith("cannot build the kernels: ")


def test_a_cache_that_cannot_be_written_is_a_reason(compiler, source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = build()
    assert found.path is None
    assert str(tmp_path / "file") in found.reason


def test_a_library_that_cannot_be_loaded_counts_as_none(compiler, source):
    path = library_path(compiler)
    path.parent.mkdir(parents=True)
    path.write_text("not a library")
    assert library.built().path is None
    assert library.built().reason.startswith(f"cannot load {path}: ")
    assert library.load() is None


def test_builds_at_the_same_time_all_get_a_whole_library(compiler, source):
    with ThreadPoolExecutor(6) as pool:
        found = [future.result() for future in [pool.submit(build) for _ in range(6)]]
    assert {one.path for one in found} == {library_path(compiler)}
    assert list(cache_folder().iterdir()) == [library_path(compiler)], "nothing half done is left"
    assert ctypes.CDLL(str(found[0].path)).answer() == 42
