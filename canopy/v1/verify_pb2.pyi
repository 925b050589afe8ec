from canopy.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetVerifyInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetVerifyInfoResponse(_message.Message):
    __slots__ = ("protocol_version", "target", "features", "max_context_len", "max_tree_nodes", "max_sequences", "page_size_tokens", "num_pages", "step_times", "max_ahead_nodes")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_TREE_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    MAX_AHEAD_NODES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    target: _types_pb2.TargetIdentity
    features: _types_pb2.FeatureSpec
    max_context_len: int
    max_tree_nodes: int
    max_sequences: int
    page_size_tokens: int
    num_pages: int
    step_times: _containers.RepeatedCompositeFieldContainer[StepTime]
    max_ahead_nodes: int
    def __init__(self, protocol_version: _Optional[int] = ..., target: _Optional[_Union[_types_pb2.TargetIdentity, _Mapping]] = ..., features: _Optional[_Union[_types_pb2.FeatureSpec, _Mapping]] = ..., max_context_len: _Optional[int] = ..., max_tree_nodes: _Optional[int] = ..., max_sequences: _Optional[int] = ..., page_size_tokens: _Optional[int] = ..., num_pages: _Optional[int] = ..., step_times: _Optional[_Iterable[_Union[StepTime, _Mapping]]] = ..., max_ahead_nodes: _Optional[int] = ...) -> None: ...

class StepTime(_message.Message):
    __slots__ = ("num_tokens", "num_kv_tokens", "num_sequences", "seconds")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_kv_tokens: int
    num_sequences: int
    seconds: float
    def __init__(self, num_tokens: _Optional[int] = ..., num_kv_tokens: _Optional[int] = ..., num_sequences: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[VerifyCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[VerifyCommand, _Mapping]]] = ...) -> None: ...

class VerifyCommand(_message.Message):
    __slots__ = ("sequence_id", "epoch", "acked_round", "open", "attach", "verify_tree", "rollback", "close", "replay_features", "tree_ahead", "acknowledge")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACKED_ROUND_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    VERIFY_TREE_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FEATURES_FIELD_NUMBER: _ClassVar[int]
    TREE_AHEAD_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: bytes
    epoch: int
    acked_round: int
    open: VerifyOpen
    attach: VerifyAttach
    verify_tree: VerifyTree
    rollback: VerifyRollback
    close: VerifyClose
    replay_features: VerifyReplayFeatures
    tree_ahead: VerifyTreeAhead
    acknowledge: VerifyAcknowledge
    def __init__(self, sequence_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., acked_round: _Optional[int] = ..., open: _Optional[_Union[VerifyOpen, _Mapping]] = ..., attach: _Optional[_Union[VerifyAttach, _Mapping]] = ..., verify_tree: _Optional[_Union[VerifyTree, _Mapping]] = ..., rollback: _Optional[_Union[VerifyRollback, _Mapping]] = ..., close: _Optional[_Union[VerifyClose, _Mapping]] = ..., replay_features: _Optional[_Union[VerifyReplayFeatures, _Mapping]] = ..., tree_ahead: _Optional[_Union[VerifyTreeAhead, _Mapping]] = ..., acknowledge: _Optional[_Union[VerifyAcknowledge, _Mapping]] = ...) -> None: ...

class VerifyOpen(_message.Message):
    __slots__ = ("tokens", "num_prompt_tokens", "sampling", "stop_token_ids", "max_total_tokens", "round", "wants_features", "choice_index", "logprobs", "top_logprobs", "cache_salt", "prompt_logprobs", "fork_of", "trace", "runs_on", "draft_ahead")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WANTS_FEATURES_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FORK_OF_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    RUNS_ON_FIELD_NUMBER: _ClassVar[int]
    DRAFT_AHEAD_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: _types_pb2.SamplingParams
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_total_tokens: int
    round: int
    wants_features: bool
    choice_index: int
    logprobs: bool
    top_logprobs: int
    cache_salt: bytes
    prompt_logprobs: int
    fork_of: bytes
    trace: _types_pb2.TraceContext
    runs_on: bool
    draft_ahead: bool
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., max_total_tokens: _Optional[int] = ..., round: _Optional[int] = ..., wants_features: _Optional[bool] = ..., choice_index: _Optional[int] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., prompt_logprobs: _Optional[int] = ..., fork_of: _Optional[bytes] = ..., trace: _Optional[_Union[_types_pb2.TraceContext, _Mapping]] = ..., runs_on: _Optional[bool] = ..., draft_ahead: _Optional[bool] = ...) -> None: ...

class VerifyAttach(_message.Message):
    __slots__ = ("features_from",)
    FEATURES_FROM_FIELD_NUMBER: _ClassVar[int]
    features_from: int
    def __init__(self, features_from: _Optional[int] = ...) -> None: ...

class VerifyTree(_message.Message):
    __slots__ = ("round", "kv_len", "tree")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    KV_LEN_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    round: int
    kv_len: int
    tree: _types_pb2.DraftTree
    def __init__(self, round: _Optional[int] = ..., kv_len: _Optional[int] = ..., tree: _Optional[_Union[_types_pb2.DraftTree, _Mapping]] = ...) -> None: ...

class VerifyTreeAhead(_message.Message):
    __slots__ = ("round", "kv_len", "tree", "most")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    KV_LEN_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    round: int
    kv_len: int
    tree: _types_pb2.DraftTree
    most: _types_pb2.TreeShape
    def __init__(self, round: _Optional[int] = ..., kv_len: _Optional[int] = ..., tree: _Optional[_Union[_types_pb2.DraftTree, _Mapping]] = ..., most: _Optional[_Union[_types_pb2.TreeShape, _Mapping]] = ...) -> None: ...

class VerifyAcknowledge(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyRollback(_message.Message):
    __slots__ = ("committed_len", "round")
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    committed_len: int
    round: int
    def __init__(self, committed_len: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class VerifyClose(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyReplayFeatures(_message.Message):
    __slots__ = ("position",)
    POSITION_FIELD_NUMBER: _ClassVar[int]
    position: int
    def __init__(self, position: _Optional[int] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[VerifyEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[VerifyEvent, _Mapping]]] = ...) -> None: ...

class VerifyEvent(_message.Message):
    __slots__ = ("sequence_id", "epoch", "state", "result", "error", "preempted", "closed")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    sequence_id: bytes
    epoch: int
    state: _types_pb2.SequenceState
    result: VerifyResult
    error: _types_pb2.SequenceError
    preempted: VerifyPreempted
    closed: VerifyClosed
    def __init__(self, sequence_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[_types_pb2.SequenceState, _Mapping]] = ..., result: _Optional[_Union[VerifyResult, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.SequenceError, _Mapping]] = ..., preempted: _Optional[_Union[VerifyPreempted, _Mapping]] = ..., closed: _Optional[_Union[VerifyClosed, _Mapping]] = ...) -> None: ...

class VerifyResult(_message.Message):
    __slots__ = ("round", "kv_len", "tokens", "pick_margins", "num_nodes", "accepted_nodes", "logprobs", "step_seconds", "queue_seconds", "top_logprobs", "drafting", "next_begun", "ahead", "prompt_logprobs", "prompt_top_logprobs", "num_cached_tokens")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    KV_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PICK_MARGINS_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_NODES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    NEXT_BEGUN_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    round: int
    kv_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    pick_margins: _containers.RepeatedScalarFieldContainer[float]
    num_nodes: int
    accepted_nodes: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    step_seconds: float
    queue_seconds: float
    top_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    drafting: _types_pb2.Drafting
    next_begun: bool
    ahead: VerifiedAhead
    prompt_logprobs: _containers.RepeatedScalarFieldContainer[float]
    prompt_top_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    num_cached_tokens: int
    def __init__(self, round: _Optional[int] = ..., kv_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., pick_margins: _Optional[_Iterable[float]] = ..., num_nodes: _Optional[int] = ..., accepted_nodes: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., step_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., top_logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., drafting: _Optional[_Union[_types_pb2.Drafting, str]] = ..., next_begun: _Optional[bool] = ..., ahead: _Optional[_Union[VerifiedAhead, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[float]] = ..., prompt_top_logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class VerifiedAhead(_message.Message):
    __slots__ = ("kv_len", "tree")
    KV_LEN_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    kv_len: int
    tree: _types_pb2.DraftTree
    def __init__(self, kv_len: _Optional[int] = ..., tree: _Optional[_Union[_types_pb2.DraftTree, _Mapping]] = ...) -> None: ...

class VerifyPreempted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyClosed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReceiveFeaturesRequest(_message.Message):
    __slots__ = ("credit_bytes",)
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    credit_bytes: int
    def __init__(self, credit_bytes: _Optional[int] = ...) -> None: ...

class ReceiveFeaturesResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[_types_pb2.FeatureBlock]
    def __init__(self, blocks: _Optional[_Iterable[_Union[_types_pb2.FeatureBlock, _Mapping]]] = ...) -> None: ...
