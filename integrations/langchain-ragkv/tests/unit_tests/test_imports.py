"""What the package gives, and what importing it loads."""

from __future__ import annotations

import subprocess
import sys

import langchain_ragkv


def test_every_public_class_is_there():
    assert all(getattr(langchain_ragkv, name).__doc__ for name in langchain_ragkv.__all__)
    assert langchain_ragkv.__all__ == list(langchain_ragkv._MODULES)


def test_importing_the_package_loads_no_framework():
    code = "import sys, langchain_ragkv; print('langchain_core' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
