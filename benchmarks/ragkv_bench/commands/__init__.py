"""The commands that ragkv-bench adds to ``ragkv``: the entry points in its ``pyproject.toml``."""

from ragkv_bench.commands.bench import bench
from ragkv_bench.commands.bench_serve import bench_serve_command

bench.command("serve")(bench_serve_command)
