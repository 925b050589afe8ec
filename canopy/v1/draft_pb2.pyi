from canopy.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetDraftInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDraftInfoResponse(_message.Message):
    __slots__ = ("protocol_version", "head_name", "target", "features", "max_context_len", "max_tree", "max_sequences", "draft_ahead")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    HEAD_NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_TREE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_AHEAD_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    head_name: str
    target: _types_pb2.TargetIdentity
    features: _types_pb2.FeatureSpec
    max_context_len: int
    max_tree: _types_pb2.TreeShape
    max_sequences: int
    draft_ahead: bool
    def __init__(self, protocol_version: _Optional[int] = ..., head_name: _Optional[str] = ..., target: _Optional[_Union[_types_pb2.TargetIdentity, _Mapping]] = ..., features: _Optional[_Union[_types_pb2.FeatureSpec, _Mapping]] = ..., max_context_len: _Optional[int] = ..., max_tree: _Optional[_Union[_types_pb2.TreeShape, _Mapping]] = ..., max_sequences: _Optional[int] = ..., draft_ahead: _Optional[bool] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[DraftCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[DraftCommand, _Mapping]]] = ...) -> None: ...

class DraftCommand(_message.Message):
    __slots__ = ("sequence_id", "epoch", "acked_round", "open", "attach", "extend", "rollback", "close")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACKED_ROUND_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: bytes
    epoch: int
    acked_round: int
    open: DraftOpen
    attach: DraftAttach
    extend: DraftExtend
    rollback: DraftRollback
    close: DraftClose
    def __init__(self, sequence_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., acked_round: _Optional[int] = ..., open: _Optional[_Union[DraftOpen, _Mapping]] = ..., attach: _Optional[_Union[DraftAttach, _Mapping]] = ..., extend: _Optional[_Union[DraftExtend, _Mapping]] = ..., rollback: _Optional[_Union[DraftRollback, _Mapping]] = ..., close: _Optional[_Union[DraftClose, _Mapping]] = ...) -> None: ...

class DraftOpen(_message.Message):
    __slots__ = ("tokens", "sampling", "tree", "max_total_tokens", "features_from", "cache_salt", "choice_index", "trace")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FROM_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.SamplingParams
    tree: _types_pb2.TreeShape
    max_total_tokens: int
    features_from: int
    cache_salt: bytes
    choice_index: int
    trace: _types_pb2.TraceContext
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., tree: _Optional[_Union[_types_pb2.TreeShape, _Mapping]] = ..., max_total_tokens: _Optional[int] = ..., features_from: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., choice_index: _Optional[int] = ..., trace: _Optional[_Union[_types_pb2.TraceContext, _Mapping]] = ...) -> None: ...

class DraftAttach(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftExtend(_message.Message):
    __slots__ = ("round", "base_len", "tokens", "tree", "ahead", "verified_ahead")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_AHEAD_FIELD_NUMBER: _ClassVar[int]
    round: int
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    tree: _types_pb2.TreeShape
    ahead: bool
    verified_ahead: int
    def __init__(self, round: _Optional[int] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., tree: _Optional[_Union[_types_pb2.TreeShape, _Mapping]] = ..., ahead: _Optional[bool] = ..., verified_ahead: _Optional[int] = ...) -> None: ...

class DraftRollback(_message.Message):
    __slots__ = ("committed_len", "round")
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    committed_len: int
    round: int
    def __init__(self, committed_len: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class DraftClose(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DraftEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[DraftEvent, _Mapping]]] = ...) -> None: ...

class DraftEvent(_message.Message):
    __slots__ = ("sequence_id", "epoch", "state", "tree", "error", "evicted", "closed")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    sequence_id: bytes
    epoch: int
    state: _types_pb2.SequenceState
    tree: DraftTreeReady
    error: _types_pb2.SequenceError
    evicted: DraftEvicted
    closed: DraftClosed
    def __init__(self, sequence_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[_types_pb2.SequenceState, _Mapping]] = ..., tree: _Optional[_Union[DraftTreeReady, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.SequenceError, _Mapping]] = ..., evicted: _Optional[_Union[DraftEvicted, _Mapping]] = ..., closed: _Optional[_Union[DraftClosed, _Mapping]] = ...) -> None: ...

class DraftTreeReady(_message.Message):
    __slots__ = ("round", "committed_len", "tree", "step_seconds", "queue_seconds")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    round: int
    committed_len: int
    tree: _types_pb2.DraftTree
    step_seconds: float
    queue_seconds: float
    def __init__(self, round: _Optional[int] = ..., committed_len: _Optional[int] = ..., tree: _Optional[_Union[_types_pb2.DraftTree, _Mapping]] = ..., step_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ...) -> None: ...

class DraftEvicted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftClosed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SendFeaturesRequest(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[_types_pb2.FeatureBlock]
    def __init__(self, blocks: _Optional[_Iterable[_Union[_types_pb2.FeatureBlock, _Mapping]]] = ...) -> None: ...

class SendFeaturesResponse(_message.Message):
    __slots__ = ("credit_bytes",)
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    credit_bytes: int
    def __init__(self, credit_bytes: _Optional[int] = ...) -> None: ...
