"""``ragkv serve``: OpenAI's HTTP API."""

from __future__ import annotations

import json
import signal
import tomllib
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.console import err, out
from ragkv.cli.options import (
    Device,
    DType,
    Method,
    ModelName,
    Namespace,
    Ratio,
    SinkFrom,
    StorePath,
)
from ragkv.cli.session import open_engine, reuse_config
from ragkv.config import STORE_SETTINGS, StoreConfig, check_known
from ragkv.config.extensions import extension
from ragkv.errors import ConfigError, MissingDependencyError, install_command

if TYPE_CHECKING:
    from ragkv import RagKV
    from ragkv.serve.config import ServeConfig

KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        help="File with lines NAMESPACE=KEY; a key gives access to its namespace.",
        show_default="no key is required, and --namespace is served",
    ),
]
Anonymous = Annotated[
    bool, typer.Option("--allow-anonymous", help="Serve other machines without keys.")
]
ServedName = Annotated[
    str | None,
    typer.Option(
        "--served-model-name",
        help="The model's name for clients, besides default.",
        show_default="its hub name, or its folder's",
    ),
]
Running = Annotated[int | None, typer.Option(min=1, help="Answers at once.", show_default="16")]
KVBytes = Annotated[
    int | None,
    typer.Option(min=1, help="KV of running answers, in bytes.", show_default="the free memory"),
]
MaxWaiting = Annotated[int, typer.Option(min=0, help="Most answers waiting in addition.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="Time limit of a request, in seconds.")]
Drain = Annotated[
    float, typer.Option(min=0.1, help="Time for running answers to end after SIGTERM, in seconds.")
]
VllmUrl = Annotated[
    str | None,
    typer.Option(
        help="Address of a vLLM with ragkv's connector, which then decodes; needs vllm-ragkv.",
        show_default="ragkv decodes",
    ),
]
VllmFolder = Annotated[
    Path | None,
    typer.Option(help="The connector's folder.", show_default="the user's, in shared memory"),
]
CorsOrigins = Annotated[
    list[str],
    typer.Option(
        "--cors-origin",
        help="Origin of web pages that can send requests, or *; repeatable.",
        show_default="none",
    ),
]
StoreFile = Annotated[
    Path | None,
    typer.Option(
        "--store-config",
        help="TOML or .json file with settings of the store, e.g. disk_bytes and codec.",
        show_default="the defaults of StoreConfig",
    ),
]


def serve(
    model: ModelName = None,
    store: StorePath = None,
    store_config: StoreFile = None,
    namespace: Namespace = "default",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 chooses a free port.")] = 8000,
    api_key_file: KeyFile = None,
    allow_anonymous: Anonymous = False,
    served_model_name: ServedName = None,
    max_running: Running = None,
    max_waiting: MaxWaiting = 64,
    timeout: Seconds = 600.0,
    drain_timeout: Drain = 60.0,
    recompute_ratio: Ratio = 0.2,
    method: Method = None,
    sink_from: SinkFrom = None,
    auxiliary_model: Annotated[
        str | None,
        typer.Option(
            help="Model that scores tokens for cacheclip.", show_default="the embedded one"
        ),
    ] = None,
    on_miss: Annotated[
        str, typer.Option(help="Named chunks that are not stored: store or skip.")
    ] = "store",
    device: Device = None,
    dtype: DType = None,
    cors_origin: CorsOrigins = [],  # noqa: B006  typer's default of a list
    kv_bytes: KVBytes = None,
    vllm_url: VllmUrl = None,
    vllm_folder: VllmFolder = None,
) -> None:
    """Serve OpenAI's HTTP API; stored chunks are reused.

    Namespaces share the store's budgets evenly.
    """
    from ragkv.cli.texts import read_system_prompt
    from ragkv.serve.config import ServeConfig
    from ragkv.serve.keys import read_keys

    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if find_spec(package) is None:
            raise MissingDependencyError(f"serve needs {package}: {install_command('serve')}")
    system_prompt = read_system_prompt(sink_from)
    settings = ServeConfig(
        host=host,
        port=port,
        namespace=namespace,
        keys={} if api_key_file is None else read_keys(api_key_file),
        allow_anonymous=allow_anonymous,
        model_name=served_model_name,
        timeout=timeout,
        drain_timeout=drain_timeout,
        max_waiting=max_waiting,
        cors_origins=tuple(cors_origin),
    )
    first, *others = sorted(settings.namespaces)
    reuse = reuse_config(method, recompute_ratio).override(
        auxiliary_model=auxiliary_model, on_miss=on_miss
    )
    where = _shared(_read_store_config(store, store_config), len(settings.namespaces))
    with ExitStack() as stack:
        decoder = None
        if vllm_url is not None:
            vllm = extension("vllm", "vllm-ragkv")
            decoder = stack.enter_context(closing(vllm(vllm_url, vllm_folder)))
        kv = open_engine(
            model,
            store=where,
            namespace=first,
            reuse=reuse,
            on_unsupported="full" if vllm_url is None else "raise",
            device=device,
            dtype=dtype,
            max_running=max_running,
            kv_bytes=kv_bytes,
            decoder=decoder,
            system_prompt=system_prompt,
        )
        engines = {first: stack.enter_context(kv)}
        if kv.info.unsupported:
            err.print(f"Chunks are not reused: {kv.info.unsupported}", highlight=False)
        for each in others:
            other = type(kv)(
                kv.loaded, store=where, namespace=each, reuse=kv.reuse, decoder=decoder
            )
            engines[each] = stack.enter_context(other)
        _run(settings, engines)


def _read_store_config(path: str | None, file: Path | None) -> StoreConfig:
    """Return the store's settings; ConfigError if the file is wrong."""
    if file is None:
        return StoreConfig(path)
    form, parse = ("JSON", json.loads) if file.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        settings = parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--store-config {file} cannot be read as {form}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--store-config {file} must contain an object of settings")
    check_known("store setting", settings, STORE_SETTINGS)
    return StoreConfig(path, **settings)


def _shared(store: StoreConfig, namespaces: int) -> StoreConfig:
    """Return one namespace's share of the budgets."""
    from ragkv.model.memory import budget_of

    return replace(
        store,
        memory_bytes=budget_of(store.memory_bytes) // namespaces,
        disk_bytes=store.disk_bytes and max(1, store.disk_bytes // namespaces),
        device_bytes=store.device_bytes and store.device_bytes // namespaces,
        history_bytes=budget_of(store.history_bytes) // namespaces,
    )


def _run(settings: ServeConfig, engines: dict[str, RagKV]) -> None:
    """Serve until SIGTERM or an interrupt."""
    from ragkv.serve.app import make_app
    from ragkv.serve.run import DrainingServer

    app = make_app(settings, engines)
    name = app.state.service.model_name

    def say(address: str) -> None:
        out.print(f"Serving {name} at {address}", highlight=False, markup=False, soft_wrap=True)

    # uvicorn raises the signal again at its end: it must not end the process before cleanup
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        DrainingServer(app, settings, on_ready=say).run()
