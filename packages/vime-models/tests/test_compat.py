# SPDX-License-Identifier: Apache-2.0
import sys
import warnings

import pytest

from vime_models import _compat


@pytest.fixture(autouse=True)
def _fresh() -> None:
    _compat.check_megatron.cache_clear()


def test_the_tested_version_passes_silently() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert _compat.check_megatron().startswith("0.19.")


@pytest.mark.parametrize("installed", ["0.19.1", "0.20.0rc1", "0.19.0+dev"], ids=["older", "newer", "tree"])
def test_another_version_with_everything_we_adapt_warns_once(
    monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    monkeypatch.setattr(_compat, "version", lambda _: installed)
    with pytest.warns(RuntimeWarning, match="outside the tested range"):
        assert _compat.check_megatron() == installed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _compat.check_megatron()


def test_a_version_that_lacks_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "version", lambda _: "0.18.0")
    monkeypatch.setattr(
        _compat, "_ADAPTED", (*_compat._ADAPTED, ("megatron.core", "gone"), ("megatron.gone", "x"))
    )
    with pytest.raises(
        RuntimeError, match=r"0\.18\.0 lacks megatron\.core\.gone, megatron\.gone\.x; install"
    ):
        _compat.check_megatron()


def test_absent_megatron_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install vime-models\[dsv4\]"):
        _compat.check_megatron()
