"""The batch and its columns: what the driver and the workers exchange."""

from verl_like.protocol.batch_ops import (
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from verl_like.protocol.columns import COLUMNS, PAD_COLUMN, Column
from verl_like.protocol.dataproto import DataProto, DataProtoItem
from verl_like.protocol.future import CallHeader, DataProtoFuture, Future, Part, PendingCall
from verl_like.protocol.merge import union_numpy_dict, union_tensor_dict
from verl_like.protocol.metric import Metric, merge_metrics, metric_values
