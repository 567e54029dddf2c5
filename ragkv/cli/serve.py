"""``ragkv serve``: answer over HTTP, as OpenAI's API does."""

from __future__ import annotations

import signal
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ragkv.cli.console import err, out
from ragkv.cli.options import (
    Codec,
    Device,
    DType,
    Method,
    ModelName,
    Namespace,
    Ratio,
    SinkFrom,
    StorePath,
)
from ragkv.cli.plugins import extension
from ragkv.cli.session import open_engine, reuse_config
from ragkv.config import StoreConfig
from ragkv.errors import MissingDependencyError, install_command

if TYPE_CHECKING:
    from ragkv import RagKV
    from ragkv.serve.config import ServeConfig

KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        help="Lines NAMESPACE=KEY; a key opens its namespace alone.",
        show_default="no key is needed, and --namespace is served",
    ),
]
Anonymous = Annotated[
    bool, typer.Option("--allow-anonymous", help="Let other machines in without keys.")
]
ServedName = Annotated[
    str | None,
    typer.Option(
        "--served-model-name",
        help="What clients call the model, besides default.",
        show_default="its hub name, or its folder's",
    ),
]
MaxRunning = Annotated[int, typer.Option(min=1, help="Answers that are generated at once.")]
KVBytes = Annotated[
    int | None, typer.Option(min=1, help="Of answers at once.", show_default="what is left")
]
MaxWaiting = Annotated[int, typer.Option(min=0, help="Answers that may wait besides.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="Longest time of a request, in seconds.")]
Drain = Annotated[
    float, typer.Option(min=0.1, help="Seconds for running answers to end after SIGTERM.")
]
Decoder = Annotated[
    Literal["ragkv", "vllm"],
    typer.Option("--engine", help="What decodes the answers; vllm: package vllm-ragkv."),
]
VllmUrl = Annotated[
    str, typer.Option(help="The vLLM that decodes, started with ragkv's connector.")
]
VllmFolder = Annotated[
    Path | None,
    typer.Option(help="The connector's folder.", show_default="the user's, in shared memory"),
]
VllmBytes = Annotated[
    int | None,
    typer.Option(
        min=1, help="Limit for pending hand-overs.", show_default="half of the free space"
    ),
]
CorsOrigins = Annotated[
    list[str],
    typer.Option(
        "--cors-origin",
        help="Origin whose pages may send requests from a browser, or *; may be repeated.",
        show_default="none",
    ),
]
Reports = Annotated[bool, typer.Option(help="Whether clients may have an answer's whole report.")]


def serve(
    model: ModelName = None,
    store: StorePath = None,
    namespace: Namespace = "default",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key_file: KeyFile = None,
    allow_anonymous: Anonymous = False,
    served_model_name: ServedName = None,
    max_running: MaxRunning = 16,
    max_waiting: MaxWaiting = 64,
    timeout: Seconds = 600.0,
    drain_timeout: Drain = 60.0,
    recompute_ratio: Ratio = 0.2,
    method: Method = None,
    codec: Codec = "raw",
    sink_from: SinkFrom = None,
    auxiliary_model: Annotated[
        str | None,
        typer.Option(help="Scores tokens for cacheclip.", show_default="the embedded one"),
    ] = None,
    on_miss: Annotated[
        str, typer.Option(help="Of chunks that a prompt names and lacks: store or skip.")
    ] = "store",
    history: Annotated[bool, typer.Option(help="Use what former prompts left.")] = True,
    device: Device = None,
    dtype: DType = None,
    reports: Reports = True,
    cors_origin: CorsOrigins = [],  # noqa: B006  typer's default of a list
    memory_bytes: Annotated[
        int, typer.Option(min=0, help="Of chunks in the host's memory.")
    ] = StoreConfig().memory_bytes,
    disk_bytes: Annotated[
        int | None, typer.Option(min=1, help="Of the store's folder, which evicts then.")
    ] = None,
    device_bytes: Annotated[
        int | None, typer.Option(min=0, help="Of chunks on the model's device.")
    ] = None,
    history_bytes: Annotated[
        int | None, typer.Option(min=0, help="Of former prompts; default: an eighth of memory.")
    ] = None,
    kv_bytes: KVBytes = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Write nothing to the store.")
    ] = False,
    engine: Decoder = "ragkv",
    vllm_url: VllmUrl = "http://127.0.0.1:8001",
    vllm_folder: VllmFolder = None,
    vllm_bytes: VllmBytes = None,
) -> None:
    """Answer over HTTP, as OpenAI's API does; chunks that are stored are reused.

    All namespaces together have the bytes that the options give, shared evenly.
    """
    from ragkv.cli.texts import read_system_prompt
    from ragkv.model.memory import default_history
    from ragkv.serve.config import ServeConfig
    from ragkv.serve.keys import read_keys

    needs = dict.fromkeys(("fastapi", "uvicorn", "prometheus_client"), "serve")
    for package, extra in needs.items():
        if find_spec(package) is None:
            raise MissingDependencyError(f"serve needs {package}: {install_command(extra)}")
    decode_by_vllm = extension("vllm", "vllm-ragkv") if engine == "vllm" else None
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
        max_running=max_running,
        max_waiting=max_waiting,
        reports=reports,
        cors_origins=tuple(cors_origin),
    )
    first, *others = sorted(settings.namespaces)
    reuse = reuse_config(method, recompute_ratio).override(
        auxiliary_model=auxiliary_model, on_miss=on_miss, history=history
    )
    shares = len(settings.namespaces)
    where = StoreConfig(
        store,
        memory_bytes=memory_bytes // shares,
        disk_bytes=disk_bytes and max(1, disk_bytes // shares),
        device_bytes=device_bytes and device_bytes // shares,
        history_bytes=(default_history() if history_bytes is None else history_bytes) // shares,
        read_only=read_only,
        codec=codec,
    )
    with ExitStack() as stack:
        kv = open_engine(
            model,
            store=where,
            namespace=first,
            reuse=reuse,
            on_unsupported="full" if engine == "ragkv" else "raise",
            device=device,
            dtype=dtype,
            max_running=max_running,
            kv_bytes=kv_bytes,
            system_prompt=system_prompt,
        )
        engines = {first: stack.enter_context(kv)}
        if kv.info.unsupported:
            err.print(f"Chunks are not reused: {kv.info.unsupported}", highlight=False)
        for each in others:
            other = type(kv)(kv.loaded, store=where, namespace=each, reuse=kv.reuse)
            engines[each] = stack.enter_context(other)
        if decode_by_vllm is not None:
            vllm = decode_by_vllm(
                *engines.values(), url=vllm_url, folder=vllm_folder, most_bytes=vllm_bytes
            )
            stack.callback(vllm.close)
        _run(settings, engines)


def _run(settings: ServeConfig, engines: dict[str, RagKV]) -> None:
    """Serve until SIGTERM or an interrupt, which leaves the engines to be closed."""
    from ragkv.serve.app import make_app
    from ragkv.serve.run import DrainingServer

    app = make_app(settings, engines)
    name = app.state.service.model_name

    def say(address: str) -> None:
        out.print(f"Serving {name} at {address}", highlight=False, markup=False, soft_wrap=True)

    # uvicorn raises the signal again when it has ended: that is to end the command alone
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        DrainingServer(app, settings, on_ready=say).run()
