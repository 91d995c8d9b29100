"""Settings of every process; validated once; frozen. `settings_loader.py` reads them."""

from ipaddress import ip_address
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, CliImplicitFlag, SettingsConfigDict

from common.setting_types import (
    ByteAmount,
    ByteSize,
    CpuList,
    Duration,
    PlacementName,
    Port,
    Seconds,
    SecondsOrNone,
    ThreadSplit,
    Words,
    WorkerSources,
)

ENV_PREFIX = "MOERELAY_"


def is_loopback(host: str) -> bool:
    """Whether a listening address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class LogSettings(BaseSettings):
    """Shared by every process."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        validate_default=True,
        protected_namespaces=(),
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe line that is logged."
    )
    log_format: Literal["auto", "text", "json"] = Field("auto", description="auto: text on a terminal, JSON elsewhere.")


class ModelSettings(LogSettings):
    """How the checkpoint is loaded and computed; equal on every worker of a cluster."""

    model: str = Field(
        min_length=1, description="Checkpoint directory, or a Hugging Face hub id.", examples=["models/tiny"]
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: what the checkpoint declares.")
    kernels: Literal["auto", "avx512_bf16", "avx512", "portable", "torch"] = Field(
        "auto", description="What computes: auto is the fastest set here; all workers of a cluster need the same."
    )
    max_model_len: int | None = Field(None, gt=1, description="Context in tokens; default: what the checkpoint allows.")
    block_size: int = Field(16, description="Tokens per KV block: a power of two, at most 256.")
    kv_cache_memory: ByteSize | None = Field(None, description="KV cache per worker, e.g. 1GiB (the default).")
    num_kv_blocks: int | None = Field(
        None, gt=1, description="KV cache per worker in blocks, instead of --kv-cache-memory."
    )
    max_num_batched_tokens: int = Field(512, gt=0, description="Tokens per engine step: the size of a prefill chunk.")
    max_mixed_prefill_tokens: int = Field(
        256, gt=0, description="Prompt tokens of a step in which others decode, where no --slo-itl says how many."
    )
    max_contended_step: Duration = Field(
        0.25,
        description="What a step may take while short prompts meet a long one, as far as it can be foretold.",
    )
    max_num_seqs: int = Field(64, gt=0, description="Sequences in the running batch.")
    slo_ttft: Duration | None = Field(
        None, description="Time to first token that requests are meant to keep to (2s, 500ms); hopeless ones get a 429."
    )
    slo_itl: Duration | None = Field(
        None, description="Time between tokens that streams are meant to keep to (50ms); bounds what steps compute."
    )
    step_timeout_s: Seconds = Field(
        8.0, description="A worker whose engine is busy with one step for longer is unhealthy until the step ends."
    )
    max_waiting: int = Field(1024, gt=0, description="Requests that may wait for blocks; one more is refused (429).")
    enable_prefix_caching: CliImplicitFlag[bool] = Field(True, description="Keep KV of prompts, for later ones.")
    enable_return_routed_experts: CliImplicitFlag[bool] = Field(True, description="Capture and return routing rows.")
    weight_version: str = Field("0", description="Label of the weights that are loaded.")
    tensor_parallel_size: int = Field(1, ge=1, description="Only 1: not supported yet.")
    pipeline_parallel_size: int = Field(1, ge=1, description="Only 1: routing cannot follow it.")
    decode_context_parallel_size: int = Field(1, ge=1, description="Only 1: routing cannot follow it.")
    prefill_context_parallel_size: int = Field(1, ge=1, description="Only 1: routing cannot follow it.")
    debug_poison_kv: CliImplicitFlag[bool] = Field(False, description="Fill free blocks with NaN, to find stale reads.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.block_size not in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            raise ValueError(f"--block-size must be a power of two, at most 256, got {self.block_size}")
        if self.kv_cache_memory is not None and self.num_kv_blocks is not None:
            raise ValueError("--kv-cache-memory and --num-kv-blocks exclude each other")
        self._check_parallel_sizes()
        return self

    def _check_parallel_sizes(self) -> None:
        if self.tensor_parallel_size > 1:
            raise ValueError(
                "--tensor-parallel-size must be 1: a worker computes on one device; more is not supported yet"
            )
        kinds = ("pipeline", "decode_context", "prefill_context")
        wide = [f"--{k.replace('_', '-')}-parallel-size" for k in kinds if getattr(self, f"{k}_parallel_size") > 1]
        if wide:
            raise ValueError(f"{', '.join(wide)} must be 1: routing rows cannot follow a model that is split this way")


class TraceSettings(LogSettings):
    """Where every process sends what it traces; needs the extra `tracing`."""

    otlp_traces_endpoint: str | None = Field(
        None, description="Trace requests: http://HOST:PORT of an OTLP collector (gRPC), or file:PATH; default: do not."
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of requests that are traced, unless the client's traceparent says."
    )


class LinkSettings(TraceSettings):
    """What router and workers do the same way."""

    max_message_bytes: ByteSize = Field(64 * 2**20, description="Largest gRPC message, both ways; rows need 2MiB.")
    pre_stop_s: SecondsOrNone = Field(
        1.0, description="How long new requests are still taken after SIGTERM, while everybody hears that it drains."
    )
    drain_timeout_s: Seconds = Field(30.0, description="How long live requests may go on after SIGTERM.")
    insecure: CliImplicitFlag[bool] = Field(
        False, description="Listen beyond this machine, and call out of it, without keys: whoever gets there is obeyed."
    )


class ClusterKeySettings(LogSettings):
    """What processes on several machines know each other by."""

    cluster_key_file: Path | None = Field(
        None, description="Keys of this process, made by `moerelay keys`, for TLS and an encrypted handoff."
    )


class HandoffSettings(LogSettings):
    """How workers hand sequences over."""

    handoff_timeout_s: Seconds = Field(5.0, description="A handoff without progress for this long fails.")
    handoff_credit_bytes: ByteSize = Field(64 * 2**20, description="Bytes one handoff may have in flight.")


class LocalPrefillSettings(LogSettings):
    """Which prompts a decode worker computes itself."""

    local_prefill_max_tokens: int = Field(
        0, ge=0, description="Decode workers prefill prompts of which no more tokens than this are uncached; 0: none."
    )


class PreemptionSettings(LogSettings):
    """What becomes of sequences that lose their KV blocks; prefill workers preempt nobody."""

    swap_space: ByteAmount = Field(
        4 * 2**30,
        description="Host memory of a decode worker for KV of preempted sequences; what exceeds it is computed again.",
    )


class SelfCheckSettings(LogSettings):
    """Which finished requests a decode worker computes again, to compare the bytes."""

    self_check_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of finished requests that idle decode workers run again, alone, and compare.",
    )
    self_check_max_tokens: int = Field(
        4096, gt=1, description="Longest sequence that is checked; its KV takes memory of its own meanwhile."
    )
    self_check_dir: Path | None = Field(
        None, description="Where requests that came out differently are kept for `moerelay replay`; default: nowhere."
    )
    self_check_files: int = Field(20, gt=0, description="Files in --self-check-dir; the oldest make room.")

    @model_validator(mode="after")
    def _keeps_what_it_finds(self) -> Self:
        if self.self_check_dir is not None and not self.self_check_rate:
            raise ValueError("--self-check-dir has no effect without --self-check-rate; give both or neither")
        return self


class WorkerSettings(ModelSettings, HandoffSettings, LinkSettings, ClusterKeySettings):
    """One prefill or decode worker."""

    worker_id: str = Field(
        "", description="Unique name in the cluster; default: role and port, with the address beyond loopback."
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(0, description="gRPC port; 0 takes a free one.")
    advertise_address: str | None = Field(
        None, description="Host name or address at which others reach this worker; auto: this machine's."
    )
    ready_file: Path | None = Field(None, description="Written, as JSON, once the worker serves.")
    cpus: CpuList | None = Field(None, description="Cpus that its engine keeps to, e.g. 0-3,8; default: not pinned.")
    threads: int | None = Field(None, gt=0, description="Engine threads; default: one per core that it may use.")


class PrefillSettings(WorkerSettings):
    """moerelay prefill worker: computes prompts and hands KV and routing rows to decode workers."""


class DecodeSettings(WorkerSettings, LocalPrefillSettings, PreemptionSettings, SelfCheckSettings):
    """moerelay decode worker: receives handoffs (or, as role both, prefills itself) and generates tokens."""

    role: Literal["decode", "both"] = Field("decode", description="both: prefill here too, no handoff.")
    handoff_endpoint: str | None = Field(None, description="ZMQ endpoint to bind; default: tcp on --host, free port.")

    @model_validator(mode="after")
    def _leaves_prompts_to_others(self) -> Self:
        if self.role == "both" and self.local_prefill_max_tokens:
            raise ValueError(
                "--local-prefill-max-tokens has no effect with --role both, which computes every prompt; leave it out"
            )
        return self


class ApiSettings(LinkSettings):
    """What the HTTP API does, whoever starts the router."""

    served_model_name: str | None = Field(
        None, description="Name in /v1/models; default: the hub id, or the directory's name."
    )
    stream_routed_experts: Literal["delta", "final"] = Field(
        "delta", description="How rows travel in streams by default."
    )
    routed_experts_format: Literal["npy", "dict"] = Field(
        "npy", description="Form of rows on /inference/v1/generate: a base64 .npy, or prime-rl's object."
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = Field(
        "raw_logprobs", description="Of which distribution logprobs are: the model's, or the one sampled from."
    )
    ignore_generation_config: CliImplicitFlag[bool] = Field(False, description="Neutral sampling defaults.")
    chat_template: Path | None = Field(None, description="Jinja file; default: the checkpoint's template.")
    api_key_file: Path | None = Field(None, description="One API key per line; without it nobody needs one.")
    ssl_certfile: Path | None = Field(
        None, description="Certificate, with its chain, in PEM: serve HTTPS; default: plain HTTP."
    )
    ssl_keyfile: Path | None = Field(None, description="Private key of --ssl-certfile; default: it is in there, too.")
    cors_origin: Words = Field([], description="Origins that browsers may call from, repeated; * for any.")
    admin_host: str = Field("127.0.0.1", description="Address of the control port.")
    admin_port: Port | None = Field(None, description="Port for pause, weights and sleep; default: no such port.")
    admin_key_file: Path | None = Field(None, description="One key per line for the control routes.")
    admin_on_public_port: CliImplicitFlag[bool] = Field(
        False, description="Serve the control routes on the HTTP port too; needs --admin-key-file."
    )
    router_processes: int = Field(
        1, ge=1, le=64, description="Router processes that share the HTTP port; more than 1 not on Windows."
    )
    max_event_bytes: ByteSize = Field(64 * 2**10, description="Largest SSE event in delta streams.")
    max_body_bytes: ByteSize = Field(32 * 2**20, description="Largest request body.")
    max_body_values: int = Field(
        2_000_000, gt=0, description="Most values in a request body; a key, an object or a list counts as 20."
    )
    max_header_bytes: ByteSize = Field(64 * 2**10, description="Largest request header, and all of them together.")
    body_timeout_s: Seconds = Field(60.0, description="Time for a request's body to arrive.")
    max_n: int = Field(128, gt=0, description="Largest number of choices per request.")
    max_logprobs: int = Field(20, ge=0, description="Largest number of logprobs per token.")
    max_prompts: int = Field(128, gt=0, description="Largest number of prompts per request.")
    max_messages: int = Field(4096, gt=0, description="Largest number of messages, and of tools, of a chat.")
    max_stop_strings: int = Field(64, gt=0, description="Largest number of stop strings, and of bad words.")
    max_stop_chars: int = Field(1024, gt=0, description="Longest stop string or bad word, in characters.")
    max_mask_ids: int = Field(2**24, gt=0, description="Most ids that all sampling masks of a request may have.")
    max_listed_tokens: int = Field(
        4096, gt=0, description="Largest number of logit_bias, allowed_token_ids and stop_token_ids entries."
    )
    max_grammar_bytes: ByteSize = Field(64 * 2**10, description="Longest JSON schema, regex or grammar.")
    heartbeat_interval_s: Seconds = Field(0.5, description="How often each worker is asked for its state.")
    heartbeat_timeout_s: Seconds = Field(3.0, description="A worker silent for this long is suspect.")
    connect_timeout_s: Seconds = Field(3.0, description="Time for a worker to accept a request.")
    placement: PlacementName = Field(
        "prefix",
        description="Who takes a prompt: whoever has its beginning, its session, or the least to do, and so on.",
    )
    max_prefixes: int = Field(
        2**16,
        gt=0,
        description="Most prefixes that `prefix` placement remembers per side; 65,536 take some 20 MB.",
    )
    max_attempts: int = Field(
        2, ge=1, le=16, description="Pairs of workers that a prompt is offered to, while none of them takes it."
    )
    client_stall_timeout_s: Seconds = Field(120.0, description="A client that reads nothing for this long is gone.")
    allow_aggregated_fallback: CliImplicitFlag[bool] = Field(
        False, description="Without a healthy prefill worker, decode workers prefill themselves."
    )

    @model_validator(mode="after")
    def _shows_what_it_has_a_key_of(self) -> Self:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-keyfile has no effect without --ssl-certfile; give both or neither")
        return self


class RouterSettings(ApiSettings, ClusterKeySettings):
    """moerelay router: the HTTP API in front of prefill and decode workers."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(8000, description="HTTP port; 0 takes a free one.")
    ready_file: Path | None = Field(None, description="Written, as JSON, once the port is bound.")
    prefill: WorkerSources = Field(
        [], description="Prefill workers: HOST:PORT, dns://HOST:PORT, srv://NAME or file://PATH; repeat it for more."
    )
    decode: WorkerSources = Field([], description="The same for decode workers (role both: no prefill needed).")
    discovery_interval_s: Seconds = Field(2.0, description="How often dns://, srv:// and file:// are looked up.")
    model: str | None = Field(None, description="Checkpoint directory, for its tokenizer and generation_config.json.")
    enable_return_routed_experts: CliImplicitFlag[bool] = Field(True, description="Return routing rows.")


class UpSettings(
    ModelSettings, HandoffSettings, LocalPrefillSettings, PreemptionSettings, SelfCheckSettings, ApiSettings
):
    """Start a whole cluster on this machine and print one line on stdout when it serves."""

    prefill: int = Field(1, ge=0, description="Number of prefill workers; none in aggregated mode.")
    decode: int = Field(1, ge=1, description="Number of decode workers.")
    mode: Literal["disaggregated", "aggregated"] = Field("disaggregated", description="aggregated: no handoff.")
    host: str = Field("127.0.0.1", description="Address of the HTTP port.")
    port: Port = Field(8000, description="HTTP port; 0 takes a free one.")
    pre_stop_s: SecondsOrNone = Field(
        0.0, description="How long new requests are still taken after SIGTERM, while /ready says no."
    )
    start_timeout_s: Seconds = Field(600.0, description="Time for every process to become ready.")
    cpus: CpuList | None = Field(None, description="Cpus for the whole cluster, e.g. 0-3,8; default: all it may use.")
    threads: ThreadSplit | None = Field(
        None, description="Engine threads per worker, or PREFILL:DECODE, e.g. 6:2; default: an equal part of the cores."
    )

    @model_validator(mode="after")
    def _has_prefill(self) -> Self:
        if self.mode == "disaggregated" and self.prefill < 1:
            raise ValueError(
                "--prefill must be at least 1 in disaggregated mode; for one process use --mode aggregated"
            )
        return self

    @model_validator(mode="after")
    def _splits_threads_among_roles(self) -> Self:
        if self.mode == "aggregated" and self.threads is not None and ":" in self.threads:
            raise ValueError(
                f"--threads {self.threads}: there are no prefill workers with --mode aggregated; give one number"
            )
        return self

    @property
    def prefill_threads(self) -> int | None:
        """Of each prefill worker; None: its part of the cores."""
        return None if self.threads is None else int(self.threads.partition(":")[0])

    @property
    def decode_threads(self) -> int | None:
        """The same for decode workers."""
        return None if self.threads is None else int(self.threads.rpartition(":")[2])

    @model_validator(mode="after")
    def _has_something_to_do_without(self) -> Self:
        if self.mode == "aggregated":
            given = {
                "--local-prefill-max-tokens": self.local_prefill_max_tokens,
                "--allow-aggregated-fallback": self.allow_aggregated_fallback,
            }
            if ignored := [flag for flag, value in given.items() if value]:
                raise ValueError(
                    f"no effect with --mode aggregated, where workers compute every prompt that they decode: leave out "
                    f"{' and '.join(ignored)}"
                )
        return self
