"""The settings, by subject. Every field has a default, a unit and the reason for the default.

`Settings` is what the rest of the program sees: frozen, complete, validated. Reading files, environment and flags is
`loading`'s work. Defaults: docs/reference/configuration.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self
from urllib.parse import quote, unquote, urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, field_validator, model_validator

from osrdyne.config.types import Duration, Size
from osrdyne.errors import InvalidKeyError
from osrdyne.protocol.names import is_pool_id, parse_key
from osrdyne.protocol.spark_master import EXECUTOR_IMAGE, FORMS, MasterKind, parse_spark_master
from osrdyne.protocol.uri import TlsFiles, tls_of, with_tls


class Model(BaseModel):
    """Base of all settings: frozen, and an unknown key is an error with its path."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)


class TlsSettings(Model):
    """TLS to the broker (`amqps://` and `https://`), for controller, workers and `osrdyne call`."""

    ca_file: str | None = Field(None, description="Certificate authorities to trust, PEM; the system's when absent.")
    certificate_file: str | None = Field(None, description="Client certificate, PEM.")
    key_file: str | None = Field(None, description="Private key of the client certificate, PEM.")
    verify: bool = Field(True, description="Check the broker's certificate; turn it off only for a test.")

    @model_validator(mode="after")
    def _certificate_and_key(self) -> Self:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file belong together: set both or neither")
        return self

    def files(self) -> TlsFiles:
        return TlsFiles(self.ca_file, self.certificate_file, self.key_file, self.verify)


def _checked_uri(value: SecretStr | None, *, schemes: tuple[str, str], example: str) -> SecretStr | None:
    """Raises ValueError without the value: it holds a password."""
    if value is None:
        return None
    try:
        parts = urlsplit(value.get_secret_value())
        # A password with a raw `/`, `?` or `#` ends the host early, and its rest would pass for a path.
        whole = "@" not in parts.path + parts.query and not parts.fragment
        usable = parts.scheme in schemes and bool(parts.hostname) and (parts.port is None or parts.port > 0) and whole
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"must look like {example}, with special characters of the password percent-encoded")
    return value


class BrokerSettings(Model):
    """The address of RabbitMQ, and the time limits for it."""

    uri: SecretStr = Field(
        SecretStr("amqp://guest:guest@localhost:5672/"),
        description="AMQP URI with the controller's credentials; a fresh RabbitMQ accepts the default from localhost.",
    )
    uri_file: str | None = Field(None, description="A file that contains the AMQP URI, instead of `uri`.")
    management_uri: SecretStr | None = Field(
        None, description="HTTP API of the management plugin; by default the AMQP host and user at port 15672."
    )
    management_uri_file: str | None = Field(
        None, description="A file that contains the URI, instead of `management_uri`."
    )
    worker_uri: SecretStr | None = Field(
        None,
        description="AMQP URI for workers, passed on unchanged; set it if workers need another address, other paths "
        "of TLS files or another user. Default: `uri` with the files of `broker.tls` as its parameters.",
    )
    worker_uri_file: str | None = Field(None, description="A file that contains the URI, instead of `worker_uri`.")
    tls: TlsSettings = Field(default_factory=TlsSettings, description="Certificates for amqps and https.")
    scoped_credentials: bool = Field(
        False,
        description="Give each worker its own RabbitMQ user with only the permissions that a worker needs. The user "
        "of `uri` must then be an administrator; off by default, because it often is not.",
    )
    heartbeat: Duration = Field(30.0, ge=1, description="AMQP heartbeat of ordinary connections.")
    leader_heartbeat: Duration = Field(
        2.0, ge=1, description="Heartbeat of the leader's connection: a silent leader is replaced after three of them."
    )
    connect_timeout: Duration = Field(10.0, gt=0, description="Limit for opening a connection.")
    rpc_timeout: Duration = Field(30.0, gt=0, description="Limit for one AMQP operation or publisher confirm.")
    management_timeout: Duration = Field(30.0, gt=0, description="Limit for one call of the HTTP API.")
    retry_interval: Duration = Field(30.0, gt=0, description="Longest pause between attempts to reach the broker.")

    @field_validator("uri", "worker_uri")
    @classmethod
    def _amqp_uri(cls, value: SecretStr | None) -> SecretStr | None:
        checked = _checked_uri(value, schemes=("amqp", "amqps"), example="amqp://user:password@host:5672/vhost")
        if checked is not None:
            tls_of(checked.get_secret_value())
        return checked

    @field_validator("management_uri")
    @classmethod
    def _http_uri(cls, value: SecretStr | None) -> SecretStr | None:
        return _checked_uri(value, schemes=("http", "https"), example="http://user:password@host:15672")

    def effective_management_uri(self) -> str:
        """The HTTP API's URI, derived from the AMQP URI when not set. Holds the password: never log it."""
        if self.management_uri is not None:
            return self.management_uri.get_secret_value()
        parts = urlsplit(self.uri.get_secret_value())
        scheme, port = ("https", 15671) if parts.scheme == "amqps" else ("http", 15672)
        user = quote(unquote(parts.username or "guest"), safe="")
        password = quote(unquote(parts.password or "guest"), safe="")
        host = parts.hostname or "localhost"
        return f"{scheme}://{user}:{password}@{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def uses_amqps(self) -> bool:
        return urlsplit(self.uri.get_secret_value()).scheme == "amqps"

    def effective_uri(self) -> str:
        """The AMQP URI with the files of `tls` as its parameters. Holds the password: never log it."""
        return with_tls(self.uri.get_secret_value(), self.tls.files())

    def effective_tls(self) -> TlsFiles:
        """The files for TLS, from `tls` or else from the parameters of the URI."""
        return tls_of(self.effective_uri()) if self.uses_amqps else self.tls.files()

    def effective_worker_uri(self) -> str:
        """The AMQP URI for workers. Holds the password: never log it."""
        return self.effective_uri() if self.worker_uri is None else self.worker_uri.get_secret_value()


class PoolSettings(Model):
    """The pool that this daemon serves."""

    id: str = Field("osrdyne", description="Name of the pool, `[a-z0-9_]{1,32}`; part of every name on the broker.")
    kind: Literal["direct", "managed"] = Field(
        "direct",
        description="`managed`: every request passes through the controller, which applies the pool's routes; "
        "`direct`: only requests for keys that are not bound do.",
    )
    pinned_keys: tuple[str, ...] = Field(
        (), description="Keys whose group is always active, from the start of the daemon."
    )

    @field_validator("id")
    @classmethod
    def _valid_id(cls, value: str) -> str:
        if not is_pool_id(value):
            raise ValueError("a pool id has 1 to 32 characters out of a-z, 0-9 and _")
        return value

    @property
    def is_managed(self) -> bool:
        return self.kind == "managed"

    @field_validator("pinned_keys")
    @classmethod
    def _valid_keys(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for key in value:
            try:
                parse_key(key)
            except InvalidKeyError as error:
                raise ValueError(str(error)) from error
        return value


def _driver_from_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class DriverSettings(Model):
    """The driver that starts the workers. `driver: subprocess` is short for `driver: {name: subprocess}`."""

    name: str = Field(
        "subprocess",
        description="Entry-point name: `subprocess`, `docker`, `systemd`, `kubernetes`, `noop`, or that of another "
        "package.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, repr=False, description="The driver's own options; see its page."
    )


def _spark_text(value: Any) -> Any:
    """Convert numbers and booleans of a YAML file (`2`, `false`) to text: Spark accepts only text."""
    if not isinstance(value, dict):
        return value
    return {
        name: str(item).lower() if isinstance(item, bool) else str(item) if isinstance(item, int | float) else item
        for name, item in value.items()
    }


class ScalingSettings(Model):
    """The number of workers of a group, for drivers whose platform does not scale workers itself."""

    min: int = Field(1, ge=1, le=100, description="Minimum number of workers of a group.")
    max: int = Field(
        1, ge=1, le=100, description="Maximum number of workers of a group; several workers share its requests."
    )
    target_lag: Duration = Field(
        30.0, gt=0, description="A group gets more workers when a request would wait longer than this."
    )
    cooldown: Duration = Field(
        300.0, ge=0, description="A worker is removed only if fewer workers were enough for this time."
    )

    @model_validator(mode="after")
    def _min_up_to_max(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) must not be more than max ({self.max})")
        return self


class PooledSettings(Model):
    """Processes that several keys share, with `worker.placement: pooled`."""

    keys_per_process: int = Field(50, ge=1, le=1000, description="Workers that one process may have.")
    spares: int = Field(1, ge=0, le=100, description="Empty processes that are up before they are needed.")
    max_processes: int = Field(
        8, ge=1, le=1000, description="Processes that take workers. Those that are being replaced do not count."
    )
    max_heap_used: float = Field(
        0.75,
        gt=0,
        le=1,
        description="Used share of a process's heap above which it gets no further keys, and its least recently used "
        "idle key ends.",
    )
    max_age: Duration | None = Field(None, gt=0, description="A process of this age is replaced.")
    max_requests: int | None = Field(None, ge=1, description="A process that has served so many requests is replaced.")
    process_timeout: Duration = Field(
        30.0, ge=6, description="A process that answers nothing for so long is killed, and its workers start elsewhere."
    )

    @model_validator(mode="after")
    def _spares_up_to_max(self) -> Self:
        if self.spares > self.max_processes:
            raise ValueError(
                f"spares ({self.spares}) must not be more than max_processes ({self.max_processes}): raise "
                "max_processes"
            )
        return self


JAVA_OPTIONS = "spark.driver.extraJavaOptions"
SMALL_FOOTPRINT = {
    "spark.driver.memory": "600m",  # Spark refuses less than 450 MB
    JAVA_OPTIONS: "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    "spark.sql.shuffle.partitions": "1",
    "spark.default.parallelism": "1",
}


def _log_levels(value: Any) -> Any:
    """One level is that of the root logger."""
    return {"root": value} if isinstance(value, str) else value


class WorkerSettings(Model):
    """The application of the workers and its settings. `runtime`, `spark` and `config` reach a worker as
    `WORKER_CONFIG`."""

    app: str = Field(
        "osrdyne_worker.pipelines.sql:app", description="`module:attribute` of the application that answers requests."
    )
    concurrency: int = Field(1, ge=1, le=64, description="Requests that one worker runs at once.")
    processing_timeout: Duration = Field(
        1800.0, gt=0, description="Limit for the work on one request; RabbitMQ's consumer timeout must be longer."
    )
    queue_missing_timeout: Duration = Field(
        60.0, gt=0, description="A worker exits if its queue is missing, or RabbitMQ refuses its log-in, for this time."
    )
    stop_grace: Duration = Field(
        30.0, ge=0, description="Time that a worker has to finish its requests after SIGTERM; then it is killed."
    )
    silence_timeout: Duration = Field(
        30.0,
        ge=6,
        description="A busy worker that sends no report for this time is asked for one, and replaced if "
        "it does not answer.",
    )
    skip_abandoned: bool = Field(False, description="Do not run a request whose caller is no longer connected.")
    debug: bool = Field(False, description="Put Python tracebacks into `error` replies. Do not use it in production.")
    log_level: Annotated[
        dict[str, Literal["debug", "info", "warning", "error", "critical"]], BeforeValidator(_log_levels)
    ] = Field(
        default_factory=dict,
        description="Level of log records of applications (Python's `logging`): one level for all, or one for each "
        "logger, e.g. `{root: warning, my_app: debug}`. Default: `info`.",
    )
    spark_master: str = Field("local[*]", description=f"The Spark of a worker: {FORMS}.")
    cores: int = Field(
        4, ge=1, description="Cores of a cluster that one worker may use at once: `spark://`, `k8s://` and `yarn` only."
    )
    spark_conf: Annotated[dict[str, str], BeforeValidator(_spark_text)] = Field(
        default_factory=dict, repr=False, description="Further Spark settings, as Spark names them."
    )
    footprint: Literal["standard", "small"] = Field(
        "standard",
        description="`small`: Spark settings for keys with little data, which save memory and processor time "
        "at the start and are slower on heavy queries; `spark_conf` wins.",
    )
    config: dict[str, Any] = Field(default_factory=dict, repr=False, description="The application's own configuration.")
    scaling: ScalingSettings = Field(default_factory=ScalingSettings, description="Several workers for one key.")
    placement: Literal["dedicated", "pooled"] = Field(
        "dedicated",
        description="`dedicated`: a process for each worker; `pooled`: the workers of many keys share a process and "
        "its JVM. Keys whose authors do not trust each other stay dedicated.",
    )
    pooled: PooledSettings = Field(default_factory=PooledSettings, description="Processes of `placement: pooled`.")
    environment: Literal["minimal", "reference"] = Field(
        "minimal",
        description="`minimal`: the driver passes the AMQP URI in a file or on standard input if it can, not in the "
        "environment; `reference`: it passes it in `WORKER_AMQP_URI`, which workers of the reference "
        "need.",
    )

    @field_validator("spark_master")
    @classmethod
    def _known_master(cls, text: str) -> str:
        parse_spark_master(text)
        return text

    def effective_spark_conf(self) -> dict[str, str]:
        """`spark_conf` on top of the settings of `footprint`. Options of the JVM are joined; a later one wins."""
        if self.footprint == "standard":
            return self.spark_conf
        options = f"{SMALL_FOOTPRINT[JAVA_OPTIONS]} {self.spark_conf.get(JAVA_OPTIONS, '')}".strip()
        return {**SMALL_FOOTPRINT, **self.spark_conf, JAVA_OPTIONS: options}

    def to_worker_config(
        self,
        *,
        max_clock_skew: float,
        start_timeout: float,
        reply_to_prefixes: tuple[str, ...] | None = None,
        statuses: Literal["full", "reference"] = "full",
    ) -> dict[str, object]:
        """The JSON document given to workers as `WORKER_CONFIG`."""
        # Only where it is set: a further name would be another configuration, and workers would be replaced for it.
        addresses = {} if reply_to_prefixes is None else {"reply_to_prefixes": list(reply_to_prefixes)}
        replies = {} if statuses == "full" else {"statuses": statuses}
        on_cluster = parse_spark_master(self.spark_master).is_cluster
        cluster = {"cores": self.cores, "start_timeout": start_timeout} if on_cluster else {}
        logs = {"log_level": self.log_level} if self.log_level else {}
        return {
            "runtime": {
                "max_clock_skew": max_clock_skew,
                "concurrency": self.concurrency,
                "processing_timeout": self.processing_timeout,
                "queue_missing_timeout": self.queue_missing_timeout,
                "stop_grace": self.stop_grace,
                "skip_abandoned": self.skip_abandoned,
                "debug": self.debug,
                **addresses,
                **replies,
                **logs,
            },
            "spark": {"master": self.spark_master, "conf": self.effective_spark_conf(), **cluster},
            "app": self.config,
        }


class LifecycleSettings(Model):
    """Delays and limits for the start and end of groups. Source: docs/design/lifecycle.md."""

    unbind_delay: Duration = Field(600.0, description="After this time without activity, a group's queue is unbound.")
    stop_delay: Duration = Field(
        600.0, description="After this further time without activity, the workers of the unbound group are stopped."
    )
    settle_delay: Duration = Field(
        10.0,
        gt=0,
        description="Waiting time after an unbind; must be longer than RabbitMQ takes to route a "
        "published message. Tests may set 1 s.",
    )
    extra_lifetime: Duration = Field(1.0, description="Window in which activity of one key counts once.")
    max_groups: int = Field(
        100,
        ge=1,
        description="Maximum number of groups with workers; requests for further keys wait until there is room.",
    )
    max_waiting_groups: int = Field(
        1000,
        ge=0,
        description="Maximum number of groups that wait for room; requests for further keys are answered `capacity`.",
    )
    make_room_after: Duration = Field(
        10.0, description="If groups wait for room, a group that was idle for this time may be ended."
    )
    max_distinct_keys: int = Field(
        200_000,
        ge=1,
        description="Maximum number of different keys in the life of a daemon: each key uses one of RabbitMQ's 5 "
        "million Erlang atoms until the node restarts.",
    )
    max_concurrent_starts: int = Field(
        4, ge=1, description="Maximum number of worker starts at the same time, for the whole pool."
    )
    start_timeout: Duration = Field(
        300.0, gt=0, description="Time within which a worker must become ready; otherwise its start has failed."
    )
    start_attempts: int = Field(2, ge=1, description="Failed starts in a row after which callers get `start-failed`.")
    resync_interval: Duration = Field(
        60.0,
        ge=1,
        description="Interval of the comparison of all groups with RabbitMQ and the driver, independent "
        "of events (lifecycle: resync).",
    )
    topology_interval: Duration = Field(
        10.0,
        ge=1,
        description="Interval at which the leader compares the pool's exchanges, queues, bindings and policy with "
        "RabbitMQ and repairs them. Requests can be lost while one of them is missing; a comparison costs"
        " about 20 short calls.",
    )

    @model_validator(mode="after")
    def _settle_before_stop(self) -> Self:
        if self.stop_delay < self.settle_delay:
            raise ValueError(
                f"stop_delay ({self.stop_delay:g} s) must be at least settle_delay ({self.settle_delay:g} s): "
                "raise stop_delay"
            )
        return self


class RequestSettings(Model):
    """Limits of requests and request queues."""

    ttl: Duration = Field(
        600.0, gt=0, description="How long a request waits in a queue before it is answered `expired`."
    )
    max_ttl: Duration = Field(
        604800.0,
        gt=0,
        le=4233600,
        description="Managed pools only: the longest time-to-live that a route or a manifest may give; up to 49 days.",
    )
    delivery_limit: int = Field(5, ge=3, le=1000, description="Failed deliveries after which a request is poison.")
    poison_time: Duration = Field(
        600.0,
        ge=0,
        description="How long a text (path and body) is refused with `poison` after it has ended a second worker, "
        "because it ran there alone or its handler could not be cancelled. 0: never; the delivery limit "
        "decides.",
    )
    consumer_timeout: Duration | None = Field(
        None, description="RabbitMQ's limit for an unacknowledged delivery; default: processing_timeout + 5 minutes."
    )
    max_length: int | None = Field(
        None, ge=1, description="Maximum number of messages in one request queue; RabbitMQ refuses more."
    )
    max_length_bytes: Size | None = Field(
        None, ge=1, description="Maximum number of bytes in one request queue; RabbitMQ refuses more."
    )
    max_message_bytes: Size = Field(
        16 * 2**20, ge=1024, description="Largest body; RabbitMQ 4 allows 16 MiB by default."
    )
    max_clock_skew: Duration = Field(
        5.0, description="Allowed difference between the clocks of client, worker and controller."
    )
    reply_to_prefixes: tuple[str, ...] | None = Field(
        None,
        description="Reply queues of requests must have a name that begins with one of these; an empty list allows "
        "direct reply-to only. By default every queue that is not the pool's own. A request with another `reply-to` "
        "is dropped and counted.",
    )
    statuses: Literal["full", "reference"] = Field(
        "full",
        description="`reference`: controller and workers write every status other than `ok` as `core_error` into "
        "`x-status`, and the status itself into `x-osrdyne-status`. The reference client stops at any other status; "
        "the osrdyne clients read both.",
    )
    check_entire_queue_on_cleanup: bool = Field(
        False,
        description="Managed pools only: also answer requests that expire behind a request that has not expired, "
        "before they reach the head of their queue. For this the leader reads and writes the whole queue.",
    )
    cleanup_interval: Duration = Field(
        30.0,
        ge=1,
        description="Time within which such a request is answered, counted from its deadline plus max_clock_skew. "
        "Requests that an earlier leader forwarded and requests that were tried before take up to 10 s "
        "longer.",
    )

    @property
    def longest_ttl(self) -> float:
        """The longest time-to-live of a request of the pool, in seconds."""
        return max(self.ttl, self.max_ttl)


class ApiTlsSettings(Model):
    """TLS of the HTTP API."""

    certificate_file: str | None = Field(
        None, description="The API's certificate with its chain, PEM. It turns HTTPS on."
    )
    key_file: str | None = Field(None, description="The private key of the certificate, PEM, without a passphrase.")
    ca_file: str | None = Field(
        None, description="Authorities that the command line trusts for this API, PEM; the system's when absent."
    )

    @model_validator(mode="after")
    def _certificate_and_key(self) -> Self:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file belong together: set both or neither")
        return self


class ApiSettings(Model):
    """The HTTP API."""

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. Any other than loopback needs `tokens_file` and `allowed_hosts`.",
    )
    port: int = Field(4242, ge=0, le=65535, description="Port; 0 picks a free one.")
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Names in the `Host` header to answer, besides the daemon's own name and the address of the "
        "connection. A request with another name is refused: a web page could otherwise reach the API through a name "
        "of its own (DNS rebinding).",
    )
    tokens_file: str | None = Field(
        None,
        description="File with the digests of API tokens, written by `osrdyne token`. With it every request over TCP "
        "needs a token; without it the API is open.",
    )
    insecure: bool = Field(
        False,
        description="Listen on an address other than loopback without tokens. Every host that can reach the address "
        "may use the API.",
    )
    socket: str = Field(
        "auto",
        description="Unix socket that only the daemon's user and root can connect to; the command line prefers it. "
        "`auto`: in `/run/osrdyne`, `$XDG_RUNTIME_DIR/osrdyne` or the user's state directory; `off`: none.",
    )
    tls: ApiTlsSettings = Field(default_factory=ApiTlsSettings, description="HTTPS.")
    max_body: Size = Field(2**20, ge=1024, description="Largest body of a request that is not a manifest.")
    max_manifest: Size = Field(16 * 2**20, ge=1024, le=64 * 2**20, description="Largest body that holds a manifest.")
    header_timeout: Duration = Field(10.0, gt=0, description="Time within which the headers of a request must arrive.")
    body_timeout: Duration = Field(60.0, gt=0, description="Time within which the body of a request must arrive.")
    limit_concurrency: int = Field(
        100,
        ge=2,
        description="Maximum number of connections and of requests at once; further requests are answered 503.",
    )


class LogSettings(Model):
    """Logs."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is written.")
    format: Literal["auto", "json", "text"] = Field("auto", description="`auto`: text on a terminal, else JSON.")


class Settings(Model):
    """The whole configuration of one daemon."""

    broker: BrokerSettings = Field(default_factory=BrokerSettings, description="RabbitMQ.")
    pool: PoolSettings = Field(default_factory=PoolSettings, description="The pool this daemon serves.")
    driver: Annotated[DriverSettings, BeforeValidator(_driver_from_name)] = Field(
        default_factory=DriverSettings, description="What starts workers."
    )
    worker: WorkerSettings = Field(default_factory=WorkerSettings, description="What runs in them.")
    lifecycle: LifecycleSettings = Field(default_factory=LifecycleSettings, description="When groups come and go.")
    requests: RequestSettings = Field(default_factory=RequestSettings, description="Request queues.")
    api: ApiSettings = Field(default_factory=ApiSettings, description="HTTP API.")
    log: LogSettings = Field(default_factory=LogSettings, description="Logs.")

    @model_validator(mode="after")
    def _cleanup_of_managed_pools(self) -> Self:
        if self.requests.check_entire_queue_on_cleanup and not self.pool.is_managed:
            raise ValueError("requests.check_entire_queue_on_cleanup needs a managed pool: set pool.kind to managed")
        return self

    @model_validator(mode="after")
    def _ttl_of_managed_pools(self) -> Self:
        if self.requests.max_ttl != RequestSettings.model_fields["max_ttl"].default:
            if not self.pool.is_managed:
                raise ValueError("requests.max_ttl needs a managed pool: set pool.kind to managed, or remove it")
            if self.requests.max_ttl < self.requests.ttl:
                raise ValueError(
                    f"requests.max_ttl ({self.requests.max_ttl:g} s) must be at least requests.ttl "
                    f"({self.requests.ttl:g} s): raise max_ttl"
                )
        return self

    @model_validator(mode="after")
    def _image_of_executors(self) -> Self:
        on_kubernetes = parse_spark_master(self.worker.spark_master).kind is MasterKind.KUBERNETES
        # Pods of the Kubernetes driver know their own image, and executors get the same.
        if on_kubernetes and self.driver.name != "kubernetes" and EXECUTOR_IMAGE not in self.worker.spark_conf:
            raise ValueError(
                f"worker.spark_master {self.worker.spark_master!r} needs the image of the executors: set "
                f"{EXECUTOR_IMAGE} in worker.spark_conf"
            )
        return self

    def worker_config(self) -> dict[str, object]:
        """The JSON document given to workers as `WORKER_CONFIG`."""
        return self.worker.to_worker_config(
            max_clock_skew=self.requests.max_clock_skew,
            start_timeout=self.lifecycle.start_timeout,
            reply_to_prefixes=self.requests.reply_to_prefixes,
            statuses=self.requests.statuses,
        )

    def effective_consumer_timeout(self) -> float:
        """RabbitMQ's limit for an unacknowledged delivery, seconds."""
        return self.requests.consumer_timeout or self.worker.processing_timeout + 300.0
