"""The whole configuration as one tree, fed by YAML, environment (DSDE_*) and command line. No settings elsewhere."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from dsde.control.policies import DEFAULT_POLICY, build_policy

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = [
    "AccessConfig",
    "DsdeConfig",
    "EngineConfig",
    "LimitsConfig",
    "ModelConfig",
    "ServingConfig",
    "SpeculationConfig",
    "TelemetryConfig",
    "explain",
    "from_values",
    "load",
]

PairName = Literal["embedded", "bench", "bench-low"]
# A replica's default KV cache holds little more of the bench pair.
PREPARED_MAX_MODEL_LEN = 4096


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Section):
    """Which target and draft are served: a prepared pair, or any two models that share a vocabulary."""

    pair: PairName | None = Field("embedded", description="prepared pair; ignored when target and draft are given")
    target: str | None = Field(None, description="target model, a Hugging Face name or a local path")
    draft: str | None = Field(None, description="draft model with the target's vocabulary, name or path")
    served_name: str | None = Field(None, description="model name in the API; default: the pair's or the target's name")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | None = Field(None, ge=16, description="longest prompt plus answer, in tokens")

    @model_validator(mode="after")
    def _pair_or_models(self) -> ModelConfig:
        if (self.target is None) != (self.draft is None):
            missing = "draft" if self.draft is None else "target"
            raise ValueError(f"model.{missing} is missing: model.target and model.draft go together")
        if self.target is None and self.pair is None:
            accepted = "name a pair (embedded, bench, bench-low) or give model.target and model.draft"
            raise ValueError(f"model.pair is null: {accepted}")
        return self

    @property
    def longest(self) -> int | None:
        """max_model_len in tokens; where it is not set, 4096 for a prepared pair, None (the model's own) for others."""
        return PREPARED_MAX_MODEL_LEN if self.max_model_len is None and self.target is None else self.max_model_len


class SpeculationConfig(_Section):
    """The controller: a policy, its settings and the longest speculation length."""

    policy: str = Field(DEFAULT_POLICY, description="policy that sets each request's speculation length")
    settings: dict[str, Any] = Field(default_factory=dict, description="the policy's own settings, by name")
    max_length: int = Field(8, ge=1, le=64, description="longest speculation length in draft tokens")

    @model_validator(mode="after")
    def _known_policy(self) -> SpeculationConfig:
        build_policy(self.policy, self.settings, self.max_length)
        return self


class EngineConfig(_Section):
    """One vLLM engine; whatever is not here passes through `extra` to vLLM unchanged."""

    max_num_seqs: int = Field(32, ge=1, description="requests that decode together in one engine")
    kv_cache_gib: float | None = Field(
        1.0, gt=0, description="KV cache of a CPU engine in GiB; a GPU takes its share of memory"
    )
    step_timeout_s: float = Field(
        120.0, ge=5, description="seconds that a step may take; an engine that takes longer is ended and replaced"
    )
    start_timeout_s: float = Field(
        1800.0, ge=10, description="seconds that an engine may take to load and start; then it is ended and replaced"
    )
    enforce_eager: bool | None = Field(None, description="skip graph capture; default: true on CPU, false on GPU")
    extra: dict[str, Any] = Field(default_factory=dict, description="further vLLM engine arguments")


class ServingConfig(_Section):
    """The Ray Serve application."""

    replicas: int = Field(2, ge=1)
    device: Literal["cpu", "gpu"] = "cpu"
    cpus_per_replica: float = Field(1.0, gt=0, description="CPU cores, and on CPU engine threads, of one replica")
    gpus_per_replica: float = Field(1.0, ge=0, description="GPUs of one replica; device=gpu only")
    cpus_per_ingress: float = Field(
        0.0, ge=0, description="CPU cores set aside for an ingress; above 0, it keeps off nodes without cores"
    )
    max_ongoing_requests: int = Field(64, ge=1, description="requests a replica takes before they queue at the router")
    router: Literal["stability_aware", "power_of_two"] = Field(
        "stability_aware", description="how a request finds its replica; power_of_two is Ray Serve's own"
    )
    tool_call_parser: str | None = Field(
        "hermes", description="vLLM's parser for the tool calls that the model writes; null refuses tools"
    )
    max_queued_requests: int = Field(256, ge=1, description="requests that may queue for the replicas; more get a 503")
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    grpc_port: int = Field(9000, ge=0, le=65535, description="gRPC port, on the same host")
    dashboard_port: int = Field(8265, ge=0, le=65535, description="Ray dashboard, on loopback only")


class AccessConfig(_Section):
    """Who may ask: those with an API key, or, where that is said, anyone on this machine."""

    keys_file: Path | None = Field(None, description="API keys, made by `dsde keys`; followed while serving")
    open: bool = Field(False, description="serve without keys, to this machine only")

    @field_validator("keys_file")
    @classmethod
    def _found_from_anywhere(cls, path: Path | None) -> Path | None:
        # Whoever reads it may run in another folder.
        return None if path is None else path.expanduser().absolute()

    @model_validator(mode="after")
    def _one_of_two(self) -> AccessConfig:
        if self.open and self.keys_file is not None:
            raise ValueError(f"access.open = true and access.keys_file = {self.keys_file}: accepted is one of them")
        return self


class LimitsConfig(_Section):
    """What one request, and one API key, may use. A key's own limits go before those here."""

    message_mib: int = Field(4, ge=1, le=1024, description="largest HTTP body and gRPC message, in MiB")
    header_kib: int = Field(32, ge=1, le=1024, description="longest HTTP header, path included, in KiB")
    body_s: float = Field(60.0, gt=0, description="longest time in which an HTTP body arrives, in seconds")
    sequences: int = Field(64, ge=1, description="prompts of one request times n")
    grammar_kib: int = Field(64, ge=1, le=1024, description="longest schema, regex or grammar of one request, in KiB")
    requests_per_minute: int | None = Field(None, ge=1, description="requests of one key; null: no limit")
    tokens_per_minute: int | None = Field(None, ge=1, description="tokens of one key, prompts included; null: no limit")
    concurrency: int | None = Field(
        None, ge=1, description="requests of one key at a time; default: as many as the replicas take"
    )


class TelemetryConfig(_Section):
    """Metrics and traces. Where OTLP goes, and how, stands in the standard OTEL_* variables."""

    enabled: bool = Field(True, description="metrics, and traces where an OTLP endpoint is set")
    prometheus: bool = Field(True, description="show dsde's and vLLM's metrics on Ray's Prometheus endpoint")
    metrics_port: int = Field(0, ge=0, le=65535, description="port of that endpoint; 0: any free one")
    record_content: bool = Field(False, description="record prompts and answers in spans")


class DsdeConfig(BaseSettings):
    """dsde's settings. Environment names join the path with two underscores: DSDE_SPECULATION__POLICY=static."""

    model_config = SettingsConfigDict(env_prefix="DSDE_", env_nested_delimiter="__", extra="forbid", frozen=True)

    model: ModelConfig = ModelConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    engine: EngineConfig = EngineConfig()
    serving: ServingConfig = ServingConfig()
    access: AccessConfig = AccessConfig()
    limits: LimitsConfig = LimitsConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings


def load(file: Path | None = None, overrides: dict[str, dict[str, Any]] | None = None) -> DsdeConfig:
    """Read the configuration: command-line `overrides` win over the environment, the environment over `file`.

    A layer that names a policy or a pair starts afresh there: settings or models from the layers below it are dropped.
    Raises ValueError naming the setting, its value and what is accepted, FileNotFoundError for `file`.
    """
    values: dict[str, Any] = {}
    for layer in (_from_file(file), _from_environment(), overrides or {}):
        values = _overlay(values, layer)
    return from_values(values)


def from_values(values: Mapping[str, Any]) -> DsdeConfig:
    """The configuration that `values` and the defaults make, whatever the environment says; ValueError as in load()."""
    try:
        # Read again by the class, the environment would win over what load() has laid over it.
        return DsdeConfig(_build_sources=((InitSettingsSource(DsdeConfig, dict(values)),), {}))
    except ValidationError as error:
        raise ValueError(explain(error)) from error


def explain(error: ValidationError) -> str:
    """One line for each error: the setting's path, its value, what is accepted."""
    return "\n".join(_explain(details) for details in error.errors(include_url=False))


def _explain(details: ErrorDetails) -> str:
    path = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        return f"{path} is not a setting; accepted here: {', '.join(_fields(details['loc'][:-1]))}"
    if details["type"] == "value_error":
        return details["msg"].removeprefix("Value error, ")
    reason = details["msg"].removeprefix("Input should be ")
    return f"{path} = {details['input']!r} is not accepted; it should be {reason}"


def _fields(sections: tuple[int | str, ...]) -> list[str]:
    model: Any = DsdeConfig
    for section in sections:
        model = model.model_fields[section].annotation
    return list(model.model_fields)


def _from_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    if not file.is_file():
        raise FileNotFoundError(f"configuration file {file} does not exist")
    try:
        values = yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"configuration file {file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"configuration file {file} holds a {type(values).__name__}; accepted: sections with settings")
    return values


def _from_environment() -> dict[str, Any]:
    prefix, delimiter = "DSDE_", "__"
    for name in os.environ:
        section = name.removeprefix(prefix).split(delimiter)[0].lower()
        if name.startswith(prefix) and delimiter in name and section not in DsdeConfig.model_fields:
            raise ValueError(f"{name}: {section} is no section; accepted: {', '.join(DsdeConfig.model_fields)}")
    try:
        return EnvSettingsSource(DsdeConfig)()
    except SettingsError as error:
        raise ValueError(f"environment: {error}: {error.__cause__}") from error


def _overlay(below: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(below)
    for name, section in layer.items():
        known = result.get(name)
        if not isinstance(section, dict) or not isinstance(known, dict):
            result[name] = section
            continue
        if name == "model" and section.get("pair") is not None:
            known.pop("target", None)
            known.pop("draft", None)
        if name == "speculation" and section.get("policy", known.get("policy")) != known.get("policy"):
            known.pop("settings", None)
        result[name] = _overlay(known, section)
    return result
