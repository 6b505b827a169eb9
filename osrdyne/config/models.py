"""The settings, by subject. Every field has a default, a unit and the reason for the default.

`Settings` is frozen, complete and validated; `loading` reads it from files, environment and flags. Defaults:
docs/reference/configuration.
"""

from __future__ import annotations

from ipaddress import ip_network
from typing import Annotated, Any, Literal, Self
from urllib.parse import quote, unquote, urlsplit

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator

from osrdyne.config.profiles import LEAST_HEAP, Footprint, PlacementName, Profile, profile_problems
from osrdyne.config.types import Duration, MasterUri, PublicMarker, Size, SparkConf
from osrdyne.config.types import Model as Model
from osrdyne.errors import InvalidKeyError
from osrdyne.protocol.event_mapping import mapping_from_settings
from osrdyne.protocol.names import is_pool_id, parse_key
from osrdyne.protocol.spark_master import EXECUTOR_IMAGE, FORMS, MasterKind, parse_spark_master, shown_master
from osrdyne.protocol.uri import TlsFiles, tls_of, with_tls

HEADER_NAME = r"^[A-Za-z0-9-]{1,100}$"


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
    """Return the value. Raises ValueError without the value, because it contains a password."""
    if value is None:
        return None
    try:
        parts = urlsplit(value.get_secret_value())
        # An unencoded `/`, `?` or `#` in the password ends the host early; the rest would be parsed as a path.
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
    management_timeout: Duration = Field(
        30.0, gt=0, description="Limit for one call of the HTTP API; listings get up to ten times as long."
    )
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
    max_memory_used: float | None = Field(
        0.85,
        gt=0,
        le=1,
        description="Used share of the memory of a host, or of the cgroup of a process if that share is larger. Above "
        "it the leader ends spares, then idle keys, then the least loaded process.",
    )
    max_heap_growth: float | None = Field(
        0.3,
        gt=0,
        description="A process whose live heap has grown by this share, with the same keys, is replaced.",
    )
    max_age: Duration | None = Field(None, gt=0, description="A process of this age is replaced.")
    max_requests: int | None = Field(
        None, ge=1, description="A process that has served this number of requests is replaced."
    )
    process_timeout: Duration = Field(
        30.0,
        ge=6,
        description="A process that does not answer for this time is killed; its workers start in another one.",
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


NO_BROKER_TIMEOUT = 600.0


class WorkerSettings(Model):
    """The application of the workers and its settings; a worker gets them in `WORKER_CONFIG`."""

    app: str = Field(
        "osrdyne_worker.pipelines.sql:app", description="`module:attribute` of the application that answers requests."
    )
    key_exists: str | None = Field(
        None,
        pattern=r"\{key\}|^[^:/]+:[^:/]+$",
        description="How the leader checks that a key exists before it starts a worker: a path with `{key}`, such as "
        "`/data/{key}`, that must exist on its host, or `module:function` of a function of the key that returns true "
        "or false. Requests for other keys get 404. If the check fails, or takes more than 5 s, the worker is started.",
    )
    principal: str | None = Field(
        None,
        description="Managed pools only: name of the API token whose grant `listen` says for which keys workers may "
        "receive requests, where a queue policy demands it (Authorization).",
    )
    concurrency: int = Field(1, ge=1, le=64, description="Requests that one worker runs at once.")
    processing_timeout: Duration = Field(
        1800.0, gt=0, description="Limit for the work on one request; RabbitMQ's consumer timeout must be longer."
    )
    queue_missing_timeout: Duration = Field(
        60.0, gt=0, description="A worker exits if its queue is missing, or RabbitMQ refuses its log-in, for this time."
    )
    no_broker_timeout: Duration = Field(
        NO_BROKER_TIMEOUT,
        gt=0,
        description="A worker exits after this time without a connection to RabbitMQ; its requests are in their queue.",
    )
    stop_grace: Duration = Field(
        30.0, ge=0, description="Time that a worker has to finish its requests after SIGTERM; then it is killed."
    )
    silence_timeout: Duration = Field(
        30.0,
        ge=6,
        description="The leader requests a report from a busy worker that has sent none for this time, and replaces "
        "the worker if it does not answer.",
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
    spark_master: MasterUri = Field("local[*]", repr=False, description=f"The Spark of a worker: {FORMS}.")
    cores: int = Field(
        4, ge=1, description="Cores of a cluster that one worker may use at once: `spark://`, `k8s://` and `yarn` only."
    )
    memory: Size | None = Field(
        None,
        ge=LEAST_HEAP,
        description="Heap of Spark's Java process, whole MiB; `spark.driver.memory` in `spark_conf` takes precedence.",
    )
    spark_conf: SparkConf = Field(
        default_factory=dict, repr=False, description="Further Spark settings, as Spark names them."
    )
    footprint: Footprint = Field(
        "standard",
        description="`small`: Spark settings for keys with little data, which save memory and processor time "
        "at the start and are slower on heavy queries; `spark_conf` takes precedence.",
    )
    config: dict[str, Any] = Field(default_factory=dict, repr=False, description="The application's own configuration.")
    scaling: ScalingSettings = Field(default_factory=ScalingSettings, description="Several workers for one key.")
    placement: PlacementName = Field(
        "dedicated",
        description="`dedicated`: a process for each worker; `pooled`: the workers of many keys share a process and "
        "its JVM. Keys whose authors do not trust each other stay dedicated.",
    )
    pooled: PooledSettings = Field(default_factory=PooledSettings, description="Processes of `placement: pooled`.")
    profiles: tuple[Profile, ...] = Field(
        (),
        description="Settings by key: a list of profiles; a key has the first one that matches it. They apply until "
        "`osrdyne profiles apply` stores others.",
    )
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
        """`spark_conf` on top of `memory`, on top of the settings of `footprint`. Options of the JVM are joined; a
        later one wins."""
        memory = {} if self.memory is None else {"spark.driver.memory": f"{self.memory // 2**20}m"}
        if self.footprint == "standard":
            return {**memory, **self.spark_conf}
        options = f"{SMALL_FOOTPRINT[JAVA_OPTIONS]} {self.spark_conf.get(JAVA_OPTIONS, '')}".strip()
        return {**SMALL_FOOTPRINT, **memory, **self.spark_conf, JAVA_OPTIONS: options}

    def to_worker_config(
        self,
        *,
        max_clock_skew: float,
        start_timeout: float,
        reply_to_prefixes: tuple[str, ...] | None = None,
        statuses: Literal["full", "reference"] = "full",
    ) -> dict[str, object]:
        """The JSON document given to workers as `WORKER_CONFIG`."""
        # Only if they are set: another name changes the hash of the settings, and the leader would replace all workers.
        addresses = {} if reply_to_prefixes is None else {"reply_to_prefixes": list(reply_to_prefixes)}
        replies = {} if statuses == "full" else {"statuses": statuses}
        on_cluster = parse_spark_master(self.spark_master).is_cluster
        cluster = {"cores": self.cores, "start_timeout": start_timeout} if on_cluster else {}
        logs = {"log_level": self.log_level} if self.log_level else {}
        broker = {} if self.no_broker_timeout == NO_BROKER_TIMEOUT else {"no_broker_timeout": self.no_broker_timeout}
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
                **broker,
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
    refused_key_time: Duration = Field(
        60.0,
        ge=1,
        description="If `on_start` raises a `RequestError` with a code below 500, or `key_exists` finds no key, "
        "requests get this error for this time, and no worker is started for them.",
    )
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
    poison_drop_networks: tuple[str, ...] = Field(
        (),
        description="Managed pools only: networks, such as 127.0.0.0/8, whose addresses a PoisonMessageDrop of a queue "
        "policy may have although they are loopback, link-local or those of a metadata service.",
    )
    poison_time: Duration = Field(
        600.0,
        ge=0,
        description="How long a text (path and body) is refused with `poison` after it has ended a second worker, "
        "because it ran there alone or its handler could not be cancelled. 0: never; the delivery limit "
        "decides.",
    )
    consumer_timeout: Duration | None = Field(
        None,
        gt=0,
        description="RabbitMQ's limit for an unacknowledged delivery; default: processing_timeout + 5 minutes.",
    )
    max_length: int | None = Field(
        None, ge=1, description="Maximum number of messages in one request queue; RabbitMQ refuses more."
    )
    max_length_bytes: Size | None = Field(
        2**30,
        ge=1,
        description="Maximum number of bytes in one request queue; RabbitMQ refuses more. By default one key cannot "
        "fill the disk of the broker.",
    )
    poison_max_bytes: Size = Field(
        2**30, ge=2**20, description="Size of the poison inventory; the oldest entries are dropped when it is full."
    )
    max_message_bytes: Size = Field(
        16 * 2**20, ge=1024, description="Largest body; RabbitMQ 4 allows 16 MiB by default."
    )
    max_clock_skew: Duration = Field(
        5.0,
        description="Allowed difference between the clocks of client, worker and controller. It extends no "
        "time-to-live of a route, and no `expiration`.",
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
        description="Time within which a request that expires behind others is answered, counted from its "
        "deadline. Requests that an earlier leader forwarded and requests that were tried before take up to 10 s "
        "longer.",
    )

    @field_validator("poison_drop_networks")
    @classmethod
    def _networks(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            try:
                ip_network(text)
            except ValueError:
                raise ValueError(f"{text!r} is not a network; write 127.0.0.0/8 or ::1/128") from None
        return texts

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


GrantedRole = Literal["viewer", "operator", "admin", "bodies"]


class JwtSettings(Model):
    """JWTs that the HTTP API accepts as bearer tokens."""

    algorithm: Literal["HS256", "RS256", "ES256", "EdDSA"] | None = Field(
        None, description="The only algorithm that is accepted. It turns JWTs on."
    )
    key_file: str | None = Field(
        None, description="The public key, PEM, or the secret for HS256 (at least 32 bytes). Read at the start."
    )
    jwks_file: str | None = Field(
        None, description="A JWKS instead of one key. Read again for a token with an unknown `kid`, like `jwks_url`."
    )
    jwks_url: str | None = Field(
        None,
        description="URL of a JWKS: https, or http on loopback; without user and password. Read again for a token with "
        "an unknown `kid`, at most once a minute.",
    )
    issuer: str | None = Field(None, min_length=1, description="Required `iss` of a token.")
    audience: str | None = Field(None, min_length=1, description="Required `aud` of a token.")
    role_claim: str = Field("role", min_length=1, description="Claim with one role, or with a list of roles.")
    roles: Annotated[dict[str, GrantedRole], PublicMarker()] = Field(
        default={"viewer": "viewer", "operator": "operator", "admin": "admin", "bodies": "bodies"},
        description="Values of `role_claim`, and what each gives: `viewer`, `operator`, `admin` or `bodies`.",
    )

    @field_validator("jwks_url")
    @classmethod
    def _url_of_keys(cls, url: str | None) -> str | None:
        if url is not None and not _is_url_of_keys(url):
            # Without the value: it may hold a password.
            raise ValueError("must be an https URL, or http on localhost, without user, password, blanks and backslash")
        return url

    @model_validator(mode="after")
    def _complete(self) -> Self:
        sources = [one for one in (self.key_file, self.jwks_file, self.jwks_url) if one is not None]
        if self.algorithm is None:
            if sources:
                raise ValueError("set algorithm to turn JWTs on, or remove key_file, jwks_file and jwks_url")
        elif len(sources) != 1:
            raise ValueError("set one of key_file, jwks_file and jwks_url")
        elif self.issuer is None or self.audience is None:
            raise ValueError("set issuer and audience: a token for another service must not count here")
        elif self.algorithm == "HS256" and self.jwks_url is not None:
            raise ValueError("HS256 has a secret, which no URL may show: use key_file or jwks_file")
        return self


def _is_url_of_keys(url: str) -> bool:
    """Whether keys may be read from a URL: the host that answers decides which tokens count."""
    # Parsers disagree about such characters, so one of them may see another host.
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        return False
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return False
    if not host or "@" in parts.netloc:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and host in {"localhost", "127.0.0.1", "::1"})


WIDEST_NETWORKS = {4: 8, 6: 7}
"""The shortest prefix of a network of proxies, by version of IP: that of the largest private network."""


_OWN_PATHS = frozenset({"v1", "health", "ready", "version", "metrics", "status", "openapi.json"})


class ApiSettings(Model):
    """The HTTP API."""

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. Any other than loopback needs `allowed_hosts`, and `tokens_file`, `jwt` or "
        "`trusted_proxies`.",
    )
    port: int = Field(4242, ge=0, le=65535, description="Port; 0 picks a free one.")
    probe_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port for `/health` and `/ready` alone, on `host`, over plain HTTP and without details: clients "
        "that use up the connections of the API make no probe fail there. Without it, probes use `port`.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Names in the `Host` header to answer, besides the daemon's own name and the address of the "
        "connection. A request with another name is refused: a web page could otherwise reach the API through a name "
        "of its own (DNS rebinding).",
    )
    tokens_file: str | None = Field(
        None,
        description="File with the digests of API tokens, written by `osrdyne token`. Without it, `jwt` and "
        "`trusted_proxies` the API is open.",
    )
    jwt: JwtSettings = Field(default_factory=JwtSettings, description="JWTs as bearer tokens.")
    trusted_proxies: tuple[str, ...] = Field(
        (),
        description="Addresses or networks (`10.0.0.0/24`) of proxies that identify users. Their headers count only on "
        "connections from these addresses.",
    )
    proxy_user_header: str = Field(
        "X-Forwarded-User", pattern=HEADER_NAME, description="Header in which a trusted proxy names the user."
    )
    proxy_role_header: str = Field(
        "X-Forwarded-Role",
        pattern=HEADER_NAME,
        description="Header in which a trusted proxy names the roles of the user, separated by commas: `viewer`, "
        "`operator`, `admin`, `bodies`. A user without a role may do nothing.",
    )
    allow_anonymous: bool = Field(
        False,
        description="Listen on an address other than loopback without tokens, JWTs or a trusted proxy. Every host that "
        "can reach the address may use the API.",
    )
    circuits_path: str = Field(
        "/queuecircuitbreaker/circuit",
        pattern=r"^(/[A-Za-z0-9._~-]+)+/?$",
        description="Path of the circuits in the shapes of Gateleen's queue circuit breaker, as its clients have it.",
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

    @field_validator("circuits_path")
    @classmethod
    def _no_other_endpoint(cls, path: str) -> str:
        if path.split("/")[1] in _OWN_PATHS:
            raise ValueError("begins like a path of the API's own; use another, such as /circuits")
        return path

    @property
    def identifies(self) -> bool:
        """Whether a request over TCP needs to be identified."""
        return self.tokens_file is not None or self.jwt.algorithm is not None or bool(self.trusted_proxies)

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            try:
                found = ip_network(network)
            except ValueError:
                raise ValueError(
                    f"{network!r} is not an IP address or network such as 10.0.0.0/24, with zeros after the prefix"
                ) from None
            if found.prefixlen < WIDEST_NETWORKS[found.version]:
                raise ValueError(
                    f"{network!r} holds addresses that are not proxies, and each of them could name any user. List the "
                    "addresses of the proxies"
                )
        return networks


class PriceSettings(Model):
    """Prices per unit and month, from which `osrdyne capacity` finds the cheapest tiers."""

    iot_hub_free: float = Field(0.0, ge=0, description="Azure IoT Hub, edition free.")
    iot_hub_s1: float = Field(25.0, ge=0, description="Azure IoT Hub, edition S1.")
    iot_hub_s2: float = Field(250.0, ge=0, description="Azure IoT Hub, edition S2.")
    iot_hub_s3: float = Field(2500.0, ge=0, description="Azure IoT Hub, edition S3.")
    store_s1: float = Field(150.0, ge=0, description="Azure Time Series Insights, edition S1.")
    store_s2: float = Field(1350.0, ge=0, description="Azure Time Series Insights, edition S2.")

    def by_tier(self) -> dict[str, float]:
        """The prices by the names of the tiers, such as `iot-hub-s1`."""
        return {name.replace("_", "-"): price for name, price in self.model_dump().items()}


class AuditSettings(Model):
    """Records of the changes that are made through the API."""

    max_age: Duration = Field(
        30 * 86400.0,
        ge=3600,
        le=49 * 86400,
        description="How long RabbitMQ keeps the record of a change. A changed value counts for new records.",
    )
    max_changes: int = Field(
        10_000,
        ge=100,
        le=30_000,
        description="Changes whose records RabbitMQ keeps; the oldest are dropped. The leader holds them in memory once"
        " they are read.",
    )
    required: bool = Field(
        False,
        description="Refuse a change with `audit-unavailable` (503) if RabbitMQ does not confirm its record within "
        "5 s.",
    )


class ScheduledTable(Model):
    """A table of telemetry for which the leader requests ingests."""

    name: str = Field(
        pattern=r"^[a-z0-9_-]{1,64}$", description="Name of the table in `worker.config` of the pool that writes it."
    )
    pool: str | None = Field(None, description="Pool whose workers run the ingest. Default: the pool of the log.")
    target_lag: Duration = Field(60.0, ge=1, le=86_400, description="Age of unread messages that demands an ingest.")
    interval: Duration | None = Field(
        None, ge=1, le=86_400, description="Time after an ingest when the next one follows if there are messages."
    )
    at_once: int = Field(4, ge=1, le=256, description="Partitions that are ingested at the same time.")
    request_timeout: Duration = Field(
        600.0, ge=1, le=86_400, description="Deadline of a request; without an answer it is sent again."
    )
    token_file: str | None = Field(
        None,
        description="A file with the API token or JWT of the requests, for a managed pool whose policies demand one. "
        "It is read for each request, so that it can be replaced.",
    )

    @field_validator("pool")
    @classmethod
    def _valid_pool(cls, value: str | None) -> str | None:
        if value is not None and not is_pool_id(value):
            raise ValueError(f"{value!r} is not a valid pool id: use 1 to 32 characters out of a-z, 0-9 and _")
        return value


class LastValueSettings(Model):
    """The last-value reader of a log, and its database."""

    store: Literal["sqlite", "postgresql"] = Field(
        "sqlite", description="Database of the last values: a file of SQLite on this host, or PostgreSQL."
    )
    file: str | None = Field(
        None, description="The file of SQLite. Default: `POOL-last-values.db` in the user's state directory."
    )
    uri: SecretStr | None = Field(
        None, description="URI of PostgreSQL: `postgresql://user:password@host/database`. Needs psycopg."
    )
    uri_file: str | None = Field(None, description="A file that contains the URI, instead of `uri`.")
    max_future: Duration = Field(
        300.0,
        le=365 * 86400,
        description="How far the time of an event may be after its arrival at the ingress. A later time is replaced by "
        "that of the arrival, so that a device whose clock is wrong does not hide later values.",
    )
    mapping: dict[str, str] = Field(
        default_factory=dict,
        description="How messages become events: `preset`, and what differs from it, as in the tables of the log.",
    )

    @field_validator("mapping")
    @classmethod
    def _valid_mapping(cls, value: dict[str, str]) -> dict[str, str]:
        mapping_from_settings(value)
        return value

    @field_validator("uri")
    @classmethod
    def _postgresql_uri(cls, value: SecretStr | None) -> SecretStr | None:
        return _checked_uri(
            value, schemes=("postgresql", "postgres"), example="postgresql://user:password@host:5432/database"
        )

    @model_validator(mode="after")
    def _uri_of_postgresql(self) -> Self:
        if self.store == "postgresql" and self.uri is None:
            raise ValueError("store postgresql needs a URI: set uri or uri_file")
        if self.store == "sqlite" and self.uri is not None:
            raise ValueError("uri is used by the store postgresql only: set store to postgresql, or remove it")
        return self


class TelemetrySettings(Model):
    """The log of telemetry of a managed pool."""

    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="Name of the log, which sinks of routes use: `/streams/NAME/inputs/log`. Without a name the pool "
        "has no log.",
    )
    partitions: int = Field(
        4,
        ge=1,
        le=256,
        description="Streams of the log; a key always has the same one. The number of an existing log cannot change.",
    )
    max_age: Duration = Field(
        7 * 86400.0,
        ge=1,
        le=3650 * 86400,
        description="How long RabbitMQ keeps messages, at least: it removes whole segments. It cannot change later.",
    )
    max_bytes: Size = Field(
        16 * 2**30,
        ge=2**20,
        description="Size of the whole log; each partition has an equal share. RabbitMQ removes the oldest segments "
        "beyond it. It cannot change later.",
    )
    tables: tuple[ScheduledTable, ...] = Field(
        (),
        description="Tables for which the leader requests ingests: a list of mappings with `name`, `pool`, "
        "`target_lag`, `interval`, `at_once`, `request_timeout` and `token_file`.",
    )
    last_values: LastValueSettings = Field(
        default_factory=LastValueSettings, description="The last-value reader, `osrdyne last-value`."
    )

    @property
    def partition_bytes(self) -> int:
        return self.max_bytes // self.partitions

    @property
    def segment_bytes(self) -> int:
        """The size of a segment. Retention removes whole segments, and never the one that is being written."""
        return min(128 * 2**20, max(64 * 2**10, self.partition_bytes // 8))

    @model_validator(mode="after")
    def _room_for_segments(self) -> Self:
        if self.partition_bytes < 2 * self.segment_bytes:
            least = 2 * self.segment_bytes * self.partitions
            raise ValueError(f"max_bytes is too small for {self.partitions} partitions: set it to {least} or more")
        return self

    @model_validator(mode="after")
    def _tables_of_a_log(self) -> Self:
        if self.tables and self.name is None:
            raise ValueError("tables need a log: set telemetry.name, or remove them")
        names = [table.name for table in self.tables]
        if len(set(names)) < len(names):
            raise ValueError(f"tables: {next(one for one in names if names.count(one) > 1)!r} is there twice")
        return self


class LogSettings(Model):
    """Logs."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is written.")
    format: Literal["auto", "json", "text"] = Field("auto", description="`auto`: text on a terminal, else JSON.")


class Settings(Model):
    """The whole configuration of one daemon."""

    broker: BrokerSettings = Field(default_factory=BrokerSettings, description="RabbitMQ.")
    pool: PoolSettings = Field(default_factory=PoolSettings, description="The pool this daemon serves.")
    driver: Annotated[DriverSettings, BeforeValidator(_driver_from_name)] = Field(
        default_factory=DriverSettings, description="The driver that starts workers."
    )
    worker: WorkerSettings = Field(default_factory=WorkerSettings, description="The workers and their application.")
    lifecycle: LifecycleSettings = Field(default_factory=LifecycleSettings, description="Start and end of groups.")
    requests: RequestSettings = Field(default_factory=RequestSettings, description="Request queues.")
    api: ApiSettings = Field(default_factory=ApiSettings, description="HTTP API.")
    audit: AuditSettings = Field(default_factory=AuditSettings, description="Records of changes.")
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings, description="The log of telemetry.")
    log: LogSettings = Field(default_factory=LogSettings, description="Logs.")
    prices: PriceSettings = Field(default_factory=PriceSettings, description="Prices for plans of capacity.")

    @model_validator(mode="after")
    def _cleanup_of_managed_pools(self) -> Self:
        if self.requests.check_entire_queue_on_cleanup and not self.pool.is_managed:
            raise ValueError("requests.check_entire_queue_on_cleanup needs a managed pool: set pool.kind to managed")
        return self

    @model_validator(mode="after")
    def _log_of_managed_pools(self) -> Self:
        if self.telemetry.name is not None and not self.pool.is_managed:
            raise ValueError("telemetry.name needs a managed pool: set pool.kind to managed, or remove it")
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
        if self.lacks_executor_image:
            raise ValueError(
                f"worker.spark_master {shown_master(self.worker.spark_master)!r} needs the image of the executors: set "
                f"{EXECUTOR_IMAGE} in worker.spark_conf"
            )
        return self

    @model_validator(mode="after")
    def _usable_profiles(self) -> Self:
        if problems := profile_problems(self, self.worker.profiles):
            texts = (f"{'.'.join(filter(None, ('worker.profiles', path)))}: {message}" for path, message in problems)
            raise ValueError("; ".join(texts))
        return self

    @property
    def lacks_executor_image(self) -> bool:
        """Whether Spark starts executors on Kubernetes, and the settings do not name their image."""
        on_kubernetes = parse_spark_master(self.worker.spark_master).kind is MasterKind.KUBERNETES
        # Workers of the Kubernetes driver use the image of their own pod for executors.
        return on_kubernetes and self.driver.name != "kubernetes" and EXECUTOR_IMAGE not in self.worker.spark_conf

    def with_profile(self, profile: Profile | None) -> Settings:
        """The settings of the groups that have this profile; those of the pool if it is None."""
        if profile is None:
            return self
        given = profile.given()
        given.pop("eviction", None)  # applies to the group: a change must not replace its workers
        delays = ("unbind_delay", "stop_delay")
        lifecycle: dict[str, Any] = {name: given.pop(name) for name in delays if name in given}
        if "spares" in given:
            given["pooled"] = self.worker.pooled.model_copy(update={"spares": given.pop("spares")})
        given["spark_conf"] = {**self.worker.spark_conf, **profile.spark_conf}
        return self.model_copy(
            update={
                "worker": self.worker.model_copy(update=given),
                "lifecycle": self.lifecycle.model_copy(update=lifecycle),
            }
        )

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
        configured = self.requests.consumer_timeout
        return self.worker.processing_timeout + 300.0 if configured is None else configured
