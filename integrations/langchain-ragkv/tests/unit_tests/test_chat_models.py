"""langchain-tests' unit suite of chat models."""

from __future__ import annotations

from langchain_tests.unit_tests import ChatModelUnitTests
from standard import What


class TestChatRagKV(What, ChatModelUnitTests):
    pass
