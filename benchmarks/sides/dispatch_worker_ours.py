"""verl_like's worker of the benchmarks `dispatch`, `calls` and `scaling`."""

from verl_like.protocol import DataProto
from verl_like.single_controller import Dispatch, Worker, register


class DispatchWorker(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self) -> None:
        return None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def one_column_back(self, batch: DataProto) -> DataProto:
        """All columns arrive; one is looked at and returned."""
        column = batch.batch["advantages"]
        assert float(column[0, 0]) >= 0
        return DataProto.from_dict({"returns": column})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, jagged=True)
    def one_ragged_column_back(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"returns": batch.batch["advantages"]})
