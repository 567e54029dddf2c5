"""The default method, whose prompts continue no former one: what they get depends on chunks alone."""

from __future__ import annotations

from dataclasses import replace

from ragkv.select import get_method

QUERY = replace(get_method("query"), reuse="versions")
