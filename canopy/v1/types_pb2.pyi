from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Drafting(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFTING_UNSPECIFIED: _ClassVar[Drafting]
    DRAFTING_NONE: _ClassVar[Drafting]
    DRAFTING_SYNCHRONOUS: _ClassVar[Drafting]
    DRAFTING_AHEAD: _ClassVar[Drafting]

class SequenceErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_ERROR_CODE_UNSPECIFIED: _ClassVar[SequenceErrorCode]
    SEQUENCE_ERROR_CODE_INVALID: _ClassVar[SequenceErrorCode]
    SEQUENCE_ERROR_CODE_UNKNOWN_SEQUENCE: _ClassVar[SequenceErrorCode]
    SEQUENCE_ERROR_CODE_CLOSED: _ClassVar[SequenceErrorCode]
    SEQUENCE_ERROR_CODE_STALE_EPOCH: _ClassVar[SequenceErrorCode]
    SEQUENCE_ERROR_CODE_WRONG_ROUND: _ClassVar[SequenceErrorCode]
    SEQUENCE_ERROR_CODE_NEVER_FITS: _ClassVar[SequenceErrorCode]
    SEQUENCE_ERROR_CODE_OVERLOADED: _ClassVar[SequenceErrorCode]
    SEQUENCE_ERROR_CODE_NOT_SERVING: _ClassVar[SequenceErrorCode]
    SEQUENCE_ERROR_CODE_INTERNAL: _ClassVar[SequenceErrorCode]
    SEQUENCE_ERROR_CODE_UNIMPLEMENTED: _ClassVar[SequenceErrorCode]

class FeatureDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_DTYPE_UNSPECIFIED: _ClassVar[FeatureDtype]
    FEATURE_DTYPE_FLOAT32: _ClassVar[FeatureDtype]
    FEATURE_DTYPE_BFLOAT16: _ClassVar[FeatureDtype]

class FeatureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_KIND_UNSPECIFIED: _ClassVar[FeatureKind]
    FEATURE_KIND_NONE: _ClassVar[FeatureKind]
    FEATURE_KIND_LAST: _ClassVar[FeatureKind]
    FEATURE_KIND_AUX: _ClassVar[FeatureKind]
DRAFTING_UNSPECIFIED: Drafting
DRAFTING_NONE: Drafting
DRAFTING_SYNCHRONOUS: Drafting
DRAFTING_AHEAD: Drafting
SEQUENCE_ERROR_CODE_UNSPECIFIED: SequenceErrorCode
SEQUENCE_ERROR_CODE_INVALID: SequenceErrorCode
SEQUENCE_ERROR_CODE_UNKNOWN_SEQUENCE: SequenceErrorCode
SEQUENCE_ERROR_CODE_CLOSED: SequenceErrorCode
SEQUENCE_ERROR_CODE_STALE_EPOCH: SequenceErrorCode
SEQUENCE_ERROR_CODE_WRONG_ROUND: SequenceErrorCode
SEQUENCE_ERROR_CODE_NEVER_FITS: SequenceErrorCode
SEQUENCE_ERROR_CODE_OVERLOADED: SequenceErrorCode
SEQUENCE_ERROR_CODE_NOT_SERVING: SequenceErrorCode
SEQUENCE_ERROR_CODE_INTERNAL: SequenceErrorCode
SEQUENCE_ERROR_CODE_UNIMPLEMENTED: SequenceErrorCode
FEATURE_DTYPE_UNSPECIFIED: FeatureDtype
FEATURE_DTYPE_FLOAT32: FeatureDtype
FEATURE_DTYPE_BFLOAT16: FeatureDtype
FEATURE_KIND_UNSPECIFIED: FeatureKind
FEATURE_KIND_NONE: FeatureKind
FEATURE_KIND_LAST: FeatureKind
FEATURE_KIND_AUX: FeatureKind

class DraftTree(_message.Message):
    __slots__ = ("tokens", "parents", "scores")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., scores: _Optional[_Iterable[float]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "ignore_eos")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    ignore_eos: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class TraceContext(_message.Message):
    __slots__ = ("request_id", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("tokens", "logprobs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class TreeShape(_message.Message):
    __slots__ = ("max_depth", "top_k", "max_nodes")
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    max_depth: int
    top_k: int
    max_nodes: int
    def __init__(self, max_depth: _Optional[int] = ..., top_k: _Optional[int] = ..., max_nodes: _Optional[int] = ...) -> None: ...

class SequenceState(_message.Message):
    __slots__ = ("epoch", "next_round", "committed_len", "kv_len")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    KV_LEN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    next_round: int
    committed_len: int
    kv_len: int
    def __init__(self, epoch: _Optional[int] = ..., next_round: _Optional[int] = ..., committed_len: _Optional[int] = ..., kv_len: _Optional[int] = ...) -> None: ...

class SequenceError(_message.Message):
    __slots__ = ("code", "message", "round", "state")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    code: SequenceErrorCode
    message: str
    round: int
    state: SequenceState
    def __init__(self, code: _Optional[_Union[SequenceErrorCode, str]] = ..., message: _Optional[str] = ..., round: _Optional[int] = ..., state: _Optional[_Union[SequenceState, _Mapping]] = ...) -> None: ...

class FeatureBlock(_message.Message):
    __slots__ = ("sequence_id", "epoch", "position", "num_rows", "row_width", "dtype", "data")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    ROW_WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    sequence_id: bytes
    epoch: int
    position: int
    num_rows: int
    row_width: int
    dtype: FeatureDtype
    data: bytes
    def __init__(self, sequence_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., num_rows: _Optional[int] = ..., row_width: _Optional[int] = ..., dtype: _Optional[_Union[FeatureDtype, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class TargetIdentity(_message.Message):
    __slots__ = ("model_name", "vocab_size", "padded_vocab_size", "tokenizer_hash", "hidden_size", "weights_hash")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    PADDED_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    vocab_size: int
    padded_vocab_size: int
    tokenizer_hash: str
    hidden_size: int
    weights_hash: str
    def __init__(self, model_name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., padded_vocab_size: _Optional[int] = ..., tokenizer_hash: _Optional[str] = ..., hidden_size: _Optional[int] = ..., weights_hash: _Optional[str] = ...) -> None: ...

class FeatureSpec(_message.Message):
    __slots__ = ("kind", "boundaries", "dtype", "row_width", "fused_by")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROW_WIDTH_FIELD_NUMBER: _ClassVar[int]
    FUSED_BY_FIELD_NUMBER: _ClassVar[int]
    kind: FeatureKind
    boundaries: _containers.RepeatedScalarFieldContainer[int]
    dtype: FeatureDtype
    row_width: int
    fused_by: str
    def __init__(self, kind: _Optional[_Union[FeatureKind, str]] = ..., boundaries: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[FeatureDtype, str]] = ..., row_width: _Optional[int] = ..., fused_by: _Optional[str] = ...) -> None: ...
