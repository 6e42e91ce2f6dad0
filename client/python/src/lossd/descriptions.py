# SPDX-License-Identifier: Apache-2.0
"""What the server says of itself, of heads, steps and checkpoints.

Each class has the fields of the protocol's message of that name (proto/lossd/v1), with words for its enumerations ("adam",
"bf16") and tuples for its lists. Objects are immutable, comparable, hashable and can be pickled. Sizes are bytes, times
are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar

from google.protobuf.message import Message

from lossd import types
from lossd._shown import Shown, text_of_bytes
from lossd.types import DType, Gradients, Logits, Norm, OptimizerState, Residency, Split
from lossd.v1 import head_pb2, server_pb2

T = TypeVar("T", bound=Shown)
SavePhase = Literal["waiting", "reading", "writing"]
StreamWait = Literal["open", "client", "server", "send", "end"]


def _word(names: Mapping[str, Any], unspecified: str | None) -> Any:
    """A field for an enumeration: `names` has the numbers of its words."""
    return field(default=unspecified, metadata={"words": {number: word for word, number in names.items()}})


def _one(kind: type[Shown], **options: Any) -> Any:
    """A field for another message."""
    return field(default_factory=kind, metadata={"kind": kind}, **options)


def _many(kind: type[Shown]) -> Any:
    """A field for a list of messages."""
    return field(default=(), metadata={"kind": kind}, repr=False)


def read(kind: type[T], message: Message) -> T:
    """The object that describes what a message says. A word that this client does not know is given as its number."""
    return kind(**{each.name: _value(each, message) for each in fields(kind)})  # type: ignore[arg-type]


def _value(of: Any, message: Message) -> Any:
    value = getattr(message, of.name)
    if words := of.metadata.get("words"):
        return words.get(value, str(value)) if value else of.default
    if kind := of.metadata.get("kind"):
        return read(kind, value) if isinstance(value, Message) else tuple(read(kind, each) for each in value)
    if isinstance(of.default, tuple):
        return tuple(value)
    return None if of.default is None and not message.HasField(of.name) else value


@dataclass(frozen=True, repr=False)
class MemoryUsage(Shown):
    """Bytes held, by purpose."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    workspace: int = 0  # what is computed on the way: logits, sums, lists, rows being converted
    staging: int = 0
    retained: int = 0  # hidden states of deferred microbatches
    slots: int = 0  # of the chunks on a GPU: hidden states, their gradients, per-row inputs and results
    ledger: int = 0  # what is remembered of rows
    host_values: int = 0  # of the host: values of heads with residency "host"
    teacher_pool: int = 0  # of a device: where such heads are copied to, and what their chunks work in

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))

    def _facts(self) -> list[tuple[str, str]]:
        return [(each.name, text_of_bytes(getattr(self, each.name))) for each in fields(self) if getattr(self, each.name)]


@dataclass(frozen=True, repr=False)
class HeadSpec(Shown):
    """What a head is: the arguments of Client.create_head, which explains them."""

    name: str = ""
    hidden_size: int = 0
    vocab_size: int = 0
    bias: bool = False
    class_weights: bool = False
    norm: Norm = _word(types.NORMS, "none")
    norm_epsilon: float | None = None
    compute_dtype: DType | None = _word(types.DTYPES, None)
    optimizer_state: OptimizerState = _word(types.OPTIMIZER_STATES, "adam")
    frozen: bool = False
    gradients: Gradients = _word(types.GRADIENTS, "exact")
    workspace_bytes: int = 0  # 0: as the server was started
    logits: Logits = _word(types.LOGITS, "stored")
    split: Split = _word(types.SPLITS, "any")
    shares: tuple[int, ...] = ()  # of the devices (of a replica), by vocabulary; empty: all have the same
    replicas: int = 0  # by vocabulary; 0 and 1: one on all devices
    residency: Residency = _word(types.RESIDENCIES, "device")
    # The numbers of its classes in a larger vocabulary of full_vocab_size classes; empty: it has no larger one.
    # list_heads() and list_checkpoints() leave the list out.
    class_list: tuple[int, ...] = field(default=(), repr=False)
    full_vocab_size: int = 0


@dataclass(frozen=True, repr=False)
class HeadState(Shown):
    """Where a head stands; docs/consistency.md says what the numbers promise."""

    incarnation: int = 0  # of the server process; another one means that gradients of the open step are gone
    step: int = 0  # the open step: how many optimizer steps were closed before it
    generation: int = 0  # of the gradients; another one each time they are zeroed
    weights_version: int = 0  # another one each time that values change
    creation: int = 0  # of the head itself; another one for a head that was deleted and made again; 0: an earlier server


@dataclass(frozen=True, repr=False)
class SliceLimits(Shown):
    """Limits on the slices that rows are sent in."""

    max_rows: int = 0
    max_bytes: int = 0
    row_grid: int = 0  # 0: none; else slices have no rows on both sides of a multiple of it
    max_bytes_in_region: int = 0  # of one that lies in shared memory; 0: as max_bytes


@dataclass(frozen=True, repr=False)
class Choice(Shown):
    """What was chosen where there was a choice. For people: the words may change with any version."""

    what: str = ""
    choice: str = ""
    reason: str = ""
    workspace_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.what}: {self.choice}{f' ({self.reason})' if self.reason else ''}"


@dataclass(frozen=True, repr=False)
class HeadDevice(Shown):
    """A device of a server that has some of a head's classes. Rows and times are the device's, since the server started."""

    device: str = ""
    share: int = 0  # HeadSpec.shares; 1 each if that is empty
    classes: int = 0
    rows: int = 0  # computed, of chunks without an error
    busy_seconds: float = 0.0  # it had something to do, exchanges included
    exchange_seconds: float = 0.0  # of these, it exchanged with the other devices or waited for them; 0: not known


@dataclass(frozen=True, repr=False)
class Paging(Shown):
    """How a head that lives in host memory has come to the server's devices and gone. Of several devices the sums."""

    on_device: bool = False  # its values are in the pool now, of several devices of all
    value_bytes: int = 0  # that one copy takes; 0: the head lives on the device
    hits: int = 0  # chunks that found it there
    copies: int = 0  # chunks that it was copied for
    evictions: int = 0  # times that it left the pool for another head
    copied_bytes: int = 0
    copy_seconds: float = 0.0  # how long the copies took; the device may have computed other chunks meanwhile


@dataclass(frozen=True, repr=False)
class HeadHistory(Shown):
    """Where the values of a head come from. A server before it kept histories says nothing of it: all is empty."""

    run: str = ""  # that applied the last step (Client.run); "": none was applied, or its trainer named none
    applied_unix_seconds: int = 0  # when the last step was applied; 0: not known
    checkpoint: str = ""  # "<head>/<name>", which holds or held the values last; "": there is none
    checkpoint_step: int = 0  # the step then open
    checkpoint_unix_seconds: int = 0  # when it was saved; 0: not known
    loaded: bool = False  # the head was restored from the checkpoint; False: it was saved to it
    open_run: str = ""  # that sent the first rows of the open step; "": it has none, or their trainer named none


@dataclass(frozen=True, repr=False)
class HeadDescription(Shown):
    """A head: what it is, where it stands, what it holds and how it is computed."""

    spec: HeadSpec = _one(HeadSpec)
    state: HeadState = _one(HeadState)
    compute_dtype: DType | None = _word(types.DTYPES, None)  # what the matrix products use
    slice_limits: SliceLimits = _one(SliceLimits)
    chunk_rows: int = 0  # rows computed at once at most
    memory: MemoryUsage = _one(MemoryUsage)  # held by this head
    open_streams: int = 0
    queued_slices: int = 0
    step_microbatches: int = 0  # seen in the open step
    step_rows: int = 0  # valid rows accumulated in the open step
    retained_microbatches: int = 0
    total_rows: int = 0  # computed since the head was created in this server process
    waiting_slices: int = 0  # deterministic server: slices that wait for their turn
    waits_for: str = ""  # what they wait for
    updates: int = 0  # steps that updated the weights since the optimizer began: those applied and not skipped
    step_contributions: int = 0  # of add_gradient, seen in the open step
    choices: tuple[Choice, ...] = _many(Choice)  # how a full chunk with gradients is computed
    last_chunk_choices: tuple[Choice, ...] = _many(Choice)
    gradient_error: float = 0.0  # predicted, relative, of the last chunk that was sampled
    history: HeadHistory = _one(HeadHistory, repr=False)
    devices: tuple[HeadDevice, ...] = _many(HeadDevice)  # of a head that is split by vocabulary over several devices
    paging: Paging = _one(Paging, repr=False)  # of a head with residency "host"; else all is 0

    def __repr__(self) -> str:
        facts = ", ".join([f"{self.compute_dtype}, {self.spec.optimizer_state}", *self._special(), *self._progress()])
        return (f"HeadDescription({self.spec.name!r}, D={self.spec.hidden_size}, V={self.spec.vocab_size}, {facts}, "
                f"{text_of_bytes(self.memory.total)})")

    def _special(self) -> list[str]:
        spec = self.spec
        flags = ("bias", spec.bias), ("class weights", spec.class_weights), ("frozen", spec.frozen)
        words = ((spec.norm, "none"), (spec.gradients, "exact"), (spec.logits, "stored"), (f"by {spec.split}", "by any"),
                 (f"in {spec.residency} memory", "in device memory"))
        return [word for word, usual in words if word != usual] + [name for name, is_so in flags if is_so]

    def _progress(self) -> list[str]:
        numbers = {"microbatches": self.step_microbatches, "rows": self.step_rows, "streams": self.open_streams}
        return [f"step={self.state.step}", *(f"{name}={number}" for name, number in numbers.items() if number)]

    def _facts(self) -> list[tuple[str, str]]:
        return [("head", self.spec.name), ("shape", f"D={self.spec.hidden_size}, V={self.spec.vocab_size}"),
                ("kind", ", ".join([str(self.compute_dtype), self.spec.optimizer_state, *self._special()])),
                ("progress", ", ".join(self._progress())), ("memory", text_of_bytes(self.memory.total)),
                *((choice.what, str(choice).partition(": ")[2]) for choice in self.choices)]


@dataclass(frozen=True, repr=False)
class RankDescription(Shown):
    """One of the processes that are a server together."""

    rank: int = 0  # 0: the one that answers
    host: str = ""
    device: str = ""
    lost: bool = False
    memory: MemoryUsage = _one(MemoryUsage, repr=False)  # as the process last said


@dataclass(frozen=True, repr=False)
class ServerDescription(Shown):
    """A server: what it is, has and allows."""

    version: str = ""
    incarnation: int = 0  # of the process: drawn at random when it starts, never 0
    backend: str = ""  # "cpu" or "cuda"
    device: str = ""
    uptime_seconds: float = 0.0
    draining: bool = False  # it ends what is under way and takes nothing new
    memory: MemoryUsage = _one(MemoryUsage, repr=False)
    memory_peak: MemoryUsage = _one(MemoryUsage, repr=False)  # each kind's own peak
    memory_limit: int = 0  # 0: none
    max_message_bytes: int = field(default=0, repr=False)
    max_streams: int = field(default=0, repr=False)
    open_streams: int = 0
    heads: int = 0
    ranks: tuple[RankDescription, ...] = _many(RankDescription)  # of a server of several processes; else empty
    region_socket: str = field(default="", repr=False)  # where programs of its host open shared memory; "": nowhere
    http: str | None = field(default=None, repr=False)  # URL of its HTTP side as it listens; "": none; None: an old server
    region_device: str = field(default="", repr=False)  # the GPU whose memory they may open there, "GPU-..."; "": of none
    collectives: str = field(default="", repr=False)  # between its devices: "nccl", "gloo" or "threads"; "": it has one
    region_devices: tuple[str, ...] = field(default=(), repr=False)  # all GPUs whose memory they may open there
    gpu_sharing: str = field(default="", repr=False)  # "MPS, client priority 0 (normal)" or "time slices"; "": it has no GPU


@dataclass(frozen=True, repr=False)
class PeerDescription(Shown):
    """A client of the server, with what it has sent and taken since the server knows it."""

    peer: str = ""  # the name in its certificate or of its token, else its address
    open_streams: int = 0
    streams: int = 0  # with those that have ended
    rows: int = 0
    received_bytes: int = 0  # by the server: hidden states
    sent_bytes: int = 0  # by the server: gradients
    staging_bytes: int = 0
    device_wait_seconds: float = 0.0  # of its slices, summed
    idle_seconds: float = 0.0


@dataclass(frozen=True, repr=False)
class StreamDescription(Shown):
    """A loss computation's stream that is open."""

    number: int = 0
    peer: str = ""
    head: str = ""
    microbatch_id: int = 0
    backward: bool = False
    shared_memory: bool = False
    rows: int = 0
    queued_rows: int = 0
    sent_rows: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    staging_bytes: int = 0
    waits_for: StreamWait | None = _word(types.numbers_of(StreamWait, server_pb2.StreamWait), None)  # the client, the server, or that an answer is taken
    wait_seconds: float = 0.0
    age_seconds: float = 0.0


@dataclass(frozen=True, repr=False)
class StreamList(Shown):
    """Who sends rows: what Client.list_streams returns."""

    incarnation: int = 0
    time_seconds: float = 0.0  # since the server started, when the numbers were read
    peers: tuple[PeerDescription, ...] = _many(PeerDescription)
    streams: tuple[StreamDescription, ...] = _many(StreamDescription)
    streams_left_out: int = 0


@dataclass(frozen=True, repr=False)
class StepResult(Shown):
    """What Client.apply_step did."""

    state: HeadState = _one(HeadState, repr=False)  # the step now open
    grad_norm: float = 0.0  # before grad_multiplier
    microbatches: int = 0  # in the step applied, of which rows were accumulated or none had to be
    rows: int = 0  # valid rows in the step applied
    repeated_call: bool = False  # this step had been applied before; the stored result is returned
    skipped: bool = False  # grad_norm is not finite, and the step was closed without an update
    contributions: int = 0  # of add_gradient
    applied_incarnation: int = field(default=0, repr=False)  # of the server that applied the step


@dataclass(frozen=True, repr=False)
class RowRange(Shown):
    """Rows [begin, end)."""

    begin: int = 0
    end: int = 0


@dataclass(frozen=True, repr=False)
class AddedGradient(Shown):
    """What Client.add_gradient did."""

    state: HeadState = _one(HeadState, repr=False)
    rows: RowRange = _one(RowRange, repr=False)
    added_rows: int = 0  # by this call
    repeated_rows: int = 0  # of this call that had been added before


@dataclass(frozen=True, repr=False)
class SaveProgress(Shown):
    """How far Client.save_checkpoint is."""

    phase: SavePhase | None = _word(types.numbers_of(SavePhase, head_pb2.SavePhase), None)  # "reading": calls that change the head wait
    total_bytes: int = 0  # of all tensors
    read_bytes: int = 0  # from the device
    written_bytes: int = 0  # to the disk, or on their way


@dataclass(frozen=True, repr=False)
class SavedCheckpoint(Shown):
    """What Client.save_checkpoint wrote."""

    state: HeadState = _one(HeadState, repr=False)
    checkpoint: str = ""  # "<head>/<name>", what load_checkpoint takes
    bytes: int = 0
    seconds: float = 0.0
    read_seconds: float = 0.0  # of these, how long calls that change the head had to wait
    pruned: tuple[str, ...] = ()  # checkpoints removed because of `keep`
    not_finite: int = 0  # values in it that are infinite or NaN; in a bias that may be meant


@dataclass(frozen=True, repr=False)
class CheckpointInfo(Shown):
    """A checkpoint in the server's directory."""

    checkpoint: str = ""  # "<head>/<name>", what load_checkpoint takes
    error: str = ""  # why its manifest cannot be read; then nothing below is set
    spec: HeadSpec = _one(HeadSpec, repr=False)
    step: int = 0  # optimizer steps applied
    incarnation: int = field(default=0, repr=False)  # of the server that saved it
    bytes: int = 0
    saved_unix_seconds: int = 0  # 0: not known
    automatic: bool = False  # named by the server; `keep` may remove it
    run: str = ""  # of the trainer that applied its last step (Client's `run`); "": not known
    save_number: int = field(default=0, repr=False)  # of this save among all of the head; 0: an earlier server saved it


@dataclass(frozen=True, repr=False)
class TensorFile(Shown):
    """Where Client.create_head finds initial values: safetensors below the server's checkpoint directory.

    `path` is a file, an index of files (".json"), or a folder with a model.safetensors(.index.json); the others are names
    of tensors in it. Heads that have a bias or a norm need the names of theirs.
    """

    path: str
    weight: str  # [V, D], e.g. "lm_head.weight", or the embedding's of a model whose head is tied to it
    bias: str = ""  # [V]
    norm_gain: str = ""  # [D]
    norm_shift: str = ""  # [D]
    class_weights: str = ""  # [V]; optional
    # False: InvalidArgument, naming the first, if a value is NaN or infinite; a bias may be -infinity all the same.
    allow_non_finite: bool = False

    def to_proto(self) -> head_pb2.TensorFile:
        return head_pb2.TensorFile(**asdict(self))
