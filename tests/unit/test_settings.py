"""The settings registry: defaults, typed values, and errors that name the variable, the value and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3dsl import settings
from k3dsl.errors import ArgumentError, UnknownNameError


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for setting in settings.all():
        monkeypatch.delenv(setting.name, raising=False)


def test_the_registry_lists_every_variable_with_its_meaning():
    names = [setting.name for setting in settings.all()]
    assert names == ["K3DSL_CACHE_DIR", "K3DSL_BACKEND", "K3DSL_CHECK", "K3DSL_DUMP", "K3DSL_PACK"]
    assert all(setting.doc.endswith(".") and setting.type for setting in settings.all())


def test_defaults():
    assert settings.get("K3DSL_BACKEND") == "auto"
    assert settings.get("K3DSL_CHECK") is True
    assert settings.get("K3DSL_DUMP") is None
    assert settings.get("K3DSL_PACK") == "auto"
    assert settings.get("K3DSL_CACHE_DIR").name == "k3dsl"
    assert not any(setting.is_set() for setting in settings.all())


def test_the_default_cache_follows_the_platforms_convention(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settings.CACHE_DIR.value() == tmp_path / "k3dsl"


def test_folders_are_absolute_and_may_not_exist_yet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("K3DSL_CACHE_DIR", "somewhere/new")
    monkeypatch.setenv("K3DSL_DUMP", "~/dump")
    assert settings.get("K3DSL_CACHE_DIR") == tmp_path / "somewhere" / "new"
    assert settings.get("K3DSL_DUMP") == Path.home() / "dump"
    assert not (tmp_path / "somewhere").exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", True),
        ("true", True),
        ("Yes", True),
        ("on", True),
        ("0", False),
        ("false", False),
        ("no", False),
        ("OFF", False),
    ],
)
def test_a_flag_takes_the_usual_words(monkeypatch, text, value):
    monkeypatch.setenv("K3DSL_CHECK", text)
    assert settings.CHECK.is_set()
    assert settings.get("K3DSL_CHECK") is value


def test_a_backend_is_one_of_the_choices(monkeypatch):
    monkeypatch.setenv("K3DSL_BACKEND", "Triton")
    assert settings.BACKEND.value() == "triton"


@pytest.mark.parametrize("name", ["K3DSL_CACHE_DIR", "K3DSL_BACKEND", "K3DSL_CHECK", "K3DSL_DUMP", "K3DSL_PACK"])
def test_an_empty_variable_counts_as_unset(monkeypatch, name):
    default = settings.get(name)
    monkeypatch.setenv(name, " ")
    assert settings.get(name) == default


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("K3DSL_BACKEND", "cuda", "auto, torch, triton"),
        ("K3DSL_CHECK", "maybe", "1 or 0"),
        ("K3DSL_DUMP", __file__, "a folder"),
    ],
)
def test_a_bad_value_names_the_variable_the_value_and_the_remedy(monkeypatch, name, text, remedy):
    monkeypatch.setenv(name, text)
    with pytest.raises(ArgumentError) as caught:
        settings.get(name)
    message = str(caught.value)
    assert name in message
    assert repr(text) in message
    assert remedy in message
    assert "unset it" in message


def test_an_unknown_setting_names_the_near_miss():
    with pytest.raises(UnknownNameError, match="K3DSL_CACHE_DIR"):
        settings.get("K3DSL_CACHEDIR")


def test_misspelt_variables_are_found(monkeypatch):
    monkeypatch.setenv("K3DSL_BACKENDS", "triton")
    assert list(settings.misspelt()) == ["K3DSL_BACKENDS"]
    assert "K3DSL_BACKEND?" in settings.misspelt()["K3DSL_BACKENDS"]
